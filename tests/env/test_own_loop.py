"""Code of a hand-written environment stays on one loop, holds up nobody without being named, and ends."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl import HermesAgentEnvConfig
from hermes_rl.env import loop_watchdog
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.scoring import reward_function
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.env.greetings import Greetings
from tests.env.tracker import dropped
from tests.env.writer_model import WriterModel, writer_model

Reward = Callable[[Any, Any, Any, Any], Any]
NOTED: ContextVar[list[str] | None] = ContextVar("noted", default=None)


model = pytest.fixture(writer_model)


def make(model: WriterModel, cls: type[Greetings], size: int = 2, **fields: Any) -> Greetings:
    config = HermesAgentEnvConfig(group_size=size, tokenizer_name=str(small_tokenizer_path()), **fields)
    return cls(config, [APIServerConfig(base_url=model.url, model_name="writer", api_key="key-1")])


class Shared(Greetings):
    """What `setup` makes belongs to the loop that it runs on."""

    async def setup(self) -> None:
        await super().setup()
        self.loop = asyncio.get_running_loop()
        self.places = asyncio.Semaphore(1)
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self.open = 0

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        assert asyncio.get_running_loop() is self.loop
        noted = NOTED.get()
        if noted is None:
            NOTED.set(noted := [])
        async with asyncio.timeout(20), self.places:
            self.open += 1
            assert self.open == 1
            said = ctx.terminal("sleep 0.1; cat ~/greeting.txt")["output"]  # without await, in the middle of it
            await asyncio.sleep(0.01)
            self.loop.call_later(0.01, self.answers.put_nowait, said)
            said = await self.answers.get()
            self.open -= 1
        noted.append(said)
        assert NOTED.get() is noted, "what a step sets is there in the next"
        also = await asyncio.gather(asyncio.to_thread(ctx.read_file, "greeting.txt"), asyncio.sleep(0))
        return float(said.strip() == also[0]["content"].strip() == f"hello {item['who']}")


async def group_of(env: Greetings) -> Any:
    await env.setup()
    try:
        group, _ = await env.collect_trajectories({"who": "Ann"})
    finally:
        await env.shut_down()
    return group


async def test_a_reward_uses_what_setup_made_on_its_loop(model: WriterModel) -> None:
    group = await group_of(make(model, Shared, 4))
    assert group["scores"] == [1.0] * 4


async def test_blocking_calls_of_rewards_run_concurrently(model: WriterModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(Greetings):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(ctx.terminal("echo done")["output"] == "done\n")

    run, together = HelperSandbox.run, asyncio.Barrier(6)

    async def run_together(self: HelperSandbox, command: Any, **how: Any) -> Any:
        """Answer on the loop that the calls without await leave free, once all six wait for their answers."""
        if command == "echo done":
            async with asyncio.timeout(30):
                await together.wait()
        return await run(self, command, **how)

    monkeypatch.setattr(HelperSandbox, "run", run_together)
    group = await group_of(make(model, Asks, 6))
    assert group["scores"] == [1.0] * 6
    assert not together.broken


async def test_sync_reward_may_return_an_awaitable(model: WriterModel) -> None:
    class Wrapped(Shared):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            return super().compute_reward(item, result, ctx)

    assert (await group_of(make(model, Wrapped)))["scores"] == [1.0, 1.0]


async def test_what_a_call_without_await_raises_is_raised_where_it_stands(model: WriterModel) -> None:
    class Looks(Greetings):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            try:
                ctx.read_bytes("missing")
            except FileNotFoundError:
                return 0.5
            return 0.0

    assert (await group_of(make(model, Looks)))["scores"] == [0.5, 0.5]


async def ends(model: WriterModel, reward: Reward, caplog: pytest.LogCaptureFixture) -> str:
    """Play a group with a reward that never returns; what is said of it."""

    env = make(model, type("Endless", (Greetings,), {"compute_reward": reward}), 1)
    async with asyncio.timeout(30):
        assert await group_of(env) is None
    assert await dropped(env) == {"reward_failure": 1}
    return caplog.text


async def test_a_reward_that_awaits_for_ever_ends(
    model: WriterModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def waits(self: Any, item: Any, result: Any, ctx: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(reward_function, "CEILING", 0.3)
    assert "did not return within 0.3 s" in await ends(model, waits, caplog)


async def test_a_reward_that_does_not_let_itself_be_cancelled_ends(
    model: WriterModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def clings(self: Any, item: Any, result: Any, ctx: Any) -> None:
        while True:
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                continue

    monkeypatch.setattr(reward_function, "CEILING", 0.3)
    assert "nor when it was cancelled" in await ends(model, clings, caplog)


async def test_reward_that_blocks_the_event_loop_is_abandoned(
    model: WriterModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def holds(self: Any, item: Any, result: Any, ctx: Any) -> None:
        time.sleep(3)  # noqa: ASYNC251 - what it must not do

    monkeypatch.setattr(reward_function, "HELD_AT_MOST", 0.2)
    assert "has held the event loop for 0.2 s" in await ends(model, holds, caplog)


async def test_a_reward_that_exits_costs_its_group_alone(model: WriterModel, caplog: pytest.LogCaptureFixture) -> None:
    async def exits(self: Any, item: Any, result: Any, ctx: Any) -> None:
        await asyncio.sleep(0)
        raise SystemExit(3)

    assert "SystemExit" in await ends(model, exits, caplog)


class Holds(Greetings):
    """Each of its methods may hold the loop."""

    holding = ""

    def _hold(self, hook: str) -> None:
        if hook == self.holding:
            time.sleep(0.15)

    async def get_next_item(self) -> dict[str, str]:
        self._hold("get_next_item")
        return await super().get_next_item()

    def format_prompt(self, item: dict[str, str]) -> str:
        self._hold("format_prompt")
        return super().format_prompt(item)

    async def compute_reward(self, item: dict[str, str], result: Any, ctx: Any) -> float:
        self._hold("compute_reward")
        return await super().compute_reward(item, result, ctx)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        self._hold("wandb_log")
        await super().wandb_log(wandb_metrics)

    async def cleanup(self) -> None:
        self._hold("cleanup")


@pytest.mark.parametrize("hook", ["get_next_item", "format_prompt", "compute_reward", "wandb_log", "cleanup"])
async def test_who_holds_the_loop_is_named_with_its_place(
    hook: str, model: WriterModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_watchdog, "HELD", 0.05)
    monkeypatch.setattr(loop_watchdog, "LOOKS", 0.01)
    monkeypatch.setattr(Holds, "holding", hook)
    caplog.set_level(logging.WARNING, loop_watchdog.__name__)
    path = str(tmp_path / "groups.jsonl")
    await make(model, Holds, 1, total_steps=3, max_num_workers=1, data_path_to_save_groups=path).process_manager()
    lines = [record.getMessage() for record in caplog.records if record.name == loop_watchdog.__name__]
    named = [line for line in lines if line.startswith(f"Holds.{hook} blocks the event loop")]
    assert len(named) == 1, lines
    held = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "time.sleep(0.15)" in line)
    assert re.search(rf"at test_own_loop\.py:{held}\b", named[0])
