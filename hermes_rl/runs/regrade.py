"""`hermes-rl regrade`: other rewards or weights over what a run kept; nothing is played."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.data.load import Rows, load_rows
from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.compiled import POLICY, CompiledSpec
from hermes_rl.rollouts.encode import Encoder
from hermes_rl.rollouts.rollout import Group, RolloutKey
from hermes_rl.rollouts.runner import give_credit
from hermes_rl.runs.directory import RunDirectory, changed_parts
from hermes_rl.runs.evaluate import Evaluation, conclude
from hermes_rl.runs.files import GroupsFile
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.launch import evaluate_plan, generation_params, write_evaluation
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.rescore import Regrading
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.overrides import Overrides


@dataclass(frozen=True)
class Regraded:
    """What a regrade did: groups that are in the file now, or the evaluation that was concluded anew."""

    directory: RunDirectory
    groups: int | None = None
    evaluation: Evaluation | None = None
    without_score: int = 0


@dataclass
class Request:
    """`path` is a run directory; `overrides` change its spec."""

    path: Path
    overrides: Overrides | None = None
    environ: Mapping[str, str] | None = None
    progress: Progress = field(default_factory=Progress)


async def regrade(request: Request) -> Regraded:
    """Score, and where its rewards have changed judge, the rollouts of a run anew; nothing is played.

    Raises:
        UserError: no run is there, the change is one of what is played, or a reward needs what was not kept.
        RunError: a judge could not be asked; nothing was changed.
    """
    directory, described = _open(request.path)
    mode: Mode = described["mode"]
    spec = load_spec(
        request.path / "spec.yaml", overrides=request.overrides, environ=request.environ, mode=mode, resolved=True
    )
    changed = changed_parts(described, spec, mode)
    if changed:
        raise UserError(
            f"{', '.join(changed)} would be other than when the rollouts were played; regrade changes only how they "
            f"are scored. `hermes-rl run {described.get('spec')} {mode} --fresh` plays anew"
        )
    with directory:
        async with _compiled(spec, request.environ) as compiled:
            rows = await asyncio.to_thread(
                load_rows, spec, "eval" if mode == "evaluate" else "train", notify=request.progress.note
            )
            return await _regrade(directory, described, compiled, rows, mode, request.progress)


def _open(path: Path) -> tuple[RunDirectory, dict[str, Any]]:
    described = RunDirectory(path).described()
    if described.get("mode") not in ("process", "evaluate"):
        mode = described.get("mode")
        what = "what serve sent is with its trainer" if mode == "serve" else "there is no run (run.json)"
        raise UserError(f"{path} cannot be graded anew: {what}")
    return RunDirectory(path, str(described.get("fingerprint"))), described


def _compiled(spec: Spec, environ: Mapping[str, str] | None) -> CompiledSpec:
    """Nothing is played, so the policy's key need not be at hand, unless a reward asks the policy itself."""
    others = {role: servers for role, servers in spec.servers.items() if role != POLICY}
    compiled = CompiledSpec(spec.model_copy(update={"servers": others}), environ)
    asked = any(POLICY in reward.function.parameters for reward in compiled.grader.rewards)
    return CompiledSpec(spec, environ) if asked else compiled


async def _regrade(
    directory: RunDirectory,
    described: dict[str, Any],
    compiled: CompiledSpec,
    rows: Rows,
    mode: Mode,
    progress: Progress,
) -> Regraded:
    spec = compiled.spec
    size = spec.evaluate.rollouts if mode == "evaluate" else spec.process.group_size
    regrading = Regrading.of(directory, compiled, rows, size, progress)
    with closing(Kept.of(directory, compiled, size)) as kept:
        groups = _groups_file(directory, spec, described) if mode == "process" else None
        try:
            if groups is not None:
                groups.check(size)
            await regrading(kept)
            kept.load()
            directory.rewrite(spec, {**described, "grading": regrading.grading.record()})
            if groups is not None:
                count = await _write_groups(groups, kept, regrading.changed, compiled)
                return Regraded(directory, groups=count, without_score=_without_score(kept))
            return await asyncio.to_thread(_conclude, directory, kept, spec, rows)
        finally:
            if groups is not None:
                groups.journal.close()


def _groups_file(directory: RunDirectory, spec: Spec, described: Mapping[str, Any]) -> GroupsFile:
    moved = spec.env.get("data_path_to_save_groups")
    journal = directory.journal(Path(moved) if moved else "groups.jsonl")
    return GroupsFile(journal, str(described.get("fingerprint")), moved=bool(moved))


async def _write_groups(groups: GroupsFile, kept: Kept, changed: set[str], compiled: CompiledSpec) -> int:
    """Take out the groups whose scores are others now, and write them and those that may be written since."""
    spec, encoder = compiled.spec, Encoder(None, "the rollout was kept without tokens")
    written = groups.reconcile(kept, changed)
    params = generation_params(spec, "process")
    for name in sorted(set(kept.groups) - written):
        if not kept.complete(name) or kept.discarded(name, drop_uniform=spec.process.drop_uniform):
            continue
        row = Row(key=name.rpartition(":")[0], columns={}, index=0, digest="")
        seats = [RolloutKey(row, name, index, kept.size) for index in range(kept.size)]
        rollouts = [rollout for key in seats if (rollout := await kept.recall(key)) is not None]
        for rollout in rollouts:
            give_credit(compiled, rollout)
        groups.journal.append_lines(await groups.lines(Group(name, row, rollouts), encoder, params))
        written.add(name)
    return len(written)


def _without_score(kept: Kept) -> int:
    return sum(score is None for group in kept.groups for score in kept.scores(group))


def _conclude(directory: RunDirectory, kept: Kept, spec: Spec, rows: Rows) -> Regraded:
    keys = [row.key for row in rows if kept.whole(row.key)]
    found = conclude(spec.name, evaluate_plan(spec), kept, keys)
    moved = spec.env.get("data_dir_to_save_evals")
    write_evaluation(found, RunDirectory(Path(moved)) if moved else directory)
    return Regraded(directory, evaluation=found, without_score=found.ungraded)
