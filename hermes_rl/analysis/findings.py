"""Find the causes that cost a run the most points of its mean score, and the rollouts that show them.

`find` is a pure function of the rollouts that count: no model is asked. A cause is compared with the other rollouts of
the same rows if there are any, so that a tool is not blamed for the difficulty of the rows that need it. Costs of
different causes overlap and do not add up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hermes_rl.analysis.record import RolloutSummary, RunRecord, by_row, scores_of
from hermes_rl.analysis.settings import clamp_of, success_in, weights_of
from hermes_rl.runs.statistics import mean
from hermes_rl.stop_reasons import stop_reason_named
from hermes_rl.terminal_text import pluralize

SMALLEST = 0.005
"""Cost in points of the mean score below which a cause is not reported."""
SMALLEST_DROP = 0.05
"""Fall of the mean score, from the best epoch on, that is reported."""
SHARE_STOPPED, SHARE_OF_CALLS = 0.02, 0.1
"""Fractions above which a stop reason, and the failed calls of a tool, are reported."""
CHANCE = 0.05
"""Chance above which rows without a pass may be bad luck."""
BEYOND = 2.0
"""Standard errors of a difference above which chance does not explain it."""
MOST_FINDINGS, READ_FIRST, NAMED = 8, 4, 3
"""Maximum number of findings, of rollouts to read first, and of rows named in a sentence."""
MOST_VALUES = 11
"""Maximum number of different values of a column by which rows are grouped."""

Kind = Literal["stop_reason", "rows", "category", "tool", "drop", "gate", "reward"]


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A cause of lost score.

    Attributes:
        kind: kind of cause; `subject` is its name: the stop reason, column=value, tool or reward; empty for rows.
        cost: points of the mean score that it costs.
        text: one sentence with the numbers.
        rollouts: number of rollouts that it concerns.
        filter: parameters of the list of rollouts that select them, as in `hermes_rl.view.query`.
        example: id of the rollout that shows it best.
    """

    kind: Kind
    subject: str
    cost: float
    text: str
    rollouts: int
    filter: Mapping[str, str]
    example: str

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self) | {"cost": round(self.cost, 4)}


@dataclass(frozen=True)
class Scoring:
    """Settings of a run that turn rewards into scores and passes."""

    success: float = 1.0
    weights: Mapping[str, float | None] | None = None
    """Weight by reward, None for a gate; None if the run does not record them."""
    clamp: tuple[float, float] | None = None

    @classmethod
    def of(cls, record: RunRecord) -> Scoring:
        """Return the settings of a run; the defaults if its spec cannot be read."""
        run_info = record.run_info
        return cls(success_in(record), weights_of(run_info) or None, clamp_of(run_info))

    def passes(self, rollout: RolloutSummary) -> bool:
        """Return True if a rollout is solved."""
        return rollout.passes(self.success)

    def weight(self, name: str) -> float | None:
        """Return the weight of a reward, or None for a gate; without recorded weights 1."""
        return 1.0 if self.weights is None else self.weights.get(name, 0.0)

    def loss(self, rollout: RolloutSummary, name: str) -> float:
        """Return the points that a reward holds back; a closed gate counts more than all others."""
        value, weight = rollout.rewards.get(name), self.weight(name)
        if value is None:
            return 0.0
        if weight is None:
            return 9.0 * (1.0 - value)
        return weight * (1.0 - value) if weight > 0 else -weight * value

    def worst(self, rollout: RolloutSummary) -> str | None:
        """Return the reward that costs a rollout the most, or None if none costs anything."""
        name = max(rollout.rewards, key=lambda name: self.loss(rollout, name), default=None)
        return name if name is not None and self.loss(rollout, name) > SMALLEST else None

    def ungated(self, rollout: RolloutSummary) -> float | None:
        """Return the score that a rollout would have if all gates were open, or None if the weights are unknown."""
        if self.weights is None:
            return None
        parts = [(self.weights.get(name, 0.0), value or 0.0) for name, value in rollout.rewards.items()]
        weighted = [weight * value for weight, value in parts if weight]
        score = math.fsum(weighted) if weighted else 1.0
        return min(max(score, self.clamp[0]), self.clamp[1]) if self.clamp else score


Rollouts = Sequence[RolloutSummary]
Categories = Mapping[str, Mapping[str, str]]


def findings_of(record: RunRecord, rollouts: Rollouts | None = None) -> list[RunFinding]:
    """Return the findings of a loaded run, the most costly first."""
    counting = list(record.counting()) if rollouts is None else rollouts

    def label(row: str) -> str:
        return record.label(row, 40) or row

    return find(counting, Scoring.of(record), record.categories, label)


