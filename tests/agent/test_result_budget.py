"""The bounds on what a model is told of tool results, as an environment's configuration builds them."""

from __future__ import annotations

import pytest

from hermes_rl import HermesAgentEnvConfig
from hermes_rl.agent.recorder import ResultBudget
from hermes_rl.tools.execute import ToolOutcome
from tests.env.test_handwritten import make
from tests.env.writer_model import WriterModel, writer_model

model = pytest.fixture(writer_model)


def outcomes(**sizes: int) -> list[ToolOutcome]:
    return [ToolOutcome(name, name, "{}", "x" * size, None, 0.0) for name, size in sizes.items()]


def kept(budget: ResultBudget, **sizes: int) -> dict[str, bool]:
    """Whether each result is as it was."""
    applied = budget.apply(outcomes(**sizes))
    assert [one.id for one in applied] == list(sizes)
    return {one.name: len(one.content) == sizes[one.name] for one in applied}


def test_long_tool_results_are_cut_except_deliberate_reads() -> None:
    budget = ResultBudget(100, 10_000, 20, {"patch": 500})
    assert kept(budget, terminal=101, process=100, patch=400, read_file=5000) == {
        "terminal": False, "process": True, "patch": True, "read_file": True,
    }  # fmt: skip


def test_of_a_turn_the_longest_results_are_cut_first() -> None:
    assert kept(ResultBudget(1000, 900, 20), terminal=500, process=300, read_file=600) == {
        "terminal": True, "process": True, "read_file": False,
    }  # fmt: skip


async def test_rollouts_of_an_environment_have_the_bounds_of_its_configuration(model: WriterModel) -> None:
    model.command = "head -c 5000 /dev/zero | tr '\\0' y"
    env = make(model, default_result_size_chars=1000, preview_size_chars=200)
    await env.setup()
    await env.collect_trajectories({"who": "Ann"})
    (told,) = {m["content"] for body in model.bodies for m in body["messages"] if m["role"] == "tool"}
    assert 200 < len(told) < 300 and "characters omitted" in told
    await env.shut_down()
    assert HermesAgentEnvConfig().build_budget_config().default_result_size == 100_000
