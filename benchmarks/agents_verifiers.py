"""verifiers' interception server as a contender of `agents.py`, run by an interpreter that has verifiers 0.4.

It prints a port and a key for each rollout, then its processor time at each line that is read. Its client for
evaluation forwards requests to a server that speaks the program's dialect; there is no token-level one without vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack

from pydantic import BaseModel
from verifiers.v1.clients import ModelContext  # type: ignore[import-not-found]
from verifiers.v1.configs.client import EvalClientConfig  # type: ignore[import-not-found]
from verifiers.v1.interception.server import InterceptionServer  # type: ignore[import-not-found]
from verifiers.v1.session import RolloutSession  # type: ignore[import-not-found]
from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # type: ignore[import-not-found]


class Nothing(BaseModel):
    """The row, and the agent's configuration."""


async def main(model: str, ports: int) -> None:
    os.environ["BENCH_KEY"] = "local"
    context = ModelContext(model="m", client=EvalClientConfig(base_url=f"{model}/v1", api_key_var="BENCH_KEY"))
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(InterceptionServer())
        endpoints = []
        for _ in range(ports):
            task = TraceTask.model_construct(type="Task", data=Nothing())
            trace = Trace.model_construct(task=task, agent=AgentInfo.model_construct(config=Nothing()))
            _, key, _ = await stack.enter_async_context(server.acquire(RolloutSession(ctx=context, trace=trace)))
            endpoints.append([server.port, key])
        sys.stdout.write(json.dumps(endpoints) + "\n")
        sys.stdout.flush()
        while await asyncio.to_thread(sys.stdin.readline):
            sys.stdout.write(f"{time.process_time()}\n")
            sys.stdout.flush()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
