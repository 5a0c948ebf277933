"""Update the recorded rollouts of a run to the current rewards and scoring of the spec; no rollout is run.

Every reward's value is recorded, so other weights, another clamp or another policy for stop reasons need no new
rollouts: the recorded values are combined again (rescoring). A reward that has changed is called again on the record
(re-judging). Its values are stored in `regrade.jsonl` until all of them are complete, so that a judge is never asked
twice for the same value. At the end each file of the store is replaced atomically.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.errors import Failure, RewardFailure, RunError, UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import RolloutState
from hermes_rl.rollouts.sandboxes import ArtifactSandboxes, kept_artifacts
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.provenance import code_hashes
from hermes_rl.runs.store import RolloutStore, group_of_episode, result_of
from hermes_rl.scoring.grader import GradedReward, Grader
from hermes_rl.scoring.reward_value import RewardValue, Weighting, combine, reward_of
from hermes_rl.spec.findings import locating
from hermes_rl.spec.model import Spec
from hermes_rl.spec.section import to_plain
from hermes_rl.stop_reasons import RETRIES_EXHAUSTED, StopReason
from hermes_rl.threads import acquire_in_thread

# ------------------------------------------------ Effect of changed rewards on existing rollouts
# Every reward's value is recorded, so other weights, a clamp or a policy for stop reasons need no new rollouts: the
# recorded values are scored again (`rescore`). A changed reward is called on the record (`rejudge`).


@dataclass(frozen=True)
class Grading:
    """Definition of a score. `rewards` are hashes of each reward's inputs, by name; the other fields turn values into a
    score.
    """

    rewards: Mapping[str, str] = field(default_factory=dict)
    weightings: Sequence[Weighting] = ()
    clamp: tuple[float, float] | None = None
    combine: str = "sum"
    on_stop: Mapping[str, Any] = field(default_factory=dict)
    seats: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the seats that a reward pays, by its name; a reward that is missing here pays all."""
    any_size: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the rewards that need the whole group and mean the same for every size, without that size."""

    @classmethod
    def from_spec(cls, spec: Spec, grader: Grader, size: int) -> Grading:
        """Return the grading that the spec requests, of groups of this size."""
        code, rewards, any_size = code_hashes(spec), {}, {}
        for reward in grader.rewards:
            material = _reward_inputs(spec, reward, code.get(f"rewards.{reward.name}"))
            if reward.group_level and reward.function.group_for is not None:
                any_size[reward.name] = _hash_inputs(material)
            rewards[reward.name] = _hash_inputs(material | ({"compared": size} if reward.group_level else {}))
        return cls(
            rewards=rewards,
            any_size=any_size,
            weightings=[reward.weighting for reward in grader.rewards],
            clamp=spec.score.clamp,
            combine=spec.score.combine,
            on_stop=to_plain(spec.on_stop),
            seats={reward.name: list(reward.seats) for reward in grader.rewards if reward.seats is not None},
        )

    def paying(self, line: Mapping[str, Any]) -> list[str]:
        """Return the names of the rewards that count for the rollout of a record."""
        seat = (line.get("seat") or {}).get("name")
        return [name for name in self.rewards if seat is None or seat in self.seats.get(name, (seat,))]

    def record(self) -> dict[str, Any]:
        """Return the `grading` entry of run.json."""
        return {"rewards": dict(self.rewards), "any_size": dict(self.any_size), "scoring": self.scoring()}

    def scoring(self) -> dict[str, Any]:
        """Return the settings that turn the rewards' values into a score, as JSON."""
        weightings = sorted(map(asdict, self.weightings), key=lambda weighting: str(weighting["name"]))
        clamp = list(self.clamp) if self.clamp else None
        more: dict[str, Any] = {"seats": dict(self.seats)} if self.seats else {}
        more |= {"combine": self.combine} if self.combine != "sum" else {}  # older runs do not record it
        return {
            "weightings": weightings,
            "clamp": clamp,
            "on_stop": dict(self.on_stop),
            **more,
        }

    def changed(self, before: Mapping[str, Any]) -> set[str]:
        """Return the rewards that are new or may have another value than before."""
        old = before.get("rewards") or {}
        return {name for name, digest in self.rewards.items() if old.get(name) != digest}

    def score(self, line: Mapping[str, Any]) -> tuple[float | None, str | None]:
        """Return the score of a graded rollout from its record in rollouts.jsonl, or why there is none."""
        policy = self.on_stop.get(line["stop_reason"], "grade")
        if policy == "drop":
            return None, f"the spec drops rollouts that end with {line['stop_reason']}"
        if not isinstance(policy, str):
            return float(policy), None
        paying = self.paying(line)
        weightings = [weighting for weighting in self.weightings if weighting.name in paying]
        if weightings and not line["rewards"]:
            return None, "it was excluded before it was graded"
        try:
            values = {weighting.name: RewardValue(line["rewards"][weighting.name]["value"]) for weighting in weightings}
            return combine(weightings, values, self.clamp, self.combine), None
        except RewardFailure as failure:
            return None, f"cannot be scored again: {failure}"
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"rollout {line.get('id')} lacks the value of a reward ({error}), so it cannot be scored again; "
                "use --fresh to start a new run next to it"
            ) from error


