"""Base class of Atropos environments whose rollouts hermes-rl runs: `HermesAgentBaseEnv`.

A hand-written subclass defines `setup`, `get_next_item`, `format_prompt` (or `format_messages`), `compute_reward` and
`evaluate`; `SpecEnv` is the subclass that a spec compiles to. The class works around defects of atroposlib 0.4.0 by
overriding its public hooks; it does not patch the installed package.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, cast

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig, ServerBaseline

from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import AgentResult, Message
from hermes_rl.data.rows import Row
from hermes_rl.env.config import HermesAgentEnvConfig
from hermes_rl.env.custom_collection import (
    GROUP_ID,
    Collecting,
    CustomCollection,
    CustomPostprocessing,
    GroupTools,
    collecting,
)
from hermes_rl.env.hooks import author_error, call, convert_author_errors, require_not_overridden
from hermes_rl.env.loop_watchdog import Watchman
from hermes_rl.env.processing import process_by_hand
from hermes_rl.env.program import configured, main
from hermes_rl.env.serve import serve_environment
from hermes_rl.env.servers import HermesServer, HermesServerManager
from hermes_rl.env.tracking import Tracking
from hermes_rl.env.upstream_checks import require_lines_that_work
from hermes_rl.errors import AgentFault, RewardFailure, UserError
from hermes_rl.rollouts.compiled import with_thinking
from hermes_rl.rollouts.environment import EndingPolicy, Environment
from hermes_rl.rollouts.rollout import Encoder, Rollout, RolloutKey
from hermes_rl.runs.metrics import BY
from hermes_rl.runs.statistics import clustered_stderr, mean
from hermes_rl.runs.wandb_text import readable
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.isolation import require_by_hand
from hermes_rl.scoring.reward_function import RewardFunction, call_reward
from hermes_rl.scoring.reward_value import RewardValue, interpret
from hermes_rl.servers.base import ReasoningOptions
from hermes_rl.spec.model import Mode
from hermes_rl.stop_reasons import StopReason
from hermes_rl.terminal_text import escape_controls
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tools.base import CLOUD, Toolkit, ToolRuntime
from hermes_rl.tools.catalogue import drawable, resolve_toolsets, sample_distribution, toolkit_of
from hermes_rl.tools.context import ToolContext
from hermes_rl.values import is_number

# ------------------ Adapting a hand-written environment's hooks to the `Environment` interface

REWARD = "reward"
"""Reward name under which the value of `compute_reward` is recorded."""


def sandbox_config(config: Any) -> SandboxConfig:
    """Return the sandbox that the configuration's `terminal_*` fields describe."""
    backend = "bubblewrap" if config.terminal_backend == "local" else config.terminal_backend
    network = config.terminal_network
    if network is None:
        network = config.terminal_backend in CLOUD
    return SandboxConfig(
        backend=backend,
        image=config.terminal_image,
        workdir=config.terminal_workdir,
        env=dict(config.terminal_env),
        network=network if isinstance(network, bool) else tuple(network),
        timeout=config.terminal_timeout,
        lifetime=config.terminal_lifetime,
    )


