"""Tasks with an image, an archive of tests and a script each: what hermes-agent's terminalbench2_env uses."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import shutil
import tarfile
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

from atroposlib.envs.base import EvalHandlingEnum
from atroposlib.envs.server_handling.server_manager import APIServerConfig
from datasets import load_dataset
from pydantic import Field

from hermes_rl import (
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    HermesAgentLoop,
    ToolContext,
    cleanup_vm,
    clear_task_env_overrides,
    register_task_env_overrides,
)

logger = logging.getLogger(__name__)


class TerminalBench2EvalConfig(HermesAgentEnvConfig):
    dataset_name: str = Field(default="some/terminal-bench-2", description="The tasks.")
    test_timeout: int = Field(default=180, description="Seconds of the tests.")
    force_build: bool = Field(default=False, description="Build each image from its Dockerfile.")
    task_filter: str | None = Field(default=None, description="Names of tasks, with commas.")
    skip_tasks: str | None = Field(default=None, description="Names of tasks to leave out.")
    task_timeout: int = Field(default=1800, description="Seconds of a task, tests included.")


def extract(archive: str, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive)), mode="r:gz") as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(path=str(folder))


class TerminalBench2EvalEnv(HermesAgentBaseEnv):
    name = "terminal-bench-2"
    env_config_cls: Any = TerminalBench2EvalConfig

    @classmethod
    def config_init(cls) -> tuple[TerminalBench2EvalConfig, list[APIServerConfig]]:
        config = cls.env_config_cls(
            enabled_toolsets=["terminal", "file"],
            disabled_toolsets=None,
            distribution=None,
            max_agent_turns=60,
            max_token_length=16000,
            agent_temperature=0.6,
            system_prompt=None,
            terminal_backend="modal",
            terminal_timeout=300,
            test_timeout=180,
            tool_pool_size=128,
            eval_handling=EvalHandlingEnum.STOP_TRAIN,
            group_size=1,
            steps_per_eval=1,
            total_steps=1,
            use_wandb=True,
            wandb_name=cls.name,
            ensure_scores_are_not_same=False,
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
        lifetime = self.config.task_timeout + 120
        self.config.terminal_lifetime = lifetime
        tasks = list(load_dataset(self.config.dataset_name, split="train"))
        if self.config.task_filter:
            allowed = {name.strip() for name in self.config.task_filter.split(",")}
            tasks = [task for task in tasks if task["task_name"] in allowed]
        self.all_eval_items = tasks
        self.iter = 0
        self.category_index: dict[str, list[int]] = defaultdict(list)
        for place, task in enumerate(tasks):
            self.category_index[task.get("category", "unknown")].append(place)
        self.eval_metrics: list[tuple[str, float]] = []
        self._streaming_file = Path("samples.jsonl").open("w")
        self._streaming_lock = threading.Lock()

    def _save_result(self, result: dict[str, Any]) -> None:
        with self._streaming_lock:
            self._streaming_file.write(json.dumps(result, default=str) + "\n")
            self._streaming_file.flush()

    async def get_next_item(self) -> Any:
        item = self.all_eval_items[self.iter % len(self.all_eval_items)]
        self.iter += 1
        return item

    def format_prompt(self, item: dict[str, Any]) -> str:
        return str(item["instruction"])

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 0.0

    async def collect_trajectories(self, item: Any) -> Any:
        return None, []

    async def score(self, rollout_group_data: Any) -> Any:
        return None

    def _resolve_task_image(self, item: dict[str, Any], task_name: str) -> tuple[str, Path | None]:
        if item.get("docker_image") and not self.config.force_build:
            return str(item["docker_image"]), None
        folder = Path(tempfile.mkdtemp(prefix=f"tb2-{task_name}-"))
        extract(item["environment_tar"], folder)
        return str(folder / "Dockerfile"), folder

    async def rollout_and_score_eval(self, eval_item: dict[str, Any]) -> dict[str, Any]:
        task_name, category = eval_item.get("task_name", "unknown"), eval_item.get("category", "unknown")
        task_id, task_dir = str(uuid.uuid4()), None
        told = {"task_name": task_name, "category": category}
        try:
            modal_image, task_dir = self._resolve_task_image(eval_item, task_name)
            register_task_env_overrides(task_id, {"modal_image": modal_image})
            tools, valid_names = self._resolve_tools_for_group()
            agent = HermesAgentLoop(
                server=self.server,
                tool_schemas=tools,
                valid_tool_names=valid_names,
                max_turns=self.config.max_agent_turns,
                task_id=task_id,
                temperature=self.config.agent_temperature,
                max_tokens=self.config.max_token_length,
                extra_body=self.config.extra_body,
                budget_config=self.config.build_budget_config(),
            )
            result = await agent.run([{"role": "user", "content": self.format_prompt(eval_item)}])
            ctx = ToolContext(task_id)
            try:
                loop = asyncio.get_event_loop()
                reward = await loop.run_in_executor(None, self._run_tests, eval_item, ctx, task_name)
            finally:
                ctx.cleanup()
            out = {**told, "passed": reward == 1.0, "reward": reward, "turns_used": result.turns_used}
        except Exception as error:
            out = {**told, "passed": False, "reward": 0.0, "error": str(error)}
        finally:
            clear_task_env_overrides(task_id)
            try:
                cleanup_vm(task_id)
            except Exception as error:
                logger.debug("clean-up of %s: %s", task_id, error)
            if task_dir is not None:
                shutil.rmtree(task_dir, ignore_errors=True)
        self._save_result(out)
        return out

    def _run_tests(self, item: dict[str, Any], ctx: ToolContext, task_name: str) -> float:
        ctx.terminal("mkdir -p /tests /logs/verifier")
        if item.get("tests_tar"):
            folder = Path(tempfile.mkdtemp(prefix="tb2-tests-"))
            try:
                extract(item["tests_tar"], folder)
                ctx.upload_dir(str(folder), "/tests")
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        ctx.write_file("/tests/test.sh", item["test_sh"])
        ctx.terminal("chmod +x /tests/test.sh")
        ran = ctx.terminal("bash /tests/test.sh", timeout=self.config.test_timeout)
        local = Path(tempfile.mkdtemp(prefix="tb2-verifier-"))
        try:
            ctx.download_dir("/logs/verifier", str(local))
            told = local / "reward.txt"
            if told.exists() and told.stat().st_size > 0:
                return float(told.read_text().strip())
            return 1.0 if ran.get("exit_code", -1) == 0 else 0.0
        finally:
            shutil.rmtree(local, ignore_errors=True)

    async def _eval_with_timeout(self, item: dict[str, Any]) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(self.rollout_and_score_eval(item), timeout=self.config.task_timeout)
        except TimeoutError:
            out = {"passed": False, "reward": 0.0, "task_name": item["task_name"], "category": item["category"]}
            self._save_result({**out, "error": "timeout"})
            return out

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        from hermes_rl import cleanup_all_environments

        began, results = time.time(), []
        pending = [asyncio.ensure_future(self._eval_with_timeout(item)) for item in self.all_eval_items]
        for one in asyncio.as_completed(pending):
            results.append(await one)
        by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for result in results:
            by_category[result["category"]].append(result)
        metrics: dict[str, Any] = {"eval/pass_rate": sum(one["passed"] for one in results) / len(results)}
        for category, own in sorted(by_category.items()):
            metrics[f"eval/pass_rate_{category}"] = sum(one["passed"] for one in own) / len(own)
        self.eval_metrics = list(metrics.items())
        await self.evaluate_log(
            metrics=metrics,
            samples=results,
            start_time=began,
            end_time=time.time(),
            generation_parameters={"temperature": self.config.agent_temperature},
        )
        self._streaming_file.close()
        cleanup_all_environments()

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {**(wandb_metrics or {}), **dict(self.eval_metrics)}
        self.eval_metrics = []
        await super().wandb_log(metrics)


if __name__ == "__main__":
    TerminalBench2EvalEnv.cli()
