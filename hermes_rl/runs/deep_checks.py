"""Checks of `validate --deep`: they report findings about rewards, prompts and rows from the answers that were run.

Names and severities are in `hermes_rl.spec.deep_checks`. A rollout that ran out of time, or whose tests were all
skipped, is reported as such and excluded from the checks that compare scores. A finding that may be caused by a script
that replaces a model is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hermes_rl.agent.result import text_of
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import ONLY_SEAT, Group, Rollout, never_asked
from hermes_rl.rollouts.solutions import gold_turns, has_solution, last_words, user_script
from hermes_rl.runs.deep_answers import GUESSES, KINDS, Answers, Probe, another_solution
from hermes_rl.scoring.grader import GradedReward
from hermes_rl.shipped import shipped_dir, shipped_rewards
from hermes_rl.spec.deep_checks import DEEP_CHECKS, Severity
from hermes_rl.spec.model import Spec
from hermes_rl.stop_reasons import StopReason
from hermes_rl.terminal_text import pluralize

NEAR = 0.1
"""A wrong answer whose score is this near to gold's, as a share of it, scores like gold."""
PASSING_SHARE = 0.5
"""Share of the rows on which a blind answer must not pass; of a shipped spec also its mean score."""
GUESSED_SHARE = 1 / 3
"""Share of the rows on which a guess may be right by chance."""
NO_END = "no end within "
"""Start of the reason that shipped rewards give for a command that ran out of time."""
SLOW_SECONDS = 10.0
OUTPUT_CHARACTERS = 400
"""Characters, from the end, of an output that is shown."""
BEGINNING = 50
"""Characters of a prompt that identify a row in messages."""
NAMED = 5
"""Rows per finding that are listed by name."""
SHORT_PROMPT = 400
"""Characters of a prompt; a longer one may be a text in which the answer must be found."""
WRONG = {
    "empty": "an empty answer scores like the solution ({score:g} of {gold:g}): the rewards ask for nothing",
    "garbage": "garbage scores like the solution ({score:g} of {gold:g}): the rewards take anything",
    "near miss": "the solution of another row scores like a row's own ({score:g} of {gold:g}): the rewards do not look "
    "at the row",
}


@dataclass(frozen=True)
class DeepFinding:
    """One thing that a check has found."""

    check: str
    severity: Severity
    message: str


@dataclass
class DeepFindings:
    """Findings of the checks, each with the severity that the spec gives it."""

    spec: Spec
    entries: list[DeepFinding] = field(default_factory=list)
    question: Callable[[Row], str] = lambda row: ""
    """Gives the first text of a user in a row's prompt."""

    def add(self, check: str, message: str, *, doubt: str | None = None) -> None:
        """Add a finding, unless the spec turns its check off; with a `doubt` it is a warning that ends with it."""
        severity = self.spec.checks.get(check) or ("warning" if doubt else DEEP_CHECKS[check].severity)
        if severity != "off":
            self.entries.append(DeepFinding(check, severity, f"{message}; {doubt}" if doubt else message))

    @property
    def errors(self) -> list[DeepFinding]:
        return [each for each in self.entries if each.severity == "error"]

    def name(self, row: Row) -> str:
        """Return the name of a row for messages: the key that the spec chooses, or a hash with the start of the
        prompt.
        """
        if self.spec.dataset.key is not None:
            return row.key
        preview = " ".join(self.question(row)[: 8 * BEGINNING].split())
        return (
            f"{row.key} ({preview[:BEGINNING] + '…' if len(preview) > BEGINNING else preview})" if preview else row.key
        )

    def rows(self, rows: Iterable[Row]) -> str:
        """Return the names of the first rows, and how many more there are."""
        every = list({row.key: row for row in rows}.values())
        more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
        return f"{'row' if len(every) == 1 else 'rows'} {', '.join(map(self.name, every[:NAMED]))}{more}"


# ------------------------------------------------------------------------------------------ Right and wrong answers


