"""`HermesAgentBaseEnv`: an Atropos environment whose rollouts are played by our core.

Subclass it by hand with `setup`, `get_next_item`, `format_prompt` (or `format_messages`), `compute_reward` and
`evaluate`; `SpecEnv` is the subclass that a spec compiles to. Whatever atroposlib 0.4.0 gets wrong is overridden here
at its public hooks; nothing in the installed package is changed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.envs.base import BaseEnv, EvalHandlingEnum
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig, ServerBaseline

from hermes_rl.agent.result import AgentResult, Message
from hermes_rl.env.collecting import Collecting
from hermes_rl.env.config import HermesAgentEnvConfig
from hermes_rl.env.handwritten import HandWritten, sandbox_config
from hermes_rl.env.pressure import Pressure
from hermes_rl.env.sending import Sending
from hermes_rl.env.servers import HermesServer, HermesServerManager
from hermes_rl.env.too_long import TooLong
from hermes_rl.env.tracking import Tracking
from hermes_rl.errors import UserError
from hermes_rl.rollouts.encode import Encoder
from hermes_rl.rollouts.environment import Environment
from hermes_rl.runs.readable import readable
from hermes_rl.servers.base import Reasoning
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tools.catalogue import resolve_toolsets, sample_distribution
from hermes_rl.tools.toolkit import Toolkit

logger = logging.getLogger(__name__)

LAST_EVALUATIONS = 600.0
"""Seconds that evaluations may still take when the trainer has had its last step."""


class HermesAgentBaseEnv(Collecting, Pressure, Sending, Tracking, BaseEnv):  # type: ignore[misc]
    """An agent environment for Atropos: tools, a sandbox per rollout, a reward.

    Args:
        config: the environment's configuration.
        server_configs: one per policy server.
    """

    name: str | None = None
    env_config_cls: Any = HermesAgentEnvConfig
    server_cls: Any = HermesServer
    # BaseEnv's own
    checkpoint_interval: int
    running_items: dict[str, Any]

    default_toolsets: ClassVar[list[str] | None] = None
    """Toolsets where the configuration names none."""

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: ServerBaseline | Sequence[APIServerConfig] | APIServerConfig,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        if slurm or testing:
            raise UserError("slurm and testing are not supported: name the servers; a scripted policy plays offline")
        configs = _configs(server_configs)
        config = config.model_copy()  # what is set below is this environment's alone
        if config.wandb_name is None:
            config.wandb_name = self.name or type(self).__name__  # run-api refuses an environment without a name
        if config.group_size == 1:
            config.ensure_scores_are_not_same = False  # a group of one is always the same, and would never be sent
        self.config = config
        self._encoder = self._make_encoder()
        self._initialise_base(config, configs)
        self._reasoning_settings = _reasoning(config)
        self.server = self._make_server(configs)
        self._core: Environment = self._make_core()
        self._group_numbers = itertools.count()
        self._evaluation_is_due = False
        self._too_long = TooLong("drop", self._sequence_counts)

    def _initialise_base(self, config: HermesAgentEnvConfig, configs: list[APIServerConfig]) -> None:
        """Run BaseEnv's constructor, kept from opening the output file and from a tokenizer that cannot be had.

        It renames an existing output, which our loops go on with; and it fails where a hub is out of reach.
        """
        kept = {
            "data_path_to_save_groups": config.data_path_to_save_groups,
            "tokenizer_name": config.tokenizer_name,
        }
        config.data_path_to_save_groups = None
        if self._encoder.tokenizer is None:
            config.tokenizer_name = str(small_tokenizer_path())
        super().__init__(config, configs)
        if self._encoder.tokenizer is None:
            self.tokenizer = None  # better none than another model's
        for name, value in kept.items():
            setattr(config, name, value)

    # ------------------------------------------------------------------ hooks of an environment

    @abstractmethod
    async def setup(self) -> None:
        """Load what the environment needs, before anything else is called."""

    @abstractmethod
    async def get_next_item(self) -> Any:
        """The next item to play; None pauses (serve) or ends (process)."""

    def format_prompt(self, item: Any) -> str:
        """The first user message for an item."""
        raise NotImplementedError(f"{type(self).__name__} defines neither format_prompt nor format_messages")

    def format_messages(self, item: Any) -> list[Message]:
        """The messages that a rollout begins with: the configured system prompt and `format_prompt`."""
        system = self.config.system_prompt
        first = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": self.format_prompt(item)}]

    async def compute_reward(self, item: Any, result: AgentResult, ctx: Any) -> Any:
        """The reward of a rollout; runs in a worker thread, so `ctx` is used without await.

        Raise to say that it could not be told: the rollout is played anew, never scored 0.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define compute_reward")

    # ------------------------------------------------------------------ parts that a subclass may replace

    def _make_server(self, configs: list[APIServerConfig]) -> Any:
        """The object behind `self.server`."""
        return HermesServerManager(
            configs,
            server_class=self.server_cls,
            reasoning_config=ReasoningConfig.from_env_config(self.config),
            tool_parser=self.config.tool_call_parser if "tool_call_parser" in self.config.model_fields_set else None,
            sandbox=sandbox_config(self.config),
        )

    def _make_core(self) -> Environment:
        """The environment as the core sees it."""
        return HandWritten(self)

    def _make_encoder(self) -> Encoder:
        """What makes tokens of conversations, with the environment's own tokenizer."""
        return Encoder.load(self.config.tokenizer_name)

    def _resolve_tools_for_group(self) -> tuple[list[dict[str, Any]], set[str]]:
        """Tool schemas and valid names for one group; drawn anew at each call from a distribution."""
        toolkit = self._toolkit_for(f"group-{next(self._group_numbers)}")
        return toolkit.schemas, set(toolkit.names)

    def _toolkit_for(self, group: str) -> Toolkit:
        """The tools of a group: the same for all its members, drawn from the seed and the group's id."""
        config = self.config
        enabled = config.enabled_toolsets if config.enabled_toolsets is not None else self.default_toolsets
        if config.distribution is not None:
            enabled = list(sample_distribution(config.distribution, f"{config.seed}:{group}"))
        elif enabled is None:
            logger.warning("%s: enabled_toolsets is not set, so every available toolset is used", self.name)
        return Toolkit(resolve_toolsets(enabled, config.disabled_toolsets or ()))

    # ------------------------------------------------------------------ Atropos' loops

    async def handle_env(self, item_uuid: str) -> Any:
        """As BaseEnv's; an item that Atropos has cancelled meanwhile is left alone."""
        if item_uuid not in self.running_items:
            return None
        return await super().handle_env(item_uuid)

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """Keep readable text of a few rollouts of each group."""
        keep = self.config.num_rollouts_per_group_for_logging
        count = len(scored_data["scores"]) if keep == -1 else keep
        messages = scored_data.get("messages") or [[]] * count
        pairs = zip(messages[:count], scored_data["scores"][:count], strict=True)
        self.rollouts_for_wandb.append([(readable(conversation), score) for conversation, score in pairs])
        if len(self.rollouts_for_wandb) > self.config.num_rollouts_to_keep:
            self.rollouts_for_wandb.pop(0)

    async def evaluate_log(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As BaseEnv's; while a trainer is served, each step's evaluation has a folder of its own."""
        folder = self.config.data_dir_to_save_evals
        if folder is not None and hasattr(self, "env_id"):
            self.config.data_dir_to_save_evals = str(Path(folder) / f"step-{self.curr_step}")
        try:
            await super().evaluate_log(metrics, *args, **kwargs)
        finally:
            self.config.data_dir_to_save_evals = folder

    async def env_manager(self) -> None:
        """Serve until the trainer has its steps; releases everything, also when cancelled."""
        self._keep_groups()
        try:
            await super().env_manager()
            await self._finish_evaluations()
        finally:
            await self.shut_down()

    async def env_step_checks(self) -> None:
        """As BaseEnv's, but no multiple of `steps_per_eval` or of the checkpoint interval goes by unseen.

        The trainer's step is looked at now and then and may jump. BaseEnv compares remainders, which misses a multiple
        where the step jumps by a whole interval (every step, where the interval is 1), and it skips an evaluation while
        another one runs. Here a jump over several multiples is one evaluation, since the weights are those of one step
        only, and an evaluation that is due while another one runs follows it.
        """
        before, now = self.curr_step, self.status_dict["current_step"]
        evaluation, checkpoint = self.config.steps_per_eval, self.checkpoint_interval
        self.config.steps_per_eval = self.checkpoint_interval = -1
        try:
            await super().env_step_checks()
        finally:
            self.config.steps_per_eval, self.checkpoint_interval = evaluation, checkpoint
        if checkpoint > 0 and before // checkpoint < now // checkpoint:
            self.save_checkpoint(now // checkpoint * checkpoint)
        if evaluation > 0 and before // evaluation < now // evaluation:
            self._evaluation_is_due = True
        self._begin_evaluation()

    def _begin_evaluation(self) -> None:
        """Begin the evaluation that is due, unless another one runs."""
        if not self._evaluation_is_due or (self.eval_runner is not None and not self.eval_runner.done()):
            return
        self._evaluation_is_due = False
        self.eval_runner = asyncio.create_task(self.evaluate())
        if self.config.eval_handling == EvalHandlingEnum.STOP_TRAIN:
            self.backlog.extend(running["item"] for running in self.running_items.values())
            for worker in self.workers:
                worker.cancel()
            self.workers, self.running_items = set(), {}

    async def _finish_evaluations(self) -> None:
        """Wait for the evaluations of the last steps, for a bounded time: the model server may end with its trainer."""
        try:
            async with asyncio.timeout(LAST_EVALUATIONS):
                while self.eval_runner is not None:
                    await asyncio.wait([self.eval_runner])
                    self.eval_runner = None
                    self._begin_evaluation()
        except TimeoutError:
            logger.error("the evaluation of the last step is given up: it took more than %g seconds", LAST_EVALUATIONS)

    async def process_manager(self) -> None:
        """Write groups of `collect_trajectories`, several at a time; a failing group ends nothing."""
        from hermes_rl.env.processing import process_by_hand

        try:
            await self.setup()
            self._begin_tracking()
            await process_by_hand(self)
        finally:
            await self.shut_down()

    async def _run_evaluate(self) -> None:
        try:
            await self.setup()
            self._begin_tracking()
            await self.evaluate()
        finally:
            await self.shut_down()

    async def shut_down(self) -> None:
        """End what is in flight, wait until its sandboxes are released, close the servers."""
        tasks = [task for task in (*self.workers, *self.eval_workers, self.eval_runner) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.server.close()
        await self._end_tracking()
        self._close_groups()

    @classmethod
    def cli(cls) -> None:
        """The environment as a program: serve, process or evaluate, with --env.* and --openai.*."""
        from hermes_rl.env.program import main

        main(cls)


def _configs(given: ServerBaseline | Sequence[APIServerConfig] | APIServerConfig) -> list[APIServerConfig]:
    """Always a list: atroposlib takes anything else for its local ports 9004 to 9007 with the key "x"."""
    if isinstance(given, APIServerConfig):
        return [given]
    if isinstance(given, ServerBaseline):
        known = given.model_dump()
        return [APIServerConfig(**known, base_url=f"http://localhost:{port}/v1") for port in range(9004, 9008)]
    return list(given)


def _reasoning(config: HermesAgentEnvConfig) -> Reasoning | None:
    if config.reasoning_effort is None and config.max_reasoning_tokens is None and not config.thinking_mode:
        return None
    return Reasoning(effort=config.reasoning_effort, max_tokens=config.max_reasoning_tokens)
