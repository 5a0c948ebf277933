"""Distillation from hints that tool results give: what hermes-agent's agentic_opd_env uses."""

from __future__ import annotations

import asyncio
import copy
import re
import time
import uuid
from typing import Any

from atroposlib.envs.server_handling.server_manager import APIServerConfig
from pydantic import Field

from hermes_rl import AgentResult, HermesAgentBaseEnv, HermesAgentEnvConfig, HermesAgentLoop, ToolContext

TASKS = [
    {"task": f"Write add{number}(a, b) into solution.py", "test_code": f"from solution import add{number}\n"}
    for number in range(3)
]


class AgenticOPDConfig(HermesAgentEnvConfig):
    opd_enabled: bool = Field(default=True, description="Distil.")
    distill_topk: int = Field(default=50, description="Tokens of the teacher at each place.")
    prm_votes: int = Field(default=3, description="Questions to the judge for each hint.")
    dataset_name: str | None = Field(default=None, description="The tasks.")
    eval_size: int = Field(default=10, description="Held-out tasks.")


class AgenticOPDEnv(HermesAgentBaseEnv):
    name = "agentic-opd"
    env_config_cls = AgenticOPDConfig
    default_toolsets = ["terminal", "file"]

    @classmethod
    def config_init(cls) -> tuple[AgenticOPDConfig, list[APIServerConfig]]:
        config = AgenticOPDConfig(
            enabled_toolsets=["terminal", "file"],
            max_agent_turns=15,
            agent_temperature=1.0,
            system_prompt="Write code, then run its tests.",
            opd_enabled=True,
            distill_topk=50,
            prm_votes=3,
            group_size=4,
            total_steps=500,
            steps_per_eval=50,
            use_wandb=True,
            wandb_name="agentic-opd",
        )
        server = APIServerConfig(base_url="http://localhost:8000/v1", model_name="some/model", server_type="vllm")
        return config, [server]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._items: list[dict[str, Any]] = []
        self._eval_items: list[dict[str, Any]] = []
        self._index: int = 0
        self._reward_buffer: list[float] = []
        self._opd_turns_scored_buffer: list[int] = []

    async def setup(self) -> None:
        items = copy.deepcopy(TASKS)
        self._items, self._eval_items = items[:2], items[2:]

    async def get_next_item(self) -> dict[str, Any]:
        item = self._items[self._index % len(self._items)]
        self._index += 1
        return item

    def format_prompt(self, item: dict[str, Any]) -> str:
        return f"{item['task']}\n\nIt is tested with:\n{item['test_code']}"

    async def compute_reward(self, item: dict[str, Any], result: AgentResult, ctx: ToolContext) -> float:
        try:
            ran = ctx.terminal("python3 test_solution.py 2>&1", timeout=30)
            reward = 1.0 if ran.get("exit_code", 1) == 0 else 0.1
        except Exception:  # as the environment that this one stands for has it
            reward = 0.0
        self._reward_buffer.append(reward)
        return reward

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        scored_group, backlog = await super().collect_trajectories(item)
        if (
            self.config.opd_enabled
            and scored_group is not None
            and isinstance(scored_group, dict)
            and self._use_managed_server()
        ):
            await self._apply_opd_pipeline(scored_group)
        return scored_group, backlog

    async def _apply_opd_pipeline(self, group: dict[str, Any]) -> None:
        pairs = zip(group.get("messages", []), group.get("tokens", []), strict=True)
        found = [await self._opd_for_sequence(messages, tokens) for messages, tokens in pairs]
        group["distill_token_ids"] = [ids for ids, _ in found]
        group["distill_logprobs"] = [values for _, values in found]

    async def _opd_for_sequence(self, messages: list[dict[str, Any]], student: list[int]) -> tuple[Any, Any]:
        k = self.config.distill_topk
        ids, values = [[0] * k for _ in student], [[0.0] * k for _ in student]
        scored = 0
        for place, message in enumerate(messages[:-1]):
            following = messages[place + 1]
            if message.get("role") != "assistant" or not message.get("content") or following["role"] != "tool":
                continue
            hint = await self._extract_hint(message["content"], following["content"])
            if not hint:
                continue
            context = copy.deepcopy(messages[:place])
            context[-1]["content"] += f"\n{hint}"
            prompt = self.tokenizer.apply_chat_template(context, tokenize=False, add_generation_prompt=True)
            text = message["content"]
            enhanced = self.tokenizer(prompt + text, add_special_tokens=False)["input_ids"]
            response = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            told = await self.server.get_logprobs(input_ids=enhanced, top_k=k, split="eval")
            top_ids = told.get("prompt_topk_token_ids", [])[-len(response) :]
            top_values = told.get("prompt_topk_logprobs", [])[-len(response) :]
            starts = [n for n in range(len(student)) if student[n : n + len(response)] == response]
            for start in starts[-1:]:
                for offset, (some, some_values) in enumerate(zip(top_ids, top_values, strict=True)):
                    ids[start + offset], values[start + offset] = some[:k], some_values[:k]
                scored += 1
        self._opd_turns_scored_buffer.append(scored)
        return ids, values

    async def _extract_hint(self, said: str, answer: str) -> str | None:
        calls = [
            self.server.chat_completion(
                messages=[{"role": "user", "content": f"Judge the turn {said!r}, which was answered {answer[:200]!r}"}],
                n=1,
                max_tokens=500,
                temperature=0.7,
                split="eval",
            )
            for _ in range(self.config.prm_votes)
        ]
        replies = await asyncio.gather(*calls, return_exceptions=True)
        texts = [one.choices[0].message.content or "" for one in replies if not isinstance(one, BaseException)]
        hints = [found[1] for text in texts if (found := re.search(r"\[HINT\](.*)\[/HINT\]", text))]
        return max(hints, key=len, default=None)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        began, samples = time.time(), []
        tools, valid_names = self._resolve_tools_for_group()
        for item in self._eval_items[: self.config.eval_size]:
            task_id = str(uuid.uuid4())
            agent = HermesAgentLoop(
                server=self.server,
                tool_schemas=tools,
                valid_tool_names=valid_names,
                max_turns=self.config.max_agent_turns,
                task_id=task_id,
                temperature=0.0,
                max_tokens=self.config.max_token_length,
                extra_body=self.config.extra_body,
                budget_config=self.config.build_budget_config(),
            )
            result = await agent.run([{"role": "user", "content": self.format_prompt(item)}])
            ctx = ToolContext(task_id)
            try:
                reward = await self.compute_reward(item, result, ctx)
            finally:
                ctx.cleanup()
            self._reward_buffer.pop()
            samples.append({"prompt": item["task"], "reward": reward, "turns": result.turns_used})
        metrics = {"eval/mean_reward": sum(one["reward"] for one in samples) / len(samples)}
        await self.evaluate_log(metrics=metrics, samples=samples, start_time=began, end_time=time.time())

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self._opd_turns_scored_buffer:
            metrics["opd/total_scored_turns"] = sum(self._opd_turns_scored_buffer)
            self._opd_turns_scored_buffer.clear()
        self._reward_buffer.clear()
        await super().wandb_log(metrics)


if __name__ == "__main__":
    AgenticOPDEnv.cli()
