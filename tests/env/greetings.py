"""An environment written by hand, in the way that people know it from hermes-agent."""

from __future__ import annotations

from typing import Any

from hermes_rl import (
    AgentResult,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    HermesAgentLoop,
    ToolContext,
)


class Greetings(HermesAgentBaseEnv):
    """Ask for a file with a greeting; the file decides."""

    name = "greetings"
    env_config_cls = HermesAgentEnvConfig
    default_toolsets = ["terminal", "file"]

    async def setup(self) -> None:
        self.items = [{"who": "Ann"}, {"who": "Bo"}]
        self.handed_out = 0
        self.logged: list[dict[str, Any]] = []
        self.scores: list[float] = []

    async def get_next_item(self) -> dict[str, str]:
        self.handed_out += 1
        return self.items[self.handed_out % len(self.items)]

    def format_prompt(self, item: dict[str, str]) -> str:
        return f"Write hello {item['who']} into ~/greeting.txt."

    async def compute_reward(self, item: dict[str, str], result: AgentResult, ctx: ToolContext) -> float:
        answer = ctx.terminal("cat ~/greeting.txt")
        return 1.0 if answer["output"].strip() == f"hello {item['who']}" else 0.0

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        for item in self.items:
            schemas, names = self._resolve_tools_for_group()
            task_id = f"evaluation-{item['who']}"
            loop = HermesAgentLoop(self.server, schemas, names, max_turns=4, task_id=task_id)
            result = await loop.run([{"role": "user", "content": self.format_prompt(item)}])
            ctx = ToolContext(task_id)
            try:
                self.scores.append(await self.compute_reward(item, result, ctx))
            finally:
                ctx.cleanup()
        await self.evaluate_log({"eval/mean_reward": sum(self.scores) / len(self.scores)}, verbose=False)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = dict(wandb_metrics or {}, handed_out=self.handed_out)
        self.logged.append({**metrics, **self._pending_metrics})
        await super().wandb_log(metrics)


if __name__ == "__main__":
    Greetings.cli()
