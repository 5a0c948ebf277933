"""Set up a run of a spec: everything between the command line and the first rollout, for every mode.

`open_run` finds the errors that can be found before a run, loads rows and tokenizer, opens the run directory, updates
its records to the current spec, describes the run, and passes a `SpecRun` to the mode that consumes its groups.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.data.load import Rows, load_rows, split_of
from hermes_rl.errors import UserError
from hermes_rl.rollouts.admission import require_descriptors
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Encoder
from hermes_rl.rollouts.sandboxes import keep_artifacts
from hermes_rl.runs.cluster import RayConnection
from hermes_rl.runs.directory import RunDirectory, changed_parts
from hermes_rl.runs.groups import GroupsFile
from hermes_rl.runs.progress import Progress, RunStatus, WandbLog, wandb_log
from hermes_rl.runs.provenance import moment, provenance
from hermes_rl.runs.regrading import Grading, bring_up_to_date
from hermes_rl.runs.renderer_check import require_same_tokenizer
from hermes_rl.runs.rollout_worker import WorkerSetup, encoder_of
from hermes_rl.runs.run import GroupRunner, Plan, RowSource, Run, RunBudget
from hermes_rl.runs.run_log import run_log
from hermes_rl.runs.store import RolloutStore
from hermes_rl.runs.workers import Workers, open_workers, require_shares
from hermes_rl.sandbox.bubblewrap import require_bubblewrap
from hermes_rl.sandbox.isolation import require_by_hand
from hermes_rl.sandbox.none import WARNING, warned
from hermes_rl.servers.exactness import engines, require_address, require_reachable
from hermes_rl.servers.usage import Meter, Usage
from hermes_rl.spec.fingerprint import fingerprint
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.stop_reasons import RETRIES_EXHAUSTED
from hermes_rl.threads import acquire_in_thread, end_tasks, run_in_thread

KEPT = 1.0
"""Seconds between two records of the use of models."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that are not part of the spec.

    `environ` holds the keys of servers. `ray` is the Ray cluster that runs the rollouts: its address, `local`, or a
    shared connection. `at_end` is called with the run directory and the function that notifies the user, in a thread,
    when the run has ended for any reason. `pick` selects rows; without it all rows are run.
    """

    mode: Mode
    out: Path | None = None
    fresh: bool = False
    environ: Mapping[str, str] | None = None
    progress: Progress = field(default_factory=Progress)
    ray: str | RayConnection | None = None
    at_end: Callable[[Path, Callable[[str], None]], None] | None = None
    sibling_runs: list[Run] | None = None
    """Runs that share this process, to which this one is added; None: it is the only one."""
    pick: Callable[[Rows], Rows] | None = None


@dataclass
class Records:
    """Records of a run on disk, updated to the current spec. `changed` groups have other scores than before."""

    directory: RunDirectory
    store: RolloutStore
    grading: Grading
    groups_file: GroupsFile | None
    changed: set[str]


@dataclass(frozen=True)
class Retried:
    """Retries of this start of a run: rollouts with infrastructure failures, and calls by the role of the server."""

    rollouts: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    last_failure: str = ""
    """Reason of the last failed call in this process."""
    died: int = 0
    """Workers that died."""
    replayed: int = 0
    """Rollouts that were run again because of it."""

    @property
    def summary(self) -> str:
        """Description of the retries; empty if there were none."""
        calls = ", ".join(f"{role} {count}" for role, count in self.calls.items())
        failure_note = f" ({self.last_failure:.120})" if self.last_failure else ""
        parts = [f"rollouts retried: {self.rollouts}"] if self.rollouts else []
        parts += [f"calls sent again: {calls}{failure_note}"] if calls else []
        if self.died:
            parts.append(f"workers that died: {self.died} (rollouts retried because of it: {self.replayed})")
        return "; ".join(parts)

    def record(self) -> dict[str, Any]:
        """Return the entry for `run.json`."""
        worker_deaths = {"workers": {"died": self.died, "rollouts": self.replayed}} if self.died else {}
        return {"rollouts": self.rollouts, "calls": dict(self.calls), **worker_deaths}


@dataclass
class SpecRun:
    """A run of a spec that is open."""

    spec: Spec
    compiled: CompiledSpec
    run: Run
    records: Records
    encoder: Encoder
    log: WandbLog
    progress: Progress
    workers: Workers | None = None
    """Processes that run the rollouts, or None if this process does."""

    @property
    def directory(self) -> RunDirectory:
        return self.records.directory

    @property
    def store(self) -> RolloutStore:
        return self.records.store

    @property
    def retried(self) -> Retried:
        """Retries so far."""
        roles, workers = self.compiled.roles, self.workers
        calls = Counter({role: server.retries for role, server in roles.items() if server.retries})
        failure = next((role.last_failure for role in roles.values() if role.last_failure), "")
        if workers is None:
            return Retried(self.run.runner.replayed, calls, failure)
        calls.update(workers.retries)
        return Retried(self.run.runner.replayed, calls, failure, workers.died, workers.replayed)

    def status(self) -> RunStatus:
        """Return the status of the run (`hermes_rl.runs.progress.Watched`)."""
        run, workers = self.run, self.workers
        return RunStatus(
            in_flight=run.runner.open,
            concurrency=run.concurrency,
            phases=run.runner.phases if workers is None else workers.phases,
            waiting_calls=self.compiled.policy.waiting if workers is None else workers.waiting,
            tokens=run.budget.tokens,
            cost=run.budget.meter.known_cost,
            failures=run.failure_rates.all.causes,
            retry_summary=self.retried.summary,
            paused=run.paused,
        )

    def pause(self, paused: bool) -> None:
        """Start nothing new while the run is paused."""
        self.run.paused = paused
        self.run.wake()

    def finish(self) -> None:
        """Let the run end after the rollouts in flight, and start no others. Does not wait."""
        self.run.budget.ended = "you asked for it"
        self.run.wake()

    def set_concurrency(self, rollouts: int) -> None:
        """Keep this number of rollouts in flight."""
        self.run.set_concurrency(rollouts)


@dataclass
class CustomHooks:
    """User code of a class made from a spec that replaces the spec or adds to it.

    `rows` are the items that the code provides; None: the spec's rows. `servers`: True if it uses other servers than
    the spec names.
    """

    compiled: CompiledSpec
    environment: Environment
    rows: RowSource | None = None
    servers: bool = False


def require_runnable(spec: Spec, launch: RunOptions, compiled: CompiledSpec | None = None) -> CompiledSpec:
    """Return the compiled spec after all checks that need no server; raises UserError with a fix."""
    if "policy" not in spec.servers:
        raise UserError("servers.policy is missing: name the model that acts")
    if launch.mode != "evaluate" and spec.dataset.eval is not None and spec.dataset.eval.only:
        raise UserError(f"dataset.eval is `only`: every row is for evaluation, so {launch.mode} cannot use any")
    if launch.mode == "evaluate" and spec.dataset.eval is None:
        raise UserError("dataset.eval is missing: select the rows for evaluation, such as {fraction: 0.1} or `only`")
    if launch.mode != "evaluate" and spec.agents and not spec.trained_seats:
        raise UserError(
            f"agents: no seat is trained (`train: false`), so {launch.mode} has nothing to give; evaluate can"
        )
    training = None if launch.mode == "evaluate" else launch.mode
    return require_machine(compiled or CompiledSpec(spec, launch.environ), launch.progress.note, training)


def require_machine(compiled: CompiledSpec, note: Callable[[str], None], training: str | None) -> CompiledSpec:
    """Return the compiled spec, after a check that its sandbox works here if one may be used, and isolates trained
    rollouts.

    Args:
        compiled: the spec.
        note: notifies the user.
        training: name of the mode that makes rollouts for training, for the message; None: they are only for the user
            to read.

    Raises:
        UserError: the sandbox cannot be used, with a fix.
    """
    spec = compiled.spec
    require_descriptors()
    if training is not None:
        require_by_hand(spec.sandbox.backend, training)
    servers = any(tool.mcp is not None and tool.mcp.where == "sandbox" for tool in spec.tools)
    if spec.toolsets.enabled or spec.toolsets.distribution or servers or compiled.uses_context:
        # Never continue without isolation unless the spec requests it.
        if spec.sandbox.backend == "none":
            note(f"WARNING: {WARNING}")
            warned.set()
        elif spec.sandbox.backend == "bubblewrap":
            require_bubblewrap()
    return compiled


@asynccontextmanager
async def open_run(spec: Spec, launch: RunOptions, hooks: CustomHooks | None = None) -> AsyncIterator[SpecRun]:
    """Open the run; its findings are in `run.json` when it closes.

    Raises `UserError` if the spec cannot run here, its rows are not available, or the directory contains another run.
    """
    compiled = require_runnable(spec, launch, hooks.compiled if hooks is not None else None)
    split = split_of(launch.mode)
    count = workers_of(spec, launch.mode, launch.ray)
    if count != 1 or launch.ray is not None:
        _require_plain(hooks)
        require_shares(spec, count or 1)
    async with compiled:
        await require_reachable("policy", compiled.policy.configs)
        meter = Meter()
        for name, role in compiled.roles.items():
            role.tell(launch.progress.note)
            role.count_by(meter)
            await require_address(name, role.configs if name != "policy" else ())
        rows = await asyncio.to_thread(load_rows, spec, split, notify=launch.progress.note)
        if launch.pick is not None:
            rows = await asyncio.to_thread(launch.pick, rows)
        if compiled.teacher is not None and split == "train":
            await require_reachable(compiled.teacher.role.name, compiled.teacher.role.configs)
            await asyncio.to_thread(require_same_tokenizer, spec)
            await compiled.teacher.probe()
        encoder = await encoder_of(spec, split)
        if encoder.missing is not None:
            launch.progress.note(f"WARNING: the groups will have messages and no tokens. {encoder.missing}")
        source = RowSource(rows)
        await compiled.open(await source.require_first(split))
        plan, environment = plan_of(spec, launch.mode), hooks.environment if hooks is not None else compiled
        with (
            RunDirectory.choose(spec, launch.mode, launch.out, fresh=launch.fresh) as directory,
            run_log(directory.path, launch.progress, launch.environ),
        ):
            if plan.keep_lost and isinstance(environment, GroupRunner):
                raise UserError(
                    "on_stop.retries_exhausted is worst, but this environment runs its groups with its own code: "
                    "remove the key, and let that code score a member without retries left"
                )
            compiled.keep = partial(keep_artifacts, directory.artifacts)
            if not directory.has_rollouts and launch.out is None and (new := changed_sections(directory, spec, launch)):
                launch.progress.note(f"{new}: starting a new run; the earlier run remains")
            budget = budget_of(spec, launch.mode, meter_of(directory.read_run_info(), meter))
            async with (
                usage_kept(directory, budget.meter),  # until the workers have ended, who may still report calls
                open_records(
                    directory, compiled, rows, launch.mode, plan.size, launch.progress, budget.meter
                ) as records,
                open_workers(
                    WorkerSetup(spec, launch.mode, launch.environ, won=records.store.won),
                    count,
                    compiled,
                    directory.artifacts,
                    launch.progress.note,
                    launch.ray,
                    budget.meter,
                ) as workers,
            ):
                offered, versions = compiled.tooling.fingerprints, await engines(compiled.policy.configs)
                made_with = provenance(spec, launch.mode, rows.fingerprint, encoder.tokenizer, offered, versions)
                directory.describe(spec, {**made_with, "grading": records.grading.record()})
                # In serve mode the trainer names the project itself, after registration.
                logging = wandb_log(spec, directory.path) if launch.mode != "serve" else nullcontext(WandbLog(None))
                with logging as log:
                    run = Run(
                        environment,
                        source if hooks is None or hooks.rows is None else hooks.rows,
                        plan if hooks is None or hooks.rows is None else replace(plan, repeat=False),
                        store=None if isinstance(environment, GroupRunner) else records.store,
                        encoder=encoder if split == "train" else None,
                        budget=budget,
                        progress=launch.progress,
                        workers=workers,
                        sibling_runs=launch.sibling_runs,
                    )
                    opened = SpecRun(spec, compiled, run, records, encoder, log, launch.progress, workers)
                    try:
                        with launch.progress.watching(opened):
                            yield opened
                    finally:
                        directory.add_images(compiled.images)
                        directory.add(
                            {
                                "ended": moment(),
                                "retried": opened.retried.record(),
                                "failure_rates": run.failure_rates.record(),
                                "stop_reasons": run.stop_reasons,
                                "usage": budget.meter.record(),
                            }
                        )
                        if (at_end := launch.at_end) is not None:
                            await run_in_thread(lambda: at_end(directory.path, launch.progress.note))


@asynccontextmanager
async def open_records(
    directory: RunDirectory,
    compiled: CompiledSpec,
    rows: Rows,
    mode: Mode,
    size: int,
    progress: Progress,
    meter: Meter,
) -> AsyncIterator[Records]:
    """Open the store and the file of groups, with every rollout updated to the spec's rewards and scoring; `meter`
    counts the calls of judges.

    Raises `UserError` if the records are of another run, or cannot be graded again, and `RunError` if a judge could
    not be called; no record was changed.
    """
    spec = compiled.spec
    grading = Grading.from_spec(spec, compiled.grader, size)
    with ExitStack() as stack:
        groups_file = None
        if mode != "evaluate":
            moved = spec.atropos.get("data_path_to_save_groups")
            journal = directory.journal(Path(moved) if moved else "groups.jsonl")
            file = GroupsFile(journal, directory.fingerprint, moved=moved is not None)
            groups_file = stack.enter_context(closing(file))
            groups_file.check(size)
        # All records are read, which takes a minute for some gigabytes.
        store = await acquire_in_thread(
            lambda: RolloutStore(directory, size, compared=compiled.has_group_rewards), RolloutStore.close
        )
        stack.enter_context(closing(store))
        with meter.counting():
            changed = await bring_up_to_date(store, directory, compiled, grading, rows, progress.note)
        compiled.seating.won |= store.won
        yield Records(directory, store, grading, groups_file, changed)


def plan_of(spec: Spec, mode: Mode) -> Plan:
    """Return the plan by which the groups of this mode are run."""
    plan = Plan(
        size=spec.group_size(mode),
        concurrency=in_flight(spec, mode),
        generation_params=generation_params(spec, mode),
        fingerprint=fingerprint(spec, mode),
    )
    if mode == "evaluate":
        return replace(plan, split="eval", repeat=False, require_complete=False)
    return replace(
        plan,
        keep_lost=spec.on_stop.get(RETRIES_EXHAUSTED) == "worst",
        drop_uniform=spec.drops_uniform(mode),
        prefer_differing=spec.dataset.row_selection == "skip_uniform",
    )


def meter_of(run_info: Mapping[str, Any], meter: Meter | None = None) -> Meter:
    """Return a meter, by default a new one, with the calls of earlier starts of a run, from its `run.json`."""
    meter = meter or Meter()
    for role, counts in (run_info.get("usage") or {}).items():
        meter.add(role, Usage.from_record(counts))
    return meter


@asynccontextmanager
async def usage_kept(directory: RunDirectory, meter: Meter) -> AsyncIterator[None]:
    """Write the use of models into `run.json` at intervals and at the end, so that it outlives a killed run.

    At the end the meter is closed: threads of user code may outlive their rollouts, and a later call of theirs would
    be counted nowhere.
    """
    first = meter.record()

    async def keep() -> None:
        written = first
        while True:
            await asyncio.sleep(KEPT)
            if (usage := meter.record()) != written:
                directory.add({"usage": usage})
                written = usage

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        await end_tasks([keeping])
        meter.close()
        if (usage := meter.record()) != first:
            directory.add({"usage": usage})


def budget_of(spec: Spec, mode: Mode, meter: Meter | None = None) -> RunBudget:
    """Return the spec's budget; if it sets no limit for failures, as many groups may fail as process mode must
    write.

    Args:
        meter: counts the calls; None: a new one.
    """
    limit = spec.budget.max_failures
    return RunBudget(
        max_failures=spec.process.groups if limit is None and mode == "process" else limit,
        max_tokens=spec.budget.max_tokens,
        deadline=spec.budget.deadline,
        max_cost=spec.budget.max_cost,
        meter=meter or Meter(),
    )


def in_flight(spec: Spec, mode: Mode) -> int | None:
    """Return the maximum number of concurrent rollouts in the spec, set directly or by Atropos' number of groups."""
    groups = spec.atropos.get("max_eval_workers" if mode == "evaluate" else "max_num_workers")
    if mode != "evaluate" and (groups is None or groups < 0) and spec.atropos.get("max_num_workers_per_node"):
        groups = spec.atropos["max_num_workers_per_node"] * len(spec.servers.get("policy", ()))
    bounds = [spec.section(mode).concurrency]
    bounds += [groups * spec.group_size(mode)] if groups is not None and groups > 0 else []
    return min((bound for bound in bounds if bound is not None), default=None)