class HandWritten:
    """Adapter that implements `Environment` with a hand-written environment's hooks and configuration."""

    has_group_rewards = False
    teacher = None
    """Teacher, which only a spec can have."""

    def __init__(self, env: HermesAgentBaseEnv) -> None:
        self._env = env
        self.name = env.name or type(env).__name__
        self.seed = env.config.seed

    @property
    def policy(self) -> Any:
        return self._env.server

    async def user(self, key: RolloutKey, runtime: ToolRuntime) -> None:
        """Return None: there is no simulated user; an environment with one runs the conversation in its own code."""

    def program(self, key: RolloutKey, runtime: ToolRuntime, context: Any) -> None:
        """Return None: there is no agent program, since the built-in loop or the environment's own code runs."""

    def options(self, split: str) -> LoopOptions:
        config = self._env.config
        return LoopOptions(
            max_turns=config.max_agent_turns,
            timeout=config.agent_timeout,
            task_timeout=config.agent_task_timeout,
            tool_timeout=max(300.0, config.terminal_timeout),
            max_tokens=config.agent_max_tokens or config.max_token_length,
            temperature=config.agent_temperature,
            reasoning=self._env._reasoning_settings,
            extra_body=config.extra_body,
            results=config.build_budget_config(),
        )

    def prompt(self, row: Row) -> list[Message]:
        method = self._env.format_messages
        with convert_author_errors(method):
            messages = method(row.columns)
        if not messages or not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise author_error(method, f"returned {str(messages)[:200]!r}, not a list of messages")
        return with_thinking(messages, self._env.config.custom_thinking_prompt)

    @asynccontextmanager
    async def runtime(self, key: RolloutKey) -> AsyncIterator[ToolRuntime]:
        toolkit = self._env._tools_of_group(key.group)
        with convert_author_errors(self._env.sandbox_for):
            sandbox = self._env.sandbox_for(key.row.columns)
        require_by_hand(sandbox.backend, self.name)
        # Two equal items may run at the same time, so the row's key is not unique.
        name = f"{key.id}-{uuid.uuid4().hex[:8]}"
        async with ToolRuntime(sandbox, task_id=name, toolkit=toolkit, run=True) as runtime:
            yield runtime

    async def grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        reward = replace(RewardFunction.from_function(REWARD, self._env.compute_reward), on_loop=True)
        arguments = {
            "item": rollout.key.row.columns,
            "result": rollout.result.copied() if rollout.result is not None else None,
            "ctx": ToolContext(runtime.task_id),
        }
        names = list(reward.parameters)[: len(arguments)]
        try:
            returned, seconds = await call_reward(reward, dict(zip(names, arguments.values(), strict=True)))
        except AgentFault as fault:
            rollout.rewards[REWARD] = RewardValue(0.0, reason=str(fault))
            return
        turns = rollout.result.turns_used if rollout.result is not None else 0
        rollout.rewards[REWARD] = interpret(REWARD, returned, seconds, turns).timed(seconds)

    async def grade_group(self, rollouts: list[Rollout]) -> None:
        """Do nothing: hand-written environments compare rollouts in `postprocess_histories`."""

    def score(self, rollout: Rollout) -> float:
        value = rollout.rewards[REWARD].value
        if value is None:
            raise RewardFailure("compute_reward returned None: it could not tell")
        return value

    def credit(self, rollout: Rollout) -> tuple[float, ...] | None:
        return rollout.rewards[REWARD].per_turn

    def on_stop_policy(self, stop_reason: StopReason) -> EndingPolicy:
        return "grade"


def _is_message(message: object) -> bool:
    """Return True if an object is a message: it has a role, and text, content parts or tool calls."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str | list) or bool(message.get("tool_calls"))


# -------------------------------------------------------------------------------- base

logger = logging.getLogger(__name__)

GROUPS = 1024
"""Number of groups whose tools are cached, so that members that start later get the same tools."""

_NEVER_CALLED = {
    "add_train_workers": "a group starts as soon as the trainer, the servers and the machine have capacity",
    "env_step_checks": "override evaluate, save_checkpoint or wandb_log",
    "get_server_info": "the trainer's answer is taken as it comes",
    "get_status": "the trainer's answer is taken as it comes",
    "handle_env": "override collect_trajectories or postprocess_histories",
    "handle_send_to_api": "override postprocess_histories, which has the last word on a group",
    "register_env": "override setup",
}
"""Methods of BaseEnv's loops that are never called here, each with the alternative."""


