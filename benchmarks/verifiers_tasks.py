"""The conversations of `runs.py` as a taskset and a harness of verifiers 0.4, which finds them by this module's name.

The harness is the loop of a tutorial in verifiers' own process. The chat program that verifiers ships would be started
by `uv` for each rollout, which costs more than all that is compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from loop_contenders import PROMPT, openai_client
from runs_contenders import FLIPS

DRAWN = random.Random(0)


class Row(vf.TaskData):
    """Data of a row."""


class Task(vf.Task[Row]):
    """Row whose score is drawn, as for the other contenders."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def done(self) -> float:
        """Return the drawn score."""
        return float(DRAWN.random() < FLIPS)


class TasksetConfig(vf.TasksetConfig):
    """Options of the taskset."""

    rows: int


class Taskset(vf.Taskset[Task, TasksetConfig]):
    """Rows that all have the same prompt."""

    def load(self) -> Iterator[Task]:
        """Yield as many rows as the options ask for."""
        prompt = [vf.SystemMessage(content=PROMPT[0]["content"]), vf.UserMessage(content=PROMPT[1]["content"])]
        for index in range(self.config.rows):
            yield Task(Row(id=str(index), prompt=prompt), self.config.task)


class Harness(vf.Harness[vf.HarnessConfig]):
    """Loop over the openai client at the endpoint that verifiers opens for a rollout."""

    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Row
    ) -> vf.ProgramResult:
        """Run the conversation."""
        async with openai_client(endpoint, secret) as play:
            await play()
        return vf.ProgramResult(0, "", "")


__all__ = ["Harness", "Taskset"]