def find(rollouts: Rollouts, scoring: Scoring, categories: Categories, label: Callable[[str], str]) -> list[RunFinding]:
    """Return the causes that cost the most, the most costly first.

    Args:
        rollouts: the rollouts that count, one for each place.
        scoring: settings of the run.
        categories: short values of the columns of each row, by its key.
        label: name of a row for people.
    """
    # In one order, whichever of them ended first.
    ordered = sorted(rollouts, key=lambda rollout: (rollout.row_key, rollout.epoch, rollout.index))
    graded = [rollout for rollout in ordered if rollout.score is not None]
    if not graded:
        return []
    mechanisms = [*_stop_reasons(graded, scoring), *_failing_tools(graded), *_closed_gates(graded, scoring)]
    explained = {rollout.id for finding, affected in mechanisms for rollout in affected}
    findings = [finding for finding, _ in mechanisms]
    findings += _never_solved(graded, explained, scoring, categories, label)
    findings += _score_drops(graded, scoring)
    findings = [finding for finding in findings if finding.cost >= SMALLEST] or [*_weak_rewards(graded, scoring)]
    return sorted(findings, key=lambda finding: -finding.cost)[:MOST_FINDINGS]


def _mean_score(rollouts: Iterable[RolloutSummary]) -> float:
    return mean(scores_of(rollouts))


def _lost_points(affected: Rollouts, others: Rollouts, everything: float) -> float:
    """Return points of the mean score: for each affected rollout, its distance from the others of its row, or from all
    others if its row has none; `everything` is the number of rollouts.
    """
    rows = {key: _mean_score(row) for key, row in by_row(others).items()}
    usual = _mean_score(others)
    return math.fsum(rows.get(each.row_key, usual) - (each.score or 0.0) for each in affected) / everything


def _is_clearly_below(low: Rollouts, high: Rollouts) -> bool:
    """Return True if the mean of `low` is below the mean of `high` by more than chance."""
    a, b = scores_of(low), scores_of(high)
    if len(a) < 2 or len(b) < 2:
        return False
    error = math.sqrt(sum(_variance(scores) / len(scores) for scores in (a, b)))
    return mean(b) - mean(a) > BEYOND * error


def _variance(values: Sequence[float]) -> float:
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def _example(rollouts: Rollouts) -> str:
    """Return the id of the rollout to read: the lowest score, then the shortest conversation."""
    return min(rollouts, key=lambda rollout: (rollout.score or 0.0, rollout.turns)).id


def _as_percent(part: int, total: int) -> str:
    return f"{100 * part / total:.0f} %"


def _is_natural(rollout: RolloutSummary) -> bool:
    """Return True if the model itself, or its environment, ended the conversation."""
    reason = stop_reason_named(rollout.stop_reason)
    return reason is not None and reason.finished_naturally


def _stop_reasons(graded: Rollouts, scoring: Scoring) -> Iterator[tuple[RunFinding, Rollouts]]:
    """Yield the stop reasons that cut rollouts off."""
    reasons: dict[str, list[RolloutSummary]] = defaultdict(list)
    finished: list[RolloutSummary] = []
    for rollout in graded:
        (finished if _is_natural(rollout) else reasons[rollout.stop_reason]).append(rollout)
    for reason, stopped in reasons.items():
        if len(stopped) <= SHARE_STOPPED * len(graded):
            continue
        score = _mean_score(stopped)
        if finished:
            cost = _lost_points(stopped, finished, len(graded))
            than = f"finished ones {_mean_score(finished):.2f}"
        else:
            cost = (scoring.success - score) * len(stopped) / len(graded)
            than = "none finished by itself"
        text = f"{pluralize(len(stopped), 'rollout')} ({_as_percent(len(stopped), len(graded))}) stopped with {reason}"
        text += f" and score {score:.2f}; {than}."
        yield (
            RunFinding("stop_reason", reason, cost, text, len(stopped), {"stop_reason": reason}, _example(stopped)),
            stopped,
        )


def _failing_tools(graded: Rollouts) -> Iterator[tuple[RunFinding, Rollouts]]:
    """Yield the tools whose failures cost points."""
    calls: dict[str, int] = defaultdict(int)
    errors: dict[str, int] = defaultdict(int)
    for rollout in graded:
        for name, called, failed in rollout.tools:
            calls[name] += max(called, failed)
            errors[name] += failed
    for name in (name for name in calls if name and errors[name] > SHARE_OF_CALLS * calls[name]):
        affected = [each for each in graded if any(tool == name and failed for tool, _, failed in each.tools)]
        ids = {rollout.id for rollout in affected}
        others = [each for each in graded if each.id not in ids]
        if not _is_clearly_below(affected, others):
            continue
        text = f"{name} failed in {_as_percent(errors[name], calls[name])} of its {calls[name]:,} calls; rollouts with "
        text += f"such a call score {_mean_score(affected):.2f}, others {_mean_score(others):.2f}."
        cost, select = _lost_points(affected, others, len(graded)), {"tool": name, "tool_errors": "1"}
        yield RunFinding("tool", name, cost, text, len(affected), select, _example(affected)), affected