class HermesAgentBaseEnv(Collecting, Tracking, BaseEnv):  # type: ignore[misc]
    """Agent environment for Atropos, with tools, one sandbox per rollout, and a reward.

    Args:
        config: the environment's configuration.
        server_configs: the configurations of the policy's servers; a bare `ServerBaseline` means atroposlib's local
            ports 9004 to 9007.
        slurm, testing: not supported.

    Raises:
        UserError: the class or the configuration cannot work here.
    """

    name: str | None = None
    env_config_cls: Any = HermesAgentEnvConfig
    server_cls: Any = HermesServer
    default_toolsets: ClassVar[list[str] | None] = None
    """Toolsets to use if the configuration names none."""
    _mode: ClassVar[Mode | None] = None
    """Mode in which a spec runs; None for hand-written environments, whose mode is not known here."""

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: ServerBaseline | Sequence[APIServerConfig] | APIServerConfig,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        if slurm or testing:
            raise UserError(
                "slurm and testing are not supported: name the servers, or use a scripted policy to run offline"
            )
        configs = _server_configs(server_configs)
        self._evaluated: dict[str, Any] = {}
        """Metrics of the last evaluation."""
        config = config.model_copy()  # do not change the caller's configuration
        if config.wandb_name is None:
            config.wandb_name = self.name or type(self).__name__  # run-api rejects an environment without a name
        if config.group_size == 1:
            config.ensure_scores_are_not_same = False  # a group of one is always uniform, and would never be sent
        require_not_overridden(type(self), BaseEnv, _NEVER_CALLED)
        if self._mode != "evaluate":  # only a spec has this mode; rewards of user code may access any sandbox
            require_by_hand(config.terminal_backend, type(self).__name__)
        require_lines_that_work(type(self), HermesAgentBaseEnv, config.terminal_backend)
        self.config = config
        self._encoder = Encoder.load(config.tokenizer_name)
        self._initialise_base(config, configs)
        self._reasoning_settings = _reasoning_options(config)
        self.server = self._make_server(configs)
        self._core: Environment = self._make_core()
        self._group_numbers = itertools.count()
        self._resolved = lru_cache(GROUPS)(self._resolve_for)

    def _environment(self) -> Environment:
        """Return the environment for a run, including the user code of a subclass."""
        cls, core = type(self), self._core
        base_methods = (HermesAgentBaseEnv.collect_trajectory, HermesAgentBaseEnv.collect_trajectories)
        if (cls.collect_trajectory, cls.collect_trajectories) != base_methods:
            return cast(Environment, CustomCollection(self, core))
        if cls.postprocess_histories is not BaseEnv.postprocess_histories:
            return cast(Environment, CustomPostprocessing(self, core))
        return core

    def _initialise_base(self, config: HermesAgentEnvConfig, configs: list[APIServerConfig]) -> None:
        """Run BaseEnv's constructor with temporary values for the output file and for an unavailable tokenizer.

        The constructor would rename an existing output file, to which hermes-rl appends, and would fail if a hub is
        unreachable.
        """
        attributes = {
            "data_path_to_save_groups": config.data_path_to_save_groups,
            "tokenizer_name": config.tokenizer_name,
        }
        config.data_path_to_save_groups = None
        if self._encoder.tokenizer is None:
            config.tokenizer_name = str(small_tokenizer_path())
        super().__init__(config, configs)
        if self._encoder.tokenizer is None:
            self.tokenizer = None  # better no tokenizer than that of another model
        for name, value in attributes.items():
            setattr(config, name, value)

    # ------------------------------------------------------------------ hooks of a hand-written environment

    @abstractmethod
    async def setup(self) -> None:
        """Load the environment's data; called before all other hooks."""

    @abstractmethod
    async def get_next_item(self) -> Any:
        """Return the next item to run; None pauses (serve mode) or ends (process mode) the run."""

    def format_prompt(self, item: Any) -> str:
        """Return the first user message for an item."""
        raise UserError(f"{type(self).__name__} defines neither format_prompt nor format_messages")

    def format_messages(self, item: Any) -> list[Message]:
        """Return the first messages of a rollout: the configured system prompt and the text of `format_prompt`."""
        system = self.config.system_prompt
        first = [{"role": "system", "content": system}] if system else []
        with convert_author_errors(self.format_prompt):
            prompt = self.format_prompt(item)
        if not isinstance(prompt, str):
            raise author_error(self.format_prompt, f"returned {type(prompt).__name__}, not a text")
        return [*first, {"role": "user", "content": prompt}]

    def sandbox_for(self, item: Any) -> SandboxConfig:
        """Return the sandbox of an item: by default as the configuration's `terminal_*` fields describe it.

        Override this method if items have their own image, files, variables or working directory:
        ``dataclasses.replace(super().sandbox_for(item), image=item["docker_image"])``.
        """
        return sandbox_config(self.config)

    async def compute_reward(self, item: Any, result: AgentResult, ctx: Any) -> Any:
        """Return the reward of a rollout, on the event loop of `setup`.

        Calls of `ctx` need no await and do not block other rollouts. Other work without await (a computation,
        `requests`) blocks all rollouts: define the method without async, so that it runs in a worker thread. Raise an
        exception if the reward cannot be determined: the rollout is then retried, and never scored 0.
        """
        raise UserError(f"{type(self).__name__} does not define compute_reward")

    # ------------------------------------------------------------------ parts that a subclass may override

    def _make_server(self, configs: list[APIServerConfig]) -> Any:
        """Return the object for `self.server`."""
        return HermesServerManager(
            configs,
            server_class=self.server_cls,
            reasoning_config=ReasoningConfig.from_env_config(self.config),
            tool_parser=self.config.tool_call_parser if "tool_call_parser" in self.config.model_fields_set else None,
            sandbox=lambda: sandbox_config(self.config),
        )

    def _make_core(self) -> Environment:
        """Return the implementation of `Environment` that runs use."""
        return HandWritten(self)

    def _use_managed_server(self) -> bool:
        """Return True if the servers report the tokens that they sampled, as a managed server requires."""
        return bool(self.server.token_level)

    def _resolve_tools_for_group(self) -> GroupTools:
        """Return tool schemas and valid tool names for the current group, or for a new group outside a run."""
        toolkit = self._toolkit_for(GROUP_ID.get() or f"group-{next(self._group_numbers)}")
        return toolkit.schemas, set(toolkit.names)

    def _resolve_for(self, group: str) -> Toolkit:
        with collecting(group), convert_author_errors(self._resolve_tools_for_group):
            schemas, names = self._resolve_tools_for_group()
        return toolkit_of(schemas, names, self._toolkit_for(group))

    def _tools_of_group(self, group: str) -> Toolkit:
        """Return the tools of a group; `_resolve_tools_for_group` is called once for all of its members."""
        if not self._current_group_tools:
            return self._resolved(group)
        return toolkit_of(*self._current_group_tools, self._toolkit_for(group))

    def _toolkit_for(self, group: str) -> Toolkit:
        """Return the tools of a group; a distribution is sampled with the seed and the group's id, once per group."""
        config = self.config
        enabled = config.enabled_toolsets if config.enabled_toolsets is not None else self.default_toolsets
        if config.distribution is not None:
            enabled = list(sample_distribution(config.distribution, f"{config.seed}:{group}"))
        elif enabled is None:
            logger.warning("%s: enabled_toolsets is not set, so every available toolset is used", self.name)
        return Toolkit(resolve_toolsets(enabled, config.disabled_toolsets or ()))

    def _require_toolsets(self) -> None:
        """Raise `UserError` if a configured toolset does not exist, or lacks a key or a program.

        Check every toolset of a distribution, since a rarely drawn one would otherwise fail after hours.
        """
        config = self.config
        toolsets = config.enabled_toolsets if config.distribution is None else drawable(config.distribution)
        if toolsets is not None:
            resolve_toolsets(toolsets, config.disabled_toolsets or ())

    def _state_at_step(self) -> Any:
        """Return the state to restore when a trainer resumes at the current step, as JSON, or None."""
        return None

    def _restore_state(self, state: Any) -> None:
        """Restore the state that `_state_at_step` returned."""

    def _note_step(self) -> None:
        """Update records after the trainer's step has changed; by default do nothing."""

    # ------------------------------------------------------------------ logging

    _format_trajectory_for_display = staticmethod(readable)

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """Save readable text of the first rollouts of a group for the next wandb log."""
        keep = self.config.num_rollouts_per_group_for_logging
        count = len(scored_data["scores"]) if keep == -1 else keep
        messages = scored_data.get("messages") or [[]] * count
        pairs = zip(messages[:count], scored_data["scores"][:count], strict=True)
        format_conversation = self._format_trajectory_for_display
        self.rollouts_for_wandb.append([(format_conversation(conversation), score) for conversation, score in pairs])
        if len(self.rollouts_for_wandb) > self.config.num_rollouts_to_keep:
            self.rollouts_for_wandb.pop(0)

    async def evaluate_log(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log an evaluation as BaseEnv does, with metrics by the columns of `eval_by`; see `metrics_by_column`.

        In serve mode, the evaluation of each step has its own directory.
        """
        samples = args[5] if len(args) > 5 else kwargs.get("samples")  # the position in BaseEnv's signature
        metrics = {**metrics, **metrics_by_column(samples or (), self.config.eval_by)}
        self._evaluated = metrics
        folder = self.config.data_dir_to_save_evals
        if folder is not None and hasattr(self, "env_id"):
            self.config.data_dir_to_save_evals = str(Path(folder) / f"step-{self.curr_step}")
        try:
            await super().evaluate_log(metrics, *args, **kwargs)
        finally:
            self.config.data_dir_to_save_evals = folder

    # ------------------------------------------------------------------ modes

    async def env_manager(self) -> None:
        """Serve until the trainer has finished its steps; release all resources, also if cancelled."""
        async with self._set_up():
            await serve_environment(self)

    async def process_manager(self) -> None:
        """Write groups, several concurrently, until the file has `total_steps`; a failed group does not end the run."""
        async with self._set_up():
            self._begin_tracking()
            await process_by_hand(self)

    async def _run_evaluate(self) -> None:
        async with self._set_up():
            self._begin_tracking()
            await call(self.evaluate)
        self.server.require_no_failed_loops()
        appended = [pair for pair in getattr(self, "eval_metrics", ()) if isinstance(pair, tuple) and len(pair) == 2]
        numbers = {**dict(appended), **self._evaluated}
        for name, value in numbers.items():
            sys.stdout.write(f"{escape_controls(str(name))} {value:.4f}\n" if is_number(value) else "")
        if not numbers:
            sys.stderr.write("evaluate() gave no numbers: call self.evaluate_log(metrics) in it\n")

    @asynccontextmanager
    async def _set_up(self) -> AsyncIterator[None]:
        """Set up the environment for the block, and warn of methods that block the event loop."""
        self._require_toolsets()
        with Watchman(type(self)):
            try:
                await call(self.setup)
                yield
            finally:
                await self.shut_down()

    async def shut_down(self) -> None:
        """Close the servers and finish the wandb run."""
        await self.server.close()
        await self._end_tracking()

    @classmethod
    def cli(cls) -> None:
        """Run the environment as a program: serve, process or evaluate mode, with --env.* and --openai.* flags."""
        main(cls)

    @classmethod
    async def _run_program(cls, mode: str, flags: list[str]) -> None:
        """Create the environment with the flags of a command line, and run one of its modes."""
        config, servers = configured(cls, flags)
        if mode == "process":
            config.data_path_to_save_groups = config.data_path_to_save_groups or f"data/{cls.name or 'groups'}.jsonl"
        if inspect.isabstract(cls):
            raise UserError(f"{cls.__name__} does not define {', '.join(sorted(cls.__abstractmethods__))}")
        with convert_author_errors(cls.__init__):
            env = cls(config, servers)
        await {"serve": env.env_manager, "process": env.process_manager, "evaluate": env._run_evaluate}[mode]()


_SCORES = ("score", "reward", "passed")
"""Keys that a hand-written evaluation may use for the score of a sample."""


def metrics_by_column(samples: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, float]:
    """Return the mean score, its standard error and the number of scored samples for each value of each column.

    Raises:
        UserError: the samples lack a column, or a score.
    """
    metrics: dict[str, float] = {}
    sample_columns = sorted({name for sample in samples for name in sample})
    score = next((name for name in _SCORES if name in sample_columns), None)
    for column in columns:
        if column not in sample_columns or score is None:
            lack = f"column {column!r}" if column not in sample_columns else f"score ({', '.join(_SCORES)})"
            raise UserError(
                f"eval_by: the samples of the evaluation have no {lack}; they have {', '.join(sample_columns)}"
            )
        values: dict[str, list[float]] = {}
        for sample in samples:
            if sample.get(score) is not None:
                values.setdefault(str(sample.get(column)), []).append(float(sample[score]))
        for value, scores in sorted(values.items()):
            figures = {
                "mean_reward": mean(scores),
                "mean_reward_stderr": clustered_stderr([[score] for score in scores]),
            }
            figures["rows"] = float(len(scores))
            metrics |= {f"{BY}{column}/{value}/{name}": one for name, one in figures.items() if one is not None}
    return metrics


def _server_configs(servers: ServerBaseline | Sequence[APIServerConfig] | APIServerConfig) -> list[APIServerConfig]:
    """Return the servers as a list; anything else atroposlib reads as its local ports 9004 to 9007 with the key "x"."""
    if isinstance(servers, APIServerConfig):
        return [servers]
    if isinstance(servers, ServerBaseline):
        server_fields = servers.model_dump()
        return [APIServerConfig(**server_fields, base_url=f"http://localhost:{port}/v1") for port in range(9004, 9008)]
    return list(servers)


def _reasoning_options(config: HermesAgentEnvConfig) -> ReasoningOptions | None:
    if config.reasoning_effort is None and config.max_reasoning_tokens is None and not config.thinking_mode:
        return None
    return ReasoningOptions(effort=config.reasoning_effort, max_tokens=config.max_reasoning_tokens)