def judge(
    findings: DeepFindings, probe: Probe, groups: Sequence[Group], replaced: str | None
) -> dict[str, float | None]:
    """Add what the kinds of answers show, and return their mean scores.

    Args:
        replaced: the image or backend that a demo replaces with the default sandbox.
    """
    played = {kind: [group.rollouts[index] for group in groups] for index, kind in enumerate(KINDS)}
    has_gold = has_solution(probe.spec)
    if not has_gold:
        findings.add("no_solution", "there is no solution, so it was not shown that a right answer scores well")
        played = {kind: played[kind] for kind in ("empty", "garbage")}
    else:
        played["near miss"] = [rollout for rollout in played["near miss"] if probe.other(rollout.key.row) is not None]
    played = {kind: rollouts for kind, rollouts in played.items() if rollouts}
    asking = _rewards_that_ask(probe)
    doubt = _doubt_about(probe, groups[0].row, asking)
    elsewhere = (
        f"but `--deep` uses the default sandbox instead of {replaced}, in which it may score well"
        if replaced is not None
        else None
    )
    failures(findings, played, asking, elsewhere)
    unheard = _report_silent(findings, played, elsewhere)
    judged = {kind: [each for each in rollouts if id(each) not in unheard] for kind, rollouts in played.items()}
    judged = {kind: rollouts for kind, rollouts in judged.items() if rollouts}
    scores = {kind: _mean_score(rollouts) for kind, rollouts in played.items()}
    if has_gold:
        _report_gold(findings, probe, played["gold"], unheard, doubt or elsewhere)
        _report_leaks(findings, probe, judged, doubt)
        _report_differences(findings, probe, judged, doubt)
    _compare_answers(findings, {kind: _mean_score(rollouts) for kind, rollouts in judged.items()}, doubt or elsewhere)
    _same_prompts(findings, probe, groups)
    _report_slow(findings, (rollout for rollouts in played.values() for rollout in rollouts))
    return scores


def _mean_score(rollouts: Iterable[Rollout]) -> float | None:
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    return fmean(scores) if scores else None


def _rewards_that_ask(probe: Probe) -> dict[str, str]:
    """Return the rewards that ask a server, each with its role; shipped rewards ask in a form that scripts can
    answer.
    """
    custom_rewards = [
        reward for reward in probe.grader.rewards if probe.spec.rewards[reward.name].fn not in shipped_rewards()
    ]
    return {
        reward.name: role
        for reward in custom_rewards
        for role in probe.spec.servers
        if {role, "roles"} & reward.function.parameters.keys()
    }


def _doubt_about(probe: Probe, row: Any, asking: Mapping[str, str]) -> str | None:
    """Return why a script that replaces a model may have caused a low score, or None if the rewards alone decide."""
    for name, role in asking.items():
        return (
            f"but `{role}`, which reward {name} calls, is replaced by a script here, which does not judge like a "
            "model: check a few rows with the real one (`hermes-rl play`)"
        )
    for seat in probe.seats:
        if seat.role != ONLY_SEAT.role:
            return (
                f"but seat `{seat.name}` is replaced by a script here, which does not answer like a model: "
                "check a few rows with the real one (`hermes-rl play`)"
            )
    user = probe.spec.user
    if user is not None and user.simulated and len(user_script(probe.spec, row, 0).turns) <= len(user.stop[:1]):
        return (
            "but the simulated user is replaced by a script here, and the solution has no messages for it: add "
            "`user:` to the solution's turns"
        )
    return None


def failures(
    findings: DeepFindings, played: Mapping[str, list[Rollout]], asking: Mapping[str, str], elsewhere: str | None = None
) -> None:
    """Add each different failure of a reward once, with the first kind of answer that caused it."""
    first: dict[str, str] = {}
    for kind, rollouts in played.items():
        for rollout in rollouts:
            if rollout.error is not None:
                first.setdefault(rollout.error, f"{kind} (row {findings.name(rollout.key.row)}): {rollout.error}")
    for error, message in first.items():
        role = next((role for name, role in asking.items() if f"reward {name!r}" in error), None)
        scripted = None if role is None else f"but `{role}` is replaced by a script here"
        findings.add("reward_fails", message, doubt=scripted or elsewhere)


