"""Each call to a model is in run.json, whatever made it and whatever ended what made it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.spec.load import load_spec
from tests.runs.counting_server import counting_server
from tests.runs.test_budgets import write_spec
from tests.waiting import until

QUESTION = [{"role": "user", "content": "Is it good?"}]


async def test_call_of_a_thread_does_not_end_with_another_thread(tmp_path: Path) -> None:
    """As a regrade makes them: no rollout has told the models on which event loop they live."""
    async with counting_server() as server:
        server.held = asyncio.Event()
        spec = load_spec(write_spec(tmp_path, server), environ={})
        async with CompiledSpec(spec, {}) as compiled:
            judge: Any = compiled.grader.roles["judge"]

            async def leave_after_another_has_asked() -> None:
                asking = asyncio.ensure_future(judge.chat(QUESTION))
                await until(lambda: server.in_flight == 2)
                asking.cancel()

            first = asyncio.create_task(asyncio.to_thread(asyncio.run, leave_after_another_has_asked()))
            await until(lambda: server.in_flight == 1)
            second = asyncio.create_task(asyncio.to_thread(asyncio.run, judge.chat(QUESTION)))
            await first
            server.held.set()
            assert "score" in await second
