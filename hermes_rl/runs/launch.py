"""A spec from the command line to its files: loads rows, opens the run directory, plays, writes, sums up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from hermes_rl.data.load import Rows, Split, load_rows
from hermes_rl.data.rows import Row
from hermes_rl.errors import RunError, UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.encode import Encoder
from hermes_rl.runs.budget import Budget
from hermes_rl.runs.directory import RunDirectory, changed_parts
from hermes_rl.runs.evaluate import EvaluatePlan, Evaluation, evaluate
from hermes_rl.runs.exact import TOKEN_LEVEL, renderer_of, tokenizer_of
from hermes_rl.runs.formats import write_format
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.process import ProcessPlan, ProcessSummary, process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.provenance import provenance
from hermes_rl.runs.rescore import Regrading
from hermes_rl.runs.wandb_log import wandb_log
from hermes_rl.sandbox.none import WARNING
from hermes_rl.sandbox.probe import require_bubblewrap
from hermes_rl.servers.engine import engines
from hermes_rl.servers.reach import require_reachable
from hermes_rl.spec.model import Mode, Spec


@dataclass(frozen=True)
class Launch:
    """What the user asked for beside the spec. `environ` is where the keys of servers are."""

    mode: Mode
    out: Path | None = None
    fresh: bool = False
    environ: Mapping[str, str] | None = None
    progress: Progress = field(default_factory=Progress)


def prepare(spec: Spec, launch: Launch) -> CompiledSpec:
    """Everything that can be found wrong before the first rollout.

    Raises:
        UserError: the spec cannot run in this mode on this machine, and what to do.
    """
    if "policy" not in spec.servers:
        raise UserError("servers.policy is missing: name the model that acts")
    if launch.mode != "evaluate" and spec.dataset.eval is not None and spec.dataset.eval.only:
        raise UserError(f"dataset.eval is `only`: every row is for evaluation, so {launch.mode} cannot use any")
    if launch.mode == "evaluate" and spec.dataset.eval is None:
        raise UserError("dataset.eval is missing: say which rows are for evaluation, such as {fraction: 0.1} or `only`")
    compiled = CompiledSpec(spec, launch.environ)
    if _may_use_sandbox(compiled):
        _require_sandbox(spec, launch)
    return compiled


async def run_process(spec: Spec, launch: Launch) -> tuple[ProcessSummary, RunDirectory]:
    """Process mode of a spec, into its run directory."""
    async with prepare(spec, launch) as compiled:
        await require_reachable("policy", compiled.policy.configs)
        for role in compiled.roles.values():
            role.tell(launch.progress.note)
        rows, encoder = await _load(spec, "train", launch)
        first, rows = await first_of(rows, "train")
        await compiled.open(first)
        moved = spec.env.get("data_path_to_save_groups")
        plan = ProcessPlan(
            group_size=spec.process.group_size,
            groups=spec.process.groups,
            drop_uniform=spec.process.drop_uniform,
            prefer_differing=spec.dataset.sampling == "differing",
            concurrency=in_flight(spec, "process"),
            groups_path=Path(moved) if moved else None,
            generation_params=generation_params(spec, "process"),
            run=spec.fingerprint("process"),
        )
        with RunDirectory.choose(spec, "process", launch.out, fresh=launch.fresh) as directory:
            compiled.artifact_folder = directory.artifacts
            say_what_is_new(directory, spec, launch)
            regrade = Regrading.of(directory, compiled, rows, plan.group_size, launch.progress)
            said = {
                **await _described(compiled, launch.mode, rows, encoder),
                "grading": regrade.grading.record(),
            }
            plan = replace(plan, regrade=regrade, ready=partial(directory.describe, spec, said))
            with wandb_log(spec, directory.path) as log:
                summary = await process(
                    compiled,
                    rows,
                    plan,
                    directory,
                    encoder=encoder,
                    budget=budget(spec, spec.process.groups),
                    progress=launch.progress,
                    log=log,
                )
            directory.add({"failed": summary.failed, "quarantined": summary.quarantined})
            directory.add_images(compiled.images)
            if spec.process.format != "atropos":
                await asyncio.to_thread(_write_format, spec, compiled, directory, plan, launch.progress, encoder)
        for reason, count in encoder.reasons.most_common():
            launch.progress.note(f"{count} rollouts have no tokens: {reason}")
        return summary, directory


def _write_format(
    spec: Spec,
    compiled: CompiledSpec,
    directory: RunDirectory,
    plan: ProcessPlan,
    progress: Progress,
    encoder: Encoder,
) -> None:
    kept = Kept.of(directory, compiled, plan.group_size)
    with closing(kept), closing(directory.journal(plan.groups_path or "groups.jsonl")) as groups:
        kept.load()
        written = write_format(spec.process.format, directory, kept, groups, encoder.tokenizer)
    for path, count in written:
        progress.note(f"{count} rows for {spec.process.format} in {path}")


async def run_evaluate(spec: Spec, launch: Launch) -> tuple[Evaluation, RunDirectory]:
    """Evaluate mode of a spec, into its run directory."""
    async with prepare(spec, launch) as compiled:
        await require_reachable("policy", compiled.policy.configs)
        for role in compiled.roles.values():
            role.tell(launch.progress.note)
        rows, encoder = await _load(spec, "eval", launch)
        first, rows = await first_of(rows, "eval")
        await compiled.open(first)
        with RunDirectory.choose(spec, "evaluate", launch.out, fresh=launch.fresh) as directory:
            compiled.artifact_folder = directory.artifacts
            say_what_is_new(directory, spec, launch)
            size = spec.evaluate.rollouts
            regrade = Regrading.of(directory, compiled, rows, size, launch.progress)
            kept = Kept.of(directory, compiled, size)
            with closing(kept), wandb_log(spec, directory.path) as log:
                await regrade(kept)
                kept.load()
                said = {
                    **await _described(compiled, launch.mode, rows, encoder),
                    "grading": regrade.grading.record(),
                }
                directory.describe(spec, said)
                found = await evaluate(
                    compiled,
                    rows,
                    evaluate_plan(spec),
                    kept,
                    budget=budget(spec, None),
                    progress=launch.progress,
                )
                log.metrics(found.metrics)
                directory.add({"failed": dict(found.causes), "quarantined": found.ungraded_rows})
                directory.add_images(compiled.images)
                moved = spec.env.get("data_dir_to_save_evals")
                await asyncio.to_thread(write_evaluation, found, RunDirectory(Path(moved)) if moved else directory)
        return found, directory


async def _described(compiled: CompiledSpec, mode: Mode, rows: Rows, encoder: Encoder) -> dict[str, Any]:
    offered, told = compiled.tooling.fingerprints, await engines(compiled.policy.configs)
    return provenance(compiled.spec, mode, rows.fingerprint, encoder.tokenizer, offered, told)


def say_what_is_new(directory: RunDirectory, spec: Spec, launch: Launch) -> None:
    """Where a run begins although one of this spec is there: which parts have changed, so that it is played anew."""
    if directory.has_rollouts or launch.fresh or launch.out is not None:
        return
    earlier = directory.sibling()
    if earlier is not None:
        changed = ", ".join(changed_parts(earlier.described(), spec, launch.mode)) or "the spec"
        launch.progress.note(
            f"{changed} changed since {earlier.path}: all rollouts are played anew; what is there stays"
        )


def evaluate_plan(spec: Spec) -> EvaluatePlan:
    """How many rollouts, and what counts as success, from the spec."""
    return EvaluatePlan(
        rollouts=spec.evaluate.rollouts,
        concurrency=in_flight(spec, "evaluate"),
        success=spec.evaluate.success,
        span=spec.score.clamp or (0.0, 1.0),
        generation_params=generation_params(spec, "evaluate"),
    )


def write_evaluation(found: Evaluation, directory: RunDirectory) -> None:
    """metrics.json and samples.jsonl."""
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.write_json("metrics.json", found.metrics_file())
    with closing(directory.journal("samples.jsonl")) as samples:
        samples.keep(found.samples())


def budget(spec: Spec, groups: int | None) -> Budget:
    """The spec's bounds; where it names none for failures, as many groups may fail as the run is to have."""
    limit = spec.budget.max_failures
    return Budget(
        max_failures=limit if limit is not None else groups,
        max_tokens=spec.budget.max_tokens,
        deadline=spec.budget.deadline,
        max_cost=spec.budget.max_cost,
    )


