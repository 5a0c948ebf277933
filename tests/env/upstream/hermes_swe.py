"""Rows of a dataset with tests that run in the sandbox: what hermes-agent's hermes_swe_env uses."""

from __future__ import annotations

import time
from typing import Any

from atroposlib.envs.server_handling.server_manager import APIServerConfig
from datasets import load_dataset

from hermes_rl import AgentResult, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext


class HermesSweEnvConfig(HermesAgentEnvConfig):
    pass


class HermesSweEnv(HermesAgentBaseEnv):
    name = "hermes-swe"
    env_config_cls = HermesSweEnvConfig

    @classmethod
    def config_init(cls) -> tuple[HermesSweEnvConfig, list[APIServerConfig]]:
        config = HermesSweEnvConfig(
            enabled_toolsets=["terminal", "file", "web"],
            disabled_toolsets=None,
            distribution=None,
            max_agent_turns=30,
            max_token_length=4096,
            agent_temperature=1.0,
            system_prompt="Write code that passes its tests.",
            terminal_backend="modal",
            dataset_name="some/dataset",
            dataset_split="test",
            prompt_field="prompt",
            group_size=4,
            tool_call_parser="hermes",
            steps_per_eval=50,
            total_steps=500,
            use_wandb=True,
            wandb_name="hermes-swe",
        )
        server = APIServerConfig(
            base_url="http://localhost:8000/v1", model_name="some/model", server_type="openai", api_key=""
        )
        return config, [server]

    async def setup(self) -> None:
        name = self.config.dataset_name
        self.dataset = load_dataset(name, split=self.config.dataset_split) if name else []
        self.iter = 0
        self.reward_buffer: list[float] = []

    async def get_next_item(self) -> dict[str, Any]:
        if not self.dataset:
            raise ValueError("No dataset loaded.")
        item = self.dataset[self.iter % len(self.dataset)]
        self.iter += 1
        return item

    def format_prompt(self, item: dict[str, Any]) -> str:
        prompt: str = item.get(self.config.prompt_field, "")
        tests = item.get("test", item.get("test_code", item.get("tests", "")))
        return f"{prompt}\n\nTests:\n{tests}" if tests else prompt

    async def compute_reward(self, item: dict[str, Any], result: AgentResult, ctx: ToolContext) -> float:
        tests = item.get("test", item.get("test_code", item.get("tests", "")))
        reward = 0.0
        if tests and ctx.terminal(f'cd /workspace && python3 -c "{tests}"', timeout=60)["exit_code"] == 0:
            reward = 1.0
        else:
            found = ctx.terminal("find /workspace -name '*.py' 2>/dev/null | head -5")
            if found["exit_code"] == 0 and found.get("output", "").strip():
                reward = 0.1
        self.reward_buffer.append(reward)
        return reward

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        now = time.time()
        await self.evaluate_log(metrics={"eval/placeholder": 0.0}, start_time=now, end_time=time.time())

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.reward_buffer:
            metrics["train/avg_reward"] = sum(self.reward_buffer) / len(self.reward_buffer)
            self.reward_buffer = []
        await super().wandb_log(metrics)


if __name__ == "__main__":
    HermesSweEnv.cli()
