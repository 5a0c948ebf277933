"""Grading rollouts and groups: order, what is offered, what is kept when something fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from hermes_rl.agent.result import AgentResult
from hermes_rl.errors import RewardFailure, UserError
from hermes_rl.scoring.grader import GradedReward, Grader
from hermes_rl.scoring.reward_function import RewardFunction
from hermes_rl.scoring.reward_value import RewardValue, Score, Weighting
from hermes_rl.spec.templates import render

ITEM = {"answer": 0.5, "word": "hi"}


class Ctx:
    """Remembers what the grader does to it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def restore(self) -> None:
        self.log.append("restore")


def machine(ctx: Ctx) -> Callable[[GradedReward], nullcontext[Ctx]]:
    return lambda reward: nullcontext(ctx)


def graded(
    function: Callable[..., Any],
    weight: float = 1.0,
    gate: bool = False,
    bounds: tuple[float, float] | None = None,
    **args: Any,
) -> GradedReward:
    name = function.__name__
    return GradedReward(RewardFunction.from_function(name, function), Weighting(name, weight, gate), args, range=bounds)


def grader(*rewards: GradedReward, clamp: tuple[float, float] | None = None, **roles: Any) -> Grader:
    return Grader(rewards, lambda args, item: render(args, item), clamp, roles)


async def grade(judge: Grader, ctx: Ctx | None = None, state: Any = None, turns: int = 2) -> dict[str, RewardValue]:
    values: dict[str, RewardValue] = {}
    await judge.grade_rollout(ITEM, AgentResult(turns_used=turns), machine(ctx or Ctx()), state, values)
    return values


async def test_gates_run_first_and_other_rewards_in_file_order() -> None:
    order: list[str] = []

    def first() -> float:
        order.append("first")
        return 0.25

    def gate() -> float:
        order.append("gate")
        return 0.5

    def last() -> float:
        order.append("last")
        return 0.75

    judge = grader(graded(first), graded(gate, gate=True), graded(last))
    values = await grade(judge)
    assert order == ["gate", "first", "last"]
    assert judge.score(values) == 0.5


async def test_a_reward_is_offered_everything_by_name() -> None:
    ctx, state, referee = Ctx(), object(), object()
    seen: dict[str, Any] = {}

    async def mine(state: Any, item: Any, judge: Any, result: Any, ctx: Any, *, target: str, n: int = 1) -> float:
        seen.update(state=state, item=item, judge=judge, turns=result.turns_used, ctx=ctx, target=target, n=n)
        return 1.0

    await grade(grader(graded(mine, target="{{ answer }}"), judge=referee), ctx, state)
    assert seen == {"state": state, "item": ITEM, "judge": referee, "turns": 2, "ctx": ctx, "target": "0.5", "n": 1}


async def test_context_is_restored_after_each_reward_that_uses_it() -> None:
    ctx = Ctx()

    def one(ctx: Ctx) -> float:
        ctx.log.append("one")
        return 1.0

    def without() -> float:
        ctx.log.append("without")
        return 1.0

    def broken(ctx: Ctx) -> float:
        ctx.log.append("broken")
        raise ValueError

    with pytest.raises(RewardFailure):
        await grade(grader(graded(one), graded(without), graded(broken)), ctx)
    assert ctx.log == ["one", "restore", "without", "broken", "restore"]


async def test_values_computed_before_a_failure_are_retained() -> None:
    def fine() -> Score:
        return Score(0.5, reason="half")

    def broken() -> str:
        return "1"

    values: dict[str, RewardValue] = {}
    with pytest.raises(RewardFailure, match="'broken' returned str"):
        await grader(graded(fine), graded(broken)).grade_rollout(ITEM, AgentResult(), machine(Ctx()), None, values)
    assert [(name, value.value, value.reason) for name, value in values.items()] == [("fine", 0.5, "half")]


async def test_a_reward_per_turn_must_match_the_turns() -> None:
    def mine() -> list[float]:
        return [0.25, 0.5]

    assert (await grade(grader(graded(mine))))["mine"].per_turn == (0.25, 0.5)
    with pytest.raises(RewardFailure, match="2 values for 5 turns"):
        await grade(grader(graded(mine)), turns=5)


async def test_none_is_accepted_from_a_metric_but_not_from_a_weighted_reward() -> None:
    def unsure() -> None:
        return None

    def sure() -> float:
        return 1.0

    metric = grader(graded(sure), graded(unsure, weight=0))
    assert metric.score(await grade(metric)) == 1.0
    with pytest.raises(RewardFailure, match="'unsure' could not tell"):
        await grade(grader(graded(sure), graded(unsure)))


async def test_the_score_is_clamped() -> None:
    def one() -> int:
        return 1

    judge = grader(graded(one, weight=5), clamp=(0.0, 1.0))
    assert judge.score(await grade(judge)) == 1.0


@pytest.mark.parametrize("needs", ["target", "judge", "group_size"])
async def test_unfilled_reward_parameter_is_a_user_error(needs: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def mine(item, {needs}): return 1.0", scope)
    with pytest.raises(UserError, match=f"'mine' needs '{needs}': give it under args"):
        await grade(grader(graded(scope["mine"])))


# ------------------------------------------------------------------ the whole group


def ranks(group: list[AgentResult]) -> list[float]:
    return [float(sorted(r.turns_used for r in group).index(one.turns_used)) for one in group]


async def grade_group(judge: Grader, turns: list[int]) -> list[dict[str, RewardValue]]:
    values: list[dict[str, RewardValue]] = [{} for _ in turns]
    await judge.grade_group(ITEM, [AgentResult(turns_used=n) for n in turns], values)
    return values


async def test_a_group_level_reward_sees_all_and_gives_each_its_own() -> None:
    judge = grader(graded(ranks, bounds=(0, 2)))
    assert judge.has_group_rewards
    assert await grade(judge) == {}
    values = await grade_group(judge, [5, 1, 3])
    assert [value["ranks"].value for value in values] == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("returned", [[1.0], 1.0, "ab", b"ab", None, {}])
async def test_a_group_level_reward_must_give_one_value_per_member(returned: object) -> None:
    def mine(group: Any) -> object:
        return returned

    with pytest.raises(RewardFailure, match="one value per rollout"):
        await grade_group(grader(graded(mine)), [1, 2])


async def test_a_group_level_reward_may_give_values_per_turn() -> None:
    def mine(group: list[AgentResult]) -> list[list[float]]:
        return [[1.0] * one.turns_used for one in group]

    values = await grade_group(grader(graded(mine, bounds=(0, 3))), [1, 3])
    assert [value["mine"].value for value in values] == [1.0, 3.0]


def test_a_reward_cannot_have_both_the_group_and_a_sandbox() -> None:
    def mine(group: Any, ctx: Any) -> list[float]:
        return []

    with pytest.raises(UserError, match="both `group` and `ctx`"):
        grader(graded(mine))


async def test_a_group_level_reward_may_take_any_argument() -> None:
    def mine(group: Any, **others: Any) -> list[float]:
        return [others["value"] for _ in group]

    values = await grade_group(grader(graded(mine, value="{{ answer }}")), [1, 1])
    assert [value["mine"].value for value in values] == [0.5, 0.5]


async def test_rendered_arguments_are_asked_for_with_the_columns_of_the_row() -> None:
    seen: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []

    def note(args: Mapping[str, Any], item: Mapping[str, Any]) -> Mapping[str, Any]:
        seen.append((args, item))
        return args

    await grade_group(Grader((graded(ranks),), note), [1])
    assert seen == [({}, ITEM)]