def workers_of(spec: Spec, mode: Mode, ray: str | RayConnection | None = None) -> int | None:
    """Return the number of workers; 1 is this process alone, and None is as many as the Ray cluster has room for."""
    section = spec.section(mode)
    if ray is not None and section.workers == 1 and not spec.is_written((mode, "workers")):
        return None
    return section.workers


def _require_plain(hooks: CustomHooks | None) -> None:
    """Raise UserError for workers of a class with user code: they run only the spec."""
    if hooks is not None and (hooks.environment is not hooks.compiled or hooks.rows is not None or hooks.servers):
        raise UserError(
            "workers: this environment has its own Python code besides the spec, which runs in a single process; "
            "remove `workers`, or set it to 1"
        )


_OF_A_TRAINER = "it is about a trainer, and only serve has one: leave it out"
_WITHOUT_EFFECT: Mapping[str, tuple[tuple[Mode, ...], str]] = {
    "max_token_length": (
        ("process", "evaluate"),
        "it limits the sequences sent to a trainer. Set agent.max_tokens to bound a turn, or "
        "agent.max_trajectory_tokens to bound a rollout",
    ),
    "worker_timeout": (
        ("serve", "process", "evaluate"),
        "groups have no timeout. Set agent.timeout to limit a rollout",
    ),
    "max_eval_workers": (("process",), "process runs no evaluation. Set --env.max_num_workers"),
    "max_num_workers": (("evaluate",), "it bounds training. Set --env.max_eval_workers or evaluate.concurrency"),
    "max_num_workers_per_node": (("evaluate",), "it bounds training. Set evaluate.concurrency"),
    "data_path_to_save_groups": (("evaluate",), "an evaluation writes no groups. Set --env.data_dir_to_save_evals"),
    "data_dir_to_save_evals": (("process",), "process runs no evaluation. Set --env.data_path_to_save_groups"),
    **dict.fromkeys(
        (
            "batch_size",
            "eval_handling",
            "eval_limit_ratio",
            "include_messages",
            "inference_weight",
            "max_batches_offpolicy",
            "min_batch_allocation",
            "min_items_sent_before_logging",
            "rollout_server_url",
            "steps_per_eval",
        ),
        (("process", "evaluate"), _OF_A_TRAINER),
    ),
}
"""Flags of Atropos, the modes in which they have no effect, and the fix."""
_AS_IF_ABSENT = {("worker_timeout", "-1"), ("include_messages", "true")}


