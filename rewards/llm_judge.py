"""A model judges the final answer, or the whole conversation, by a rubric or by a list of assertions."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Mapping
from typing import Any, Literal

from hermes_rl import Score
from hermes_rl.agent.result import text_of
from hermes_rl.errors import AgentFault, JudgeFailure, UserError
from hermes_rl.scoring.judge import JudgeRole, JudgeUsage, Shown, marked, number_in, require_agreement, verdict
from hermes_rl.scoring.reward_function import RewardFunction, call_reward, find_reward
from hermes_rl.scoring.reward_value import group_only_for, in_runner, interpret, requires
from hermes_rl.terminal_text import start_of

WORDS = 300
"""Maximum characters that are stored of a judge's reason."""
ASSERTION = "The score is 1 if this assertion holds, and 0 if it does not: {}"


@in_runner
@group_only_for("fallback")
@requires("(rubric is none) != (assertions is none)", "give it either a `rubric` or `assertions`")
@requires("scale[0] < scale[1]", "scale needs a lower and a higher score, not {{ scale | list | tojson }}")
async def llm_judge(
    group: list[Any],
    roles: Mapping[str, JudgeRole],
    *,
    rubric: str | None = None,
    assertions: list[str] | None = None,
    need: Literal["all", "share"] = "all",
    where: Literal["final", "conversation"] = "final",
    server: str | list[str] = "judge",
    question: str | None = None,
    reference: str | None = None,
    scale: tuple[float, float] = (0, 1),
    fallback: str | None = None,
    calibrate: str | None = None,
    min_agreement: float = 0.8,
) -> list[Score | AgentFault]:
    """Return the judge's score for the policy's answer, mapped from `scale` to 0…1; the median of several judges.

    A judge that fails, or whose verdict cannot be parsed after repair, fails the rollout. An answer that prevents a
    verdict gets the low end of the range. An answer that is too long for the judge is cut in the middle, at a marker.
    With a `fallback`, a failure affects the group: that reward scores all its members, and each reason names it.

    With `assertions` instead of a rubric, each one is judged separately, and the score depends on the number that
    hold; the metrics `assertion_1`, `assertion_2`, … are the results. Without any the score is 1.

    Args:
        rubric: description of the answers that deserve each score.
        assertions: statements that must be true.
        need: `all` assertions must hold for a score of 1, else 0; or the score is the `share` that holds.
        where: judge the final response, or all messages and tool calls without system messages.
        server: the server role of the judge, or several roles.
        question: the question, if the judge should know it.
        reference: the right answer, if the judge should know it.
        scale: the lowest and the highest score in the rubric.
        fallback: a reward that scores the complete group instead, with `question` and `reference` if it takes them.
        calibrate: file of labelled cases; a judge that agrees with fewer than `min_agreement` of them is refused.
        min_agreement: minimum share of the cases.
    """
    judges = [_judge_role(roles, name) for name in ([server] if isinstance(server, str) else server)]
    rubrics = [rubric] if rubric is not None else [ASSERTION.format(each) for each in assertions or ()]
    tasks = [_Task(each, question, reference, scale if rubric is not None else (0, 1)) for each in rubrics]
    instead = None if fallback is None else find_reward(fallback, None)

    async def judged(result: Any) -> Score | AgentFault:
        transcript = _shown_conversation(result) if where == "conversation" else [("ANSWER", result.final_response)]
        scores = await asyncio.gather(*(task.judged(judges, transcript, result.final_response) for task in tasks))
        faults = [score for score in scores if isinstance(score, AgentFault)]
        if faults and (rubric is not None or need == "all"):
            return faults[0]  # and no 0, which raises the score if the weight is negative
        task_scores = [
            score if isinstance(score, Score) else Score(0.0, reason=start_of(str(score), WORDS)) for score in scores
        ]
        return task_scores[0] if rubric is not None else _combine_scores(task_scores, need)

    try:
        if calibrate is not None:
            for judge in judges:
                await require_agreement(judge.name, calibrate, min_agreement, tasks[0].scorer(judge))
        return list(await asyncio.gather(*map(judged, group)))
    except JudgeFailure as failure:
        if instead is None:
            raise
        return [await _fallen_back(instead, result, question, reference, failure) for result in group]


Said = list[tuple[str, str]]
"""What is judged: who said it, and the text."""


def _shown_conversation(result: Any) -> Said:
    """Return the messages and calls of a conversation; texts that an agent program made up count as the program's."""
    spoken = []
    for message in result.messages:
        calls = [call.get("function") for call in message.get("tool_calls") or ()]
        parts = [text_of(message.get("content")), *([json.dumps(calls)] if calls else [])]
        if message["role"] != "system":
            speaker = "PROGRAM" if message.get("context") else message["role"].upper()
            spoken.append((speaker, "\n".join(part for part in parts if part)))
    return spoken


