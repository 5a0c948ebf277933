"""Answers that `validate --deep` uses instead of a policy, and the environment that runs them.

`KINDS` are right and wrong answers to a few rows; `BLIND` are answers that solve nothing, tried on more rows.
`deep_checks` judges their scores, `deep` calls both.
"""

from __future__ import annotations

import copy
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from hermes_rl.agent.result import text_of
from hermes_rl.data.load import Split
from hermes_rl.data.rows import Row
from hermes_rl.errors import Failure
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import ONLY_SEAT, Group, Rollout, RolloutKey, Seat
from hermes_rl.rollouts.solutions import gold_turns, last_words
from hermes_rl.runs.renderer_check import uses_tools
from hermes_rl.runs.run import Plan, Run
from hermes_rl.scoring.grader import GradedReward
from hermes_rl.servers.scripted.play import Script, ScriptedCall, ScriptedTurn
from hermes_rl.spec.model import Spec
from hermes_rl.tools.base import DescribedTool, ToolInputError, Toolkit, ToolRuntime

Turns = tuple[ScriptedTurn, ...]
KINDS = ("gold", "gold again", "empty", "garbage", "near miss", "last words")
REPEATED = ("gold", "garbage")
"""Kinds whose end state is graded twice."""
LETTERS = "abcdefghijklmnopqrstuvwxyz {}[]<>()0123456789.,:;'\"\\/!?#*_-\n"
COPIED = 20_000
"""Characters of a prompt that a blind answer repeats."""
BLIND_SECONDS = 30.0
"""Seconds after which no further row gets blind answers."""
NO_EFFECT = ScriptedTurn(tools=(ScriptedCall("terminal", {"command": "true"}),))
"""A call that changes nothing; without a terminal, a call of a tool that does not exist."""


class RowQuestion(NamedTuple):
    """Material from which a blind answer may be made."""

    prompt: str
    """Text of the row's prompt."""
    gold: Turns
    other: Turns | None
    """Another row's solution; None if no row has another one."""
    frequent: str | None
    """The answer of most solutions; None if no answer is that of two rows and of a tenth of them."""


Answer = Callable[[RowQuestion], Turns | None]
"""Gives the turns for a question; None if there is no such answer to it."""
Answers = Mapping[str, Answer]


def saying(text: str) -> Answer:
    """Return an answer that is this text, whatever the question."""
    return lambda question: (ScriptedTurn(say=text),)


def last_line(question: RowQuestion) -> Turns:
    """Repeat the last line of the prompt."""
    return (ScriptedTurn(say=question.prompt.strip().rpartition("\n")[2][:COPIED]),)


def last_word(question: RowQuestion) -> Turns | None:
    """Repeat the last word of the prompt."""
    prompt_words = re.findall(r"\w+", question.prompt[-COPIED:])
    return (ScriptedTurn(say=prompt_words[-1]),) if prompt_words else None


def last_number(question: RowQuestion) -> Turns | None:
    """Repeat the last number of the prompt."""
    numbers = re.findall(r"\d+(?:\.\d+)?", question.prompt[-COPIED:])
    return (ScriptedTurn(say=numbers[-1]),) if numbers else None


def another_solution(question: RowQuestion) -> Turns | None:
    """Return the solution of another row."""
    return question.other


def frequent_answer(question: RowQuestion) -> Turns | None:
    """Return the answer that most solutions give."""
    return None if question.frequent is None else (ScriptedTurn(say=question.frequent),)


def refused_calls(question: RowQuestion) -> Turns | None:
    """Make the solution's calls without its text; the tools of `Probe` refuse each call."""
    turns = tuple(ScriptedTurn(tools=turn.tools) for turn in question.gold if turn.tools)
    return (*turns, ScriptedTurn(say="")) if turns else None


