"""`RolloutStore`: the record of a run's rollouts, written to disk before it counts.

`rollouts.jsonl` has a record for each rollout that has ended. `waiting.jsonl` has the rollouts that were run and get
their score together with their group, so that a crash in between costs no generation. Resuming, regrading, evaluating
and delivering read only the store. A record holds everything that is needed to score the rollout again and to make the
records of its group; it is found again by the fields `group`, `index`, `attempt` and `state`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from hermes_rl.agent.result import (
    AgentResult,
    GradedStep,
    ManagedState,
    ModelCall,
    ProgramRun,
    Timings,
    ToolCall,
    reasoning_of,
)
from hermes_rl.data.rows import Row, readable_columns
from hermes_rl.errors import ToolError, UserError
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import (
    ONLY_SEAT,
    Group,
    Rollout,
    RolloutKey,
    RolloutState,
    Seat,
    are_uniform,
    baseline,
    seat_suffix,
    update_win_rate,
)
from hermes_rl.rollouts.runner import restore_derived_fields
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.group_index import GroupEntry, GroupIndex, PlayedEntry
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.record_check import problem_of
from hermes_rl.runs.remaining import left_to_play
from hermes_rl.scoring.reward_value import reward_of
from hermes_rl.servers.base import ChatReply, LedgerEntry
from hermes_rl.servers.usage import Usage
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.transcript import TokenLogprobs, WeightVersions, packed, unpacked
from hermes_rl.values import read_json

# --------------------------------------------------------------------------------- A rollout as a record, and back
# A record of `rollouts.jsonl` holds everything that is needed to score the rollout again and to make the records of its
# group (`hermes_rl.runs.groups`).

DIGITS = 16
"""Digits of the hash of a row's content, enough to detect another content."""
ROLLOUT_KEYS = (
    "id", "row_key", "group", "epoch", "index", "attempt", "state", "rewards", "score", "stop_reason", "error",
)  # fmt: skip
"""Keys that a record of rollouts.jsonl must have to be resumed."""


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """Return the JSON form of a finished rollout; times in seconds, rounded to the microsecond.

    `others` are the records of the other seats of its episode, which the store writes as separate records.
    """
    result = rollout.result
    others = {"others": [rollout_record(other) for other in rollout.others]} if rollout.others else {}
    if rollout.line is not None:
        return {**rollout.line, "roles": rollout.roles, **_outcome(rollout), **others}  # its tokens are packed already
    return {
        "id": rollout.id,
        "row_key": rollout.key.row.key,
        "group": rollout.key.group + seat_suffix(rollout.key.seat),
        "epoch": rollout.key.epoch,
        "index": rollout.key.index,
        "attempt": rollout.key.attempt,
        **({"seat": rollout.seat.record(rollout.key.group)} if rollout.seat.name else {}),
        **({"started_at": round(rollout.started_at, 3)} if rollout.started_at is not None else {}),
        **_outcome(rollout),
        "messages": result.messages if result else [],
        "turns": result.turns_used if result else 0,
        "usage": result.usage.record() if result else {},
        "roles": rollout.roles,
        "tool_errors": [asdict(error) for error in result.tool_errors] if result else [],
        "timings": {name: round(seconds, 6) for name, seconds in rollout.timings.items()},
        "policy": rollout.policy,
        "first_stop_reason": str(result.stop_reason) if result else None,
        "row_digest": rollout.key.row.digest[:DIGITS],
        "prompt_length": result.prompt_length if result else 0,
        "tool_calls": _call_records(result) if result else [],
        "sequences": None if rollout.sequences is None else [packed(sequence) for sequence in rollout.sequences],
        # For each call the server's report: count, digest, length and check of the prompt, weights' versions.
        "sampled": [
            [
                entry.count,
                entry.digest.hex(),
                entry.prompt,
                entry.prompt_check,
                entry.weights.before,
                entry.weights.after,
            ]
            for entry in rollout.ledger
        ],
        **({"model_calls": calls} if result and (calls := _model_calls(result)) else {}),
        **({"sandbox_start": _round_times(rollout.sandbox_start)} if rollout.sandbox_start else {}),
        **({"teacher": [logprobs.packed() for logprobs in rollout.teacher]} if rollout.teacher is not None else {}),
        "tools": list(result.tool_schemas) if result and rollout.key.index == 0 else None,
        # Once for each group, for people to read; a run reads the row from the dataset.
        **({"row": readable_columns(rollout.key.row.columns)} if rollout.key.index == 0 else {}),
        **({"artifacts": rollout.artifacts} if rollout.artifacts else {}),
        **({"image": rollout.image} if rollout.image else {}),
        **({"environment_rewards": result.environment_rewards} if result and result.environment_rewards else {}),
        **({"steps": [asdict(step) for step in result.steps]} if result and result.steps else {}),
        **({"program": asdict(result.program)} if result and result.program else {}),
        **({"trained_share": round(share, 6)} if result and (share := result.trained_share) is not None else {}),
        **({"outcome": result.outcome} if result and result.outcome is not None else {}),
        **others,
    }


