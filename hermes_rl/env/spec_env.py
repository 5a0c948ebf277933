"""Compile a spec to an Atropos environment, `SpecEnv`, and run it as a program or in serve mode.

`runs` owns process and evaluate mode of plain specs; this module runs them only for subclasses with their own code.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple, cast

from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl.analysis.report import write_report_or_say
from hermes_rl.data.load import Rows, load_rows
from hermes_rl.data.rows import Row
from hermes_rl.env.base import HermesAgentBaseEnv
from hermes_rl.env.config import HermesAgentEnvConfig
from hermes_rl.env.custom_collection import items_of
from hermes_rl.env.hooks import call, require_not_overridden
from hermes_rl.env.processing import EnvLog
from hermes_rl.env.serve import EnvHooks, atropos_trainer, registration, require_exact, require_trajectory_api
from hermes_rl.env.servers import HermesServerManager, server_config
from hermes_rl.errors import RunError, UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.runs.deliveries import DELIVERIES, DeliveryLog
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.evaluate import (
    EvaluatePlan,
    Evaluation,
    evaluate,
    evaluation_directory,
    run_evaluate,
    write_evaluation,
)
from hermes_rl.runs.process import Processing, run_process
from hermes_rl.runs.progress import mode_of
from hermes_rl.runs.remaining import Curriculum
from hermes_rl.runs.renderer_check import tokenizer_of
from hermes_rl.runs.run import GroupRunner, RowSource, Run
from hermes_rl.runs.setup import (
    CustomHooks,
    RunOptions,
    SpecRun,
    budget_of,
    open_run,
    plan_of,
    require_effect,
    workers_of,
)
from hermes_rl.runs.store import RolloutStore
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.servers.base import POLICY
from hermes_rl.servers.factory import create_client
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.overrides import parse_extra_args
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tools.base import Toolkit
from hermes_rl.trainers.atropos import AtroposTrainer
from hermes_rl.trainers.base import Trainer
from hermes_rl.trainers.checks import Checks, TooLong
from hermes_rl.trainers.registry import own_trainer
from hermes_rl.trainers.serving import Serving, SharedTrainer, closed

logger = logging.getLogger(__name__)

_ANSWERED_BY_THE_SPEC = {
    name: f"the spec's `{section}` says that. Change the spec, or subclass HermesAgentBaseEnv, which has no spec"
    for name, section in {
        "_resolve_tools_for_group": "toolsets",
        "compute_reward": "rewards",
        "default_toolsets": "toolsets",
        "format_messages": "prompt",
        "format_prompt": "prompt",
        "sandbox_for": "sandbox",
    }.items()
}
"""Hooks that only environments without a spec may override, each with the alternative."""


class SpecEnv(HermesAgentBaseEnv):
    """Atropos environment of a spec; create a subclass with `compile_spec`."""

    spec: ClassVar[Spec]
    environ: ClassVar[Mapping[str, str] | None] = None
    _mode: ClassVar[Mode] = "serve"

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        require_not_overridden(type(self), SpecEnv, _ANSWERED_BY_THE_SPEC)
        self._compiled = CompiledSpec(self.spec, self.environ)
        self._own_servers = False
        """True if the policy's servers differ from the spec's servers."""
        self._wandb_mode = mode_of(self.spec.wandb) if self.spec.wandb else None
        super().__init__(config, server_configs, slurm, testing)
        self.wandb_project = self.spec.wandb.project if self.spec.wandb else None
        self._opened: SpecRun | None = None
        """Run that the environment is part of, or None."""
        self._training_rows: AsyncIterator[Row] | None = None
        self._evaluation_rows: Rows | None = None

    @classmethod
    def config_init(cls) -> tuple[Any, list[APIServerConfig]]:
        return env_config(cls.spec, cls._mode), server_configs(cls.spec)

    def _make_server(self, configs: list[APIServerConfig]) -> HermesServerManager:
        """Return the manager of the spec's policy, or of other servers if the constructor got any."""
        self._own_servers = configs != server_configs(self.spec)
        if self._own_servers:
            self._compiled.roles[POLICY] = create_client(POLICY, [server_config(config) for config in configs])
        return HermesServerManager(
            configs,
            server_class=self.server_cls,
            role=self._compiled.policy,
            sandbox=lambda: self._compiled.sandbox or SandboxConfig(),
        )

    def _make_core(self) -> CompiledSpec:
        return self._compiled

    def _own_code(self) -> CustomHooks:
        """Return the environment for a run, including the user code of a subclass."""
        if self._mode == "evaluate":
            return CustomHooks(self._compiled, self._compiled, servers=self._own_servers)
        items = RowSource(items_of(self, pauses=self._mode == "serve"))
        own_items = type(self).get_next_item is not SpecEnv.get_next_item
        return CustomHooks(self._compiled, self._environment(), items if own_items else None, self._own_servers)

    def _use(self, opened: SpecRun) -> None:
        """Make the environment part of a run, and use the run's store of rollouts."""
        self._opened = opened
        self._wandb_folder = opened.directory.path
        self._rollout_store = opened.store

    def _toolkit_for(self, group: str) -> Toolkit:
        """Return the spec's tools, including its own Python tools; tools of a state object belong to a rollout."""
        return self._compiled.tooling.shared(group)

    async def setup(self) -> None:
        """Load the training and evaluation rows, which may download them.

        Raises:
            UserError: the spec has no training rows, or asks for workers outside `hermes-rl run`.
        """
        if self._opened is None and workers_of(self.spec, self._mode) != 1:
            raise UserError(
                f"{self._mode}.workers: only `hermes-rl run` starts workers; remove the key for use in a program"
            )
        source = RowSource(await asyncio.to_thread(load_rows, self.spec, "train", notify=logger.warning))
        if self._mode != "evaluate":
            await self._compiled.open(await source.require_first("train"))
        self._training_rows = _repeat_rows(source)
        if self.spec.dataset.eval is not None:
            self._evaluation_rows = await asyncio.to_thread(load_rows, self.spec, "eval", notify=logger.warning)

    async def get_next_item(self) -> Row | None:
        """Return the next row of the training split, which repeats without end, or None if it has no rows."""
        if self._training_rows is None:
            await self.setup()
        assert self._training_rows is not None
        return await anext(self._training_rows, None)

    def curriculum_state(self) -> Any:
        """Return the curriculum's state as JSON, or None outside a run.

        Serve mode saves it at each step of the trainer. A subclass may override it for its own curriculum.
        """
        return self._opened.run.curriculum.state() if self._opened is not None else None

    def restore_curriculum(self, state: Any) -> None:
        """Restore the state that `curriculum_state` returned at the step from which the trainer resumes."""
        if self._opened is not None:
            self._opened.run.curriculum = Curriculum(self.spec.dataset.row_selection == "skip_uniform", state)

    def _state_at_step(self) -> Any:
        return {"curriculum": self.curriculum_state()}

    def _restore_state(self, state: Any) -> None:
        if state.get("curriculum") is not None:
            self.restore_curriculum(state["curriculum"])

    def _note_step(self) -> None:
        if self._opened is not None:
            self._opened.directory.add_images(self._compiled.images)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Evaluate on the evaluation split; write the metrics to wandb and to `eval/step-<N>` of the run directory.

        Raises:
            RunError: in evaluate mode, too many rollouts failed for a reliable result.
        """
        if self._evaluation_rows is None:
            logger.warning("skipping evaluation: the spec has no evaluation rows (dataset.eval)")
            return
        step = self.curr_step
        with ExitStack() as stack:
            if self._mode == "evaluate" and self._opened is not None:
                evaluation = await evaluate(self._opened.run, EvaluatePlan.from_spec(self.spec))
                directory = evaluation_directory(self.spec, self._opened.directory)
            else:
                # Discard earlier rollouts: the weights of an earlier run may differ at this step.
                parent = self._opened.directory.path if self._opened is not None else None
                folder = parent / "eval" / f"step-{step}" if parent else Path(stack.enter_context(TemporaryDirectory()))
                directory, plan = RunDirectory(folder), plan_of(self.spec, "evaluate")
                store = RolloutStore(directory, plan.size, compared=self._compiled.has_group_rewards)
                stack.enter_context(closing(store))
                store.clear()
                meter = self._opened.run.budget.meter if self._opened is not None else None
                budget = budget_of(self.spec, "evaluate", meter)
                workers = self._opened.workers if self._opened is not None else None
                run = Run(self._compiled, self._evaluation_rows, plan, store=store, budget=budget, workers=workers)
                evaluation = await evaluate(run, EvaluatePlan.from_spec(self.spec))
            await asyncio.to_thread(write_evaluation, evaluation, directory)
        if self._mode == "evaluate":
            evaluation.require_reliable()
        self._pending_metrics |= evaluation.metrics
        if self._opened is not None:
            mean = evaluation.metrics["eval/mean_reward"]
            self._opened.progress.note(f"step {step}: evaluation, mean reward {mean:.3f}")

    def load_checkpoint(self) -> None:
        """Load BaseEnv's checkpoint, but not in a run, whose own records replace it."""
        if self._opened is None:
            super().load_checkpoint()

    async def shut_down(self) -> None:
        await super().shut_down()
        await self._compiled.close()

    @classmethod
    async def _run_program(cls, mode: str, flags: list[str]) -> None:
        """Load the spec again with the flags, which have the same meaning as for `hermes-rl run`, and run it.

        Methods that a subclass of the compiled spec overrides are called in every mode.

        Raises:
            UserError: a flag is unknown or has no effect in this mode, or the spec is wrong.
            RunError: the run failed, or a budget ended it early.
        """
        chosen, spec = cast(Mode, mode), cls.spec
        require_effect(flags, chosen)
        if flags:
            changes = parse_extra_args(flags, ()).stack_on(spec.overrides)
            spec = load_spec(spec.source, overrides=changes, demo=spec.demo, environ=cls.environ, mode=chosen)
        launch = RunOptions(chosen, environ=cls.environ, at_end=write_report_or_say)
        if chosen == "serve":
            directory, stopped = await run_serve(spec, launch, with_spec(cls, spec, chosen))
            if stopped is not None:
                raise RunError(f"ended early: {stopped}. Run directory: {directory.path}")
        elif overridden(cls):
            directory = await run_subclass(with_spec(cls, spec, chosen), launch)
        else:
            outcome, directory = await (run_process if chosen == "process" else run_evaluate)(spec, launch)
            if outcome.stopped is not None:
                raise RunError(f"ended early: {outcome.stopped}. Run directory: {directory.path}")
            if isinstance(outcome, Evaluation):
                for name, value in outcome.metrics.items():
                    sys.stdout.write(f"{name.removeprefix('eval/')} {value:.4f}\n")
                outcome.require_reliable()
        launch.progress.note(f"run directory: {directory.path}")