def _closed_gates(graded: Rollouts, scoring: Scoring) -> Iterator[tuple[RunFinding, Rollouts]]:
    """Yield the gates that closed."""
    for name in (name for name, weight in (scoring.weights or {}).items() if weight is None):
        closed = [rollout for rollout in graded if rollout.rewards.get(name) == 0]
        if not closed:
            continue
        losses = [(scoring.ungated(rollout) or 0.0) - (rollout.score or 0.0) for rollout in closed]
        text = f"The gate {name} set {pluralize(len(closed), 'score')} to 0."
        select, cost = {"reward": name, "most": "0"}, math.fsum(losses) / len(graded)
        example = closed[max(range(len(closed)), key=losses.__getitem__)].id
        yield RunFinding("gate", name, cost, text, len(closed), select, example), closed


def _never_solved(
    graded: Rollouts, explained: set[str], scoring: Scoring, categories: Categories, label: Callable[[str], str]
) -> Iterator[RunFinding]:
    """Yield the categories of rows that were never solved, and other such rows, unless chance may explain it.

    Rows whose rollouts mostly have another finding are not named again.
    """
    rows = by_row(graded)
    unsolved = {
        key: row
        for key, row in rows.items()
        if not any(rollout.passes(scoring.success) for rollout in row)
        and 2 * sum(rollout.id in explained for rollout in row) <= len(row)
    }
    # Over all rows: among solved rows alone each rollout passes if every row has one.
    rate = sum(rollout.passes(scoring.success) for rollout in graded) / len(graded)
    if not unsolved or not rate:
        return
    reported: set[str] = set()
    for (column, value), keys in _rows_by_value(rows, categories).items():
        members = [rollout for key in keys for rollout in rows[key]]
        if len(keys) < 2 or not unsolved.keys() >= keys or (1 - rate) ** len(members) > CHANCE or keys <= reported:
            continue
        reported |= keys
        text = f"None of the {pluralize(len(keys), 'row')} with {column} = {value} was ever solved"
        yield _unsolved_rows("category", f"{column}={value}", text, members, graded, {"where": f"{column}={value}"})
    rest = {key: row for key, row in unsolved.items() if key not in reported and (1 - rate) ** len(row) <= CHANCE}
    if rest:
        members = [rollout for row in rest.values() for rollout in row]
        names = ", ".join(label(key) for key in list(rest)[:NAMED]) + (", …" if len(rest) > NAMED else "")
        text = f"{pluralize(len(rest), 'row')} {'was' if len(rest) == 1 else 'were'} never solved ({names})"
        yield _unsolved_rows("rows", "", text, members, graded, {"unsolved": "1"})


def _unsolved_rows(
    kind: Kind, subject: str, text: str, members: Rollouts, graded: Rollouts, select: Mapping[str, str]
) -> RunFinding:
    """Return the finding of rows that were never solved."""
    ids = {rollout.id for rollout in members}
    others = [rollout for rollout in graded if rollout.id not in ids]
    loss = _mean_score(others) - _mean_score(members)
    text += f"; they score {_mean_score(members):.2f}, others {_mean_score(others):.2f}."
    return RunFinding(kind, subject, loss * len(members) / len(graded), text, len(members), select, _example(members))


def _rows_by_value(rows: Mapping[str, Any], categories: Categories) -> dict[tuple[str, str], set[str]]:
    """Return the rows with each value of each column that groups them."""
    return {
        (column, value): set(keys)
        for column, values in groups_of_rows(rows, categories).items()
        for value, keys in values.items()
    }


def groups_of_rows(rows: Iterable[str], categories: Categories) -> dict[str, dict[str, list[str]]]:
    """Return the rows by value of each column that has 2 to `MOST_VALUES` different values, fewer than rows."""
    rows = list(rows)
    columns: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for column, value in categories.get(row, {}).items():
            columns.setdefault(column, {}).setdefault(value, []).append(row)
    return {column: values for column, values in columns.items() if 2 <= len(values) <= min(MOST_VALUES, len(rows) - 1)}


