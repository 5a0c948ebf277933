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
from hermes_rl.env.sending import GroupsWriter
from hermes_rl.env.served import PlacedRow, Served
from hermes_rl.env.servers import HermesServerManager, server_config
from hermes_rl.env.settings import env_config, server_configs
from hermes_rl.env.too_long import TooLong
from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.rollouts.admission import Admission, admission
from hermes_rl.rollouts.compiled import POLICY, CompiledSpec
from hermes_rl.rollouts.curriculum import Curriculum
from hermes_rl.rollouts.quarantine import Quarantine
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.directory import Journal, RunDirectory
from hermes_rl.runs.evaluate import EvaluatePlan, evaluate, write_evaluation
from hermes_rl.runs.opening import budget_of, plan_of
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.rows import RowSource
from hermes_rl.runs.run import Run
from hermes_rl.runs.store import RolloutStore
from hermes_rl.servers.factory import create_role
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.tools.toolkit import Toolkit

logger = logging.getLogger(__name__)

_ANSWERED_BY_THE_SPEC = {
    "compute_reward": "rewards",
    "default_toolsets": "toolsets",
    "format_messages": "prompt",
    "format_prompt": "prompt",
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
        self._wandb_mode = self.spec.wandb.mode if self.spec.wandb else "online"
        super().__init__(config, server_configs, slurm, testing)
        self.wandb_project = self.spec.wandb.project if self.spec.wandb else None
        serve = self.spec.serve
        self._longest_sent, self._allow_inexact = serve.max_token_length, serve.allow_inexact
        self._max_staleness, self._keep_stale = serve.max_staleness, serve.on_stale == "keep"
        self._admission = self._admission_of_the_spec()
        self._too_long = TooLong(serve.on_too_long, self._sequence_counts)
        self._run_directory: RunDirectory | None = None
        self._progress = Progress(quiet=True)
        self._served: Served | None = None
        """What an earlier start has left, where there is a run directory."""
        self._quarantine = Quarantine()
        self._training_rows: AsyncIterator[Row] | None = None
        self._evaluation_rows: Rows | None = None
        self._curriculum = Curriculum(self.spec.dataset.sampling == "differing")
        self._position = 0
        """Rows handed out so far; saved with the trainer's checkpoints."""
        self._rows_per_pass = 0
        self._rows_taken = 0
        """Rows taken from `_rows`; Atropos loads a checkpoint only after `setup`."""

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
            self._compiled.roles[POLICY] = create_role(POLICY, [server_config(config) for config in configs])
        return HermesServerManager(configs, server_class=self.server_cls, role=self._compiled.policy)

    def _admission_of_the_spec(self) -> Admission | None:
        """As many rollouts as are carried, unless the spec, or Atropos' own field, fixes their number."""
        number = self.spec.serve.concurrency
        found = admission(number, self._compiled.policy)
        return found if number is None and "max_num_workers" not in self.spec.env else None

    async def _weights_now(self) -> int | None:
        return await self._compiled.policy.weights()

    def _make_core(self) -> CompiledSpec:
        return self._compiled

    def _toolkit_for(self, group: str) -> Toolkit:
        """The spec's tools, its own Python tools included; those of a state object belong to a rollout."""
        return self._compiled.tooling.shared(group)

    async def setup(self) -> None:
        """Load the rows of training and evaluation; may wait for a hub."""
        rows = await asyncio.to_thread(load_rows, self.spec, "train", notify=logger.warning)
        source = RowSource(rows)
        await self._compiled.open(await source.require_first("train"))
        self.server.sandbox = self._compiled.sandbox
        if self._run_directory is not None:
            offered = self._compiled.tooling.fingerprints
            self._run_directory.add({"dataset": {"fingerprint": rows.fingerprint}, "tool_servers": offered})
        self._training_rows, self._rows_taken, self._rows_per_pass = _repeated(source), 0, rows.length or 1_000_000
        if self.spec.dataset.eval is not None:
            self._evaluation_rows = await asyncio.to_thread(load_rows, self.spec, "eval", notify=logger.warning)

    async def get_next_item(self) -> Row | None:
        """The next row of the training split, over and over, but those that are set aside or were sent already."""
        if self._training_rows is None:
            await self.setup()
        assert self._training_rows is not None
        passed_by = 0
        while (following := await anext(self._training_rows, None)) is not None:
            row, number = following, self._rows_taken
            self._rows_taken += 1
            if row.key in self._quarantine:
                passed_by += 1
                if passed_by > self._rows_per_pass:
                    return None  # every row is set aside
            elif number >= self._position:
                self._position = number + 1
                if not self._curriculum.wants(row.key, number // self._rows_per_pass):
                    continue
                placed = PlacedRow(row.key, row.columns, row.index, row.digest, number)
                if self._served is None or not self._served.settled(placed.group):
                    return placed
        return None

    def _number_of(self, item: Any, count: int) -> int:
        return item.number if isinstance(item, PlacedRow) else count

    def _seated_for_a_trainer(self, item: Any) -> tuple[Row, str]:
        """A row has its group's id from its place among all, so that a restart finds its rollouts again."""
        known = self._served is not None and isinstance(item, PlacedRow)
        return (item, item.group) if known else super()._seated_for_a_trainer(item)

    def curriculum_state(self) -> Any:
        """What of a curriculum is to be restored with the trainer's step, as JSON; a subclass may have its own."""
        return self._curriculum.state()

    def restore_curriculum(self, state: Any) -> None:
        """Take up what `curriculum_state` gave at the step at which the trainer goes on."""
        self._curriculum = Curriculum(self.spec.dataset.sampling == "differing", state)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Evaluate on the evaluation split; the numbers go to wandb and to `eval/step-<N>` of the run directory."""
        if self._evaluation_rows is None:
            logger.warning("no evaluation: the spec keeps no rows for it (dataset.eval)")
            return
        step = self.curr_step
        try:
            metrics = await self._evaluated(self._evaluation_rows, step)
        except HermesRLError as error:
            if self._mode == "evaluate":
                raise
            # Atropos never looks at the result of an evaluation, so a failure has to be said here.
            logger.error("the evaluation at step %d failed: %s", step, error)
            return
        self._pending_metrics |= metrics
        self._progress.note(f"step {step}: evaluation, mean reward {metrics['eval/mean_reward']:.3f}")

    async def _evaluated(self, rows: Rows, step: int) -> dict[str, float]:
        """Evaluate into the step's folder; anew, as the weights of an earlier run at this step may be others.

        In evaluate mode the run directory itself is the folder, and a run that was cut short goes on.
        """
        with ExitStack() as stack:
            parent = self._run_directory.path if self._run_directory is not None else None
            within = Path() if self._mode == "evaluate" else Path("eval") / f"step-{step}"
            folder = parent / within if parent else Path(stack.enter_context(TemporaryDirectory()))
            directory, plan = RunDirectory(folder), plan_of(self.spec, "evaluate")
            store = RolloutStore(directory, plan.size, compared=self._compiled.has_group_rewards)
            stack.enter_context(closing(store))
            if self._mode != "evaluate":
                store.clear()
            budget = budget_of(self.spec, "evaluate")
            found = await evaluate(
                Run(self._compiled, rows, plan, store=store, budget=budget), EvaluatePlan.of(self.spec)
            )
            await asyncio.to_thread(write_evaluation, found, directory)
            if self._mode == "evaluate":
                found.require_reliable()
            return found.metrics

    def _record_to(self, directory: RunDirectory, progress: Progress, *, send: bool = True) -> None:
        """Keep every rollout, sent group and evaluation of training in this run directory, and say how it goes.

        What an earlier start has left there is gone on with. Without `send` the groups are for whoever writes them.
        """
        self._run_directory, self._progress = directory, progress
        self._wandb_folder = directory.path
        self._served = Served(directory, self._compiled, self.config.group_size, drop=self.spec.serve.drop_uniform)
        self._rollout_store = self._served.store
        moved = self.spec.env.get("data_path_to_save_groups")
        if send:
            self.jsonl_writer = _GroupsWriter(self, directory.journal(Path(moved) if moved else "groups.jsonl"))
        for role in self._compiled.roles.values():
            role.tell(progress.note)

    def _track_group(self, group: Group) -> None:
        self._curriculum.count(group.row.key, [rollout.score for rollout in group.rollouts])
        if self._quarantine.count(group):
            self._progress.note(f"row {group.row.key} is set aside: it failed again and again ({group.detail})")

    async def register_env(self) -> None:
        """As BaseEnv's; then what the trainer has not received is offered again."""
        await super().register_env()
        if self._served is None:
            return
        mark, lost = await self._served.restore(self.config.rollout_server_url, self.curr_step, self.env_id)
        self._position = 0
        self._quarantine = Quarantine(mark.state.get("quarantined") or ())
        if mark.state.get("curriculum") is not None:
            self.restore_curriculum(mark.state["curriculum"])
        if self._served.place.sent or lost:
            said = f", {lost} groups that it had not received are sent again" if lost else ""
            self._progress.note(f"going on at step {self.curr_step}{said}; nothing that was played is played again")

    def load_checkpoint(self) -> None:
        """As BaseEnv's, where the run directory does not know better."""
        if self._served is None:
            super().load_checkpoint()

    async def env_step_checks(self) -> None:
        """As BaseEnv's; each step of the trainer is marked with what it has received."""
        if self._served is not None and self.curr_step != self.status_dict["current_step"]:
            state = {"quarantined": self._quarantine.record(), "curriculum": self.curriculum_state()}
            await self._served.mark(self.config.rollout_server_url, self.status_dict, state)
            self._say_images()
        await super().env_step_checks()

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        parts = scored_data if isinstance(scored_data, list) else [scored_data]
        groups = list(dict.fromkeys(part["group"] for part in parts if "group" in part))
        if self._served is None or len(groups) != 1:
            await super()._send_scored_data_to_api(scored_data)
            return
        async with self._served.sending(groups[0]):
            await super()._send_scored_data_to_api(scored_data)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save the place in the dataset with the trainer's checkpoint; BaseEnv loads each entry as an attribute."""
        super().save_checkpoint(step, {"_position": self._position, **(data or {})})

    async def shut_down(self) -> None:
        await super().shut_down()
        await self._compiled.close()
        self._say_images()
        if self._served is not None:
            self._served.close()

    def _say_images(self) -> None:
        if self._run_directory is not None:
            self._run_directory.add_images(self._compiled.images)


class _GroupsWriter(GroupsWriter):
    """Says how it goes with every group."""

    def __init__(self, env: SpecEnv, journal: Journal) -> None:
        super().__init__(journal)
        self._env, self._sent = env, 0
        self._written = {line["group"] for line in journal.read() if "group" in line}

    async def keep(self, groups: list[dict[str, Any]]) -> None:
        if groups[0].get("group") not in self._written:  # what is sent again is in the file
            await super().keep(groups)
        self._sent += sum(not group.get("layer") for group in groups)
        self._env._progress.show(f"step {self._env.curr_step} · {self._sent} groups sent", groups[0]["scores"])


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
