"""Run NeMo Gym's own collector against a running agent server, in NeMo Gym's environment.

``nemo_collect.py CONFIG.yaml ROWS.jsonl OUT.jsonl``: the head server is NeMo Gym's own, and tells the collector
where the agents of the configuration are. Prints what NeMo RL asserts of the rows that came back, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

CONFIG, ROWS, OUT = sys.argv[1:]
os.environ["NEMO_GYM_CONFIG_DICT"] = Path(CONFIG).read_text("utf-8")

import requests  # noqa: E402
from nemo_gym.base_resources_server import BaseVerifyResponse  # noqa: E402
from nemo_gym.global_config import get_global_config_dict  # noqa: E402
from nemo_gym.openai_utils import RESPONSES_TO_TRAIN  # noqa: E402
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper  # noqa: E402
from nemo_gym.server_utils import HeadServer  # noqa: E402


def start_head_server() -> None:
    """Start NeMo Gym's head server, and wait until it responds."""
    HeadServer.run_webserver()
    head = get_global_config_dict()["head_server"]
    for _ in range(200):
        try:
            requests.get(f"http://{head['host']}:{head['port']}/", timeout=5)
            return
        except requests.exceptions.ConnectionError:
            time.sleep(0.1)


async def main() -> None:
    config = RolloutCollectionConfig(
        input_jsonl_fpath=ROWS,
        output_jsonl_fpath=OUT,
        num_repeats=4,
        num_samples_in_parallel=8,
        upload_rollouts_to_wandb=False,
    )
    answers = await RolloutCollectionHelper().run_from_config(config)
    found: dict[str, object] = {"rollouts": len(answers), "contiguous": True, "trained": 0, "turns": []}
    for answer in answers:
        items = BaseVerifyResponse.model_validate(answer).response.output
        turns = [item for item in items if isinstance(item, tuple(RESPONSES_TO_TRAIN.values()))]
        seen: list[int] = []
        for turn in turns:
            if turn.prompt_token_ids[: len(seen)] != seen:
                found["contiguous"] = False
            if len(turn.generation_token_ids) != len(turn.generation_log_probs):
                found["contiguous"] = False
            seen = turn.prompt_token_ids + turn.generation_token_ids
            found["trained"] += len(turn.generation_token_ids)  # type: ignore[operator]
        found["turns"].append(len(turns))  # type: ignore[attr-defined]
    print("\n" + json.dumps(found))  # noqa: T201


start_head_server()
asyncio.run(main())
