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
from hermes_rl.errors import HermesRLError
from hermes_rl.rollouts.admission import Admission, admission
from hermes_rl.rollouts.compiled import POLICY, CompiledSpec
from hermes_rl.rollouts.curriculum import Curriculum
from hermes_rl.rollouts.groups import repeated
from hermes_rl.rollouts.quarantine import Quarantine
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.runs.directory import Journal, RunDirectory
from hermes_rl.runs.evaluate import evaluate
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.launch import budget, evaluate_plan, write_evaluation
from hermes_rl.runs.progress import Progress
from hermes_rl.servers.factory import create_role
from hermes_rl.spec.model import Spec
from hermes_rl.tools.toolkit import Toolkit

logger = logging.getLogger(__name__)


class SpecEnv(HermesAgentBaseEnv):
    """A spec as an Atropos environment. Make a subclass with `compile_spec`."""

    spec: ClassVar[Spec]
    environ: ClassVar[Mapping[str, str] | None] = None

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        self.compiled = CompiledSpec(self.spec, self.environ)
        self.wandb_mode = self.spec.wandb.mode if self.spec.wandb else "online"
        super().__init__(config, server_configs, slurm, testing)
        self.wandb_project = self.spec.wandb.project if self.spec.wandb else None
        serve = self.spec.serve
        self.longest_sent, self.allow_inexact = serve.max_token_length, serve.allow_inexact
        self.max_staleness, self.keep_stale = serve.max_staleness, serve.on_stale == "keep"
        self.admission = self._admission()
        self.too_long = TooLong(serve.on_too_long, self.sequence_counts)
        self.directory: RunDirectory | None = None
        self.progress = Progress(quiet=True)
        self.served: Served | None = None
        """What an earlier start has left, where there is a run directory."""
        self.quarantine = Quarantine()
        self._rows: AsyncIterator[tuple[Row, str]] | None = None
        self._eval_rows: Rows | None = None
        self._curriculum = Curriculum(self.spec.dataset.sampling == "differing")
        self.position = 0
        """Rows handed out so far; saved with the trainer's checkpoints."""
        self._count = 0
        self._taken = 0
        """Rows taken from `_rows`; Atropos loads a checkpoint only after `setup`."""

    @classmethod
    def config_init(cls) -> tuple[Any, list[APIServerConfig]]:
        return env_config(cls.spec), server_configs(cls.spec)

    def make_server(self, configs: list[APIServerConfig]) -> HermesServerManager:
        """The spec's own policy; other servers given to the constructor take its place."""
        if configs != server_configs(self.spec):
            self.compiled.roles[POLICY] = create_role(POLICY, [server_config(config) for config in configs])
        return HermesServerManager(configs, server_class=self.server_cls, role=self.compiled.policy)

    def _admission(self) -> Admission | None:
        """As many rollouts as are carried, unless the spec, or Atropos' own field, fixes their number."""
        number = self.spec.serve.concurrency
        found = admission(number, self.compiled.policy)
        return found if number is None and "max_num_workers" not in self.spec.env else None

    async def weights_now(self) -> int | None:
        return await self.compiled.policy.weights()

    def make_core(self) -> CompiledSpec:
        return self.compiled

    def toolkit_for(self, group: str) -> Toolkit:
        """The spec's tools, its own Python tools included; those of a state object belong to a rollout."""
        return self.compiled.tooling.shared(group)

    async def setup(self) -> None:
        """Load the rows of training and evaluation; may wait for a hub."""
        rows = await asyncio.to_thread(load_rows, self.spec, "train", notify=logger.warning)
        await self.compiled.open(rows[0])
        self.server.sandbox = self.compiled.sandbox
        if self.directory is not None:
            offered = self.compiled.tooling.fingerprints
            self.directory.add({"dataset": {"fingerprint": rows.fingerprint}, "tool_servers": offered})
        self._rows, self._taken, self._count = repeated(rows), 0, rows.length or 1_000_000
        if self.spec.dataset.eval is not None:
            self._eval_rows = await asyncio.to_thread(load_rows, self.spec, "eval", notify=logger.warning)

    async def get_next_item(self) -> Row | None:
        """The next row of the training split, over and over, but those that are set aside or were sent already."""
        if self._rows is None:
            await self.setup()
        assert self._rows is not None
        passed_by = 0
        while (following := await anext(self._rows, None)) is not None:
            row, number = following[0], self._taken
            self._taken += 1
            if row.key in self.quarantine:
                passed_by += 1
                if passed_by > self._count:
                    return None  # every row is set aside
            elif number >= self.position:
                self.position = number + 1
                if not self._curriculum.wants(row.key, number // self._count):
                    continue
                placed = PlacedRow(row.key, row.columns, row.index, row.digest, number)
                if self.served is None or not self.served.settled(placed.group):
                    return placed
        return None

    def _placed(self, item: Any) -> tuple[Row, str]:
        """A row has its group's id from its place among all, so that a restart finds its rollouts again."""
        known = self.served is not None and isinstance(item, PlacedRow)
        return (item, item.group) if known else super()._placed(item)

    def curriculum_state(self) -> Any:
        """What of a curriculum is to be restored with the trainer's step, as JSON; a subclass may have its own."""
        return self._curriculum.state()

    def restore_curriculum(self, state: Any) -> None:
        """Take up what `curriculum_state` gave at the step at which the trainer goes on."""
        self._curriculum = Curriculum(self.spec.dataset.sampling == "differing", state)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Evaluate on the evaluation split; the numbers go to wandb and to `eval/step-<N>` of the run directory."""
        if self._eval_rows is None:
            logger.warning("no evaluation: the spec keeps no rows for it (dataset.eval)")
            return
        step = self.curr_step
        try:
            metrics = await self._evaluated(self._eval_rows, step)
        except HermesRLError as error:
            # Atropos never looks at the result of an evaluation, so a failure has to be said here.
            logger.error("the evaluation at step %d failed: %s", step, error)
            return
        self.pending_metrics |= metrics
        self.progress.note(f"step {step}: evaluation, mean reward {metrics['eval/mean_reward']:.3f}")

    async def _evaluated(self, rows: Rows, step: int) -> dict[str, float]:
        """Evaluate into the step's folder; anew, as the weights of an earlier run at this step may be others."""
        with ExitStack() as stack:
            parent = self.directory.path if self.directory is not None else None
            folder = parent / "eval" / f"step-{step}" if parent else Path(stack.enter_context(TemporaryDirectory()))
            directory, plan = RunDirectory(folder), evaluate_plan(self.spec)
            kept = stack.enter_context(closing(Kept.of(directory, self.compiled, plan.rollouts)))
            kept.clear()
            found = await evaluate(
                self.compiled,
                rows,
                plan,
                kept,
                budget=budget(self.spec, None),
                progress=Progress(quiet=True),
            )
            await asyncio.to_thread(write_evaluation, found, directory)
            return found.metrics

    def record_to(self, directory: RunDirectory, progress: Progress) -> None:
        """Keep every rollout, sent group and evaluation of training in this run directory, and say how it goes.

        What an earlier start has left there is gone on with.
        """
        self.directory, self.progress = directory, progress
        self.wandb_folder = directory.path
        self.served = Served(directory, self.compiled, self.config.group_size, drop=self.spec.serve.drop_uniform)
        self.memory = self.served.kept
        moved = self.spec.env.get("data_path_to_save_groups")
        self.jsonl_writer = _GroupsWriter(self, directory.journal(Path(moved) if moved else "groups.jsonl"))
        for role in self.compiled.roles.values():
            role.tell(progress.note)

    def track_rollout(self, rollout: Rollout) -> None:
        super().track_rollout(rollout)
        if self.served is not None:
            self.served.kept.keep(rollout)

    def track_group(self, group: Group) -> None:
        self._curriculum.count(group.row.key, [rollout.score for rollout in group.rollouts])
        if self.quarantine.count(group):
            self.progress.note(f"row {group.row.key} is set aside: it failed again and again ({group.detail})")

    def layers(self, group: Group) -> list[dict[str, Any]]:
        """As they are sent, with the group's id: the API drops it, files and the place in the run need it."""
        return [{**layer, "group": group.id, "row_key": group.row.key} for layer in super().layers(group)]

    async def register_env(self) -> None:
        """As BaseEnv's; then what the trainer has not received is offered again."""
        await super().register_env()
        if self.served is None:
            return
        mark, lost = await self.served.restore(self.config.rollout_server_url, self.curr_step, self.env_id)
        self.position = 0
        self.quarantine = Quarantine(mark.state.get("quarantined") or ())
        if mark.state.get("curriculum") is not None:
            self.restore_curriculum(mark.state["curriculum"])
        if self.served.place.sent or lost:
            said = f", {lost} groups that it had not received are sent again" if lost else ""
            self.progress.note(f"going on at step {self.curr_step}{said}; nothing that was played is played again")

    def load_checkpoint(self) -> None:
        """As BaseEnv's, where the run directory does not know better."""
        if self.served is None:
            super().load_checkpoint()

    async def env_step_checks(self) -> None:
        """As BaseEnv's; each step of the trainer is marked with what it has received."""
        if self.served is not None and self.curr_step != self.status_dict["current_step"]:
            state = {"quarantined": self.quarantine.record(), "curriculum": self.curriculum_state()}
            await self.served.mark(self.config.rollout_server_url, self.status_dict, state)
            self._say_images()
        await super().env_step_checks()

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        parts = scored_data if isinstance(scored_data, list) else [scored_data]
        groups = list(dict.fromkeys(part["group"] for part in parts if "group" in part))
        if self.served is None or len(groups) != 1:
            await super()._send_scored_data_to_api(scored_data)
            return
        async with self.served.sending(groups[0]):
            await super()._send_scored_data_to_api(scored_data)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save the place in the dataset with the trainer's checkpoint."""
        super().save_checkpoint(step, {"position": self.position, **(data or {})})

    async def shut_down(self) -> None:
        await super().shut_down()
        await self.compiled.close()
        self._say_images()
        if self.served is not None:
            self.served.close()

    def _say_images(self) -> None:
        if self.directory is not None:
            self.directory.add_images(self.compiled.images)


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
        self._env.progress.show(f"step {self._env.curr_step} · {self._sent} groups sent", groups[0]["scores"])


def compile_spec(spec: Spec, environ: Mapping[str, str] | None = None) -> type[SpecEnv]:
    """The environment class of a spec, a subclass of `atroposlib.envs.base.BaseEnv`.

    Make an instance with ``cls(*cls.config_init())``; ``cls.cli()`` is an Atropos environment program. Keys of servers
    are looked up in `environ` (default: the process's environment) when an instance is made.
    """
    namespace = {"spec": spec, "environ": environ, "name": spec.name, "__doc__": spec.description}
    return type("SpecEnv", (SpecEnv,), namespace)
