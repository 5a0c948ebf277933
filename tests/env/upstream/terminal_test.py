"""Tasks that end with a file in the home folder: hooks, attributes and calls of hermes-agent's terminal_test_env."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from atroposlib.envs.server_handling.server_manager import APIServerConfig

from hermes_rl import AgentResult, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext

logger = logging.getLogger(__name__)
TASKS = [
    {"prompt": f"Put {word} into ~/{word}.txt", "verify_path": f"~/{word}.txt", "expected_content": word}
    for word in ("plum", "pear", "quince")
]


class TerminalTestEnvConfig(HermesAgentEnvConfig):
    pass


class TerminalTestEnv(HermesAgentBaseEnv):
    name = "terminal-test"
    env_config_cls = TerminalTestEnvConfig

    @classmethod
    def config_init(cls) -> tuple[TerminalTestEnvConfig, list[APIServerConfig]]:
        config = TerminalTestEnvConfig(
            enabled_toolsets=["terminal", "file"],
            disabled_toolsets=None,
            distribution=None,
            max_agent_turns=10,
            max_token_length=16000,
            agent_temperature=1.0,
            system_prompt="Work with the terminal.",
            terminal_backend="modal",
            group_size=3,
            tool_call_parser="hermes",
            steps_per_eval=3,
            total_steps=3,
            use_wandb=True,
            wandb_name="terminal-test",
            ensure_scores_are_not_same=False,
            dataset_name=None,
        )
        server = APIServerConfig(
            base_url="https://openrouter.ai/api/v1",
            model_name="some/model",
            server_type="openai",
            api_key=os.getenv("OPENROUTER_API_KEY", ""),
            health_check=False,
        )
        return config, [server]

    async def setup(self) -> None:
        self.train_tasks = list(TASKS)
        self.eval_tasks = list(TASKS[:1])
        self.iter = 0
        self.reward_buffer: list[float] = []

    async def get_next_item(self) -> dict[str, str]:
        item = self.train_tasks[self.iter % len(self.train_tasks)]
        self.iter += 1
        return item

    def format_prompt(self, item: dict[str, str]) -> str:
        return item["prompt"]

    async def compute_reward(self, item: dict[str, str], result: AgentResult, ctx: ToolContext) -> float:
        shown = ctx.terminal(f"cat {item['verify_path']}")
        there, wanted = shown.get("output", "").strip(), item["expected_content"]
        reward = 0.0 if shown["exit_code"] != 0 else 1.0 if there == wanted else 0.5 if wanted in there else 0.0
        self.reward_buffer.append(reward)
        return reward

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        began, samples = time.time(), []
        for item in self.eval_tasks:
            try:
                completion = await self.server.chat_completion(
                    messages=[
                        {"role": "system", "content": self.config.system_prompt or ""},
                        {"role": "user", "content": item["prompt"]},
                    ],
                    n=1,
                    max_tokens=self.config.max_token_length,
                    temperature=0.0,
                    split="eval",
                )
                response = completion.choices[0].message.content if completion.choices else ""
            except Exception as error:
                response = f"ERROR: {error}"
            samples.append({"prompt": item["prompt"], "response": response, "expected": item["expected_content"]})
        metrics = {"eval/num_samples": len(samples)}
        await self.evaluate_log(metrics=metrics, samples=samples, start_time=began, end_time=time.time())

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.reward_buffer:
            metrics["train/avg_reward"] = sum(self.reward_buffer) / len(self.reward_buffer)
            metrics["train/accuracy"] = sum(one == 1.0 for one in self.reward_buffer) / len(self.reward_buffer)
            self.reward_buffer = []
        await super().wandb_log(metrics)


if __name__ == "__main__":
    TerminalTestEnv.cli()