def _combine_scores(scores: list[Score], need: str) -> Score:
    """Return the score of all assertions, combined from the score of each."""
    holds = [float(score.value or 0.0) > 0.5 for score in scores]  # half of the judges is not a majority
    metrics: dict[str, float] = {f"assertion_{index}": held for index, held in enumerate(holds, 1)}
    for name in {name for score in scores for name in score.metrics}:
        metrics[name] = sum(score.metrics.get(name, 0.0) for score in scores)
    reasons = [
        f"{index} {'holds' if held else 'does not hold'}: {score.reason}"
        for index, (held, score) in enumerate(zip(holds, scores, strict=True), 1)
    ]
    value = float(all(holds)) if need == "all" or not holds else sum(holds) / len(holds)
    return Score(value, reason="; ".join(reasons) or "nothing is asserted", metrics=metrics)


class _Task:
    """The grading task: rubric, question and reference, the same for every answer of a group."""

    def __init__(self, rubric: str, question: str | None, reference: str | None, scale: tuple[float, float]) -> None:
        self.low, self.high = scale
        self.rubric, self.question, self.reference = rubric, question, reference
        self.schema = {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
            "required": ["reason", "score"],
            "additionalProperties": False,
        }

    async def judged(self, judges: list[JudgeRole], transcript: Said, answer: str) -> Score | AgentFault:
        bill = JudgeUsage()
        try:
            verdicts = await asyncio.gather(*(self.ask(judge, transcript, answer, bill) for judge in judges))
        except AgentFault as fault:
            return fault
        scores = [score for score, _ in verdicts]
        reason = start_of(" | ".join(reason for _, reason in verdicts), WORDS)
        return Score(statistics.median(scores), reason=reason, metrics=bill.counts)

    def scorer(self, judge: JudgeRole) -> Any:
        """Return a function that gives the judge's score for a labelled case."""

        async def score(case: Mapping[str, Any]) -> float:
            case_task = _Task(self.rubric, case.get("question"), case.get("reference"), (self.low, self.high))
            try:
                return (await case_task.ask(judge, [("ANSWER", case["answer"])], case["answer"], JudgeUsage()))[0]
            except AgentFault as fault:  # no agent has written a labelled case
                raise JudgeFailure(str(fault)) from fault

        return score

    async def ask(self, judge: JudgeRole, transcript: Said, answer: str, bill: JudgeUsage) -> tuple[float, str]:
        if judge.scripted:
            return self._scripted(answer)

        def question(shorten: Shown) -> str:
            parts = [f"Rubric:\n{self.rubric}"]
            parts += [marked("QUESTION", self.question)] if self.question is not None else []
            parts += [marked("REFERENCE", self.reference)] if self.reference is not None else []
            parts += [marked(speaker, shorten(text)) for speaker, text in transcript]
            subject = "answer" if [speaker for speaker, _ in transcript] == ["ANSWER"] else "conversation"
            parts.append(
                f"Score the {subject} from {self.low:g} to {self.high:g} by the rubric. First the reason in one "
                "sentence, "
                'then the score: {"reason": "…", "score": …}'
            )
            return "\n\n".join(parts)

        return await verdict(judge, question, self.schema, self._read, bill)

    def _read(self, parsed_reply: Mapping[str, Any]) -> tuple[float, str]:
        score = number_in(parsed_reply, "score", self.low, self.high)
        return (score - self.low) / (self.high - self.low), str(parsed_reply.get("reason", ""))

    def _scripted(self, answer: str) -> tuple[float, str]:
        """Score without a model: check that the answer contains the reference, or any text at all."""
        expected = (self.reference or "").casefold().strip()
        return float(expected in answer.casefold() and bool(answer.strip())), "scripted judge: is the reference in it?"


def _judge_role(roles: Mapping[str, JudgeRole], name: str) -> JudgeRole:
    if name not in roles:
        raise UserError(f"llm_judge: the spec has no servers.{name}; there are {', '.join(sorted(roles))}")
    return roles[name]


async def _fallen_back(
    reward: RewardFunction, result: Any, question: str | None, reference: str | None, failure: JudgeFailure
) -> Score:
    inputs = {"question": question, "reference": reference}
    arguments = {key: value for key, value in inputs.items() if key in reward.parameters}
    reward.require_fitting(arguments)
    returned, seconds = await call_reward(reward, {**reward.select_parameters({"result": result}), **arguments})
    value = interpret(reward.name, returned, seconds).value
    return Score(value, reason=start_of(f"fallback {reward.name}: {failure.detail}", WORDS), metrics={"fallback": 1.0})