def _outcome(rollout: Rollout) -> dict[str, Any]:
    """Return the fields that the comparison with its group may still change."""
    return {
        "state": str(rollout.state),
        "rewards": {name: value.record() for name, value in rollout.rewards.items()},
        "score": rollout.score,
        "stop_reason": str(rollout.stop_reason),
        "error": rollout.error,
    }


def _model_calls(result: AgentResult) -> list[dict[str, Any]]:
    names = ("started_at", "seconds", "prompt_tokens", "completion_tokens")  # `asdict` takes eight times as long
    return [
        {"turn": turn, **_round_times({name: getattr(call, name) for name in names})}
        for turn, call in enumerate(result.model_calls, 1)
    ]


def _round_times(times: Mapping[str, float]) -> dict[str, float]:
    """Return times as recorded: seconds since 1970 to the millisecond, durations to the microsecond."""
    return {name: round(value, 3 if name == "started_at" else 6) for name, value in times.items()}


def _call_records(result: AgentResult) -> list[dict[str, Any]]:
    """Return the calls without the data in the messages: their results, and arguments that ran unchanged."""
    written, records = written_calls(result.messages[result.prompt_length :]), []
    for call in result.tool_calls:
        record = {"turn": call.turn, "id": call.id, "name": call.name, "seconds": round(call.seconds, 6)}
        record |= {"started_at": round(call.started_at, 3)} if call.started_at is not None else {}
        record |= {"repaired": call.repaired} if call.repaired else {}
        call_written = written.get((call.turn, call.id))
        if call_written is None or call.arguments != call_written.arguments:
            # As text: a tool's arguments may hold numbers that JSON does not have.
            record["arguments"] = json.dumps(call.arguments, ensure_ascii=False, default=str)
        if call.result != (call_written.result if call_written is not None else ""):
            record["result"] = call.result  # no message contains it, or the program has sent another one
        record |= {"executed_by": call.executed_by} if call.executed_by != "hermes_rl" else {}
        records.append(record if call.error is None else {**record, "error": call.error})
    return records


@dataclass
class WrittenCall:
    """A call in the messages: its arguments, parsed if possible, and the result that the model received."""

    arguments: Any
    result: str = ""


def written_calls(messages: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], WrittenCall]:
    """Return the calls of a conversation without its prompt, by turn and id; an id may come again in a later turn."""
    calls: dict[tuple[int, str], WrittenCall] = {}
    turn = 0
    for message in messages:
        if message["role"] == "assistant":
            turn += 1
            for call in message.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                with suppress(ValueError):
                    arguments = read_json(arguments)
                calls[turn, call["id"]] = WrittenCall(arguments)
        elif message["role"] == "tool" and (turn, message["tool_call_id"]) in calls:
            calls[turn, message["tool_call_id"]].result = str(message.get("content") or "")
    return calls


