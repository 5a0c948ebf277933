"""The game of `yc_bench`, with the variable given to the task, as the message at its start says."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

from atroposlib.envs.server_handling.server_manager import APIServerConfig

from hermes_rl import HermesAgentBaseEnv, HermesAgentLoop, register_task_env_overrides
from tests.env.upstream.yc_bench import YCBenchEvalConfig


class GivenEnv(HermesAgentBaseEnv):
    name = "yc-bench"
    env_config_cls = YCBenchEvalConfig

    @classmethod
    def config_init(cls) -> tuple[YCBenchEvalConfig, list[APIServerConfig]]:
        config = YCBenchEvalConfig(enabled_toolsets=["terminal"], seeds=[1, 2], presets=["hard"])
        return config, [APIServerConfig(model_name="m", server_type="openai")]

    async def setup(self) -> None:
        Path(self.config.db_dir).mkdir(parents=True, exist_ok=True)

    async def get_next_item(self) -> Any:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        began, scores = time.time(), []
        for seed in self.config.seeds:
            run_id = str(uuid.uuid4())[:8]
            database = Path(self.config.db_dir) / f"{run_id}.db"
            url = f"sqlite:///{database}"
            register_task_env_overrides(run_id, {"env": {"DATABASE_URL": url}})
            subprocess.run(
                ["yc-bench", "sim", "init", "--seed", str(seed)], env={**os.environ, "DATABASE_URL": url}, check=True
            )
            tools, names = self._resolve_tools_for_group()
            agent = HermesAgentLoop(self.server, tools, names, max_turns=5, task_id=run_id)
            await agent.run([{"role": "user", "content": "Begin with `yc-bench company status`."}])
            scores.append(float(database.read_text()))
        metrics = {"eval/avg_composite_score": sum(scores) / len(scores)}
        await self.evaluate_log(metrics=metrics, samples=[], start_time=began, end_time=time.time())