def require_effect(flags: Sequence[str], mode: Mode) -> None:
    """Raise UserError for a flag that has no effect in this mode, with a fix."""
    for index, word in enumerate(flags):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--env.")
        modes, instead = _WITHOUT_EFFECT.get(name, ((), ""))
        if not equals:
            value = flags[index + 1] if index + 1 < len(flags) else ""
        if option != name and mode in modes and (name, value) not in _AS_IF_ABSENT:
            raise UserError(f"{option} has no effect in {mode}: {instead}")


def generation_params(spec: Spec, mode: Mode) -> dict[str, Any]:
    """Return the sampling parameters of the policy, for trainers and records."""
    agent = spec.agent_for(mode)
    params = {"temperature": agent.temperature, "top_p": agent.top_p, "max_tokens": agent.max_tokens}
    return {name: value for name, value in params.items() if value is not None}


def changed_sections(directory: RunDirectory, spec: Spec, launch: RunOptions) -> str:
    """Return the parts of the spec that changed since the latest sibling run; empty if there is none."""
    earlier = None if launch.fresh else directory.sibling()
    if earlier is None:
        return ""
    changed = ", ".join(changed_parts(earlier.read_run_info(), spec, launch.mode)) or "the spec"
    return f"{changed} changed since {earlier.path}"