def rollout_of(line: Mapping[str, Any], key: RolloutKey) -> Rollout:
    """Return the rollout at a place from its record; the environment sets its seed and mask.

    Raises `UserError` if the record lacks something.
    """
    try:
        sequences = None if line.get("sequences") is None else [unpacked(sequence) for sequence in line["sequences"]]
        result = None if line.get("first_stop_reason", "") is None else result_of(line)
        if result is not None and sequences is not None and line.get("sampled"):
            result.managed_state = ManagedState(lambda: sequences)
        seat = _seat_of(line["seat"]) if line.get("seat") is not None else ONLY_SEAT
        key = replace(key, attempt=line["attempt"], epoch=line["epoch"])
        return Rollout(
            key,
            0,
            StopReason(line["stop_reason"]),
            result,
            state=RolloutState(line["state"]),
            rewards={name: reward_of(value) for name, value in line["rewards"].items()},
            score=line["score"],
            error=line["error"],
            timings=dict(line.get("timings") or {}),
            started_at=line.get("started_at"),
            sandbox_start=line.get("sandbox_start"),
            roles=dict(line.get("roles") or {}),
            artifacts=dict(line.get("artifacts") or {}),
            image=line.get("image"),
            sequences=sequences,
            teacher=None if line.get("teacher") is None else [TokenLogprobs.unpacked(row) for row in line["teacher"]],
            seat=seat,
            others=[rollout_of(other, replace(key, seat=other["seat"]["name"])) for other in line.get("others", ())],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"rollout {line.get('id')} of rollouts.jsonl cannot be read ({error}); use --fresh") from error


def result_of(line: Mapping[str, Any]) -> AgentResult:
    """Return the part of a rollout that rewards see; the server's replies come from the record of the policy."""
    messages = list(line["messages"])
    spoken = messages[line.get("prompt_length", 0) :]
    written = written_calls(spoken)
    policy = line.get("policy") or {}
    # A rollout with a failed reward or judge had ended before; its rewards see that stop reason.
    stop_reason = StopReason(line.get("first_stop_reason") or line["stop_reason"])
    return AgentResult(
        messages=messages,
        turns_used=line.get("turns", 0),
        finished_naturally=stop_reason.finished_naturally,
        reasoning_per_turn=[reasoning_of(message) for message in spoken if message["role"] == "assistant"],
        tool_errors=[ToolError(**error) for error in line.get("tool_errors") or ()],
        stop_reason=stop_reason,
        tool_calls=list(_recorded_calls(line, written)),
        usage=Usage.from_record(line.get("usage") or {}),
        timings=Timings(**{k: v for k, v in (line.get("timings") or {}).items() if k in _TIMINGS}),
        replies=list(_recorded_replies(line, spoken)) if policy else [],
        model_calls=[
            ModelCall(**{name: value for name, value in call.items() if name != "turn"})
            for call in line.get("model_calls") or ()
        ],
        prompt_length=line.get("prompt_length", 0),
        tool_schemas=list(line.get("tools") or ()),
        environment_rewards=[(turn, reward) for turn, reward in line.get("environment_rewards") or ()],
        steps=[GradedStep(**step) for step in line.get("steps") or ()],
        program=ProgramRun(**line["program"]) if "program" in line else None,
        seat=(line.get("seat") or {}).get("name", ""),
        outcome=line.get("outcome"),
    )