def _report_silent(findings: DeepFindings, played: Mapping[str, list[Rollout]], doubt: str | None) -> set[int]:
    """Report the rollouts whose scores show nothing, and return their identities."""
    every = [(kind, rollout) for kind, rollouts in played.items() for rollout in rollouts]
    late = [(kind, rollout, cause) for kind, rollout in every if (cause := _out_of_time(rollout)) is not None]
    skipped = [(kind, rollout) for kind, rollout in every if _metric_sources(rollout, "all_skipped")]
    for cause in dict.fromkeys(cause for _, _, cause in late):
        kinds = list(dict.fromkeys(kind for kind, _, late_cause in late if late_cause == cause))
        rows = findings.rows(_rows_of(rollout for _, rollout, late_cause in late if late_cause == cause))
        count = sum(late_cause == cause for _, _, late_cause in late)
        findings.add(
            "timeouts",
            f"{count} of {pluralize(len(every), 'rollout')} ({', '.join(kinds)}; {rows}) ended by a time limit, so "
            f"their scores say nothing about the rewards: {cause}",
            doubt=doubt,
        )
    if skipped:
        names = ", ".join(
            dict.fromkeys(name for _, rollout in skipped for name in _metric_sources(rollout, "all_skipped"))
        )
        rows = findings.rows(_rows_of(rollout for _, rollout in skipped))
        findings.add(
            "tests_skipped", f"reward {names}: all tests were skipped ({rows}), so nothing was tested", doubt=doubt
        )
    return {id(rollout) for _, rollout, _ in late} | {id(rollout) for _, rollout in skipped}


def _out_of_time(rollout: Rollout) -> str | None:
    if rollout.stop_reason is StopReason.TIMEOUT:
        return "`agent.timeout`, `agent.task_timeout` or `agent.deadline` is too short for them"
    reasons = ((name, value.reason) for name, value in rollout.rewards.items())
    return next((f"reward {name}: {reason}" for name, reason in reasons if reason and reason.startswith(NO_END)), None)


def _metric_sources(rollout: Rollout, metric: str) -> list[str]:
    """Return the names of the rewards that give this metric."""
    return [name for name, value in rollout.rewards.items() if value.metrics.get(metric)]


def _rows_of(rollouts: Iterable[Rollout]) -> list[Row]:
    return [rollout.key.row for rollout in rollouts]


def fails(probe: Probe, rollout: Rollout) -> bool:
    """Return True if a rollout of the solution does not succeed. One that is compared with its own copies need not
    reach `evaluate.success_threshold`."""
    if rollout.score is None:
        return True
    if not gold_turns(probe.spec, rollout.key.row):
        return False  # this row has no solution
    return not probe.has_group_rewards and rollout.score < probe.spec.evaluate.success_threshold


def _report_gold(
    findings: DeepFindings, probe: Probe, gold: Sequence[Rollout], unheard: set[int], doubt: str | None
) -> None:
    """Report the rows whose solution does not succeed, each with the result of every reward."""
    lacking = [row for row in _rows_of(gold) if not gold_turns(probe.spec, row)]
    if lacking:
        text = (
            f"{pluralize(len(lacking), 'row')} of {len(gold)} have no solution, so it was not shown that a right answer"
        )
        findings.add("no_solution", f"{text} scores well; {findings.rows(lacking)}")
    failed = [rollout for rollout in gold if fails(probe, rollout) and id(rollout) not in unheard]
    below = [rollout for rollout in failed if rollout.score is not None]
    everywhere = bool(below) and len(below) == sum(id(rollout) not in unheard for rollout in gold)
    threshold = probe.spec.evaluate.success_threshold
    for rollout in failed[:NAMED]:
        findings.add(
            "gold_fails" if everywhere else "gold_fails_on_some_rows",
            f"{_explain_failure(findings.name(rollout.key.row), rollout)}; `evaluate.success_threshold` is "
            f"{threshold:g}",
            doubt=doubt,
        )
    if len(failed) > NAMED:
        rest = findings.rows(_rows_of(failed[NAMED:]))
        findings.add("gold_fails" if everywhere else "gold_fails_on_some_rows", f"so does that of {rest}", doubt=doubt)


