"""Comparing expressions, and surviving those that never end."""

from __future__ import annotations

import pytest

from hermes_rl.agent.result import AgentResult
from hermes_rl.errors import RewardFailure
from hermes_rl.scoring.grader import GradedReward, Grader
from hermes_rl.scoring.mathematics import equal
from hermes_rl.scoring.reward_function import find_reward
from hermes_rl.scoring.reward_value import RewardValue, Weighting


def same(answer: str, target: str) -> bool:
    return equal(answer, target)[0]


HEDGED = ("31 or 32", "31, or maybe 32", "$31$ or $32$", "31 and 32", "31, 32")


@pytest.mark.parametrize("target", ["0.5", "1/2", r"\frac12", r"\frac{1}{2}"])
@pytest.mark.parametrize("answer", [r"\boxed{0.5}", r"\boxed{1/2}", r"\boxed{\frac12}", r"so it is $\frac{1}{2}$."])
def test_a_half_is_a_half(answer: str, target: str) -> None:
    assert same(answer, target)


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        (r"\boxed{12\text{ cm}}", "12"),
        (r"\boxed{12}", r"12 \text{ cm}"),
        (r"\boxed{\$1,000}", "1000"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{50\%}", r"50\%"),
        ("The answer is 50%.", "50"),
        ("The answer is 50 apples for 4 people.", "50"),
        ("The answer is $(1,2)$.", "(1,2)"),
        ("The final answer is 31. I hope it is correct. The answer is 32.", "32"),
        (r"\boxed{14^\circ}", "14"),
        (r"\boxed{x=3}", "3"),
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{ 007.50 }", "7.5"),
        ("She earns $18 every day.", "18"),
    ],
)
def test_the_same_written_otherwise_is_equal(answer: str, target: str) -> None:
    assert same(answer, target)


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        ("####72", "72"),
        ("24 + 48 = 72\n#### 72 clips\nI have checked it in 2 ways.", "72"),
        ("#### 5 dollars and 50 cents", "5"),
        ("#### 72 (in 2 trips)", "72"),
        ("####-5.", "-5"),
        (r"#### \$10", "10"),
        ("####$1,200.50 at 3 shops", "1200.5"),
        (r"#### 10\% of 70", "10"),
        ("#### 70{,}000", "70000"),
        ("#### **72**", "72"),
        ("#### 1/2", "0.5"),
        (r"#### 2\sqrt{2}", r"\sqrt{8}"),
        ("#### 72 = 8*9", "72"),
        ("#### 3\nno:\n#### 72", "72"),
        ("#### Step 2\n5 + 5\n#### Answer: 10", "10"),
        ("#### 1. Conclusion\nso the result is 42", "42"),
        ("#### 2) Check\nso the result is 42", "42"),
        ("#### Answer\n72", "72"),
        (r"#### 5 and \boxed{72}", "72"),
        (r"It costs \$10.", "10"),
        ("It costs 70{,}000.", "70000"),
        ("#### 72", "####72"),
        ("#### 72", "8 * 9 = 72\n#### 72"),
        ("70000", "70,000"),
    ],
)
def test_an_answer_in_the_form_of_gsm8k_is_read(answer: str, target: str) -> None:
    """Fault 30."""
    assert same(answer, target)


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        (r"\boxed{0.33}", "1/3"),
        (r"\boxed{31\%}", "0.31"),
        (r"\boxed{3100\%}", "31"),
        ("The answer is 31%.", "0.31"),
        *[(f"The answer is {said}.", "31") for said in HEDGED],
        *[(f"The answer is {said}.", "32") for said in HEDGED],
        ("The final answer is 31. I hope it is correct. The answer is 32.", "31"),
        ("#### 72 and not 73", "73"),
        ("72\n#### 73", "72"),
        ("#### 7", "72"),
        (r"\boxed{1.4142}", r"\sqrt{2}"),
        (r"\boxed{3}", "-3"),
        (r"\boxed{1,2,3}", "3"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{2}, no: \boxed{1}", "2"),
        (r"\boxed{x^2+1}", "x^2+2x+1"),
        (r"\boxed{}", "5"),
        ("", "5"),
        ("It is 19.", "18"),
        (r"\boxed{12345678901234567891}", "12345678901234567890"),
        (r"\boxed{0.1000000000000000001}", "0.1"),
    ],
)
def test_near_misses_are_not_equal(answer: str, target: str) -> None:
    verdict, reason = equal(answer, target)
    assert not verdict
    assert reason is not None


@pytest.mark.parametrize("target", ["", " ", "$"])
def test_target_that_is_not_an_expression_is_a_reward_failure(target: str) -> None:
    with pytest.raises(RewardFailure, match="target"):
        equal(r"\boxed{5}", target)


def test_a_long_answer_with_any_character_in_it_is_read() -> None:
    assert same("word \N{SNOWMAN} \ud800 \n" * 20_000 + r"\boxed{1/2}", "0.5")


async def test_an_answer_that_never_ends_scores_0_and_the_next_one_is_compared() -> None:
    async def graded(answer: str, timeout: float) -> RewardValue:
        args = {"target": "5", "timeout": timeout}
        reward = GradedReward(find_reward("math_equal", None), Weighting("math_equal"), args)
        grader = Grader((reward,), lambda args, item: args)
        values: dict[str, RewardValue] = {}
        result = AgentResult(messages=[{"role": "assistant", "content": answer}], turns_used=1)
        await grader.grade_rollout({}, result, None, None, values)
        return values["math_equal"]

    endless = await graded(r"\boxed{9^{9^{9^9}}}", 0.5)
    assert endless.value == 0
    assert endless.reason is not None
    assert (await graded(r"\boxed{10/2}", 60)).value == 1


def test_nothing_is_said_of_timeouts_that_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    assert equal(r"\boxed{x + 1}", "1 + x") == (True, None)
    assert not caplog.records
