"""`hermes-rl show`: show a run, or one of its rollouts, in the terminal; `hermes_rl.analysis` reads the run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hermes_rl.analysis.findings import findings_of
from hermes_rl.analysis.record import RolloutSummary, RunRecord, text_of
from hermes_rl.analysis.rollout_view import conversation, program
from hermes_rl.analysis.settings import spec_of, success_of, weights_of
from hermes_rl.analysis.summary import (
    SORTS,
    RowSummary,
    RunSummary,
    Sort,
    Spread,
    columns_read,
    failure_reasons,
    select_rollouts,
    summarise,
)
from hermes_rl.analysis.tokens import RecordedTokens, first_prompt, tokens_of
from hermes_rl.cli.echo import echo
from hermes_rl.cli.screen import (
    BAD,
    DIM,
    GOOD,
    HEAD,
    arguments_text,
    call_parts,
    heading,
    indented,
    pairs_table,
    reasoning_parts,
    result_parts,
    safe,
    short,
    show,
    show_exactly,
    table,
)  # fmt: skip
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import NEVER_ASKED
from hermes_rl.runs.store import Line
from hermes_rl.spec.suggest import choices
from hermes_rl.stop_reasons import StopReason, stop_reason_named
from hermes_rl.terminal_text import end_of, pluralize, start_of

TEXT_CHARACTERS = 2_000
"""Maximum number of characters shown of a text without --full."""
ANSWERS = 4
"""Maximum number of replies shown of one conversation of a program without --full."""
NOTE = "yellow"


@dataclass(frozen=True)
class ShowRequest:
    """Arguments of `hermes-rl show`."""

    run: Path
    rollout: str | None = None
    failed: bool = False
    stop_reason: str | None = None
    tool: str | None = None
    prompt: bool = False
    tokens: bool = False
    full: bool = False
    sort: str = "number"
    limit: int = 20
    as_json: bool = False
    pager: bool = True

    @property
    def filters(self) -> dict[str, Any]:
        """The given options that choose the listed rollouts, as arguments of `select_rollouts`."""
        return {name: value for name in ("failed", "stop_reason", "tool") if (value := getattr(self, name))}


def show_run(request: ShowRequest) -> int:
    """Show a run or a rollout of it; return the exit status."""
    if request.stop_reason is not None and request.stop_reason not in list(StopReason):
        hint = choices(request.stop_reason, list(StopReason))
        raise UserError(f"--stop-reason: there is no stop reason {request.stop_reason!r}{hint}")
    if request.sort not in SORTS:
        raise UserError(f"--sort: {request.sort!r} is none of {', '.join(SORTS)}")
    record = RunRecord(request.run)
    record.refresh()
    if request.rollout is None:
        if request.prompt or request.tokens:
            raise UserError(f"--prompt and --tokens are about one rollout: hermes-rl show {record.path} ID")
        status = _show_run(record, request)
        if record.excluded:
            echo(record.excluded, err=True)
        return status
    matches = record.matching(request.rollout)
    if len(matches) == 1:
        return _show_rollout(record, matches[0], request)
    several = f"{len(matches)} rollouts start with {request.rollout!r}"
    if request.as_json:
        more = ", …" if len(matches) > 5 else ""
        raise UserError(f"{several}: {', '.join(match.id for match in matches[:5])}{more}")
    show([safe(several), _table(record, matches, success_of(spec_of(record)), request.limit)], pager=request.pager)
    return 0


# ------------------------------------------------------------------------------------------------ Showing a run


def _show_run(record: RunRecord, request: ShowRequest) -> int:
    summary = summarise(record)
    rollouts = select_rollouts(record, summary.success, **request.filters, sort=cast("Sort", request.sort))
    if request.as_json:
        entries = [asdict(rollout) | {"number": record.line_number(rollout.id)} for rollout in rollouts]
        findings = [finding.record() for finding in findings_of(record)]
        document = {"summary": asdict(summary), "findings": findings, "rollouts": entries}
        echo(json.dumps(document, indent=2, ensure_ascii=False))
        return 0
    filtered = bool(request.filters)
    parts: list[RenderableType] = [_run_header(summary)]
    if not filtered:
        parts += _overview_parts(record, summary)
    parts += _list_rollouts(record, summary, rollouts, request, filtered)
    if not filtered:
        parts += _finding_parts(record)
    show(parts, pager=request.pager)
    return 0


def _run_header(summary: RunSummary) -> RenderableType:
    name = f"{summary.name} {summary.mode}" + (" (demo)" if summary.demo else "")
    lines = [Text.assemble(safe(name, HEAD), safe(f"  {summary.model}  started {summary.started}"))]
    rollouts, rows = pluralize(summary.rollouts, "rollout"), pluralize(summary.rows, "row")
    played = f"{rollouts} of {rows} in {pluralize(summary.groups, 'group')}"
    without = [
        f"{count} {description}"
        for count, description in (
            (summary.rollouts - summary.graded - summary.excluded - summary.waiting, "could not be graded"),
            (summary.excluded, "excluded by `on_stop`"),
            (summary.waiting, "wait for their group"),
            (sum(summary.again.values()), "retried"),
            (summary.unreadable, "records cannot be read"),
            (summary.unasked, "beyond the latest requested number, which do not count"),
        )
        if count
    ]
    lines.append(safe("; ".join([played, *without])))
    if summary.score is not None:
        between = summary.interval
        interval = f", 95 % interval {between.low:.3f} to {between.high:.3f}" if between.low is not None else ""
        passed = f"; {summary.passed} of {summary.graded} pass (a score of {summary.success:g} or more)"
        seat_text = f" of {next(iter(summary.seats))}" if summary.seats else ""
        lines.append(safe(f"mean score{seat_text} {summary.score.mean:.3f}{interval}{passed}"))
    parts: list[RenderableType] = [*lines]
    for reward, count in summary.fallbacks.items():
        groups = pluralize(count, "group")
        parts.append(safe(f"the judge of {reward} was unavailable: its fallback graded {groups}", NOTE))
    for cause in summary.failures:
        parts.append(
            safe(
                f"without a score: {cause.count} × {cause.stop_reason} ({_meaning(cause.stop_reason, program=False)})",
                NOTE,
            )
        )
        parts.append(indented(safe(f"{cause.id}: {_cut_middle(cause.error or 'it gives no reason', 300)}")))
    return Group(*parts, Text())


def _overview_parts(record: RunRecord, summary: RunSummary) -> Iterator[RenderableType]:
    stop_reasons = table("stop reason", "rollouts", "", right=("rollouts",))
    spec = spec_of(record)
    agents = [spec.get("agent"), *(spec.get("agents") or {}).values()]
    program = any(isinstance(agent, dict) and agent.get("program") for agent in agents)
    for stop_reason, count in summary.stop_reasons.items():
        stop_reasons.add_row(safe(stop_reason), str(count), safe(_meaning(stop_reason, program=program), DIM))
    parts = [stop_reasons]
    spreads = {"reward": summary.rewards, "per rollout": summary.counts, "seconds": summary.seconds}
    parts += [_spread_table(name, each) for name, each in spreads.items() if each]
    parts += [_seat_table(summary)] if summary.seats else []
    rows = {"worst rows": summary.worst, "slowest rows": summary.slowest} if summary.rows > 1 else {}
    parts += [_row_table(name, record, each) for name, each in rows.items() if each]
    for part in parts:
        yield part
        yield Text()


def _finding_parts(record: RunRecord) -> Iterator[RenderableType]:
    """Yield the problems of the run, the most costly first."""
    findings = findings_of(record)
    if findings:
        findings_table = table("what went wrong", "costs", "see", right=("costs", "see"))
        for finding in findings:
            findings_table.add_row(safe(finding.text), f"{finding.cost:.2f}", f"#{record.line_number(finding.example)}")
        yield Text()
        yield findings_table


def _spread_table(name: str, spreads: Mapping[str, Spread]) -> Table:
    spread_table = table(name, "mean", "least", "most", "of", right=("mean", "least", "most", "of"))
    for key, spread in spreads.items():
        if name == "reward" or spread.most > (0.001 if name == "seconds" else 0):
            values = (spread.mean, spread.least, spread.most)
            numbers = (f"{value:.2f}" if name == "seconds" else _format_number(value) for value in values)
            spread_table.add_row(safe(key), *numbers, str(spread.count))
    return spread_table


def _seat_table(summary: RunSummary) -> Table:
    """Return the table of each seat's mean score and activity."""
    names = [name.removeprefix("reward/").replace("_", " ") for name in next(iter(summary.seats.values()))]
    seats = table("seat", *names, right=names)
    for seat, means in summary.seats.items():
        seats.add_row(safe(seat), *map(_format_number, means.values()))
    return seats


