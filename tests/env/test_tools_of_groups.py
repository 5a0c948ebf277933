"""The names of the reference design around the tools of a group have an effect in rollouts, and their own state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_rl import compile_spec, load_spec
from hermes_rl.errors import UserError
from tests.env.greetings import Greetings
from tests.env.test_handwritten import make
from tests.env.tracker import logged
from tests.env.writer_model import WriterModel, writer_model

model = pytest.fixture(writer_model)


class Chooses(Greetings):
    """Each group has one tool more than the terminal, another one each time."""

    calls = 0

    def _resolve_tools_for_group(self) -> tuple[list[dict[str, Any]], set[str]]:
        schemas, names = super()._resolve_tools_for_group()
        self.calls += 1
        wanted = {"terminal", ("write_file", "read_file")[self.calls % 2]}
        return [schema for schema in schemas if schema["function"]["name"] in wanted], names & wanted


class Narrows(Chooses):
    """Has the names alone, and plays by hand."""

    def _resolve_tools_for_group(self) -> tuple[list[dict[str, Any]], set[str]]:
        schemas, names = Greetings._resolve_tools_for_group(self)
        self.calls += 1
        return schemas, names & {"terminal", ("write_file", "read_file")[self.calls % 2]}

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        assert self._current_group_tools is not None
        return await super().collect_trajectory(item)


def offered(model: WriterModel) -> list[set[str]]:
    """The tools of each conversation, as the model was told of them."""
    return [{tool["function"]["name"] for tool in body["tools"]} for body in model.bodies]


@pytest.mark.parametrize("cls", [Chooses, Narrows])
async def test_rollouts_have_the_tools_that_an_override_chose_for_their_group(
    cls: type[Chooses], model: WriterModel, tmp_path: Path
) -> None:
    path = str(tmp_path / "groups.jsonl")
    env: Any = make(model, cls, total_steps=2, max_num_workers=1, data_path_to_save_groups=path)
    await env.process_manager()
    assert env.calls == 2, "once for each group"
    assert {frozenset(names) for names in offered(model)} == {
        frozenset({"terminal", "write_file"}), frozenset({"terminal", "read_file"})
    }  # fmt: skip


@pytest.mark.parametrize(
    ("distribution", "said"),
    [
        ({"terminal": 1.0, "memory": 0.001}, "toolset memory cannot be used in a rollout"),
        ({"terminal": 1.0, "terminl": 0.001}, "no toolset is named 'terminl'"),
        ("tereminal_only", "no distribution is named 'tereminal_only'"),
    ],
)
@pytest.mark.parametrize("mode", ["process_manager", "env_manager", "_run_evaluate"])
async def test_all_toolsets_of_a_distribution_are_checked_before_any_rollout(
    distribution: Any, said: str, mode: str, model: WriterModel, tmp_path: Path
) -> None:
    class Loads(Greetings):
        loaded = False

        async def setup(self) -> None:
            self.loaded = True
            await super().setup()

    path = str(tmp_path / "groups.jsonl")
    env: Any = make(model, Loads, distribution=distribution, total_steps=1, data_path_to_save_groups=path)
    with pytest.raises(UserError, match=said):
        await getattr(env, mode)()
    assert not env.loaded
    assert model.bodies == []


async def test_a_toolset_that_no_group_can_draw_may_be_missing(model: WriterModel, tmp_path: Path) -> None:
    path = str(tmp_path / "groups.jsonl")
    chances = {"terminal": 1.0, "memory": 0.0, "clarify": 0.5}
    env: Any = make(
        model, distribution=chances, disabled_toolsets=["clarify"], total_steps=1, data_path_to_save_groups=path
    )
    await env.process_manager()
    assert {"terminal"} <= set.union(*offered(model))


async def test_collect_trajectories_of_ones_own_may_set_the_tools_of_its_group(model: WriterModel) -> None:
    class Sets(Greetings):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            schemas, _ = self._resolve_tools_for_group()
            self._current_group_tools = schemas, {"terminal"}
            scored, more = await self.collect_trajectory(item)
            return {name: [value] for name, value in (scored or {}).items() if value is not None}, more

    env = make(model, Sets)
    await env.setup()
    assert env._current_group_tools is None
    await env.collect_trajectories({"who": "Ann"})
    assert offered(model) == [{"terminal"}] * 2
    await env.shut_down()


async def test_tool_errors_wait_for_wandb_log_under_their_name(model: WriterModel) -> None:
    env = make(model, max_agent_turns=2)
    model.command = ""
    await env.setup()
    assert env._tool_error_buffer == []
    env._tool_error_buffer.append({"turn": 1, "tool": "mine", "args": "{}", "error": "broken"})
    metrics = await logged(env)
    assert metrics["train/tool_errors_count"] == 1
    assert metrics["train/tool_error_details"] == "[turn 1] mine({}): broken"
    env._tool_error_buffer = [{"turn": 2, "tool": "t", "args": "", "error": "e"}]
    env._tool_error_buffer = []
    assert (await logged(env))["train/tool_errors_count"] == 0
    await env.shut_down()


async def test_rollouts_are_shown_as_an_override_formats_them(model: WriterModel) -> None:
    class Short(Greetings):
        @staticmethod
        def _format_trajectory_for_display(messages: list[dict[str, Any]]) -> str:
            return f"{len(messages)} messages"

    said = [{"role": "user", "content": "hi"}]
    for cls, shown in ((Short, "1 messages"), (Greetings, "[USER]")):
        env = make(model, cls)
        await env.add_rollouts_for_wandb({"scores": [1.0], "messages": [said]})
        ((text, score),) = env.rollouts_for_wandb[0]
        assert shown in text and score == 1.0
        assert env._format_trajectory_for_display(said) == text
        await env.shut_down()


def test_a_spec_answers_for_its_tools() -> None:
    parent: Any = compile_spec(load_spec("terminal-files"))
    mine = type("Mine", (parent,), {"_resolve_tools_for_group": lambda self: ([], set())})
    with pytest.raises(UserError, match=r"Mine\._resolve_tools_for_group is never called: the spec's `toolsets`"):
        mine(*mine.config_init())
