"""What a run says where there is no terminal: a line every few seconds, and what is wrong with a server."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.agent.result import AgentResult
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey, RolloutState
from hermes_rl.runs import progress
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress, Tracker, WandbLog
from hermes_rl.runs.setup import RunOptions
from hermes_rl.servers import pool
from hermes_rl.spec.load import load_spec
from tests.rollouts.worlds import row
from tests.waiting import until

SPEC = """
dataset: {{items: [{{n: 1}}, {{n: 2}}]}}
prompt: {{user: "{{{{ n }}}}"}}
rewards: {{right: {{fn: exact_match, args: {{target: "{{{{ n }}}}"}}}}}}
servers: {{policy: {{base_url: "{url}", model: m}}}}
process: {{group_size: 2, groups: 2, concurrency: 4}}
"""


class Model:
    """A chat server that gives one and the same answer, until it is told another."""

    def __init__(self, status: str, body: str) -> None:
        self.status, self.body = status, body

    async def __aenter__(self) -> Model:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                if length := re.search(r"content-length: (\d+)", head):
                    await reader.readexactly(int(length[1]))
                writer.write(f"HTTP/1.1 {self.status}\r\nContent-Length: {len(self.body)}\r\n\r\n{self.body}".encode())
        writer.close()


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        pytest.param("500 Oops", '{"error": "out of order"}', "out of order", marks=pytest.mark.slow),
        ("200 OK", "<html>Welcome</html>", "Welcome"),
    ],
)
async def test_broken_server_is_reported_with_its_response_and_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, body: str, cause: str
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.3)
    monkeypatch.setattr(pool, "_BROKEN", 0.5)
    said = io.StringIO()
    async with Model(status, body) as model:
        (tmp_path / "spec.yaml").write_text(SPEC.format(url=model.url))
        spec = load_spec(str(tmp_path / "spec.yaml"), environ={})
        launch = RunOptions("process", out=tmp_path / "out", progress=Progress(said), environ={})
        playing = asyncio.create_task(run_process(spec, launch))
        words = ("calls sent again: policy", "has failed for")
        await until(lambda: playing.done() or all(word in said.getvalue() for word in words))
        assert not playing.done()
        choice = {"message": {"role": "assistant", "content": "1"}, "finish_reason": "stop"}
        model.status, model.body = "200 OK", json.dumps({"model": "m", "choices": [choice], "usage": {}})
        await playing
    (notice,) = [line for line in said.getvalue().splitlines() if "has failed for" in line]
    assert cause in notice and model.url in notice
    assert "0/2 groups" in said.getvalue()
    assert re.search(rf"calls sent again: policy \d+ \(.*{cause}", said.getvalue())
    assert said.getvalue().count("is back after") == 1


def test_the_mean_score_is_that_of_graded_rollouts_of_all_starts() -> None:
    shown = Progress(io.StringIO())
    shown.start(3, 1, unit="rows", scores=[1.0, 0.0])
    assert shown.mean() == "0.500"
    lost = Rollout(RolloutKey(row(), "g", 1, 2), 0, state=RolloutState.RETRIES_EXHAUSTED)
    shown.step(2, Group("g", row(), [Rollout(RolloutKey(row(), "g", 0, 2), 0, score=1.0), lost]))
    assert shown.mean() == "0.667", "a lost member counts as the worst in its group, and has no score"


async def test_wandb_gets_no_score_of_a_member_without_retries() -> None:
    scored, lost = (Rollout(RolloutKey(row(), "g", index, 2), 0, result=AgentResult(messages=[])) for index in range(2))
    scored.scored(1.0)
    lost.state = RolloutState.RETRIES_EXHAUSTED
    logged: list[dict[str, Any]] = []

    class Kept(Tracker):
        def __init__(self) -> None: ...

        def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            logged.append(dict(metrics))

    shown = WandbLog(Kept(), per_group=-1)
    await shown.group(Group("g", row(), [scored, lost]), 1, [])
    assert logged[0]["train/mean_reward"] == 1.0
    assert [[score for _, score in texts] for texts in shown.texts] == [[1.0]]