async def _repeat_rows(source: RowSource) -> AsyncIterator[Row]:
    some = True
    while some:
        some = False
        async for row in source:
            some = True
            yield row


def compile_spec(spec: Spec, environ: Mapping[str, str] | None = None) -> type[SpecEnv]:
    """Return the environment class of a spec, a subclass of `atroposlib.envs.base.BaseEnv`.

    Create an instance with ``cls(*cls.config_init())``; ``cls.cli()`` is an Atropos environment program. An instance
    reads the keys of servers from `environ` (default: the process's environment) when it is created.
    """
    namespace = {"spec": spec, "environ": environ, "name": spec.name, "__doc__": spec.description}
    return type("SpecEnv", (SpecEnv,), namespace)


# ----------------------------------------------------------------- From a spec to Atropos' configuration classes

CONCURRENCY = 64
"""Number of concurrent rollouts if the spec sets none, for Atropos' own loops, which do not adapt it."""
MAX_TOKEN_LENGTH = 32768
"""Maximum number of tokens of a sequence if the spec sets none."""


def env_config(spec: Spec, mode: Mode = "serve") -> HermesAgentEnvConfig:
    """Return the configuration for a mode; fields without an own key in a spec come from the spec's `atropos:`."""
    serve, agent, toolsets = spec.serve, spec.agent_for(mode), spec.toolsets
    playing = spec.process if mode == "process" else serve
    fields: dict[str, Any] = {
        "group_size": playing.group_size,
        "total_steps": spec.process.groups if mode == "process" else serve.total_steps,
        "max_token_length": serve.max_token_length or MAX_TOKEN_LENGTH,
        "steps_per_eval": serve.eval_every or -1,
        "rollout_server_url": serve.api_url,
        "ensure_scores_are_not_same": playing.drop_uniform,
        "max_num_workers": max(1, (playing.concurrency or CONCURRENCY) // playing.group_size),
        "tokenizer_name": tokenizer_of(spec) or str(small_tokenizer_path()),
        "include_messages": True,
        "use_wandb": spec.wandb is not None and spec.wandb.mode != "disabled",
        "wandb_name": (spec.wandb.name if spec.wandb else None) or spec.name,
        "enabled_toolsets": list(toolsets.enabled),
        "disabled_toolsets": list(toolsets.disabled),
        "max_agent_turns": agent.max_turns,
        "eval_by": list(spec.evaluate.group_by),
        "agent_timeout": agent.timeout,
        "agent_task_timeout": agent.task_timeout,
        "agent_temperature": agent.temperature,
        "agent_max_tokens": agent.max_tokens,
        "extra_body": dict(agent.extra_body) or None,
        "terminal_backend": spec.sandbox.backend,
        "terminal_timeout": spec.sandbox.timeout,
        "seed": spec.seed,
    }
    return HermesAgentEnvConfig(**{**fields, **spec.atropos})


def server_configs(spec: Spec) -> list[APIServerConfig]:
    """Return one configuration per policy server, without API keys, which only the model client has."""
    return [
        APIServerConfig(
            model_name=server.model or "default",
            base_url=server.base_url or "",
            timeout=int(server.timeout),
            num_max_requests_at_once=server.max_concurrency,
            tokenizer_name=server.tokenizer or "none",
            server_type=server.type if server.type in ("openai", "vllm", "sglang") else "openai",
            health_check=False,
        )
        for server in spec.servers.get("policy", ())
    ]


# --------------------- Subclasses of a compiled spec as programs: their overrides apply in every mode

_NOT_HOOKS = {"spec", "environ", "name"}
"""Attributes that `compile_spec` itself defines."""


def overridden(cls: type[SpecEnv]) -> list[str]:
    """Return the members of `SpecEnv` or its base classes that a subclass of a compiled spec overrides, sorted."""
    derived_classes = cls.__mro__[: cls.__mro__.index(SpecEnv)]
    names = {name for cls in derived_classes for name in vars(cls) if not name.startswith("_") or name == "__init__"}
    return sorted(name for name in names - _NOT_HOOKS if hasattr(SpecEnv, name))


def with_spec(cls: type[SpecEnv], spec: Spec, mode: Mode) -> type[SpecEnv]:
    """Return a subclass of `cls` for another spec and mode, such as its own spec changed by command-line flags."""
    return type(cls.__name__, (cls,), {"spec": spec, "_mode": mode, "__module__": cls.__module__})


async def run_subclass(cls: type[SpecEnv], launch: RunOptions) -> RunDirectory:
    """Run process or evaluate mode with the hooks of the class, and return the run directory.

    Raises:
        UserError: the spec requires something that the class's own code cannot provide.
        RunError: the run failed.
    """
    env: Any = cls(*cls.config_init())
    try:
        custom_hooks = env._own_code()
        if isinstance(custom_hooks.environment, GroupRunner) and cls.spec.process.format != "atropos":
            raise UserError(
                f"process.format: {cls.spec.process.format} is made of rollouts, and {cls.__name__} collects groups by "
                "its own code: leave process.format out"
            )
        async with open_run(cls.spec, launch, custom_hooks) as opened:
            env._use(opened)
            await call(env.setup)
            env._begin_tracking()
            if launch.mode == "evaluate":
                env.config.data_dir_to_save_evals = env.config.data_dir_to_save_evals or str(opened.directory.path)
                await call(env.evaluate)
            else:
                assert opened.records.groups_file is not None
                work = Processing(opened.run, opened.records.groups_file, cls.spec.process.groups, EnvLog(env))
                await work.play(opened.records.changed)
            return opened.directory
    finally:
        await env.shut_down()


class Served(NamedTuple):
    """Result of serve mode: the run directory, and the budget that ended it early, or None if the trainer finished."""

    directory: RunDirectory
    stopped: str | None


async def run_serve(
    spec: Spec,
    launch: RunOptions,
    cls: type[SpecEnv] | None = None,
    *,
    together: SharedTrainer | None = None,
    before_registration: Callable[[], Awaitable[None]] | None = None,
) -> Served:
    """Serve a spec until the trainer that it names has finished its steps.

    Args:
        spec: the spec to serve.
        launch: the options of the run.
        cls: the spec's environment class; default: `compile_spec` creates it.
        together: the environments of this process that serve the same trainer; None: it is the only one.
        before_registration: a function awaited after everything is open, before the environment registers with the
        trainer.

    Raises:
        UserError: the spec cannot be served, or no trajectory API responds at its address.
        RunError: the trainer stopped responding.
    """
    require_exact(spec)
    trainer: Trainer | None = own_trainer(spec)
    cls = cls or compile_spec(spec, launch.environ)
    env = cls(*cls.config_init())
    try:
        if trainer is None:
            await require_trajectory_api(spec.serve.api_url)
            trainer = atropos_trainer(env.config, launch.progress)
        if env._encoder.tokenizer is None:
            raise UserError(f"serve needs the policy's tokenizer: {env._encoder.missing}. Set servers.policy.tokenizer")
        destination = spec.serve.api_url if isinstance(trainer, AtroposTrainer) else trainer.name
        launch.progress.note(f"serving {spec.name} to {destination}; waiting for a trainer")
        async with open_run(spec, launch, env._own_code()) as opened:
            env._use(opened)
            await call(env.setup)
            if before_registration is not None:
                await before_registration()
            serve, directory = spec.serve, opened.directory
            with closing(DeliveryLog(directory.journal(DELIVERIES), trainer.name)) as log:
                serving = Serving(
                    opened.run,
                    trainer,
                    registration(env),
                    log,
                    Checks(
                        group_size=serve.group_size,
                        exact=not serve.allow_inexact,
                        uniform=not serve.drop_uniform,
                        longest=serve.max_token_length,
                        max_staleness=serve.max_staleness,
                        keep_stale=serve.on_stale == "keep",
                        too_long=TooLong(serve.on_too_long, env._training_counts.sequences),
                        counts=env._training_counts.dropped,
                    ),
                    EnvHooks(env),
                    file=opened.records.groups_file,
                    version=opened.compiled.policy.weights,
                    together=together,
                )
                await serving.play()
            return Served(directory, None if serving.state.finished else serving.stopped)
    finally:
        if trainer is not None:
            await closed(trainer)
        await env.shut_down()
