"""How many rollouts serve plays at a time: as many as are carried where the spec does not say, else what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.env.test_serve import serve
from tests.env.trainer import train, trajectory_api
from tests.http_servers import listening

SPEC = """
version: 1
dataset: {{items: [{{q: one}}, {{q: two}}]}}
prompt: {{user: "{{{{ q }}}}"}}
rewards: {{right: {{fn: exact_match, args: {{target: done}}}}}}
servers: {{policy: {{type: openai, base_url: "{model}", model: m, tokenizer: {tokenizer}}}}}
serve: {{group_size: 4, total_steps: 2, api_url: "{api}", allow_inexact: true, drop_uniform: false{more}}}
"""
ALONE = """
from hermes_rl.cli.main import main
from hermes_rl.rollouts import admission
admission.whole_machine = list
main()
"""
"""The program on a machine where nobody else uses the cores: beside others it would start fewer rollouts."""
USUAL = 64
"""What is in flight at a time where nothing is measured."""


class Slow:
    """A model that takes its time; `most` calls were in flight at a time."""

    def __init__(self) -> None:
        self.open = self.most = 0
        self.reached = asyncio.Event()

    async def answer(self, _: web.Request) -> web.Response:
        self.open += 1
        self.most = max(self.most, self.open)
        if self.most > USUAL:
            self.reached.set()
        await asyncio.sleep(1)
        self.open -= 1
        choice = {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
        return web.json_response({"model": "m", "choices": [choice], "usage": {}})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        async with listening(app) as address:
            yield f"{address}/v1"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("more", "most"), [("", None), (", concurrency: 12", 12)])
async def test_as_many_as_are_carried_or_as_the_spec_says(tmp_path: Path, more: str, most: int | None) -> None:
    from hermes_rl.tokens.tokenizer import small_tokenizer_path

    slow, out = Slow(), tmp_path / "run"
    async with slow.running() as model, trajectory_api() as api:
        spec = SPEC.format(model=model, api=api, tokenizer=small_tokenizer_path(), more=more)
        (tmp_path / "slow.yaml").write_text(spec)
        async with serve(tmp_path / "slow.yaml", out, program=("-c", ALONE)):
            training = asyncio.create_task(train(api, steps=1, batch_size=48 if most else 256))
            if most is None:
                await asyncio.wait_for(slow.reached.wait(), 200)  # it begins with few, and looks for more
            else:
                await asyncio.wait_for(training, 90)
                assert slow.most == most
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
    ended = [json.loads(line)["stop_reason"] for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert set(ended) <= {"finished"}
