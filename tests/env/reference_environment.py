"""An environment that uses every public hook and name of the reference design, as its users write them.

Run as a program it notes in `hooks.jsonl` of the working directory which of its hooks were called.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl import (
    AgentResult,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    HermesAgentLoop,
    ToolContext,
    ToolError,
    clear_task_env_overrides,
    register_task_env_overrides,
)


class ReferenceConfig(HermesAgentEnvConfig):
    """A configuration with a field of its own."""

    greeting: str = "hello"


class Reference(HermesAgentBaseEnv):
    name = "reference"
    env_config_cls = ReferenceConfig
    default_toolsets = ["terminal", "file"]

    @classmethod
    def config_init(cls) -> tuple[ReferenceConfig, list[APIServerConfig]]:
        config = ReferenceConfig(
            group_size=2, max_agent_turns=5, agent_temperature=1.0, system_prompt="Be brief.", terminal_timeout=60,
            terminal_lifetime=600, tool_pool_size=8, total_steps=2, steps_per_eval=1, use_wandb=False,
            ensure_scores_are_not_same=False, min_items_sent_before_logging=0,
        )  # fmt: skip
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1", server_type="vllm")]

    def note(self, hook: str) -> None:
        with Path("hooks.jsonl").open("a") as file:
            file.write(json.dumps(hook) + "\n")

    async def setup(self) -> None:
        self.note("setup")
        self.items = [{"who": "Ann"}, {"who": "Bo"}, {"who": "Cy"}]
        self.index = 0
        self.reward_buffer: list[float] = []
        self.tool_error_buffer: list[ToolError] = []
        self.metrics: list[dict[str, float]] = []

    async def get_next_item(self) -> dict[str, str]:
        self.note("get_next_item")
        self.index += 1
        return self.items[self.index % len(self.items)]

    def format_prompt(self, item: dict[str, str]) -> str:
        return f"Write {self.config.greeting} {item['who']} into ~/greeting.txt."

    def sandbox_for(self, item: Any) -> Any:
        self.note("sandbox_for")
        return replace(super().sandbox_for(item), env={"WHO": item["who"]})

    async def compute_reward(self, item: dict[str, str], result: AgentResult, ctx: ToolContext) -> float:
        self.note("compute_reward")
        assert result.turns_used >= 1
        assert result.managed_state is None or result.managed_state["nodes"]
        assert len(result.reasoning_per_turn) == result.turns_used
        self.tool_error_buffer += result.tool_errors
        ctx.write_file("notes.txt", "checked")
        assert ctx.read_file("notes.txt")["content"] == "checked"
        assert ctx.terminal("echo $WHO")["output"].strip() == item["who"]
        assert "matches" in ctx.search("hello", "greeting.txt")
        assert json.loads(ctx.call_tool("terminal", {"command": "true"}))["exit_code"] == 0
        right = ctx.terminal("cat greeting.txt")["output"].strip() == f"hello {item['who']}"
        self.reward_buffer.append(float(right))
        ctx.cleanup()
        return float(right)

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        self.note("collect_trajectory")
        return await super().collect_trajectory(item)

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        self.note("collect_trajectories")
        return await super().collect_trajectories(item)

    async def postprocess_histories(self, trajectories: Any) -> Any:
        self.note("postprocess_histories")
        return trajectories

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.note("evaluate")
        schemas, names = self._resolve_tools_for_group()
        scores, samples = [], []
        for item in self.items[: self.config.eval_size][:1]:
            task_id = str(uuid.uuid4())
            register_task_env_overrides(task_id, {"cwd": "/tmp/evaluation"})
            agent = HermesAgentLoop(
                server=self.server, tool_schemas=schemas, valid_tool_names=names, max_turns=5, task_id=task_id,
                temperature=0.0, max_tokens=256, extra_body=self.config.extra_body,
            )  # fmt: skip
            result = await agent.run([{"role": "user", "content": self.format_prompt(item)}])
            ctx = ToolContext(task_id)
            try:
                found = ctx.terminal("cat ~/greeting.txt; pwd")["output"].split("\n")
                scores.append(float(found[:2] == [f"hello {item['who']}", "/tmp/evaluation"]))
            finally:
                ctx.cleanup()
                clear_task_env_overrides(task_id)
            samples.append({"messages": result.messages, "score": scores[-1]})
        await self.evaluate_log({"eval/mean_reward": sum(scores) / len(scores)}, samples=samples, verbose=False)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        self.note("wandb_log")
        metrics = dict(wandb_metrics or {}, right=sum(self.reward_buffer))
        self.reward_buffer = []
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        self.note("save_checkpoint")
        super().save_checkpoint(step, {"index": self.index, **(data or {})})

    async def cleanup(self) -> None:
        self.note("cleanup")


if __name__ == "__main__":
    Reference.cli()