def _score_drops(graded: Rollouts, scoring: Scoring) -> Iterator[RunFinding]:
    """Yield the fall of the score since an epoch, with the reward that explains most of it."""
    epochs: dict[int, list[RolloutSummary]] = defaultdict(list)
    for rollout in graded:
        epochs[rollout.epoch].append(rollout)
    order = sorted(epochs)
    if len(order) < 2:
        return
    best = max(range(len(order)), key=lambda position: _mean_score(epochs[order[position]]))
    sides = [
        ([each for epoch in order[best:split] for each in epochs[epoch]],
         [each for epoch in order[split:] for each in epochs[epoch]])
        for split in range(best + 1, len(order))
    ]  # fmt: skip
    if not sides:
        return
    before, after = max(sides, key=lambda side: _steepness(*side))
    fall = _mean_score(before) - _mean_score(after)
    if fall <= SMALLEST_DROP or not _is_clearly_below(after, before):
        return
    since, names = min(rollout.epoch for rollout in after), {name for each in graded for name in each.rewards}
    changes = {name: _reward_effect(before, after, name, scoring) for name in sorted(names)}
    reward = min(changes, key=lambda name: changes[name], default=None)
    text, select = f"The score fell by {fall:.2f} since epoch {since}", {"first_epoch": str(since)}
    low = after
    if reward is not None and changes[reward] < 0:
        text += f", and {reward} explains {min(-changes[reward] / fall, 1):.0%} of it".replace("%", " %")
        values = [each.rewards[reward] for each in after]
        usual = mean([value for value in values if value is not None])
        select |= {"reward": reward, "most": f"{usual:.3g}"}
        low = [
            each for each in after if (value := each.rewards.get(reward)) is not None and value <= float(select["most"])
        ]
    cost = fall * len(after) / len(graded)
    yield RunFinding("drop", reward or "", cost, f"{text}.", len(low), select, _example(low or after))


def _steepness(before: Rollouts, after: Rollouts) -> float:
    """Return the fall from `before` to `after` in standard errors of a fall between as many equal rollouts."""
    return (_mean_score(before) - _mean_score(after)) / math.sqrt(1 / len(before) + 1 / len(after))


def _reward_effect(before: Rollouts, after: Rollouts, name: str, scoring: Scoring) -> float:
    """Return the change of the mean score by one reward; a gate changes all that it multiplies."""
    sides = [[value for each in side if (value := each.rewards.get(name)) is not None] for side in (before, after)]
    if not all(sides):
        return 0.0
    weight = scoring.weight(name)
    if weight is None:
        open_scores = [score for each in before if (score := scoring.ungated(each)) is not None]
        weight = mean(open_scores) if open_scores else 0.0
    return weight * (mean(sides[1]) - mean(sides[0]))


def _weak_rewards(graded: Rollouts, scoring: Scoring) -> Iterator[RunFinding]:
    """Yield the rewards that hold points back, for a run without another finding."""
    shortfall = scoring.success - _mean_score(graded)
    for name in dict.fromkeys(name for rollout in graded for name in rollout.rewards):
        weight = scoring.weight(name)
        low = [rollout for rollout in graded if (value := rollout.rewards.get(name)) is not None and value < 0.2]
        if not weight or weight < 0 or not low:
            continue
        cost = min(math.fsum(scoring.loss(rollout, name) for rollout in graded) / len(graded), shortfall)
        example = next((each for each in low if name in each.reasons), low[0])
        text = f"{name} is below 0.2 in {len(low)} of {pluralize(len(graded), 'rollout')}"
        text += f": “{example.reasons[name]}”" if name in example.reasons else "."
        if cost > 4 * SMALLEST:
            yield RunFinding("reward", name, cost, text, len(low), {"reward": name, "most": "0.2"}, example.id)


def reason_of(rollout: RolloutSummary, scoring: Scoring) -> str:
    """Return in one line why a rollout did not pass; empty if it passed."""
    if rollout.passes(scoring.success):
        return ""
    if rollout.score is None:
        return f"{rollout.stop_reason}: {rollout.error}" if rollout.error else rollout.stop_reason
    name = scoring.worst(rollout)
    if name is None:
        return "" if _is_natural(rollout) else rollout.stop_reason
    return f"{name}: {rollout.reasons[name]}" if name in rollout.reasons else f"{name} {rollout.rewards[name]:.3g}"


def to_read_first(rollouts: Rollouts, scoring: Scoring) -> list[RolloutSummary]:
    """Return one rollout of each kind that did not pass: of each reward that cost the most, and stop reason."""
    kinds: dict[tuple[str | None, str], RolloutSummary] = {}
    graded = [rollout for rollout in rollouts if rollout.score is not None and not rollout.passes(scoring.success)]
    for rollout in sorted(graded, key=lambda each: (each.score or 0.0, -each.total_seconds)):
        kinds.setdefault((scoring.worst(rollout), rollout.stop_reason), rollout)
    return list(kinds.values())[:READ_FIRST]