def _row_table(name: str, record: RunRecord, rows: Sequence[RowSummary]) -> Table:
    row_table = table(name, "score", "passed", "s", "see", right=("score", "passed", "s"), uncut=("see",))
    for row in rows:
        passed = f"{row.passed}/{row.graded}" + (f" ({row.ungraded} ungraded)" if row.ungraded else "")
        label = record.label(row.row_key, 40) or row.row_key
        row_table.add_row(
            short(label), _format_number(row.score), passed, f"{row.seconds:.1f}", f"#{record.line_number(row.shown)}"
        )
    return row_table


def _list_rollouts(
    record: RunRecord, summary: RunSummary, rollouts: Sequence[RolloutSummary], request: ShowRequest, filtered: bool
) -> Iterator[RenderableType]:
    if not rollouts:
        none = "every rollout passes" if [*request.filters] == ["failed"] else "no such rollout"
        yield Text(none if filtered else "no rollout has ended yet")
        return
    yield _table(record, rollouts, summary.success, request.limit)
    if 0 < request.limit < len(rollouts):
        yield safe(f"… and {len(rollouts) - request.limit} more (--limit 0 lists all)", DIM)
    path = shlex.quote(str(record.path))
    next_command = f"hermes-rl show {path} {record.line_number(rollouts[0].id)}"
    if not filtered and summary.passed < summary.graded + len(summary.failures):
        next_command = f"hermes-rl show {path} --failed"
    yield safe(f"next: {next_command}", DIM)


