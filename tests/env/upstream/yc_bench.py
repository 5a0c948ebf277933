"""A game that is a program of this machine, with its state in a file: what hermes-agent's yc_bench_env uses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

from atroposlib.envs.base import EvalHandlingEnum
from atroposlib.envs.server_handling.server_manager import APIServerConfig
from pydantic import Field

from hermes_rl import HermesAgentBaseEnv, HermesAgentEnvConfig, HermesAgentLoop


class YCBenchEvalConfig(HermesAgentEnvConfig):
    presets: list[str] = Field(default=["fast_test", "hard"], description="Games.")
    seeds: list[int] = Field(default=[1, 2], description="Worlds of each game.")
    run_timeout: int = Field(default=3600, description="Seconds of a game.")
    db_dir: str = Field(default="/tmp/yc_bench_dbs", description="Where the games are kept.")


class YCBenchEvalEnv(HermesAgentBaseEnv):
    name = "yc-bench"
    env_config_cls = YCBenchEvalConfig

    @classmethod
    def config_init(cls) -> tuple[YCBenchEvalConfig, list[APIServerConfig]]:
        config = YCBenchEvalConfig(
            enabled_toolsets=["terminal"],
            max_agent_turns=200,
            max_token_length=32000,
            agent_temperature=0.0,
            system_prompt="Run the company.",
            terminal_backend="local",
            terminal_timeout=60,
            eval_handling=EvalHandlingEnum.STOP_TRAIN,
            group_size=1,
            steps_per_eval=1,
            total_steps=1,
            use_wandb=True,
            wandb_name="yc-bench",
            ensure_scores_are_not_same=False,
        )
        server = APIServerConfig(
            base_url="https://openrouter.ai/api/v1", model_name="some/model", server_type="openai", health_check=False
        )
        return config, [server]

    async def setup(self) -> None:
        subprocess.run(["yc-bench", "--help"], capture_output=True, text=True, timeout=10, check=True)
        self.all_eval_items = [
            {"preset": preset, "seed": seed} for preset in self.config.presets for seed in self.config.seeds
        ]
        self.iter = 0
        Path(self.config.db_dir).mkdir(parents=True, exist_ok=True)
        self.eval_metrics: list[tuple[str, float]] = []

    async def get_next_item(self) -> Any:
        return self.all_eval_items[0]

    def format_prompt(self, item: dict[str, Any]) -> str:
        return f"Begin the game {item['preset']} with `yc-bench company status`."

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 0.0

    async def collect_trajectories(self, item: Any) -> Any:
        return None, []

    async def rollout_and_score_eval(self, eval_item: dict[str, Any]) -> dict[str, Any]:
        run_id = str(uuid.uuid4())[:8]
        db_path = str(Path(self.config.db_dir) / f"yc_bench_{run_id}.db")
        os.environ["DATABASE_URL"] = f"sqlite:///{db_path}"
        subprocess.run(["yc-bench", "sim", "init", "--seed", str(eval_item["seed"])], timeout=30, check=True)
        tools, valid_names = self._resolve_tools_for_group()
        agent = HermesAgentLoop(
            server=self.server,
            tool_schemas=tools,
            valid_tool_names=valid_names,
            max_turns=self.config.max_agent_turns,
            task_id=run_id,
            temperature=self.config.agent_temperature,
            max_tokens=self.config.max_token_length,
            extra_body=self.config.extra_body,
            budget_config=self.config.build_budget_config(),
        )
        await agent.run([{"role": "user", "content": self.format_prompt(eval_item)}])
        return {**eval_item, "score": float(Path(db_path).read_text())}

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        began, results = time.time(), []
        for item in self.all_eval_items:
            results.append(await asyncio.wait_for(self.rollout_and_score_eval(item), self.config.run_timeout))
        metrics = {"eval/avg_composite_score": sum(one["score"] for one in results) / len(results)}
        await self.evaluate_log(metrics=metrics, samples=results, start_time=began, end_time=time.time())
        from hermes_rl import cleanup_all_environments

        cleanup_all_environments()


if __name__ == "__main__":
    YCBenchEvalEnv.cli()