def _explain_failure(row: str, rollout: Rollout) -> str:
    """Return the result of each reward, and the last output."""
    score = "is not graded" if rollout.score is None else f"scores {rollout.score:g}"
    parts = [f"the solution of row {row} {score} (it ended with {rollout.stop_reason})"]
    if rollout.result is not None and rollout.result.program is not None and not rollout.turns:
        parts.append(never_asked(rollout.result.program))
    for name, reward in rollout.rewards.items():
        value = "no value" if reward.value is None else f"{reward.value:g}"
        parts.append(f"{name} {value}" + (f": {reward.reason}" if reward.reason else ""))
    messages = rollout.result.messages[rollout.result.prompt_length :] if rollout.result is not None else []
    for role, label in (("tool", "the last output of a tool"), ("assistant", "the last answer")):
        last = next((message for message in reversed(messages) if message.get("role") == role), None)
        text = text_of(last.get("content")).strip() if last is not None else ""
        parts += (
            [f"{label}: {text if len(text) <= OUTPUT_CHARACTERS else '…' + text[-OUTPUT_CHARACTERS:]!r}"]
            if text
            else []
        )
    return "; ".join(parts)


def _report_leaks(findings: DeepFindings, probe: Probe, judged: Mapping[str, list[Rollout]], doubt: str | None) -> None:
    offered = False
    for rollout in judged.get("gold", ()):
        row = rollout.key.row
        answer, prompt = last_words(gold_turns(probe.spec, row)).strip(), probe.text(row)
        # The answer is a separate word there; a single letter proves nothing.
        if len(answer) < 2 or not re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prompt):
            return
        offered = offered or _is_offered(answer, prompt)
    last, gold = judged.get("last words"), judged.get("gold")
    if not last or not gold or not _is_near_gold(_mean_score(last), _mean_score(gold)):
        return
    if doubt is None and offered:
        doubt = "which is right where the answer is one of several, or a part of a longer text"
    text = "the prompt contains the answer: the last message of the solution is enough, and the prompt contains it"
    findings.add("leaked_answer", text, doubt=doubt)


def _is_offered(answer: str, prompt: str) -> bool:
    """Return True if an answer appears in a long text, alone on a line, or among alternatives."""
    text = re.escape(answer)
    option = rf"(?m)^\W*(?:\w{{1,2}}[).:]\s*)?{text}\W*$"
    among = rf"(?:,|/|\bor\b|\|)\s*[\"'`]?{text}(?!\w)|(?<!\w){text}[\"'`]?\s*(?:,|/|\bor\b|\|)"
    return len(prompt) > SHORT_PROMPT or re.search(f"{option}|{among}", prompt) is not None


def _compare_answers(findings: DeepFindings, scores: Mapping[str, float | None], doubt: str | None) -> None:
    known_scores = {kind: score for kind, score in scores.items() if score is not None}
    gold = known_scores.get("gold")
    equal = len(known_scores) > 1 and len({round(score, 9) for score in known_scores.values()}) == 1
    if equal and (gold is not None or min(known_scores.values()) >= findings.spec.evaluate.success_threshold):
        text = f"every answer scores {next(iter(known_scores.values())):g}, right or wrong: the reward is constant"
        findings.add("constant_score", text, doubt=doubt)
        return
    if gold is None:
        return
    wrong = [
        text.format(score=known_scores[kind], gold=gold)
        for kind, text in WRONG.items()
        if _is_near_gold(known_scores.get(kind), gold)
    ]
    better = [kind for kind, score in known_scores.items() if score > gold + 1e-9 and kind in WRONG and not wrong]
    for text in (
        *wrong,
        *(f"{kind} scores {known_scores[kind]:g}, more than the solution ({gold:g})" for kind in better),
    ):
        findings.add("wrong_answer_scores", text, doubt=doubt)


def _is_near_gold(score: float | None, gold: float | None) -> bool:
    return score is not None and gold is not None and score >= gold - NEAR * max(abs(gold), 1e-9)