def _table(record: RunRecord, rollouts: Sequence[RolloutSummary], success: float, limit: int) -> Table:
    rows = table(
        "#",
        "score",
        "stop reason",
        "turns",
        "calls",
        "tokens",
        "s",
        "id",
        "row",
        right=_NUMBERS,
        uncut=("stop reason",),
    )
    for rollout in rollouts[: limit or None]:
        rows.add_row(
            str(record.line_number(rollout.id)),
            Text(_format_number(rollout.score), _score_style(rollout, success)),
            safe(
                rollout.stop_reason,
                ""
                if (stop_reason := stop_reason_named(rollout.stop_reason)) and stop_reason.finished_naturally
                else NOTE,
            ),
            str(rollout.turns),
            f"{rollout.calls}" + (f" ({rollout.call_errors} failed)" if rollout.call_errors else ""),
            str(rollout.completion_tokens),
            f"{rollout.total_seconds:.1f}",
            short(rollout.id),
            short(record.label(rollout.row_key, 30)),
        )
    return rows


_NUMBERS = ("#", "score", "turns", "calls", "tokens", "s")


def _score_style(rollout: RolloutSummary, success: float) -> str:
    return BAD if rollout.failed(success) else GOOD if rollout.score is not None else ""


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    without_decimals = abs(value) >= 1000 or (value == int(value) and abs(value) < 1e6)
    return f"{value:.0f}" if without_decimals else f"{value:.3g}"


def _meaning(stop_reason: str, *, program: bool) -> str:
    reason = stop_reason_named(stop_reason)
    return "" if reason is None else reason.rule.event(program=program)


# ------------------------------------------------------------------------------------------------- One rollout