BLIND: Answers = {
    **{text: saying(text) for text in ("", "yes", "no", "A", "0", "1", "nan")},
    "I have done it. The task is complete.": saying("I have done it. The task is complete."),
    "the prompt": lambda question: (ScriptedTurn(say=question.prompt[:COPIED]),),
    "the last line of the prompt": last_line,
    "the last word of the prompt": last_word,
    "the last number of the prompt": last_number,
    "the most frequent answer": frequent_answer,
    "another row's solution": another_solution,
    "one call without effect": lambda question: (NO_EFFECT, ScriptedTurn(say="")),
    "the solution's calls, each refused": refused_calls,
}
"""Answers that solve nothing, the empty one first, by name."""
GUESSES = ("yes", "no", "A", "0", "1", "the last word of the prompt", "the last number of the prompt",
           "the most frequent answer")  # fmt: skip
"""Answers that are right now and then, by chance."""
ACTING = ("", "another row's solution", "one call without effect", "the solution's calls, each refused")
"""Answers that make a difference to rewards that look into the sandbox alone."""


class RefusingTool(DescribedTool):
    """A tool that does nothing: a user may name it, and each call of it is an error."""

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        raise ToolInputError("this call is refused")


class Probe(CompiledSpec):
    """Spec whose groups contain an answer of each kind, in the order of `KINDS`, or else of `answers`."""

    answers: Answers | None = None
    gradings = 2

    def __init__(self, spec: Spec, rows: Sequence[Row]) -> None:
        super().__init__(spec, {})
        self.grader = replace(self.grader, blames=False)  # what is answered is the spec's own, or deliberately wrong
        self.rows = rows
        self.uses_tools = bool(spec.programs) or uses_tools(spec)
        self.regraded: dict[str, str] = {}
        """Changes found by grading the same end state again, by reward."""

    @property
    def judging(self) -> list[GradedReward]:
        """Rewards that can judge blind answers.

        Rewards that compare the members of a group, or that ask a model, are excluded: a script replaces the model
        here.
        """
        roles = {*self.spec.servers, "roles"}
        return [
            reward
            for reward in self.grader.rewards
            if reward.weighting.counts and not reward.group_level and not roles & reward.function.parameters.keys()
        ]

    @cached_property
    def reads_answers(self) -> bool:
        """True if a text makes a difference to a reward, to a user or to another seat."""
        read = {"result", "state", "seats"}
        talks = bool(self.seats) or self.spec.user is not None
        return talks or any(read & reward.function.parameters.keys() for reward in self.judging)

    @cached_property
    def reads_states(self) -> bool:
        """True if a reward looks at what tools have changed."""
        counting = (reward for reward in self.grader.rewards if reward.weighting.counts)
        return any({"ctx", "state"} & reward.function.parameters.keys() for reward in counting)

    @cached_property
    def frequent(self) -> str | None:
        """The last text of most solutions; None if too few share one."""
        texts = Counter(last_words(gold_turns(self.spec, row)) for row in self.rows)
        text, count = texts.most_common(1)[0]
        return text if text and count > 1 and 10 * count >= len(self.rows) else None

    def blind_answers(self) -> Answers:
        """Return the blind answers that may make a difference; none if no reward can judge them."""
        if not self.judging:
            return {}
        names = BLIND if self.reads_answers else ACTING
        questions = [self.question(row) for row in self.rows]
        possible = {name: BLIND[name] for name in names if any(BLIND[name](each) is not None for each in questions)}
        # Programs bring their tools along, and seats that are called as tools are not tools that could refuse.
        calls_seats = self.spec.schedule is not None and self.spec.schedule.order == "call"
        refuses = not self.spec.programs and not calls_seats
        return {name: answer for name, answer in possible.items() if answer is not refused_calls or refuses}

    def question(self, row: Row) -> RowQuestion:
        """Return the material for blind answers to a row."""
        gold, other = gold_turns(self.spec, row), self.other(row)
        return RowQuestion(self.text(row), gold, None if other is None else gold_turns(self.spec, other), self.frequent)

    def text(self, row: Row) -> str:
        """Return the text of a row's prompt."""
        return "\n".join(text_of(message.get("content")) for message in self.prompt(row))

    def question_text(self, row: Row) -> str:
        """Return the first text of a user in a row's prompt; empty if there is none."""
        questions = (message for message in self.prompt(row) if message["role"] == "user")
        return text_of(next(questions, {}).get("content"))

    def script(self, key: RolloutKey, prior: int, seat: Seat = ONLY_SEAT) -> Script:
        gold = gold_turns(self.spec, key.row, seat.name)
        first = not seat.name or seat.name == self.seats[0].name
        if self.answers is not None:
            answer = list(self.answers.values())[key.index]
            return Script((answer(self.question(key.row)) if first else gold) or (ScriptedTurn(say=""),), prior)
        kind = KINDS[key.index]
        if kind == "near miss":
            other = self.other(key.row)
            turns = () if other is None else gold_turns(self.spec, other, seat.name)
        elif not first:
            turns = gold
        else:
            turns = self._turns(kind, key.row, gold)
        return Script(turns or (ScriptedTurn(say=""),), prior)

    def _turns(self, kind: str, row: Row, gold: Turns) -> Turns:
        if kind == "garbage":
            source = random.Random(f"garbage {row.key}")
            return (ScriptedTurn(say="".join(source.choices(LETTERS, k=300))),)
        if kind == "last words":
            return (ScriptedTurn(say=last_words(gold)),)
        return () if kind == "empty" else gold

    def other(self, row: Row) -> Row | None:
        """Return a row whose solution is not right for this one; None if there is none.

        If the solution of every row makes the same calls, the rows differ in their sandbox or state. Its effect is then
        right for all rows, whatever its last message is.
        """
        first, second = self._two
        return second if self._effect(row) == self._effect(first) else first

    @cached_property
    def _two(self) -> tuple[Row, Row | None]:
        """The first row, and the first whose solution is another one."""
        first = self.rows[0]
        return first, next((row for row in self.rows if self._effect(row) != self._effect(first)), None)

    def _effect(self, row: Row) -> object:
        turns = gold_turns(self.spec, row)
        calls = [turn.tools for turn in turns if turn.tools]
        return calls if calls and self.reads_states else turns

    @asynccontextmanager
    async def runtime(self, key: RolloutKey) -> AsyncIterator[ToolRuntime]:
        async with super().runtime(key) as runtime:
            if self.answers is not None and list(self.answers.values())[key.index] is refused_calls:
                toolkit = runtime.toolkit
                refusing = [RefusingTool(each.name, each.description, each.parameters) for each in toolkit.tools]
                runtime.toolkit = Toolkit(refusing, toolkit.schemas)
            yield runtime

    async def grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        await super().grade(rollout, runtime)
        if self.answers is not None or KINDS[rollout.key.index] not in REPEATED:
            return
        duplicate = copy.copy(rollout)
        duplicate.others = [copy.copy(other) for other in rollout.others]
        for seat in duplicate.seats:
            seat.rewards = {}
        try:
            await super().grade(duplicate, runtime)
        except Failure as failure:
            self.regraded.setdefault("", f"the second time it failed: {failure.detail}")
            return
        for first, second in zip(rollout.seats, duplicate.seats, strict=True):
            for name, value in first.rewards.items():
                other = second.rewards[name].value
                if value.value != other:
                    self.regraded.setdefault(
                        name, f"row {rollout.key.row.key}: {_format_value(value.value)}, then {_format_value(other)}"
                    )


def _format_value(value: float | None) -> str:
    return "no value" if value is None else f"{value:g}"


async def play(
    probe: Probe, rows: Sequence[Row], split: Split, answers: Answers, seconds: float | None = BLIND_SECONDS
) -> AsyncIterator[Group]:
    """Run each row with these answers, in their order, until `seconds` have passed; yield a group for each row."""
    probe.answers, probe.keep = answers, None
    end = None if seconds is None else time.monotonic() + seconds
    run = Run(probe, rows, Plan(size=len(answers), split=split, repeat=False, require_complete=False, retries=0))
    async with aclosing(run.groups()) as groups:
        async for group in groups:
            yield group
            if end is not None and time.monotonic() > end:
                return