def _report_differences(
    findings: DeepFindings, probe: Probe, judged: Mapping[str, list[Rollout]], doubt: str | None
) -> None:
    """Report rewards that gave another value to the same answer, or to the same end state."""
    for name, difference in sorted(probe.regraded.items()):
        reward = f"reward {name} is" if name else "the rewards are"
        text = f"{reward} not repeatable: the same end state was graded twice ({difference})"
        findings.add("not_repeatable", text, doubt=doubt)
    repeats = {rollout.key.row.key: rollout for rollout in judged.get("gold again", ())}
    pairs = [(rollout, repeats[key]) for rollout in judged.get("gold", ()) if (key := rollout.key.row.key) in repeats]
    names = {
        name
        for first, second in pairs
        for name in first.rewards.keys() & second.rewards.keys()
        if first.rewards[name].value != second.rewards[name].value
    }
    for name in sorted(names):
        text = f"reward {name} is not deterministic: it gave different values to the same answer"
        findings.add("not_deterministic", text, doubt=doubt)


def _same_prompts(findings: DeepFindings, probe: Probe, groups: Sequence[Group]) -> None:
    rows = [group.row for group in groups]
    if len(rows) < 2 or probe.spec.user is not None or probe.seats or len({probe.text(row) for row in rows}) > 1:
        return
    message = "the prompt is the same for every row"
    if probe.uses_tools:
        findings.add(
            "same_prompt", message, doubt="which is right where the model finds out through tools, as in a game"
        )
    elif has_solution(probe.spec) and len({gold_turns(probe.spec, row) for row in rows}) == 1:
        findings.add("same_prompt", message, doubt="and so is the solution")
    else:
        # Without tools a model cannot know which row it is asked about.
        findings.add("same_prompt", f"{message}: does the template lack the question?")


def _report_slow(findings: DeepFindings, rollouts: Iterable[Rollout]) -> None:
    took: dict[str, float] = {}
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            took[name] = max(took.get(name, 0.0), value.seconds)
    for name, seconds in took.items():
        if seconds > SLOW_SECONDS:
            findings.add("slow_reward", f"reward {name} took {seconds:.0f} s")


# ---------------------------------------------------------------------------------- Answers that solve nothing


def judge_blind(
    findings: DeepFindings, probe: Probe, answers: Answers, groups: Sequence[Group]
) -> dict[str, dict[str, float]]:
    """Add what the blind answers show; return of each the mean score and the share of rows on which it passes."""
    failures(
        findings,
        {f"the answer {name!r}": [group.rollouts[index] for group in groups] for index, name in enumerate(answers)},
        _rewards_that_ask(probe),
    )
    for reward in probe.judging:
        _report_paid(findings, reward, answers, groups)
    scored = {reward.name for reward in probe.judging}
    if any(reward.weighting.counts and reward.name not in scored for reward in probe.grader.rewards):
        return {}  # what models judge is a part of the score
    success = probe.spec.evaluate.success_threshold
    summary: dict[str, dict[str, float]] = {}
    passing: dict[str, list[Row]] = {}
    for index, (name, answer) in enumerate(answers.items()):
        rollouts = [group.rollouts[index] for group in groups if answer(probe.question(group.row)) is not None]
        scores = [rollout.score for rollout in rollouts if rollout.score is not None]
        if not scores:
            continue
        passing[name] = _rows_of(each for each in rollouts if each.score is not None and each.score >= success)
        summary[name] = {"rows": len(scores), "mean": fmean(scores), "passing": len(passing[name]) / len(scores)}
    _report_blind_passes(findings, probe, passing, summary)
    return summary