def _show_rollout(record: RunRecord, rollout: RolloutSummary, request: ShowRequest) -> int:
    line = record.line_of_group(rollout.id)
    if request.prompt or request.tokens:
        return _show_tokens(record, line, request)
    if request.as_json:
        echo(json.dumps(line, indent=2, ensure_ascii=False))
        return 0
    show(_Rollout(record, rollout, line, request).parts(), pager=request.pager)
    return 0


class _Rollout:
    """One rollout and the options for showing it."""

    def __init__(self, record: RunRecord, rollout: RolloutSummary, line: Line, request: ShowRequest) -> None:
        self.record, self.one, self.line, self.request = record, rollout, line, request
        self.spec, self.weights = spec_of(record), weights_of(record.run_info)
        self.success = success_of(self.spec)

    def parts(self) -> Iterator[RenderableType]:
        yield from self._head()
        yield from self._row()
        yield from self._conversation()
        yield from self._program()
        yield from self._rewards()
        yield from self._facts()

    def _head(self) -> Iterator[RenderableType]:
        rollout = self.one
        score = "no score" if rollout.score is None else f"score {_format_number(rollout.score)}"
        yield Text.assemble(
            safe(rollout.id, HEAD),
            f"  #{self.record.line_number(rollout.id)} of {len(self.record.rollouts)}  ",
            safe(score, _score_style(rollout, self.success)),
            safe(f"  {rollout.stop_reason}  {pluralize(rollout.turns, 'turn')}  {rollout.model or ''}"),
        )
        reasons = list(failure_reasons(self.line, self.weights, self.success))
        for index, reason in enumerate(reasons):
            yield Text.assemble(("why: " if index == 0 else "     "), safe(_cut_middle(reason, 500), BAD))
        seats = [
            f"{seat.seat} #{self.record.line_number(seat.id)} {_format_number(seat.score)}"
            for seat in self.record.seats(rollout)
        ]
        if seats:
            yield safe(f"{rollout.seat} of its episode: {', '.join(seats)}", DIM)
        others = [other for other in self.record.members(rollout.group) if other.id != rollout.id]
        if others:
            scores = ", ".join(
                f"#{self.record.line_number(other.id)} {_format_number(other.score)}" for other in others[:16]
            )
            yield safe(f"others of its group: {scores}" + (", …" if len(others) > 16 else ""), DIM)
        for other in self.record.rollouts:
            if (other.group, other.index) == (rollout.group, rollout.index) and other.id != rollout.id:
                yield safe(f"attempt {other.attempt}: #{self.record.line_number(other.id)} {other.stop_reason}", DIM)

    def _row(self) -> Iterator[RenderableType]:
        yield heading(f"row {self.one.row_key}")
        row = self.line.get("row")
        if row is None:
            yield safe("the row was not recorded; the conversation shows what its prompt holds", DIM)
            return
        rewards, column_table = columns_read(self.spec, row), pairs_table()
        for name, value in row.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            by = f"  ← {', '.join(rewards[name])} looks at this" if name in rewards else ""
            column_table.add_row(safe(name, HEAD if by else ""), Text.assemble(safe(self._short(text)), safe(by, DIM)))
        yield column_table

    def _conversation(self) -> Iterator[RenderableType]:
        tool = self.request.tool
        for message in conversation(self.line):
            calls = [call for call in message["calls"] if tool in (None, call["name"])]
            if tool is not None and not calls:
                continue
            yield heading(f"{message['role']}, turn {message['turn']}" if message["turn"] else message["role"])
            if message["reasoning"]:
                yield from reasoning_parts(self._short(message["reasoning"]))
            if message["text"]:
                yield safe(self._short(message["text"]))
            for call in calls:
                yield from call_parts(call["name"], self._short(arguments_text(call["arguments"])))
                if call["result"] is not None:
                    result, failed = self._short(call["result"]), bool(call["error"])
                    yield from result_parts(call["name"], result, seconds=call["seconds"], failed=failed)

    def _program(self) -> Iterator[RenderableType]:
        """Show the calls of an agent program as a tree; for calls outside its main line, the replies too."""
        played = program(self.line)
        if played is None:
            return
        status = "ended by us" if played["exit_code"] is None else f"status {played['exit_code']}"
        refused = f", {played['refused']} refused" if played["refused"] else ""
        yield heading(f"program: {pluralize(played['requests'], 'request')}{refused}, {status}")
        if played["lines"]:
            programs = table("conversation", "calls", "sampled", "trained", "answers", right=("sampled", "trained"))
            for line in played["lines"]:
                name = f"{'  ' * line['depth']}{line['kind']}"
                branch = f" (behind {line['from']})" if line["from"] is not None else ""
                answers = [f"{call['turn']}: {call['preview']}" for call in line["calls"]]
                if not self.request.full and (line["kind"] == "main" or len(answers) > ANSWERS):
                    answers = answers[-1:] if line["kind"] == "main" else [*answers[: ANSWERS - 1], "…", answers[-1]]
                counts = (str(line["tokens"]), str(line["trained"]))
                programs.add_row(safe(name), safe(line["turns"] + branch), *counts, safe("\n".join(answers), DIM))
            yield programs
        if played["refusal"]:
            yield safe(f"refused, at last: {played['refusal']}", BAD)
        if played["sampling"]:
            yield safe(f"it has asked for {played['sampling']}; the spec's sampling was used", DIM)
        if played["output"].strip():
            yield safe("its output, at last:", DIM)
            yield self._body(played["output"].strip())

    def _rewards(self) -> Iterator[RenderableType]:
        line = self.line
        if not line["rewards"]:
            return
        yield heading("rewards")
        rewards = table("reward", "value", "weight", "reason and metrics", right=("value", "weight"))
        for name, value in line["rewards"].items():
            weight = self.weights.get(name, 1.0)
            reward_value = value["value"]
            more = [f"{key} {_format_number(metric)}" for key, metric in (value.get("metrics") or {}).items()]
            per_turn = value.get("per_turn")
            more += [f"per turn {', '.join(map(_format_number, per_turn))}"] if per_turn else []
            rewards.add_row(
                safe(name),
                Text(_format_number(reward_value), "" if reward_value is None else GOOD if reward_value >= 1 else BAD),
                "gate" if weight is None else _format_number(weight),
                safe(self._short("; ".join([value.get("reason") or "", *more]).strip("; "))),
            )
        yield rewards

    def _facts(self) -> Iterator[RenderableType]:
        line = self.line
        yield heading("end")
        meaning = _meaning(line["stop_reason"], program="program" in line)
        facts = {"stop reason": f"{line['stop_reason']}: {meaning}"}
        if line["error"]:
            facts["error"] = str(line["error"])
        for error in line["tool_errors"]:
            facts[f"tool error, turn {error['turn']}"] = f"{error['tool_name']}: {error['error']}"
        facts["seconds"] = ", ".join(f"{name} {seconds:.2f}" for name, seconds in line["timings"].items())
        facts["tokens"] = f"prompt {self.one.prompt_tokens}, completion {self.one.completion_tokens}"
        if self.one.cost is not None:
            facts["cost"] = f"{self.one.cost:.6g} $"
        policy = line.get("policy") or {}
        if policy:
            facts["policy"] = f"{policy.get('type')} {policy.get('model') or ''}".strip()
        if policy.get("sampling"):
            facts["sampling"] = json.dumps(policy["sampling"], ensure_ascii=False)
        if policy.get("version") is not None:
            facts["weights"] = str(policy["version"])
        for name, artifact in (line.get("artifacts") or {}).items():
            facts[f"artifact {name}"] = json.dumps(artifact, ensure_ascii=False)
        if line.get("image"):
            facts["image"] = str(line["image"])
        pairs = pairs_table()
        for name, text in facts.items():
            pairs.add_row(safe(name), safe(self._short(text), BAD if name == "error" else ""))
        yield pairs
        yield safe("also: --prompt (what the model got), --tokens (what is trained on), --json (everything)", DIM)

    def _body(self, text: str, style: str = "") -> RenderableType:
        return indented(safe(self._short(text), style))

    def _short(self, text: str) -> str:
        return text if self.request.full else _cut_middle(text, TEXT_CHARACTERS)