def _recorded_replies(line: Mapping[str, Any], spoken: list[dict[str, Any]]) -> Iterator[ChatReply]:
    """Yield the server's replies if they are recorded: the sampled tokens, else only the model's name."""
    model, kind = line["policy"].get("model") or "", line["policy"].get("type") or ""
    settings = line["policy"].get("sampling")
    if not line.get("sampled"):
        yield ChatReply({}, None, {}, model, kind, sampling=settings)
        return
    answers = len(line["sampled"])
    # A program may have received replies that are not in its main conversation.
    messages = [{}] * answers if "program" in line else [each for each in spoken if each["role"] == "assistant"]
    each = settings if isinstance(settings, list) else [settings] * answers
    for message, (count, digest, prompt, check, before, after), sampling in zip(
        messages, line["sampled"], each, strict=True
    ):
        sampled = LedgerEntry(count, bytes.fromhex(digest), prompt, check, WeightVersions(before, after))
        yield ChatReply(message, None, {}, model, kind, sampled=sampled, sampling=sampling)


def _recorded_calls(line: Mapping[str, Any], written: Mapping[tuple[int, str], WrittenCall]) -> Iterator[ToolCall]:
    for record in line.get("tool_calls") or ():
        written_call = written.get((record["turn"], record["id"]), WrittenCall(None))
        arguments = json.loads(record["arguments"]) if "arguments" in record else written_call.arguments
        yield ToolCall(**{"result": written_call.result, **record, "arguments": arguments})


_TIMINGS = ("generation", "tools", "queue")


# ----------------------------------------------------------------------------------------------------- The store

ROLLOUTS, WAITING = "rollouts.jsonl", "waiting.jsonl"

Line = dict[str, Any]


_STATES = frozenset(map(str, RolloutState))


