"""Request rollouts as prime-rl does: verifiers' environment server, its client, and the client that trains.

``verifiers_train.py URL SPEC TOKENIZER``, in the environment with verifiers. Prints every trace as JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.serve import EnvClient, EnvServer
from verifiers.v1.utils.loaders import resolve_env_config

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "verifiers.md"
URL, SPEC, TOKENIZER = sys.argv[1:]


def seen(trace: Any) -> dict[str, Any]:
    branches = [{"ids": one.token_ids, "mask": one.sampled_mask, "logprobs": one.logprobs} for one in trace.branches]
    return {
        "key": trace.task.data.id,
        "rewards": {name: reward.score for name, reward in trace.rewards.items()},
        "errors": [error.type for error in trace.errors],
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "branches": branches if trace.ok else [],
    }


async def main() -> None:
    shown = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)[0]
    (source,) = tomllib.loads(shown)["orchestrator"]["train"]["source"]
    source["env"]["taskset"] |= {"spec": SPEC, "rows": 3}
    config = resolve_env_config(source["env"])
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    await client.wait_for_server_startup()
    trained = vf.TrainClientConfig(
        base_url=URL, api_key_var="KEY", renderer={"name": "qwen3"}, renderer_model_name=TOKENIZER
    )
    tasks = [task.data.model_dump(mode="json") for task in server.env.taskset for _ in range(4)]
    episodes = await asyncio.gather(
        *(client.run(trained, "tiny", vf.SamplingConfig(max_tokens=128), task) for task in tasks)
    )
    await client.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    print("\n" + json.dumps([seen(trace) for episode in episodes for trace in episode.traces]))


asyncio.run(main())