def _cut_middle(text: str, max_length: int) -> str:
    """Return a text, cut in the middle if it is too long, since its end often has the important part."""
    if len(text) <= max_length:
        return text
    start, end = start_of(text, max_length // 2), end_of(text, max_length // 2)
    omitted = len(text) - len(start) - len(end) + 2
    return f"{start}\n… {omitted} characters are omitted (--full shows them) …\n{end}"


# ------------------------------------------------------------------------------- Input of the model, and its tokens


def _show_tokens(record: RunRecord, line: Line, request: ShowRequest) -> int:
    tokens = tokens_of(record.run_info, line)
    if tokens is None and request.tokens:
        if not line["turns"]:
            raise UserError(f"this rollout has no tokens: {NEVER_ASKED}")
        raise UserError(
            "this rollout has no tokens: only process and serve record them, where the policy's tokenizer can be had "
            f"(this run: {record.run_info.get('mode')}); --prompt shows its messages"
        )
    prompt, tools = line["messages"][: line["prompt_length"]], line.get("tools")
    if request.as_json:
        request_body = {"messages": prompt, "tools": tools}
        if tokens is not None:
            start = first_prompt(tokens.sequences)
            text = None if tokens.tokenizer is None else tokens.text(start)
            request_body |= {"text": text, "tokens": tokens.records() if request.tokens else start}
        echo(json.dumps(request_body, indent=2, ensure_ascii=False))
        return 0
    if request.tokens:
        assert tokens is not None
        show(_token_parts(tokens, request.full), pager=request.pager)
    elif tokens is not None and tokens.tokenizer is not None:
        show_exactly(tokens.text(first_prompt(tokens.sequences)), pager=request.pager)
    else:
        show(message_parts(prompt, tools, tokens.missing if tokens else None), pager=request.pager)
    return 0


def message_parts(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, missing: str | None = None
) -> Iterator[RenderableType]:
    """Yield messages and tools in the format for a chat server."""
    if missing:
        yield safe(f"as messages, because there is no text of it: {missing}", NOTE)
    for message in messages:
        yield heading(str(message.get("role")))
        yield safe(text_of(message.get("content")))
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        if rest:
            yield safe(json.dumps(rest, indent=2, ensure_ascii=False))
    yield heading(pluralize(len(tools or ()), "tool"))
    for tool in tools or ():
        yield safe(json.dumps(tool, indent=2, ensure_ascii=False))


def _token_parts(tokens: RecordedTokens, full: bool) -> Iterator[RenderableType]:
    if tokens.missing:
        yield safe(f"ids only: {tokens.missing}", NOTE)
    for sequence_number, sequence in enumerate(tokens.sequences, 1):
        yield heading(
            f"sequence {sequence_number} of {len(tokens.sequences)}: {len(sequence)} tokens, "
            f"{sequence.trained_length} trained"
        )
        end, sampled = 0, 0
        for span in sequence.spans:
            yield from _context_parts(tokens, sequence.ids[end : span.start], full)
            before, after = tokens.version(span.turn)
            weights = "" if before is None else f", weights {before}" + (f" to {after}" if after != before else "")
            yield safe(f"turn {span.turn + 1}: {span.stop - span.start} tokens{weights}", HEAD)
            token_table = table("place", "id", "logprob", "token", right=("place", "id", "logprob"))
            for index in range(span.start, span.stop):
                token = sequence.ids[index]
                logprob = "" if sequence.sampled is None else f"{sequence.sampled[sampled]:.4f}"
                sampled += 1
                text = "" if tokens.tokenizer is None else repr(tokens.text([token]))
                token_table.add_row(str(index), str(token), logprob, safe(text, GOOD))
            yield token_table
            end = span.stop
        yield from _context_parts(tokens, sequence.ids[end:], full)


def _context_parts(tokens: RecordedTokens, ids: Sequence[int], full: bool) -> Iterator[RenderableType]:
    if len(ids):
        text = tokens.text(ids)
        yield safe(f"{len(ids)} tokens of context, not trained", DIM)
        yield indented(safe(text if full else _cut_middle(text, 400), DIM))
