"""`hermes-rl regrade`: apply other rewards or weights to recorded rollouts; no rollout is run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.data.load import load_rows, split_of
from hermes_rl.data.rows import Rows
from hermes_rl.errors import UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Encoder
from hermes_rl.runs.directory import RunDirectory, changed_parts
from hermes_rl.runs.evaluate import EvaluatePlan, Evaluation, conclude, evaluation_directory, write_evaluation
from hermes_rl.runs.groups import group_lines
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import Records, generation_params, meter_of, open_records, usage_kept
from hermes_rl.servers.base import POLICY
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.overrides import Overrides


@dataclass(frozen=True)
class Regraded:
    """Result of a regrade: groups that are in the file now, or the new result of the evaluation."""

    directory: RunDirectory
    groups: int | None = None
    evaluation: Evaluation | None = None
    without_score: int = 0


async def regrade(
    path: Path,
    overrides: Overrides | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    progress: Progress,
) -> Regraded:
    """Score the rollouts in a run directory again, and judge them again if their rewards changed; no rollout is run.

    `overrides` change the run's spec. Raises `UserError` if there is no run, the change affects how rollouts run, or a
    reward needs data that was not recorded; `RunError` if a judge could not be called; no record was changed.
    """
    directory, run_info = _open_directory(path)
    mode: Mode = run_info["mode"]
    spec = load_spec(path / "spec.yaml", overrides=overrides, environ=environ, mode=mode, resolved=True)
    changed = changed_parts(run_info, spec, mode)
    if changed:
        raise UserError(
            f"{', '.join(changed)} differ from the run's; regrade changes only the scoring. "
            f"`hermes-rl run {run_info.get('spec')} {mode} --fresh` starts a new run"
        )
    with directory:
        async with compiled_to_grade(spec, environ) as compiled:
            rows = await asyncio.to_thread(load_rows, spec, split_of(mode), notify=progress.note)
            size = spec.group_size(mode)
            meter = meter_of(run_info)
            for role in compiled.roles.values():
                role.count_by(meter)
            async with (
                usage_kept(directory, meter),
                open_records(directory, compiled, rows, mode, size, progress, meter) as records,
            ):
                new = {"grading": records.grading.record(), "usage": meter.record()}
                directory.rewrite(spec, {**run_info, **new})
                if mode == "process":
                    return await _write_groups(records, compiled)
                evaluation = await asyncio.to_thread(_conclude, records, spec, rows)
                directory.add({"uncounted": evaluation.uncounted})
                return Regraded(directory, evaluation=evaluation, without_score=evaluation.ungraded)


def _open_directory(path: Path) -> tuple[RunDirectory, dict[str, Any]]:
    directory = RunDirectory(path)
    directory.require_format()
    run_info = directory.read_run_info()
    if (mode := run_info.get("mode")) not in ("process", "evaluate"):
        reason = "the trainer has the groups that serve sent" if mode == "serve" else "there is no run (run.json)"
        raise UserError(f"{path} cannot be regraded: {reason}")
    return RunDirectory(path, str(run_info.get("fingerprint"))), run_info


def compiled_to_grade(spec: Spec, environ: Mapping[str, str] | None) -> CompiledSpec:
    """Return a spec whose rollouts are not run: the policy's key may be missing, unless a reward calls the policy."""
    others = {role: servers for role, servers in spec.servers.items() if role != POLICY}
    compiled = CompiledSpec(spec.model_copy(update={"servers": others}), environ)
    asks_policy = any(POLICY in reward.function.parameters for reward in compiled.grader.rewards)
    return CompiledSpec(spec, environ) if asks_policy else compiled


def _conclude(records: Records, spec: Spec, rows: Rows) -> Evaluation:
    plan = EvaluatePlan.from_spec(spec)
    groups = {row.key: plan.values(row) for row in rows if records.store.played(row.key)}
    evaluation = conclude(spec.name, plan, records.store, groups)
    write_evaluation(evaluation, evaluation_directory(spec, records.directory))
    return evaluation


async def _write_groups(records: Records, compiled: CompiledSpec) -> Regraded:
    """Remove the groups whose scores have changed, and write them and the groups that may be written since."""
    store, file = records.store, records.groups_file
    assert file is not None
    encoder = Encoder(None, "the rollout was recorded without tokens")
    drop, params = compiled.spec.process.drop_uniform, generation_params(compiled.spec, "process")
    written = file.reconcile(store, records.changed)
    for name in sorted(set(store.groups) - written):
        if not store.complete(name) or store.excluded(name, drop_uniform=drop):
            continue
        group = await store.group(name, compiled)
        await encoder.encode_group(group)
        file.write(await file.encoded(group_lines(group, params, file.run)))
        written.add(name)
    without = sum(score is None for name in store.groups for score in store.scores(name))
    return Regraded(records.directory, groups=len(written), without_score=without)