def _reward_inputs(spec: Spec, reward: GradedReward, code: str | None) -> dict[str, Any]:
    """Return the inputs of a reward's value; a file is represented by its content, so that a spec may move."""
    written, takes = spec.rewards[reward.name], reward.function.parameters
    # Another judge is another reward. A reward that takes `roles` may call any of them; with another policy, the run is
    # another one.
    roles = [role for role in spec.servers if role in takes or ("roles" in takes and role != "policy")]
    not_laid = sorted(name for name, artifact in spec.artifacts.items() if not artifact.restore)
    return {
        "fn": f"{code}:{written.fn.rpartition(':')[2]}" if code is not None else written.fn,
        "args": to_plain(reward.args),
        "sandbox": written.sandbox,
        **({"steps": written.per_step} if written.per_step is not None else {}),
        **({"range": reward.bounds} if reward.bounds != (0.0, 1.0) else {}),
        "roles": {role: [[server.type, server.model] for server in spec.servers[role]] for role in roles},
        **({"not laid": not_laid} if reward.fresh and not_laid else {}),
        **({"shares": dict(reward.shares)} if reward.shares is not None else {}),
    }


def _hash_inputs(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ----------------------------------------------------------------------------------- Bringing a store up to date

PROGRESS = "regrade.jsonl"
AT_ONCE = 64
"""Rollouts that are judged at a time."""
JUDGEABLE = {StopReason.REWARD_FAILURE, StopReason.JUDGE_FAILURE}
"""Infrastructure failures that left the full conversation, so that a repaired reward can judge it."""

Line = dict[str, Any]


async def bring_up_to_date(
    store: RolloutStore,
    directory: RunDirectory,
    compiled: CompiledSpec,
    grading: Grading,
    rows: Iterable[Row],
    note: Callable[[str], None],
) -> set[str]:
    """Update the scores of the store's rollouts to `grading`; repeating it after a crash does no harm.

    Returns the groups whose score, or use for training, has changed. Raises `UserError` with a fix if the records
    cannot be scored again. Raises `RunError` if a judge could not be called; nothing was changed.
    """
    if store.empty:
        return set()
    before = directory.read_run_info().get("grading")
    if not isinstance(before, Mapping):
        raise UserError(
            f"{directory.path}: run.json does not describe the grading of the recorded rollouts; use --fresh to "
            "start a new run next to it"
        )
    rejudging = Rejudging(directory, compiled, grading, rows, note)
    changed_rewards = grading.changed(before)
    if changed_rewards:
        await rejudging.judge(store, changed_rewards)
    old = before.get("scoring") or {}
    changed: set[str] = set()
    if changed_rewards or old != grading.scoring():
        rescoring = Rescoring(grading, rejudging, old.get("on_stop") or {})

        def rewrite() -> None:
            store.rewrite(rescoring.scored)
            store.load()

        await acquire_in_thread(rewrite, lambda _: None)
        changed = rescoring.changed
        if rescoring.count:
            note(f"scoring changed: rescoring {rescoring.count} recorded rollouts")
    (directory.path / PROGRESS).unlink(missing_ok=True)  # its values are in the rollouts now
    return changed


@dataclass
class Rescoring:
    """Gives records the score of their rewards' values under the current grading. `on_stop` is the earlier spec's."""

    grading: Grading
    rejudging: Rejudging
    on_stop: Mapping[str, Any]
    changed: set[str] = field(default_factory=set)
    """Groups whose score, or use for training, has changed."""
    count: int = 0

    def scored(self, line: Line) -> Line:
        """Return the record with its score."""
        line["rewards"] = {name: line["rewards"][name] for name in self.grading.rewards if name in line["rewards"]}
        if line["state"] == RolloutState.RETRIES_EXHAUSTED and self.grading.on_stop.get(RETRIES_EXHAUSTED) != "worst":
            line["state"] = str(RolloutState.FAILED)
            self.changed.add(group_of_episode(line))
        judged = self.rejudging.apply(line)
        if judged and set(line["rewards"]) != set(self.grading.paying(line)):
            # The failed reward was repaired; rewards that compare the rollout with its group are still missing.
            line |= {"score": None, "error": None, "state": str(RolloutState.WAITING)}
        waits = line["state"] == RolloutState.WAITING
        was_dropped = self.on_stop.get(line["stop_reason"]) == "drop"
        if not waits and (judged or line["score"] is not None or was_dropped):
            self.count += 1
            before = line["score"], self.on_stop.get(line["stop_reason"]) == "mask"
            line["score"], line["error"] = self.grading.score(line)
            dropped = self.grading.on_stop.get(line["stop_reason"]) == "drop"
            without = RolloutState.EXCLUDED if dropped else RolloutState.FAILED
            line["state"] = str(without if line["score"] is None else RolloutState.SCORED)
            if before != (line["score"], self.grading.on_stop.get(line["stop_reason"]) == "mask"):
                self.changed.add(group_of_episode(line))
        return line


def regrade_obstacle(reward: GradedReward) -> str | None:
    """Return why a reward cannot judge recorded rollouts, or None if it can."""
    if reward.function.uses_context and not reward.fresh:
        return "it reads the rollout's sandbox (ctx), which no longer exists; `sandbox: fresh` reads saved artifacts"
    if reward.steps is not None:
        return "it is called after each step, while the rollout runs"
    if "state" in reward.function.parameters:
        return "it reads the state object, which ended with its rollout"
    if reward.shares is not None or {"seats", "paid"} & reward.function.parameters.keys():
        return "it reads several seats of an episode at a time"
    return None


def require_judgeable(grader: Grader, names: Iterable[str]) -> None:
    """Raise UserError, before any change, with a line for each reward that would need new rollouts."""
    reward_names = set(names)
    obstacles = [
        (reward.name, reason)
        for reward in grader.rewards
        if reward.name in reward_names and (reason := regrade_obstacle(reward))
    ]
    if obstacles:
        lines = [
            f"rewards.{name} has changed and cannot be computed from the run's record: {reason}"
            for name, reason in obstacles
        ]
        raise UserError("\n".join([*lines, "undo the change, or use --fresh to start a new run next to this one"]))


@dataclass
class Rejudging:
    """Judges the rollouts of a store by the rewards that have changed; `rows` are the rows of the rollouts."""

    directory: RunDirectory
    compiled: CompiledSpec
    grading: Grading
    rows: Iterable[Row]
    note: Callable[[str], None]
    values: defaultdict[str, dict[str, RewardValue]] = field(default_factory=lambda: defaultdict(dict))
    """Values by id of the rollout."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reason why a reward could not judge a rollout, by the rollout's id."""

    @property
    def grader(self) -> Grader:
        return self.compiled.grader

    async def judge(self, store: RolloutStore, changed: set[str]) -> None:
        """Fill `values` and `failed`.

        Raises `UserError` if a reward cannot judge the record, or a row no longer exists; `RunError` if a judge could
        not be called, or most rollouts cannot be judged; nothing was changed.
        """
        require_judgeable(self.grader, changed)

        def read() -> tuple[dict[str, set[str]], set[str]]:
            keys = set()
            lines = {}
            for line in _lines_to_grade(store):
                lines[line["id"]] = self._select_rewards(line, changed)
                keys.add(line["row_key"])
            return lines, keys

        lines, keys = await acquire_in_thread(read, lambda _: None)
        rewards_by_rollout = {name: rewards for name, rewards in lines.items() if rewards}
        if not rewards_by_rollout:
            return
        rows = await asyncio.to_thread(self._rows_of, keys)
        names = (
            f"reward {next(iter(changed))} has" if len(changed) == 1 else f"rewards {', '.join(sorted(changed))} have"
        )
        self.note(f"{names} changed: regrading {len(rewards_by_rollout)} recorded rollouts without new model calls")
        with closing(self.directory.journal(PROGRESS)) as journal:
            self._resume(journal, changed)
            await self._rollouts(store, rewards_by_rollout, rows, journal)
            await self._groups(store, changed, rows, journal)
        if len(self.failed) > len(rewards_by_rollout) / 2:
            first = next(iter(self.failed.values()))
            raise RunError(
                f"{len(self.failed)} of {len(rewards_by_rollout)} rollouts cannot be judged; nothing was changed: "
                f"{first}"
            )

    def _select_rewards(self, line: Line, changed: set[str]) -> set[str]:
        """Return the rewards to call for a rollout: rewards that changed, and rewards that failed before."""
        if line["state"] in (RolloutState.FAILED, RolloutState.RETRIES_EXHAUSTED, RolloutState.EXCLUDED):
            if StopReason(line["stop_reason"]) not in JUDGEABLE or line.get("first_stop_reason") is None:
                return set()
            missing = set(self.grading.paying(line)) - set(line["rewards"])
            judgeable = all(
                regrade_obstacle(reward) is None for reward in self.grader.rewards if reward.name in missing
            )
            return missing | (changed & set(self.grading.paying(line))) if judgeable else set()
        return changed & set(self.grading.paying(line))

    def _rows_of(self, keys: set[str]) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        for row in self.rows:
            if row.key in keys:
                rows[row.key] = row
            if len(rows) == len(keys):
                return rows
        missing = sorted(keys - set(rows))[0]
        raise UserError(f"row {missing} is no longer in the dataset, so its rollouts cannot be regraded; use --fresh")

    def _resume(self, journal: Journal, changed: set[str]) -> None:
        """Load the values that an earlier call has judged by the same rewards."""
        text = json.dumps({name: self.grading.rewards[name] for name in sorted(changed)})
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        lines = list(journal.read("id", "rewards"))
        if not lines or lines[0]["id"] != key:
            journal.keep([{"id": key, "rewards": {}}])
        for line in lines[1:] if lines and lines[0]["id"] == key else ():
            self.values[line["id"]] |= {name: reward_of(record) for name, record in line["rewards"].items()}

    async def _rollouts(
        self, store: RolloutStore, rewards_by_rollout: Mapping[str, set[str]], rows: Mapping[str, Row], journal: Journal
    ) -> None:
        rollout_reward_names = {reward.name for reward in self.grader.rewards if not reward.group_level}

        async def one(line: Line) -> None:
            names = (rewards_by_rollout[line["id"]] & rollout_reward_names) - set(self.values[line["id"]])
            if not names or line["id"] in self.failed:
                return
            values: dict[str, RewardValue] = {}
            try:
                item, result, sandboxes = rows[line["row_key"]].columns, result_of(line), self._sandboxes(line, rows)
                with locating(self.compiled.spec, line["row_key"]):
                    await self.grader.grade_rollout(item, result, sandboxes, None, values, names)
            except RewardFailure as failure:
                self.failed[line["id"]] = failure.detail
            else:
                self._remember(journal, line["id"], values)

        await _run_all(one(line) for line in _lines_to_grade(store) if line["id"] in rewards_by_rollout)

    def _sandboxes(self, line: Line, rows: Mapping[str, Row]) -> ArtifactSandboxes:
        artifact_specs = list(self.compiled.spec.artifacts)
        artifacts = partial(kept_artifacts, self.directory.path, line.get("artifacts") or {}, artifact_specs)
        return self.compiled.artifact_sandboxes(line["id"], line["group"], rows[line["row_key"]], artifacts)

    async def _groups(self, store: RolloutStore, changed: set[str], rows: Mapping[str, Row], journal: Journal) -> None:
        names = {reward.name for reward in self.grader.rewards if reward.group_level} & changed
        if not names:
            return
        store.load()

        async def one(members: list[Line]) -> None:
            if all(names <= set(self.values[line["id"]]) for line in members):
                return
            values: list[dict[str, RewardValue]] = [{} for _ in members]
            try:
                results = [result_of(line) for line in members]
                with locating(self.compiled.spec, members[0]["row_key"]):
                    await self.grader.grade_group(rows[members[0]["row_key"]].columns, results, values, names)
            except RewardFailure as failure:
                self.failed.update({line["id"]: failure.detail for line in members})
                return
            for line, member_values in zip(members, values, strict=True):
                self._remember(journal, line["id"], member_values)

        complete_groups = (group for group in store.groups if store.complete(group))
        await _run_all(
            one(members)
            for members in store.lines(complete_groups)
            if all(line["score"] is not None for line in members)
        )

    def _remember(self, journal: Journal, name: str, values: Mapping[str, RewardValue]) -> None:
        journal.append({"id": name, "rewards": {key: value.record() for key, value in values.items()}})
        self.values[name] |= values

    def apply(self, line: Line) -> bool:
        """Put the values into a rollout's record; return False if it was not judged again."""
        if line["id"] in self.failed:
            failed = {"stop_reason": str(StopReason.REWARD_FAILURE), "state": str(RolloutState.FAILED)}
            line |= {**failed, "score": None, "error": self.failed[line["id"]]}
            return False
        judged = self.values.get(line["id"])
        if not judged:
            return False
        recorded = {**line["rewards"], **{name: value.record() for name, value in judged.items()}}
        line["rewards"] = {name: recorded[name] for name in self.grading.rewards if name in recorded}
        line["stop_reason"] = line.get("first_stop_reason") or line["stop_reason"]
        return True


def _lines_to_grade(store: RolloutStore) -> Iterator[Line]:
    """Yield every rollout; of several attempts at one place that a reward failed, the first."""
    visited_slots: set[tuple[str, int]] = set()
    for line in store.all_lines():
        slot = line["group"], line["index"]
        failed = RolloutState(line["state"]).abandoned
        if failed and slot in visited_slots:
            continue
        if not failed or StopReason(line["stop_reason"]) in JUDGEABLE:
            visited_slots.add(slot)
        yield line


async def _run_all(works: Iterable[Any]) -> None:
    """Run the coroutines with bounded concurrency; the first failure ends the others."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def placed(work: Any) -> None:
        try:
            await work
        finally:
            slots.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                await slots.acquire()
                tasks.create_task(placed(work))
    except ExceptionGroup as failed:
        error = failed.exceptions[0]
        if not isinstance(error, Failure):
            raise error from None
        raise RunError(
            f"a rollout could not be regraded: {error.detail}. The run is unchanged, and values computed so far are "
            "saved: the same command continues"
        ) from error
