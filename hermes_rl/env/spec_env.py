"""`SpecEnv`: the environment that a spec compiles to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl.data.load import Rows, load_rows
from hermes_rl.data.rows import Row
from hermes_rl.env.base import HermesAgentBaseEnv
from hermes_rl.env.items import items_of
from hermes_rl.env.servers import HermesServerManager, server_config
from hermes_rl.env.settings import env_config, server_configs
from hermes_rl.errors import UserError
from hermes_rl.rollouts.admission import Curriculum
from hermes_rl.rollouts.compiled import POLICY, CompiledSpec
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.evaluate import EvaluatePlan, evaluate, evaluation_directory, write_evaluation
from hermes_rl.runs.opening import OwnCode, SpecRun, budget_of, plan_of
from hermes_rl.runs.progress import mode_of
from hermes_rl.runs.run import RowSource, Run
from hermes_rl.runs.store import RolloutStore
from hermes_rl.servers.factory import create_client
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.tools.base import Toolkit

logger = logging.getLogger(__name__)

_ANSWERED_BY_THE_SPEC = {
    "compute_reward": "rewards",
    "default_toolsets": "toolsets",
    "format_messages": "prompt",
    "format_prompt": "prompt",
    "sandbox_for": "sandbox",
}
"""Hooks of environments without a spec, and the section that says the same."""


class SpecEnv(HermesAgentBaseEnv):
    """A spec as an Atropos environment. Make a subclass with `compile_spec`."""

    spec: ClassVar[Spec]
    environ: ClassVar[Mapping[str, str] | None] = None
    _mode: ClassVar[Mode] = "serve"

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        self._require_no_hook_that_the_spec_answers()
        self._compiled = CompiledSpec(self.spec, self.environ)
        self._wandb_mode = mode_of(self.spec.wandb) if self.spec.wandb else None
        super().__init__(config, server_configs, slurm, testing)
        self.wandb_project = self.spec.wandb.project if self.spec.wandb else None
        self._opened: SpecRun | None = None
        """The run that the environment is part of, where there is one."""
        self._training_rows: AsyncIterator[Row] | None = None
        self._evaluation_rows: Rows | None = None

    @classmethod
    def config_init(cls) -> tuple[Any, list[APIServerConfig]]:
        return env_config(cls.spec, cls._mode), server_configs(cls.spec)

    def _require_no_hook_that_the_spec_answers(self) -> None:
        for name, section in _ANSWERED_BY_THE_SPEC.items():
            if getattr(type(self), name) is not getattr(SpecEnv, name):
                raise UserError(
                    f"{type(self).__name__}.{name} is never called: the spec's `{section}` says that. Change the spec, "
                    "or subclass HermesAgentBaseEnv, which has no spec"
                )

    def _make_server(self, configs: list[APIServerConfig]) -> HermesServerManager:
        """The spec's own policy; other servers given to the constructor take its place."""
        if configs != server_configs(self.spec):
            self._compiled.roles[POLICY] = create_client(POLICY, [server_config(config) for config in configs])
        return HermesServerManager(configs, server_class=self.server_cls, role=self._compiled.policy)

    def _make_core(self) -> CompiledSpec:
        return self._compiled

    def _own_code(self) -> OwnCode:
        """The environment for a run, with the code of a subclass where there is any."""
        if self._mode == "evaluate":
            return OwnCode(self._compiled, self._compiled)
        items = RowSource(items_of(self, pauses=self._mode == "serve"))
        own_items = type(self).get_next_item is not SpecEnv.get_next_item
        return OwnCode(self._compiled, self._environment(), items if own_items else None)

    def _use(self, opened: SpecRun) -> None:
        """Be part of a run: its record is the environment's."""
        self._opened = opened
        self._wandb_folder = opened.directory.path
        self._rollout_store = opened.store

    def _toolkit_for(self, group: str) -> Toolkit:
        """The spec's tools, its own Python tools included; those of a state object belong to a rollout."""
        return self._compiled.tooling.shared(group)

    async def setup(self) -> None:
        """Load the rows of training and evaluation; may wait for a hub."""
        source = RowSource(await asyncio.to_thread(load_rows, self.spec, "train", notify=logger.warning))
        if self._mode != "evaluate":
            await self._compiled.open(await source.require_first("train"))
        self.server.sandbox = self._compiled.sandbox
        self._training_rows = _repeated(source)
        if self.spec.dataset.eval is not None:
            self._evaluation_rows = await asyncio.to_thread(load_rows, self.spec, "eval", notify=logger.warning)

    async def get_next_item(self) -> Row | None:
        """The next row of the training split, over and over; None where there is none."""
        if self._training_rows is None:
            await self.setup()
        assert self._training_rows is not None
        return await anext(self._training_rows, None)

    def curriculum_state(self) -> Any:
        """What of a curriculum is to be restored with the trainer's step, as JSON; a subclass may have its own."""
        return self._opened.run.curriculum.state() if self._opened is not None else None

    def restore_curriculum(self, state: Any) -> None:
        """Take up what `curriculum_state` gave at the step at which the trainer goes on."""
        if self._opened is not None:
            self._opened.run.curriculum = Curriculum(self.spec.dataset.sampling == "differing", state)

    def _state_at_step(self) -> Any:
        return {"curriculum": self.curriculum_state()}

    def _restore_state(self, state: Any) -> None:
        if state.get("curriculum") is not None:
            self.restore_curriculum(state["curriculum"])

    def _note_step(self) -> None:
        if self._opened is not None:
            self._opened.directory.add_images(self._compiled.images)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Evaluate on the evaluation split; the numbers go to wandb and to `eval/step-<N>` of the run directory."""
        if self._evaluation_rows is None:
            logger.warning("no evaluation: the spec keeps no rows for it (dataset.eval)")
            return
        step = self.curr_step
        with ExitStack() as stack:
            if self._mode == "evaluate" and self._opened is not None:
                found = await evaluate(self._opened.run, EvaluatePlan.of(self.spec))
                directory = evaluation_directory(self.spec, self._opened.directory)
            else:
                # Anew: the weights of an earlier run at this step may be others.
                parent = self._opened.directory.path if self._opened is not None else None
                folder = parent / "eval" / f"step-{step}" if parent else Path(stack.enter_context(TemporaryDirectory()))
                directory, plan = RunDirectory(folder), plan_of(self.spec, "evaluate")
                store = RolloutStore(directory, plan.size, compared=self._compiled.has_group_rewards)
                stack.enter_context(closing(store))
                store.clear()
                budget = budget_of(self.spec, "evaluate")
                run = Run(self._compiled, self._evaluation_rows, plan, store=store, budget=budget)
                found = await evaluate(run, EvaluatePlan.of(self.spec))
            await asyncio.to_thread(write_evaluation, found, directory)
        if self._mode == "evaluate":
            found.require_reliable()
        self._pending_metrics |= found.metrics
        if self._opened is not None:
            mean = found.metrics["eval/mean_reward"]
            self._opened.progress.note(f"step {step}: evaluation, mean reward {mean:.3f}")

    def load_checkpoint(self) -> None:
        """As BaseEnv's, where the record of the run does not know better."""
        if self._opened is None:
            super().load_checkpoint()

    async def shut_down(self) -> None:
        await super().shut_down()
        await self._compiled.close()


async def _repeated(source: RowSource) -> AsyncIterator[Row]:
    some = True
    while some:
        some = False
        async for row in source:
            some = True
            yield row


def compile_spec(spec: Spec, environ: Mapping[str, str] | None = None) -> type[SpecEnv]:
    """The environment class of a spec, a subclass of `atroposlib.envs.base.BaseEnv`.

    Make an instance with ``cls(*cls.config_init())``; ``cls.cli()`` is an Atropos environment program. Keys of servers
    are looked up in `environ` (default: the process's environment) when an instance is made.
    """
    namespace = {"spec": spec, "environ": environ, "name": spec.name, "__doc__": spec.description}
    return type("SpecEnv", (SpecEnv,), namespace)
