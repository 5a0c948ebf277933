"""NeMo Gym's own collector, in a separate environment, collects rollouts from `hermes-rl serve-http` over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.api.summing import TEXT
from tests.ports import free_port
from tests.real.environments import HERE, nemo_gym_python
from tests.service.playing import named, policy
from tests.service.served import Served, spec_in
from tests.service.test_batches import BROKEN

COMPONENT = "NeMo Gym's collector"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]

PAGE = (HERE.parents[1] / "docs" / "service.md").read_text("utf-8")


def collected(folder: Path, service: Served, keys: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the collector's output and the rows that it counts, with the documented configuration."""
    (shown,) = [one for one in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "responses_api_agents" in one]
    config = yaml.safe_load(shown)
    config["head_server"]["port"] = free_port()
    config["hermes_rl"]["responses_api_agents"]["hermes_rl"]["port"] = service.port
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": "see the spec"}]},
            "verifier_metadata": {"row_key": key},
            "agent_ref": {"type": "responses_api_agents", "name": "hermes_rl"},
        }
        for key in keys
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(nemo_gym_python()), str(HERE / "nemo_collect.py"), "config.yaml", "rows.jsonl", "out.jsonl"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    counted = [json.loads(line) for line in (folder / "out.jsonl").read_text("utf-8").splitlines()]
    return json.loads(done.stdout.splitlines()[-1]), counted


async def test_the_collector_gets_every_sampled_token_and_no_failure_as_a_reward(tmp_path: Path) -> None:
    model = policy(wrong=0.4)
    async with model.running() as url:
        servers = "servers: {policy: {" + ", ".join(f"{k}: '{v}'" for k, v in named(url).items()) + "}}\n"
        text = TEXT.replace("rewards: {", 'rewards: {steady: {fn: "grading.py:steady", weight: 0}, ')
        (tmp_path / "grading.py").write_text(BROKEN)
        with await asyncio.to_thread(Served, spec_in(tmp_path, text + servers)) as service:
            keys = await asyncio.to_thread(service.keys)
            found, counted = await asyncio.to_thread(collected, tmp_path, service, keys)
            assert (found["rollouts"], found["contiguous"], set(found["turns"])) == (16, True, {2})
            assert found["trained"] == sum(len(one.ids) for one in model.log)
            assert len(counted) == 16
            assert {row["reward"] for row in counted} == {0.0, 1.0}
            summed = json.loads((tmp_path / "out_aggregate_metrics.json").read_text("utf-8"))
            mean = sum(row["reward"] for row in counted) / 16
            assert summed[0]["agent_metrics"]["mean/reward"] == pytest.approx(mean)

            (tmp_path / "broken").touch()
            other = tmp_path / "other"
            other.mkdir()
            found, counted = await asyncio.to_thread(collected, other, service, keys[:1])
            assert (found["rollouts"], found["trained"], counted) == (4, 0, []), (
                "no failed row is among those that count"
            )
            failures = (other / "out_failures.jsonl").read_text("utf-8").splitlines()
            assert {json.loads(line)["_ng_failure_class"] for line in failures} == {"reward_failure"}
