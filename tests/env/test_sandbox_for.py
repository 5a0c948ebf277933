"""Each item of a hand-written environment may have a sandbox of its own; so may each task of a loop written by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from hermes_rl import (
    ToolContext,
    cleanup_all_environments,
    cleanup_vm,
    clear_task_env_overrides,
    register_task_env_overrides,
)
from hermes_rl.errors import UserError
from hermes_rl.sandbox.base import SandboxConfig, SandboxFile
from hermes_rl.tools.base import find_runtime, runtime_for
from tests.env.greetings import Greetings
from tests.env.test_handwritten import make
from tests.env.writer_model import WriterModel, writer_model

model = pytest.fixture(writer_model)


class Placed(Greetings):
    """Each item has a file and a variable of its own in its sandbox."""

    def sandbox_for(self, item: Any) -> SandboxConfig:
        files = (SandboxFile("who.txt", item["who"].encode()),)
        return replace(super().sandbox_for(item), files=files, env={"WHO": item["who"]})

    async def compute_reward(self, item: Any, result: Any, ctx: ToolContext) -> float:
        found = ctx.terminal('printf "%s %s %s" "$WHO" "$(cat who.txt)" "$PWD"')["output"]
        return float(found == f"{item['who']} {item['who']} /tmp/place")


async def test_sandbox_combines_item_and_configuration_settings(model: WriterModel) -> None:
    env = make(model, Placed, terminal_workdir="/tmp/place")
    await env.setup()
    found = [group async for group in env.groups([{"who": "Ann"}, {"who": "Bo"}])]
    assert sorted(group.scores for group in found) == [[1.0, 1.0], [1.0, 1.0]]
    await env.shut_down()


async def test_the_fields_of_the_configuration_describe_any_backend(model: WriterModel) -> None:
    env = make(
        model, terminal_backend="modal", terminal_image="python:3.12", terminal_network=True, terminal_env={"A": "b"}
    )
    config = env.sandbox_for({"who": "Ann"})
    assert (config.backend, config.image, config.network, config.env) == ("modal", "python:3.12", True, {"A": "b"})
    listed = make(model, terminal_backend="docker", terminal_image="i", terminal_network=["pypi.org"])
    assert listed.sandbox_for(None).network == ("pypi.org",)
    await asyncio.gather(env.shut_down(), listed.shut_down())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"modal_image": "a:1", "cwd": "/app"}, ("modal", "a:1", "/app", True)),
        ({"docker_image": "b", "env_type": "docker"}, ("docker", "b", None, False)),
        ({"env_type": "local", "cwd": "/work"}, ("bubblewrap", None, "/work", False)),
    ],
)
async def test_task_overrides_set_the_sandbox_before_its_first_call(
    overrides: dict[str, str], expected: tuple[Any, ...]
) -> None:
    register_task_env_overrides("task-7", overrides)
    try:
        runtime = runtime_for("task-7")
        config = runtime.config
        await runtime.close()
    finally:
        clear_task_env_overrides("task-7")
    assert (config.backend, config.image, config.workdir, config.network) == expected
    after = runtime_for("task-7")
    assert after.config == SandboxConfig()
    await after.close()


@pytest.mark.parametrize(
    ("own", "overrides", "expected"),
    [
        (SandboxConfig(backend="docker", env={"A": "1"}), {"modal_image": "a:1"}, ("docker", "a:1", False, {"A": "1"})),
        (SandboxConfig(backend="docker"), {"modal_image": "a", "docker_image": "b"}, ("docker", "b", False, {})),
        (SandboxConfig(backend="modal"), {"modal_image": "a:1"}, ("modal", "a:1", False, {})),
        (SandboxConfig(env={"A": "1"}), {"env": {"B": "2"}}, ("bubblewrap", None, False, {"A": "1", "B": "2"})),
        (SandboxConfig(), {"env_type": "modal", "modal_image": "a"}, ("modal", "a", True, {})),
    ],
)
async def test_the_image_of_a_task_is_for_the_backend_of_its_environment(
    own: SandboxConfig, overrides: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    register_task_env_overrides("task-8", overrides)
    try:
        runtime = runtime_for("task-8", sandbox=own)
        config = runtime.config
        await runtime.close()
    finally:
        clear_task_env_overrides("task-8")
    assert (config.backend, config.image, config.network, dict(config.env)) == expected


@pytest.mark.parametrize("backend", ["bubblewrap", "none"])
def test_an_image_that_the_backend_cannot_have_is_refused(backend: str) -> None:
    register_task_env_overrides("task-9", {"docker_image": "name/of:it"})
    try:
        with pytest.raises(UserError, match=f"which the backend {backend} cannot have: set terminal_backend to docker"):
            runtime_for("task-9", sandbox=SandboxConfig(backend=backend))
    finally:
        clear_task_env_overrides("task-9")


async def test_all_sandboxes_of_tasks_are_released_at_once() -> None:
    for name in ("task-a", "task-b"):
        runtime_for(name)
    await asyncio.to_thread(cleanup_vm, "task-a")
    assert find_runtime("task-a") is None and find_runtime("task-b") is not None
    await asyncio.to_thread(cleanup_all_environments)
    assert find_runtime("task-b") is None


def test_an_override_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="unknown override 'image'; known are env_type, cwd, env, docker_image"):
        register_task_env_overrides("task", {"image": "x"})


async def test_a_tool_that_a_reward_lacks_is_named_and_no_answer(model: WriterModel) -> None:
    class Searches(Greetings):
        async def compute_reward(self, item: Any, result: Any, ctx: ToolContext) -> float:
            return float(bool(ctx.web_search("who")))

    env = make(model, Searches)
    await env.setup()
    with pytest.raises(UserError, match=r"the rollout has no tool 'web_search'.*add its toolset"):
        await env.collect_trajectories({"who": "Ann"})
    await env.shut_down()