async def first_of(rows: Rows, split: Split) -> tuple[Row, Rows]:
    """Any row, to start what all rollouts need, and the rows to play; read off the event loop.

    The rows to play begin with what was read here, so that a streamed dataset is not opened once more.

    Raises:
        RunError: there are none.
    """

    def peek() -> tuple[Row | None, Iterator[Row]]:
        iterator = iter(rows)
        return next(iterator, None), iterator

    first, rest = await asyncio.to_thread(peek)
    if first is None:
        words = "evaluate on; see dataset.eval" if split == "eval" else "play; see dataset.filter, .eval and .limit"
        raise RunError(f"the dataset has no rows to {words}")
    begun = [chain([first], rest)]
    again = Rows(
        lambda: begun.pop() if begun else iter(rows),
        length=rows.length,
        fingerprint=rows.fingerprint,
        fallback=rows.fallback,
    )
    return first, again


def in_flight(spec: Spec, mode: Mode) -> int | None:
    """Rollouts at a time in process or evaluate, where the spec bounds them: by a number of rollouts or of groups."""
    section, size, field = (
        (spec.process, spec.process.group_size, "max_num_workers")
        if mode == "process"
        else (spec.evaluate, spec.evaluate.rollouts, "max_eval_workers")
    )
    groups = spec.env.get(field)
    bounds = [section.concurrency, groups * size if groups is not None and groups > 0 else None]
    return min((bound for bound in bounds if bound is not None), default=None)