class RolloutStore:
    """Rollouts in a run directory; implements `hermes_rl.rollouts.runner.RolloutLog`.

    Args:
        size: members of a group.
        compared: rewards compare the members of a group, so that all of them get their scores together.

    Raises:
        UserError: another process uses a file, or a record was not written by this form of run.
    """

    def __init__(self, directory: RunDirectory, size: int, *, compared: bool = False) -> None:
        self.size, self.compared = size, compared
        self.path = directory.path
        self._rollouts = directory.journal(ROLLOUTS)
        self._groups: GroupIndex
        self._waiting: Journal | None = None
        try:
            if compared or (directory.path / WAITING).exists():
                self._waiting = directory.journal(WAITING)
            self.load()
        except BaseException:  # the caller has no store to close, and its files are locked
            self._rollouts.close()
            if self._waiting is not None:
                self._waiting.close()
            raise

    # ------------------------------------------------------------------ reading the files

    def load(self) -> None:
        """Index the files without records of incomplete episodes; call it again when the files were rewritten."""
        self._index()
        if self._orphans:
            for journal in self._journals:
                journal.keep(line for line in journal.read() if _episode_place(line) not in self._orphans)
            self._index()
        episodes_to_compare = self._to_compare_again()
        if episodes_to_compare:
            self._rollouts.keep(
                line for line in self._rollouts.read() if _episode_place(line) not in episodes_to_compare
            )
            self._index()

    def clear(self) -> None:
        """Forget everything."""
        for journal in self._journals:
            journal.keep([])
        self._index()

    def rewrite(self, change: Callable[[Line], Line]) -> None:
        """Replace each record by its changed form; each file is replaced atomically, so a crash leaves the old or the
        new one.
        """
        for journal in self._journals:
            journal.keep(change(line) for line in journal.read(*ROLLOUT_KEYS))

    def all_lines(self) -> Iterator[Line]:
        """Yield every record of every file, failed attempts included."""
        for journal in self._journals:
            yield from journal.read(*ROLLOUT_KEYS)

    @property
    def empty(self) -> bool:
        """True if nothing was recorded yet."""
        return all(journal.empty for journal in self._journals)

    @property
    def _journals(self) -> list[Journal]:
        return [self._rollouts, *([self._waiting] if self._waiting is not None else [])]

    def _index(self) -> None:
        self._groups = GroupIndex()
        self.won: dict[str, tuple[float, int]] = {}
        """Sum of the first seats' scores against each role of another seat when the files were read, and their
        number.
        """
        self._orphans: set[Place] = set()
        """Episodes of which a killed run has written only some seats: the first seat's record is the last."""
        for start, line, others in self._episodes(self._rollouts):
            self._enter_ended(line, start, others)
        for start, line, others in self._episodes(self._waiting) if self._waiting is not None else ():
            self._enter_waiting(line, start, others)

    def _episodes(self, journal: Journal) -> Iterator[tuple[int, Line, list[tuple[int, Line]]]]:
        """Yield the offset and the record of each rollout, with the same pairs for the other seats of its episode."""
        others: list[tuple[int, Line]] = []
        for start, line in journal.scan(*ROLLOUT_KEYS):
            problem = problem_of(line)
            if problem is None and line["state"] not in _STATES:
                problem = f"has the state {line['state']!r}, which this version does not know"
            if problem is not None:
                raise UserError(
                    f"{journal.path}: the line of rollout {line['id']!r} {problem}; take it out, or use --fresh"
                )
            if other_seat(line):
                others.append((start, line))
                continue
            yield start, line, [other for other in others if _episode_place(other[1]) == _attempt_key(line)]
            self._orphans |= {_episode_place(other) for _, other in others} - {_attempt_key(line)}
            others = []
        self._orphans |= {_episode_place(other) for _, other in others}

    def _enter_ended(self, line: Line, start: int, others: Sequence[tuple[int, Line]]) -> None:
        group, entry = self._entry_with(line), _played_entry(line, start, others)
        previous_entry = group.ended.get(line["index"])
        if previous_entry is None or not previous_entry.state.final:
            group.ended[line["index"]] = entry
            for role in {other["seat"]["role"] for _, other in others}:
                if entry.score is not None:
                    self.won[role] = update_win_rate(self.won.get(role), entry.score)
        self._put(line["group"], group)

    def _enter_waiting(self, line: Line, start: int, others: Sequence[tuple[int, Line]]) -> None:
        group = self._entry_with(line)
        group.waiting[line["index"]] = _played_entry(line, start, others)
        self._put(line["group"], group)

    def _entry_with(self, line: Line) -> GroupEntry:
        group_entry = self._groups.get(line["group"])
        return group_entry or GroupEntry(line["row_key"], line["epoch"], line.get("row_digest", ""))

    def _put(self, group: str, group_entry: GroupEntry) -> None:
        self._groups.put(group, group_entry, settled=self._is_settled(group_entry))

    def _to_compare_again(self) -> set[tuple[str, int, int]]:
        """Return the records to remove from the rollouts, since their group must be compared again as a whole.

        A run that was killed while it wrote a compared group has written only some of its members, and one whose
        comparison failed has recorded that in records without a score. Both wait again afterwards.
        """
        if not self.compared:
            return set()
        assert self._waiting is not None
        episodes = set()
        for _, line, others in self._episodes(self._rollouts):
            group = self._groups[line["group"]]
            waits = group.waiting.get(line["index"])
            announced = line["state"] == RolloutState.FAILED and waits is not None and waits.attempt == line["attempt"]
            unfinished = line["state"] in (RolloutState.SCORED, RolloutState.WAITING) and not self.complete(
                line["group"]
            )
            if announced or unfinished:
                episodes.add(_attempt_key(line))
                if waits is None:
                    lines = [*(other for _, other in others), line]
                    self._waiting.append_all({**each, "state": RolloutState.WAITING, "score": None} for each in lines)
        return episodes

    # ------------------------------------------------------------------ what is known about a group

    @property
    def groups(self) -> Mapping[str, GroupEntry]:
        """Recorded groups, by id."""
        return self._groups

    def complete(self, group: str) -> bool:
        """Return True if no rollout of the group is left to run or score."""
        group_entry = self._groups.get(group)
        return group_entry is not None and self._is_settled(group_entry)

    def _is_settled(self, group_entry: GroupEntry) -> bool:
        states = {index: entry.state for index, entry in group_entry.ended.items()}
        return not left_to_play(states, self.size, compared=self.compared)

    def played(self, group: str) -> bool:
        """Return True if every member was run to completion, perhaps to a failure."""
        group_entry = self._groups.get(group)
        return group_entry is not None and all(index in group_entry.ended for index in range(self.size))

    @property
    def graded(self) -> list[float]:
        """Scores of the graded members of complete groups."""
        complete = [group_entry for group_entry in self._groups.values() if self._is_settled(group_entry)]
        members = [entry for group_entry in complete for index, entry in group_entry.ended.items() if index < self.size]
        return [entry.score for entry in members if entry.score is not None]

    def scores(self, group: str) -> list[float | None]:
        """Return the score with which each member counts, in order, see `baseline`; None for a member without a
        score.
        """
        group_entry = self._groups.get(group)
        ended = group_entry.ended if group_entry is not None else {}
        return baseline(
            [
                (ended[index].score, ended[index].state) if index in ended else (None, RolloutState.FAILED)
                for index in range(self.size)
            ]
        )

    def excluded(self, group: str, *, drop_uniform: bool) -> bool:
        """Return True if the group was run to completion and must not be written or sent.

        Either the spec drops the stop reason of one of its members, or all of its scores are the same.
        """
        if not self.complete(group):
            return False
        uniform = self.uniform(group)
        return uniform is None or (drop_uniform and uniform)

    def uniform(self, group: str) -> bool | None:
        """Return `Group.uniform` of a group, or None if one of its rollouts has no score."""
        scores = [score for score in self.scores(group) if score is not None]
        if len(scores) < self.size:
            return None
        parts: dict[str, list[tuple[float | None, RolloutState]]] = {}
        for entry in self._groups[group].ended.values():
            for _, score, part in ((0, entry.score, entry.part), *entry.others):
                if part is not None:
                    parts.setdefault(part, []).append((score, entry.state))
        scores_by_part = [[score for score in baseline(members) if score is not None] for members in parts.values()]
        return are_uniform(scores_by_part or [scores])

    def rollouts_of_unfinished_groups(self) -> int:
        """Return how many rollouts of incomplete groups are recorded."""
        members = set(range(self.size))
        # Final and waiting rollouts are not run again.
        return sum(
            len(members & (_final_members(group_entry) | set(group_entry.waiting)))
            for group_entry in self._groups.open.values()
        )

    def require_same(self, row: Row, group: str) -> None:
        """Raise UserError if the content of a row differs from the content that its recorded rollouts had."""
        group_entry = self._groups.get(group)
        if group_entry is not None and group_entry.digest and group_entry.digest != row.digest[:DIGITS]:
            raise UserError(
                f"row {row.key} has changed since its rollouts ran; nothing was changed: use --fresh to start a new "
                "run next to this one, or restore the row"
            )

    def lines(self, groups: Iterable[str]) -> Iterator[list[Line]]:
        """Yield a record per member for each group whose members have all been run; the last record of a failed member.

        The records of the other seats of its episode are its `others`.
        """
        for group in groups:
            if self.played(group):
                ended = self._groups[group].ended
                yield [_read_episode(self._rollouts, ended[index]) for index in range(self.size)]

    # ------------------------------------------------------------------ for the runner

    def attempts(self, key: RolloutKey) -> int:
        """Return how many attempts at this place are recorded, so that no id is given twice."""
        group_entry = self._groups.get(key.group)
        entries = (
            (group_entry.ended.get(key.index), group_entry.waiting.get(key.index)) if group_entry is not None else ()
        )
        return max((entry.attempt + 1 for entry in entries if entry is not None), default=0)

    async def recall(self, key: RolloutKey) -> Rollout | None:
        """Return the rollout of this place if it need not run again: it is final, or waits for its group."""
        group_entry = self._groups.get(key.group)
        if group_entry is None:
            return None
        ended, waiting = group_entry.ended.get(key.index), group_entry.waiting.get(key.index)
        if ended is not None and ended.state.final:
            line = await asyncio.to_thread(_read_episode, self._rollouts, ended)
        elif waiting is not None and self._waiting is not None:
            line = await asyncio.to_thread(_read_episode, self._waiting, waiting)
        else:
            return None
        return rollout_of(line, key)

    async def group(self, group: str, environment: Environment) -> Group:
        """Return a complete group, with the recorded tokens of its rollouts."""
        group_entry = self._groups[group]
        # Every member is recorded, so only the key of the row is needed.
        row = Row(key=group_entry.row_key, columns={}, index=0, digest=group_entry.digest)
        keys = [RolloutKey(row, group, index, self.size) for index in range(self.size)]
        rollouts = [rollout for key in keys if (rollout := await self.recall(key)) is not None]
        for rollout in rollouts:
            restore_derived_fields(environment, rollout)
        return Group(group, row, rollouts, group_entry.epoch)

    def record(self, *rollouts: Rollout) -> None:
        """Write the records of rollouts that belong together, in one piece; raises RunError if that fails."""
        for waits in (True, False):
            episodes = [
                rollout_record(rollout) for rollout in rollouts if (rollout.state is RolloutState.WAITING) is waits
            ]
            if not episodes:
                continue
            journal = self._waiting if waits else self._rollouts
            assert journal is not None, "only a store of compared groups has rollouts that wait"
            # The first seat's record is the last of its episode: if it exists, the others exist too.
            lines = [line for episode in episodes for line in (*episode.pop("others", ()), episode)]
            others: list[tuple[int, Line]] = []
            for line, start in zip(lines, journal.append_all(lines), strict=True):
                if other_seat(line):
                    others.append((start, line))
                    continue
                (self._enter_waiting if waits else self._enter_ended)(line, start, others)
                others = []

    def close(self) -> None:
        """Close the files; the file of waiting rollouts is removed if none waits."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if not any(set(group_entry.waiting) - _final_members(group_entry) for group_entry in self._groups.values()):
                with suppress(OSError):
                    waiting.path.unlink()
            waiting.close()
        self._rollouts.close()


def _played_entry(line: Line, start: int, others: Sequence[tuple[int, Line]]) -> PlayedEntry:
    seats = tuple((seat_start, other["score"], _seat_part(other)) for seat_start, other in others)
    part = _seat_part(line) if any(part is not None for _, _, part in seats) else None
    return PlayedEntry(start, line["attempt"], RolloutState(line["state"]), line["score"], part, seats)


def _seat_part(line: Line) -> str | None:
    return _seat_of(line["seat"]).part(line["index"]) if "seat" in line else None


def _seat_of(record: Mapping[str, Any]) -> Seat:
    return Seat(**{name: value for name, value in record.items() if name != "of"})


def _read_episode(journal: Journal, entry: PlayedEntry) -> Line:
    """Return the record of a rollout with the records of the other seats of its episode."""
    line = journal.read_at(entry.start)
    return {**line, "others": [journal.read_at(start) for start, *_ in entry.others]} if entry.others else line


Place = tuple[str, int, int]
"""Group, index in the group, and attempt."""


def _attempt_key(line: Line) -> Place:
    return line["group"], line["index"], line["attempt"]


def other_seat(line: Mapping[str, Any]) -> str:
    """Return the name of a record's seat if it is not the first seat of its episode; else an empty string."""
    return str(line["seat"]["name"]) if group_of_episode(line) != line["group"] else ""


def group_of_episode(line: Mapping[str, Any]) -> str:
    """Return the group of the episode of a seat's record; the record's group if one agent runs alone."""
    group: str = line["seat"]["of"] if "seat" in line else line["group"]
    return group


def _episode_place(line: Line) -> Place:
    """Return the place of the episode of a seat's record."""
    return group_of_episode(line), line["index"], line["attempt"]


def _final_members(group_entry: GroupEntry) -> set[int]:
    return {index for index, entry in group_entry.ended.items() if entry.state.final}
