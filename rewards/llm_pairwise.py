"""A model compares the answers of a group with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from hermes_rl import Score
from hermes_rl.errors import AgentFault, UserError
from hermes_rl.scoring.judge import PROBE_TEXT, JudgeRole, JudgeUsage, Shown, marked, verdict
from hermes_rl.scoring.reward_value import in_runner

SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "winner": {"type": "string", "enum": ["first", "second", "tie"]}},
    "required": ["reason", "winner"],
    "additionalProperties": False,
}
POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}


@in_runner
async def llm_pairwise(
    group: list[Any],
    roles: Mapping[str, JudgeRole],
    *,
    rubric: str,
    server: str = "judge",
    question: str | None = None,
    reference: str | None = None,
) -> list[Score]:
    """Return the share of comparisons that each answer wins within its group, from 0 to 1; a tie is half a win.

    Each pair is judged twice, in both orders; two contradicting verdicts are a tie. An answer that prevents a verdict
    loses. A `reference` takes part as one more opponent without a score; a group of one needs it.

    Args:
        rubric: description of a better answer.
        server: the server role of the judge.
        question: the question, if the judge should know it.
        reference: an answer to compare with.
    """
    if server not in roles:
        raise UserError(f"llm_pairwise: the spec has no servers.{server}; there are {', '.join(sorted(roles))}")
    answers = [result.final_response for result in group] + ([] if reference is None else [reference])
    if len(answers) < 2:
        raise ValueError("llm_pairwise: a group of one rollout has no opponent; set `reference`")
    contest = _Contest(roles[server], rubric, question)
    pairs = list(combinations(range(len(answers)), 2))
    points = await asyncio.gather(*(contest.points(answers[i], answers[j]) for i, j in pairs))
    won = [0.0] * len(answers)
    for (i, j), first in zip(pairs, points, strict=True):
        won[i] += first
        won[j] += 1 - first
    share = len(answers) - 1
    bill = {name: count / len(group) for name, count in contest.bill.counts.items()}
    return [Score(won[i] / share, reason=f"{won[i]:g} of {share} comparisons", metrics=bill) for i in range(len(group))]


class _Contest:
    """Comparisons by one judge."""

    def __init__(self, judge: JudgeRole, rubric: str, question: str | None) -> None:
        self.judge, self.rubric, self.question = judge, rubric, question
        self.bill = JudgeUsage()

    async def points(self, one: str, other: str) -> float:
        """Return the points of `one` against `other`: 1, 0.5 or 0."""
        if one == other:
            return 0.5
        try:
            forward, back = await asyncio.gather(self._better(one, other), self._better(other, one))
        except AgentFault:
            failures = await asyncio.gather(self._talks_it_out(one), self._talks_it_out(other))
            return 0.5 + (failures[1] - failures[0]) / 2
        both = (forward + (1 - back)) / 2
        return both if both in (0.0, 1.0) else 0.5

    async def _talks_it_out(self, answer: str) -> bool:
        """Return True if the judge returns no verdict on this answer, compared with a plain one."""
        try:
            await self._better(answer, PROBE_TEXT)
        except AgentFault:
            return True
        return False

    def _rank(self, text: str) -> tuple[int, int, int]:
        tokens = text.casefold().split()
        return (
            len({word.strip(".,;:!?") for word in tokens} & set((self.question or "").casefold().split())),
            len(tokens),
            len(text),
        )

    async def _better(self, first: str, second: str) -> float:
        if self.judge.scripted:  # without a model: first the overlap with the question decides, then the length
            return POINTS["first"] if self._rank(first) > self._rank(second) else POINTS["second"]

        def question(shorten: Shown) -> str:
            parts = [f"Rubric:\n{self.rubric}"]
            parts += [marked("QUESTION", self.question)] if self.question is not None else []
            parts += [marked("FIRST ANSWER", shorten(first)), marked("SECOND ANSWER", shorten(second))]
            parts.append(
                "Which answer is better by the rubric? First the reason in one sentence, then the winner: "
                '{"reason": "…", "winner": "first" or "second" or "tie"}'
            )
            return "\n\n".join(parts)

        return await verdict(self.judge, question, SCHEMA, _read_points, self.bill)


def _read_points(parsed_reply: Mapping[str, Any]) -> float:
    winner = str(parsed_reply.get("winner", "")).strip().lower()
    if winner not in POINTS:
        raise ValueError(f"'winner' must be first, second or tie, not {winner[:40]!r}")
    return POINTS[winner]
