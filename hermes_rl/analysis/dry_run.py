"""Plan of a run: the rollouts to run, the reused part of an earlier run and the reason, and the cost. Nothing is
written.

Figures about rollouts are measured, on an earlier run in the same directory or on a sample that runs in a temporary
directory; without either, only certain facts are reported: the prompts, and bounds.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hermes_rl.analysis.record import RolloutSummary, RunRecord, summary_of
from hermes_rl.data.load import Rows, load_rows, split_of
from hermes_rl.errors import UserError
from hermes_rl.others_files import open_file, read_regular
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import RolloutState, are_uniform
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.process import run_process
from hermes_rl.runs.prompt_preview import Rendered, render_row
from hermes_rl.runs.regrading import Grading, require_judgeable
from hermes_rl.runs.remaining import group_name, left_to_play
from hermes_rl.runs.renderer_check import tokenizer_of
from hermes_rl.runs.setup import RunOptions, changed_sections, plan_of, require_runnable
from hermes_rl.runs.statistics import mean
from hermes_rl.runs.store import WAITING
from hermes_rl.servers.usage import price_of
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.sections.servers import Prices

PROMPTS = 3
"""Rows whose prompts are measured."""
ROWS = 1_000_000
"""Maximum number of rows that are counted in endless data."""


@dataclass(frozen=True)
class MeasuredRole:
    """Mean use of the models of a role per rollout; `cost` is None if the cost of a call is unknown."""

    calls: float
    prompt_tokens: float
    completion_tokens: float
    cached_tokens: float
    cost: float | None


@dataclass(frozen=True)
class Measured:
    """Means per rollout, of `count` rollouts from `source`; `roles` has the policy and all others.

    `played` is how many rollouts run for each one that the run must have: more than 1 if some fail or are excluded, or
    None if all were excluded and the number is unknown.
    """

    source: str
    count: int
    played: float | None
    turns: float
    seconds: float
    bytes: float
    roles: Mapping[str, MeasuredRole]


@dataclass
class DryRun:
    """Plan of a run.

    Attributes:
        directory: directory that it would write.
        exists: True if there are rollouts already.
        rows: number of rows; None: endless.
        groups: number of groups that it must have, of `size` rollouts; None if a trainer decides.
        kept_rollouts: existing rollouts that do not run again.
        retried_rollouts: existing rollouts that run again because of infrastructure failures.
        rescored: True if existing rollouts get another score from the same values.
        rejudged: rewards that judge existing rollouts again.
        new: why the latest other run is not reused; empty if there is none.
        play: rollouts that it would run; None if a trainer decides.
        prompts: first requests of a few rows.
        measured: use per rollout; None if nothing was measured.
        prices: prices of each role's model, if they are known.
        free: bytes on the disk.
        notes: other messages.
    """

    spec: Spec
    mode: Mode
    directory: Path
    exists: bool
    rows: int | None
    groups: int | None
    size: int
    kept_rollouts: int = 0
    retried_rollouts: int = 0
    rescored: bool = False
    rejudged: tuple[str, ...] = ()
    new: str = ""
    play: int | None = None
    prompts: list[Rendered] = field(default_factory=list)
    tokenizer: str = ""
    measured: Measured | None = None
    prices: Mapping[str, Prices] = field(default_factory=dict)
    free: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def played(self) -> float:
        """All rollouts that run, including rollouts that fail or are excluded."""
        attempts_per_rollout = None if self.measured is None else self.measured.played
        return (self.play or 0) * (1.0 if attempts_per_rollout is None else attempts_per_rollout)

    @property
    def costs(self) -> dict[str, float | None]:
        """Cost of running the rollouts in US dollars, by role, or None if it is unknown."""
        if self.measured is None or self.play is None:
            return {}
        costs = {role: measured.cost for role, measured in self.measured.roles.items()}
        for role, measured in self.measured.roles.items():
            if (price := self.prices.get(role)) is not None:
                tokens = measured.prompt_tokens, measured.completion_tokens, measured.cached_tokens
                costs[role] = price_of(price.model_dump(), *tokens)
        return {role: None if cost is None else cost * self.played for role, cost in costs.items()}


async def dry_run(
    spec: Spec, launch: RunOptions, sample: int = 0, prices: Mapping[str, Prices] | None = None
) -> DryRun:
    """Return the plan of a run and, with `sample`, the use measured on that many rows.

    Raises `UserError` if the run would be refused, for the same reason; `RunError` if a server of tools cannot be
    started, or the sample cannot run.
    """
    compiled = require_runnable(spec, launch)
    split = split_of(launch.mode)
    notes: list[str] = []
    rows = await asyncio.to_thread(load_rows, spec, split, notify=notes.append)
    async with compiled:
        plan = await asyncio.to_thread(_make_plan, compiled, launch, rows)
        plan.notes, plan.prices = notes, prices or {}
        for row in await asyncio.to_thread(lambda: list(islice(rows, PROMPTS))):
            plan.prompts.append(await render_row(compiled, row, split, with_text=True))
    missing = next((prompt.missing for prompt in plan.prompts if prompt.missing), None)
    plan.tokenizer = missing.splitlines()[0] if missing else tokenizer_of(spec) or "the small built-in one"
    if sample:
        plan.measured = await _run_sample(spec, launch, sample)
    return plan


async def nothing_left(spec: Spec, launch: RunOptions) -> bool:
    """Return True if a run is complete and graded by the current spec, or raise why it is refused; no server is
    called.
    """
    compiled = require_runnable(spec, launch)
    # The messages of loading are shown again when the run starts.
    rows = await asyncio.to_thread(load_rows, spec, split_of(launch.mode), notify=lambda _: None)
    plan = await asyncio.to_thread(_make_plan, compiled, launch, rows)
    return plan.exists and plan.play == 0 and not plan.rescored and not plan.rejudged


def prices_of(spec: Spec, path: Path | None) -> dict[str, Prices]:
    """Return the price of each role's model: of a JSON file, else of the spec.

    The file is ``{"model": {"prompt": 0.5, "completion": 1.5}}``, in US dollars per million tokens. If a role has
    several servers, the price of the first one counts. Raises `UserError` if the file cannot be read, or does not name
    the policy's model.
    """
    form = '{"MODEL": {"prompt": 0.5, "completion": 1.5}}, in US dollars for a million tokens'
    servers = {role: role_servers[0] for role, role_servers in spec.servers.items()}
    models = {role: server.model or server.type for role, server in servers.items()}
    prices = {role: server.prices for role, server in servers.items() if server.prices is not None}
    if path is None:
        return prices
    try:
        by_model = TypeAdapter(dict[str, Prices]).validate_json(read_regular(path))
    except OSError as error:
        raise UserError(f"--prices: {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        location = ".".join(map(str, wrong["loc"]))
        problem = f"{location}: {wrong['msg']}" if location else wrong["msg"]
        raise UserError(f"--prices: {path} is not of the form {form}: {problem}") from error
    if models.get("policy") not in by_model and "policy" not in prices:
        raise UserError(f"--prices: {path} does not say the price of the model {models.get('policy')}")
    return prices | {role: by_model[model] for role, model in models.items() if model in by_model}


def _make_plan(compiled: CompiledSpec, launch: RunOptions, rows: Rows) -> DryRun:
    spec, mode = compiled.spec, launch.mode
    directory = RunDirectory.choose(spec, mode, launch.out, fresh=launch.fresh)
    size, length = spec.group_size(mode), rows.length
    if mode == "evaluate" and length is None:  # the rows are finite, or the run would not end
        length = sum(1 for _ in islice(rows, ROWS))
    groups = {"process": spec.process.groups, "evaluate": length}.get(mode)
    plan = DryRun(spec, mode, directory.path, directory.has_rollouts, length, groups, size)
    absolute_path = directory.path.absolute()
    plan.free = shutil.disk_usage(
        next(folder for folder in (absolute_path, *absolute_path.parents) if folder.exists())
    ).free
    counting: Sequence[RolloutSummary] = ()
    if plan.exists:
        record = RunRecord(directory.path)
        record.refresh()
        counting = list(record.counting(size=size))
        plan.measured = _measure_record(str(directory.path), record, _uniform_size(spec, mode))
        _add_regrading(plan, compiled, directory.read_run_info(), size)
    elif launch.out is None:
        plan.new = changed_sections(directory, spec, launch)
    plan.retried_rollouts = sum(rollout.state == RolloutState.FAILED for rollout in counting)
    plan.kept_rollouts = len(counting) - plan.retried_rollouts
    if groups is not None:
        plan.play = _to_play(counting, directory.path, rows, compiled, mode)
    return plan


def _uniform_size(spec: Spec, mode: Mode) -> int | None:
    """Return the number of members from which a uniform group is excluded, or None if uniform groups are written."""
    size = spec.group_size(mode)
    return size if spec.drops_uniform(mode) and size > 1 else None


def _to_play(counting: Sequence[RolloutSummary], path: Path, rows: Rows, compiled: CompiledSpec, mode: Mode) -> int:
    """Return how many rollouts are missing in the groups that the run must have."""
    plan, groups = plan_of(compiled.spec, mode), compiled.spec.process.groups
    states: dict[str, dict[int, RolloutState]] = {}
    for rollout in counting:
        states.setdefault(rollout.group, {})[rollout.index] = RolloutState(rollout.state)

    def count_missing(name: str) -> int:
        return len(left_to_play(states.get(name, {}), plan.size, compared=compiled.has_group_rewards))

    # Rollouts that wait for a comparison do not run again, but do not count before their group is complete.
    ended = {name for name in states if not count_missing(name)}
    with suppress(FileNotFoundError), open_file(path / WAITING) as file:
        for rollout in (summary_of(line, 0) for line in file if line.endswith(b"\n")):
            states.setdefault(rollout.group, {}).setdefault(rollout.index, RolloutState.SCORED)
    if mode == "evaluate":
        return sum(map(count_missing, islice(_group_order(rows, repeat=plan.repeat), ROWS)))
    dropped = _excluded_groups(counting, _uniform_size(compiled.spec, mode))
    complete = ended - dropped
    if not states or len(complete) >= groups:
        return plan.size * max(0, groups - len(complete))
    following = (name for name in _group_order(rows, repeat=plan.repeat) if name not in complete | dropped)
    return sum(map(count_missing, islice(following, groups - len(complete))))


def _group_order(rows: Rows, *, repeat: bool) -> Iterator[str]:
    """Yield the ids of the groups in the order in which a run processes them."""
    occurrences: Counter[str] = Counter()
    for epoch in count():
        empty = True
        for row in rows:
            yield group_name(row.key, epoch if repeat else occurrences[row.key], repeat=repeat)
            occurrences[row.key] += 1
            empty = False
        if empty or not repeat:
            return


def _excluded_groups(counting: Iterable[RolloutSummary], uniform_size: int | None) -> set[str]:
    """Return the groups that a run does not write: for a member's stop reason, or because all have the same score."""
    groups: dict[str, list[RolloutSummary]] = {}
    for rollout in counting:
        groups.setdefault(rollout.group, []).append(rollout)
    return {
        name
        for name, members in groups.items()
        if any(member.state == RolloutState.EXCLUDED for member in members)
        or (len(members) == uniform_size and are_uniform([[each.score for each in members if each.score is not None]]))
    }