def require_effect(flags: Sequence[str], mode: Mode) -> None:
    """Refuse a flag that bounds what a trainer is sent where there is no trainer.

    Raises:
        UserError: which flag, and what bounds tokens here.
    """
    if mode != "serve" and any(flag.partition("=")[0] == "--env.max_token_length" for flag in flags):
        raise UserError(
            f"--env.max_token_length has no effect in {mode}: it is the longest sequence that a trainer is sent. "
            "Set agent.max_tokens to bound a turn, or agent.max_trajectory_tokens to bound a rollout"
        )


def generation_params(spec: Spec, mode: Mode) -> dict[str, Any]:
    """How the policy sampled, for trainers and records."""
    agent = spec.agent_for(mode)
    given = {"temperature": agent.temperature, "top_p": agent.top_p, "max_tokens": agent.max_tokens}
    return {name: value for name, value in given.items() if value is not None}


async def _load(spec: Spec, split: Split, launch: Launch) -> tuple[Rows, Encoder]:
    rows = await asyncio.to_thread(load_rows, spec, split, notify=launch.progress.note)
    name = tokenizer_of(spec)
    if name is None and spec.servers["policy"][0].type != "scripted":
        return rows, Encoder(None, "the policy names neither a model nor a tokenizer")
    if spec.servers["policy"][0].type in TOKEN_LEVEL:
        renderer = await asyncio.to_thread(renderer_of, spec)
        return rows, Encoder(renderer.tokenizer)
    if split == "eval":
        return rows, Encoder(None)
    return rows, await asyncio.to_thread(Encoder.load, name)


def _require_sandbox(spec: Spec, launch: Launch) -> None:
    """Stop where the sandbox cannot work here; never go on without the fence unless the spec says so."""
    if spec.sandbox.backend == "none":
        launch.progress.note(f"WARNING: {WARNING}")
    elif spec.sandbox.backend == "bubblewrap":
        require_bubblewrap()


def _may_use_sandbox(compiled: CompiledSpec) -> bool:
    """Whether a rollout can come to use its sandbox, so that it must work here."""
    spec = compiled.spec
    servers = any(tool.mcp is not None and tool.mcp.where == "sandbox" for tool in spec.tools)
    return bool(spec.toolsets.enabled or spec.toolsets.distribution or servers or compiled.uses_context)