def _report_blind_passes(
    findings: DeepFindings, probe: Probe, passing: Mapping[str, list[Row]], summary: Mapping[str, Mapping[str, float]]
) -> None:
    """Report the blind answer that passes on most rows, if these are half of them, and the score of an empty answer."""
    success = probe.spec.evaluate.success_threshold
    shipped = probe.spec.folder.is_relative_to(shipped_dir("specs"))
    doubt = "but the other seats are replaced by scripts here" if probe.seats else None
    for name, figures in sorted(summary.items(), key=lambda each: -each[1]["passing"]):
        by_chance = len(passing[name]) == 1  # a row whose right answer this is, as half of two rows may be
        if not by_chance and (figures["passing"] >= PASSING_SHARE or (shipped and figures["mean"] >= PASSING_SHARE)):
            findings.add(
                "blind_answers_pass",
                f"the answer {name!r}, which solves nothing, passes (`evaluate.success_threshold`, {success:g}) on "
                f"{len(passing[name])} of {pluralize(int(figures['rows']), 'row')} ({figures['passing']:.0%}) and "
                "scores "
                f"{figures['mean']:.2f} on average; {findings.rows(passing[name])}",
                doubt=doubt,
            )
            return  # the worst is enough
    if passing.get(""):
        share = f"{len(passing[''])} of {pluralize(int(summary['']['rows']), 'row')} pass although nothing was done"
        findings.add("untouched_passes", f"{share}; {findings.rows(passing[''])}")
    elif success > 0 and "" in summary and summary[""]["mean"] >= PASSING_SHARE * success:
        text = f"an empty answer, which solves nothing, scores {summary['']['mean']:.2f} on average"
        findings.add("blind_answers_pay", text)


def _report_paid(findings: DeepFindings, reward: GradedReward, answers: Answers, groups: Sequence[Group]) -> None:
    """Report a reward that pays for an answer that solves nothing, with the best one: an answer that is worth more than
    an empty one, by more than `NEAR` of the range."""
    sign = -1 if reward.weighting.weight < 0 else 1
    min_gain = NEAR * (reward.bounds[1] - reward.bounds[0])
    played = [_values_by_answer(group, answers, reward.name) for group in groups]
    paid = {
        name: [
            (group.row, values[name], values[""])
            for group, values in zip(groups, played, strict=True)
            if name in values
            and "" in values
            and sign * (values[name] - values[""]) > min_gain
            and _is_worth_more(group.rollouts[index], group.rollouts[list(answers).index("")])
        ]
        for index, (name, answer) in enumerate(answers.items())
        if answer is not another_solution  # its calls are right ones, which rewards of behaviour pay for
    }
    often = {
        name: rows for name, rows in paid.items() if name not in GUESSES or len(rows) >= GUESSED_SHARE * len(groups)
    }
    name, rows = max(often.items(), key=lambda each: len(each[1]))
    if rows:
        row, value, empty = rows[0]
        findings.add(
            "blind_answers_pay",
            f"reward {reward.name} pays for an answer that solves nothing: of {len(groups)} rows {len(rows)} "
            f"({len(rows) / len(groups):.0%}) give {name!r} more than no answer, such as row {findings.name(row)} "
            f"({value:g} instead of {empty:g})",
        )


def _is_worth_more(rollout: Rollout, other: Rollout) -> bool:
    """Return True unless a gate or another reward takes away what one reward pays."""
    return rollout.score is None or other.score is None or rollout.score > other.score


def _values_by_answer(group: Group, answers: Answers, reward: str) -> dict[str, float]:
    """Return the value that a reward gave to each answer, by the name of the answer; only answers that it has
    judged.
    """
    values = {name: rollout.rewards.get(reward) for name, rollout in zip(answers, group.rollouts, strict=True)}
    return {name: value.value for name, value in values.items() if value is not None and value.value is not None}


def judge_constant(findings: DeepFindings, probe: Probe, groups: Sequence[Group]) -> None:
    """Report rewards that gave one value to all answers of all rows; penalties and gates may do so."""
    for reward in probe.grader.rewards:
        if reward.group_level or reward.weighting.gate or reward.weighting.weight <= 0:
            continue
        values = [
            value.value
            for group in groups
            for rollout in group.rollouts
            if (value := rollout.rewards.get(reward.name)) is not None
        ]
        if not has_solution(probe.spec) and values[:1] == [reward.bounds[0]]:
            continue  # as it should be for wrong answers
        if reward.bounds[1] <= 0 and values[:1] == [reward.bounds[1]]:
            continue  # a penalty that no answer deserves
        if len(values) > 1 and len(set(values)) == 1 and values[0] is not None:
            text = f"reward {reward.name} is {values[0] + 0.0:g} for each of {len(values)} right and wrong answers"
            findings.add("constant_reward", text)