def _add_regrading(plan: DryRun, compiled: CompiledSpec, run_info: Mapping[str, Any], size: int) -> None:
    """Add the changes of the existing scores to the plan; raises UserError if a reward cannot judge again."""
    before = run_info.get("grading") or {}
    grading = Grading.from_spec(compiled.spec, compiled.grader, size)
    changed = grading.changed(before)
    if changed:
        require_judgeable(compiled.grader, changed)
    plan.rejudged = tuple(sorted(changed))
    # In the form of run.json: a round trip converts values that JSON represents differently.
    plan.rescored = (before.get("scoring") or {}) != json.loads(json.dumps(grading.scoring()))


def _measure_record(source: str, record: RunRecord, uniform_size: int | None) -> Measured | None:
    """Return the mean use of the rollouts of a record, failed attempts included, or None if none was graded."""
    rollouts, counting = list(record.rollouts), list(record.counting())
    if all(rollout.score is None for rollout in counting):
        return None
    excluded = _excluded_groups(counting, uniform_size)
    usable_count = sum(rollout.state != RolloutState.FAILED and rollout.group not in excluded for rollout in counting)
    size = sum(path.stat().st_size for path in record.path.rglob("*") if path.is_file())
    count = len(rollouts)
    return Measured(
        source,
        count,
        count / usable_count if usable_count else None,
        turns=mean([rollout.turns for rollout in rollouts]),
        seconds=mean([rollout.total_seconds for rollout in rollouts]),
        bytes=size / count,
        roles={
            role: MeasuredRole(
                usage.calls / count,
                usage.prompt_tokens / count,
                usage.completion_tokens / count,
                usage.cached_tokens / count,
                None if usage.cost is None else usage.cost / count,
            )
            for role, usage in record.usage.items()
        },
    )


