"""Run the agent of a spec with agent-lightning's runner: ``agl_steps.py URL SPEC``; the last line is JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import agentlightning as agl

from hermes_rl.errors import UserError
from hermes_rl.integrations.agentlightning import AttemptWithoutScore, HermesAgent

URL, SPEC = sys.argv[1:]


async def main() -> list[dict[str, Any]]:
    agent = HermesAgent(SPEC)
    try:
        tasks = agent.tasks()
    except UserError as error:
        return [{"refused": str(error)}]
    runner, store, found = agl.LitAgentRunner(agl.OtelTracer()), agl.InMemoryLightningStore(), []
    with runner.run_context(agent=agent, store=store):
        for task in tasks:
            model = agl.LLM(endpoint=URL, model="tiny", api_key="secret", sampling_parameters={"temperature": 0.5})
            error = None
            try:
                await runner.step(task, resources={"main_llm": model})
            except AttemptWithoutScore as raised:
                error = str(raised)
            (rollout,) = (await store.query_rollouts())[-1:]
            spans = await store.query_spans(rollout.rollout_id)
            found.append(
                {"key": task["key"], "status": rollout.status, "reward": agl.find_final_reward(spans), "error": error}
            )
    return found


print("\n" + json.dumps(asyncio.run(main())))
