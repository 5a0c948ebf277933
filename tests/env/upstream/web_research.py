"""Questions for the web, judged by the policy's own server: what hermes-agent's web_research_env uses."""

from __future__ import annotations

import json
import logging
import random
import time
import uuid
from typing import Any

from atroposlib.envs.server_handling.server_manager import APIServerConfig
from pydantic import Field

from hermes_rl import AgentResult, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext

logger = logging.getLogger(__name__)
SAMPLES = [{"question": f"Who wrote book {number}?", "answer": "Ann", "difficulty": "easy"} for number in range(5)]


class WebResearchEnvConfig(HermesAgentEnvConfig):
    correctness_weight: float = Field(default=0.6, description="Weight of the judge.")
    tool_usage_weight: float = Field(default=0.4, description="Weight of having searched.")
    eval_size: int = Field(default=20, description="Held-out questions.")
    eval_split_ratio: float = Field(default=0.1, description="Share that is held out.")
    dataset_name: str = Field(default="no/such-dataset", description="The questions.")


class WebResearchEnv(HermesAgentBaseEnv):
    name = "web-research"
    env_config_cls = WebResearchEnvConfig
    default_toolsets = ["web", "file"]

    @classmethod
    def config_init(cls) -> tuple[WebResearchEnvConfig, list[APIServerConfig]]:
        config = WebResearchEnvConfig(
            enabled_toolsets=["web", "file"],
            max_agent_turns=15,
            agent_temperature=1.0,
            system_prompt="Search before you answer.",
            group_size=4,
            total_steps=1000,
            steps_per_eval=100,
            use_wandb=True,
            wandb_name="web-research",
        )
        server = APIServerConfig(
            base_url="https://openrouter.ai/api/v1",
            model_name="some/model",
            server_type="openai",
            api_key="",
            health_check=False,
        )
        return config, [server]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._items: list[dict[str, Any]] = []
        self._eval_items: list[dict[str, Any]] = []
        self._index: int = 0
        self._reward_buffer: list[float] = []
        self._correctness_buffer: list[float] = []

    async def setup(self) -> None:
        items = list(SAMPLES)
        random.shuffle(items)
        split = max(1, len(items) * 8 // 10)
        self._items, self._eval_items = items[:split], items[split:]

    async def get_next_item(self) -> dict[str, Any]:
        item = self._items[self._index % len(self._items)]
        self._index += 1
        return item

    def format_prompt(self, item: dict[str, Any]) -> str:
        return f"Find out on the web: {item['question']}"

    async def compute_reward(self, item: dict[str, Any], result: AgentResult, ctx: ToolContext) -> float:
        answer, used = "", []
        for message in reversed(result.messages):
            if message.get("role") == "assistant" and message.get("content") and not answer:
                answer = message["content"]
            for one in message.get("tool_calls") or ():
                used.append(one.get("function", {}).get("name", "") if isinstance(one, dict) else "")
        correct = await self._llm_judge(item["question"], item["answer"], answer)
        searched = float("web_search" in used)
        reward = self.config.correctness_weight * correct + self.config.tool_usage_weight * searched
        self._reward_buffer.append(reward)
        self._correctness_buffer.append(correct)
        return reward

    async def _llm_judge(self, question: str, expected: str, model_answer: str) -> float:
        try:
            response = await self.server.chat_completion(
                messages=[{"role": "user", "content": f"Judge {model_answer!r} for {question} ({expected})"}],
                n=1,
                max_tokens=150,
                temperature=0.0,
                split="eval",
            )
            return float(json.loads(response.choices[0].message.content)["score"])
        except Exception as error:
            logger.debug("no judge: %s", error)
        return 0.5

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        from hermes_rl import HermesAgentLoop, ToolContext

        began, samples = time.time(), []
        tools, valid_names = self._resolve_tools_for_group()
        for item in self._eval_items[: min(self.config.eval_size, len(self._eval_items))]:
            task_id = str(uuid.uuid4())
            messages = [
                {"role": "system", "content": self.config.system_prompt},
                {"role": "user", "content": self.format_prompt(item)},
            ]
            try:
                agent = HermesAgentLoop(
                    server=self.server,
                    tool_schemas=tools,
                    valid_tool_names=valid_names,
                    max_turns=self.config.max_agent_turns,
                    task_id=task_id,
                    temperature=0.0,
                    max_tokens=self.config.max_token_length,
                    extra_body=self.config.extra_body,
                )
                result = await agent.run(messages)
                ctx = ToolContext(task_id)
                try:
                    reward = await self.compute_reward(item, result, ctx)
                finally:
                    ctx.cleanup()
                samples.append({"prompt": item["question"], "reward": reward, "turns": result.turns_used})
            except Exception as error:
                samples.append({"prompt": item["question"], "response": f"ERROR: {error}", "reward": 0.0, "turns": 0})
        metrics = {"eval/mean_reward": sum(one["reward"] for one in samples) / len(samples)}
        await self.evaluate_log(metrics=metrics, samples=samples, start_time=began, end_time=time.time())

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self._reward_buffer:
            metrics["train/mean_reward"] = sum(self._reward_buffer) / len(self._reward_buffer)
            self._reward_buffer.clear()
            self._correctness_buffer.clear()
        await super().wandb_log(metrics)


if __name__ == "__main__":
    WebResearchEnv.cli()