async def _run_sample(spec: Spec, launch: RunOptions, rows: int) -> Measured:
    """Run a few rows in a temporary directory, and measure them."""
    atropos_options = {name: value for name, value in spec.atropos.items() if not name.startswith("data_")}
    mode: Mode = "evaluate" if launch.mode == "evaluate" else "process"
    group = spec.serve.group_size if launch.mode == "serve" else spec.process.group_size
    once = {"groups": rows, "group_size": group, "workers": 1, "format": "atropos", "drop_uniform": False}
    small = spec.model_copy(
        update={
            "process": spec.process.model_copy(update=once),
            "evaluate": spec.evaluate.model_copy(update={"workers": 1}),
            "wandb": None,
            "atropos": atropos_options,
        }
    )
    # Excluded groups are replaced by other rows, and a trainer continues without end.
    max_rows = spec.process.groups if launch.mode == "process" and not spec.process.drop_uniform else None
    with TemporaryDirectory(prefix="hermes-rl-sample-") as folder:
        sample_options = replace(
            launch, mode=mode, out=Path(folder) / "run", fresh=False, ray=None, at_end=None,
            pick=lambda all_of_them: _spread_rows(all_of_them, rows, max_rows),
        )  # fmt: skip
        await (run_evaluate(small, sample_options) if mode == "evaluate" else run_process(small, sample_options))
        record = RunRecord(Path(folder) / "run")
        record.refresh()
        measured = _measure_record(f"a sample of {rows} rows", record, _uniform_size(spec, launch.mode))
    if measured is None:
        raise UserError("no rollout of the sample could be graded, so nothing could be measured")
    return measured


def _spread_rows(rows: Rows, row_count: int, max_rows: int | None) -> Rows:
    """Return a few of the rows of a run, at equal distances: data often starts with easy or short rows.

    `max_rows` is the maximum number of rows that run. If the number of rows is unknown, the first are taken.
    """
    if rows.length is None:
        chosen = list(islice(rows, row_count))
    else:
        last = min(rows.length, max_rows or rows.length)
        chosen_indexes = {(2 * sample_index + 1) * last // (2 * row_count) for sample_index in range(row_count)}
        chosen = [row for index, row in enumerate(islice(rows, last)) if index in chosen_indexes]
    return Rows.from_sequence(chosen, fingerprint=rows.fingerprint, fallback=rows.fallback)
