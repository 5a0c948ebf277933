"""Define `open_env`: run a spec from Python, without a command line and without a trainer.

`rollouts.runner` and `runs.run` run the rollouts; this module combines policy, sampling options and record.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.api.groups import Groups
from hermes_rl.api.session import ExternalPolicy, Session
from hermes_rl.data.load import Split, load_rows, require_split
from hermes_rl.data.rows import Row, Rows
from hermes_rl.errors import RunError, UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Encoder, Group, Rollout, RolloutKey
from hermes_rl.rollouts.runner import RETRIES, RolloutRunner
from hermes_rl.rollouts.sandboxes import keep_artifacts
from hermes_rl.runs.cluster import RayConnection, connected
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.provenance import moment, provenance
from hermes_rl.runs.renderer_check import require_same_tokenizer
from hermes_rl.runs.rollout_worker import WorkerSetup, encoder_with
from hermes_rl.runs.run import Plan, RowSource, Run, RunBudget
from hermes_rl.runs.run_log import run_log
from hermes_rl.runs.setup import budget_of, meter_of, open_records, require_machine, usage_kept
from hermes_rl.runs.store import RolloutStore
from hermes_rl.runs.workers import PolicyWorkers, Workers, open_workers, require_shares
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.policy import Policy
from hermes_rl.servers.usage import Meter
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Spec
from hermes_rl.spec.new_names import RenamedAttributes, with_renamed_parameters
from hermes_rl.stop_reasons import RETRIES_EXHAUSTED
from hermes_rl.threads import OfThisProcess, end_tasks
from hermes_rl.values import replace_surrogates

T = TypeVar("T")
Settings = Mapping[str, Any]
"""Settings of the spec's `agent` for one call: temperature, top_p, max_tokens, max_turns, …"""
LARGEST_GROUP = 1 << 16
"""Maximum number of rollouts in a group."""
SEARCHED = 10_000
"""Number of rows of an endless dataset that are searched for a key."""

logger = logging.getLogger(__name__)


def open_env(
    spec: Spec | str | Path,
    *,
    environ: Mapping[str, str] | None = None,
    record: str | Path | None = None,
    workers: int | None = None,
    ray: str | RayConnection | None = None,
    repeatable: bool = False,
) -> Env:
    """Return an environment for a spec; use it with `async with`, or call `open` and `close`.

    Args:
        spec: a loaded spec, a path, or the name of a shipped one.
        environ: variables for `${VAR}` and the keys of servers; default: the process's environment.
        record: a run directory to which every rollout is written. Recorded rollouts do not run again: a call with the
            same `group` and `index`, and the groups of `groups`, return the records. None records nothing.
        workers: number of processes that run rollouts; this process then only decides, records, and runs sessions.
            Default: this process runs rollouts; with `ray`, as many workers as the cluster has room for.
        ray: run rollouts on a Ray cluster: HOST:PORT of its head, `auto`, or `local` for one that is started here; or
            the result of `connect_ray`, if several environments share the cluster.
        repeatable: rollouts have the same ids and sampling seeds in each run of a program that makes the same calls in
            the same order. Otherwise every call has a new seed, so that processes that run the same rows for one
            trainer sample differently. With a record, a call without `group` may return a record too.

    Raises:
        UserError: the spec has problems, or code that it names cannot be loaded.
    """
    loaded = spec if isinstance(spec, Spec) else load_spec(spec, environ=environ)
    if workers is not None:
        _require_whole("workers", workers, 1)
    return Env(
        loaded,
        environ=environ,
        record=None if record is None else Path(record),
        workers=workers,
        ray=ray,
        repeatable=repeatable,
    )


def connect_ray(
    specs: Sequence[Spec], address: str, *, environ: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[RayConnection]:
    """Return a connection to a Ray cluster that several environments share; use it with `async with`.

    Its capacity is divided among them. Enter it before the first environment is opened, and leave it after the last.

    Args:
        specs: one spec for each environment, as returned by `load_spec` and passed to `open_env`.
        address: HOST:PORT of the head of the cluster, `auto`, or `local` for one that is started here.
        environ: variables that hold the keys of servers; default: the process's environment.

    Raises:
        UserError: Ray is not installed or not reachable, or this process is connected already.
    """
    return connected([WorkerSetup(spec, None, environ) for spec in specs], address, logger.warning)


@dataclass(frozen=True)
class EnvStatus:
    """Current state of an environment.

    Attributes:
        phases: number of running rollouts in each phase.
        retries: retried calls since it was opened, by the role of the server.
        workers: number of available workers; None if this process runs rollouts.
        died: workers that have died.
        lost: rollouts interrupted by worker deaths, each of which was retried or has failed.
    """

    phases: Mapping[str, int]
    retries: Mapping[str, int]
    workers: int | None = None
    died: int = 0
    lost: int = 0


class Env(OfThisProcess, RenamedAttributes):
    """A spec that is ready to run. When it closes, everything is released, including running rollouts.

    Infrastructure failures (of a server, a sandbox, a judge) are never raised from a rollout: the rollout has the score
    None, and `stop_reason` and `error` give the cause. Mistakes of the user raise `UserError`.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        environ: Mapping[str, str] | None,
        record: Path | None,
        workers: int | None,
        ray: str | RayConnection | None,
        repeatable: bool,
    ) -> None:
        self.spec = spec
        self.loop: asyncio.AbstractEventLoop | None = None
        """Event loop on which it is open, or None."""
        self._compiled = CompiledSpec(spec, environ)
        self._environ, self._record, self._workers_wanted, self._ray = environ, record, workers, ray
        self._workers: Workers | None = None
        self._meter = Meter()
        self._runners: WeakSet[RolloutRunner] = WeakSet()
        self._directory: RunDirectory | None = None
        self._store: RolloutStore | None = None
        self._stack = AsyncExitStack()
        self._rows: dict[str, Rows] = {}
        self._by_key: dict[str, Row] = {}
        self._searching = threading.Lock()  # `SyncEnv.row` is called from several threads
        self._policies: set[Policy] = set()
        self._encoders: WeakKeyDictionary[Policy, Encoder] = WeakKeyDictionary()
        self._own_encoder: Encoder | None = None
        self._preparing = asyncio.Lock()
        self._members: WeakValueDictionary[tuple[str, int | None], asyncio.Lock] = WeakValueDictionary()
        self._busy: set[asyncio.Task[Any]] = set()
        self._repeatable = repeatable
        self._plays: Counter[str] = Counter()
        """Number of calls by row or group, used as ids if runs of a program must be repeatable."""
        self._batches = 0
        """Number of calls of `groups`, which identifies their records."""
        self._groups: WeakSet[Groups] = WeakSet()
        self._sessions: WeakSet[Session] = WeakSet()
        self._closed = False

    # ------------------------------------------------------------------ opening and closing

    async def open(self) -> Self:
        """Load the rows and start the services that the tools of all rollouts share.

        Raises:
            UserError: the dataset cannot be loaded, the sandbox does not work here, or the record belongs to another
                run.
            RunError: a tool server or every worker failed to start.
        """
        if self.loop is not None or self._closed:
            raise UserError("an environment is opened once; open_env gives another one")
        self.loop = asyncio.get_running_loop()
        try:
            require_machine(self._compiled, logger.warning, "open_env")
            await self._stack.enter_async_context(self._compiled)
            splits: tuple[Split, ...] = ("train",) if self.spec.dataset.eval is None else ("train", "eval")
            for split in splits:
                self._rows[split] = await asyncio.to_thread(load_rows, self.spec, split, notify=logger.warning)
            await asyncio.to_thread(require_same_tokenizer, self.spec)
            if self._record is not None:
                self._directory = self._stack.enter_context(RunDirectory.choose(self.spec, "process", self._record))
                self._stack.enter_context(run_log(self._directory.path, Progress(quiet=True), self._environ))
                logger.info("recording rollouts of %s in %s", self.spec.name, self._directory.path)
                self._meter = meter_of(self._directory.read_run_info())
                await self._stack.enter_async_context(usage_kept(self._directory, self._meter))
                self._compiled.keep = partial(keep_artifacts, self._directory.artifacts)
            for role in self._compiled.roles.values():
                role.count_by(self._meter)
            for rows in self._rows.values():
                first = await RowSource(rows).first()
                if first is not None:
                    await self._compiled.open(first)
                    break
            await self._open_workers()
        except BaseException:  # also on cancellation: the caller does not close an environment that it never entered
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Stop running rollouts and release everything, even if a part of that fails; may be called twice."""
        self._closed = True
        self._meter.close()
        try:
            async with self._stack as stack:  # callbacks run in reverse order, and all of them run
                if self._directory is not None:
                    stack.callback(self._directory.add_images, self._compiled.images)
                    if self._store is not None:
                        stack.callback(self._note_end, self._directory)
                while self._policies:
                    stack.push_async_callback(self._policies.pop().leave)
                stack.push_async_callback(end_tasks, self._busy)
                for groups in self._groups:
                    stack.push_async_callback(groups.close)
                for session in self._sessions:
                    stack.push_async_callback(session.close)
        finally:
            self.loop = None

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _note_end(self, directory: RunDirectory) -> None:
        directory.add({"ended": moment()})

    async def _open_workers(self) -> None:
        worker_count, ray = self._workers_wanted, self._ray
        if ray is None and worker_count in (None, 1):
            return
        require_shares(self.spec, worker_count or 1)
        opening = WorkerSetup(self.spec, None, self._environ)
        artifacts = self._directory.artifacts if self._directory is not None else None
        self._workers = await self._stack.enter_async_context(
            open_workers(opening, worker_count, self._compiled, artifacts, logger.warning, ray, self._meter)
        )

    def _require_open(self) -> None:
        if self.loop is None or self._closed:
            raise UserError("the environment is not open: use it within `async with hermes_rl.open_env(…) as env`")

    async def release_policy(self, policy: Policy) -> None:
        """Close the connections of a policy that is no longer used, unless another environment uses them."""
        if policy in self._policies:
            self._policies.remove(policy)
            await policy.leave()

    def status(self) -> EnvStatus:
        """Return its current state: running rollouts, retried calls, workers that have died."""
        roles = [*self._compiled.roles.items(), *(("policy", policy.role) for policy in self._policies)]
        retries, phases = Counter[str](), Counter[str]()
        for name, role in roles:
            retries[name] += role.retries
        for runner in self._runners:
            phases += runner.phases
        if self._workers is None:
            return EnvStatus(phases, +retries)
        workers = self._workers
        phases, retries = phases + workers.phases, +(retries + workers.retries)
        return EnvStatus(phases, retries, workers.ready, workers.died, workers.replayed)

    async def watch(self) -> None:
        """Wait until no more rollouts can run, and raise the cause; without workers this never returns.

        Raises:
            UserError, RunError: the error that stops the workers.
        """
        if self._workers is None:
            await asyncio.Event().wait()
        else:
            await self._workers.watch()

    async def sync_policies(self) -> None:
        """Wait until workers know the current versions and model names of the policies.

        Every call that starts afterwards uses them. Otherwise workers get them some hundredths of a second later.
        """
        if self._workers is not None:
            await self._workers.announce()

    # ------------------------------------------------------------------ rows

    def rows(self, split: str = "train") -> Rows:
        """Return the rows of a split, possibly endless (see `length`); a row's `key` is the same in every run."""
        self._require_open()
        require_split(split)
        if split not in self._rows:
            raise UserError("the spec keeps no rows for evaluation; see dataset.eval")
        return self._rows[split]

    def row(self, key: str) -> Row:
        """Return the row with this key, from either split.

        Raises:
            UserError: there is none; in an endless dataset, none among the first ten thousand.
        """
        self._require_open()
        with self._searching:
            if not self._by_key:
                searched = (rows if rows.length is not None else islice(rows, SEARCHED) for rows in self._rows.values())
                self._by_key = {row.key: row for row in chain.from_iterable(searched)}
        if not isinstance(key, str) or key not in self._by_key:
            raise UserError(
                f"there is no row with the key {key!r:.200}{did_you_mean(str(key), self._by_key)}; see env.rows()"
            )
        return self._by_key[key]

    def prompt(self, row: Row | str) -> list[dict[str, Any]]:
        """Return the initial messages of a rollout of the row."""
        return self._compiled.prompt(self._row(row))

    def tools(self, row: Row | str, group: str | None = None) -> list[dict[str, Any]]:
        """Return the OpenAI schemas of the tools of a rollout of the row.

        If the spec draws toolsets for each group, the tools are drawn for `group`.
        """
        resolved_row = self._row(row)
        with ThreadPoolExecutor(1) as thread:  # its loop can run while the caller's loop is blocked
            return (
                thread.submit(asyncio.run, self._compiled.toolkit(resolved_row, group or resolved_row.key))
                .result()
                .schemas
            )

    @property
    def comparing(self) -> list[str]:
        """Rewards that compare the members of a group; if there are any, use `run_group` for groups."""
        return [reward.spec_key for reward in self._compiled.grader.rewards if reward.group_level]

    @property
    def _keeps_lost(self) -> bool:
        return self.spec.on_stop.get(RETRIES_EXHAUSTED) == "worst"

    def _row(self, row: Row | str) -> Row:
        self._require_open()
        if isinstance(row, Row):
            return row
        if isinstance(row, str):
            return self.row(row)
        raise UserError(f"a row is one of env.rows(), or its key, not {type(row).__name__}")

    # ------------------------------------------------------------------ rollouts

    @with_renamed_parameters
    async def run(
        self,
        row: Row | str,
        policy: Policy | None = None,
        group: str | None = None,
        index: int = 0,
        size: int = 1,
        split: str = "train",
        sampling: Settings | None = None,
        retries: int = RETRIES,
    ) -> Rollout:
        """Run one rollout and score it; cancelling the call releases its sandbox.

        Args:
            row: the row or its key.
            policy: the acting model; default: the spec's.
            group: id of its group. The rollouts of one group have the same tools if the spec draws them, and a record
                finds a rollout by its group and index. Without a record a group id may be reused, even concurrently.
                Default: a new group.
            index: index of the member in its group, from 0.
            size: number of members of the group.
            split: "train", or "eval" for the agent's settings in evaluation.
            sampling: settings of the spec's `agent` for this rollout, such as `{"temperature": 0.7}`.
            retries: number of retries after infrastructure failures.

        Raises:
            UserError: an argument is invalid; a spec with rewards that compare group members needs `run_group` for
                more than one member.
        """
        self._require_open()
        _require_whole("index", index, 0)
        _require_whole("size", size, 1)
        if index >= size:
            raise UserError(f"a group of {size} has members from 0 to {size - 1}, not {index}")
        if size > 1 and self._compiled.has_group_rewards:
            raise UserError(
                f"{', '.join(self.comparing)} compares the members of a group, which run together: use "
                "env.run_group(row, n)"
            )
        row = self._row(row)
        group, id_marker = self._identify_group(row, group)
        key = RolloutKey(row, group, index, size, id_marker=id_marker)

        async def work() -> Rollout:
            runner = await self._runner(policy, size, split, sampling, retries, id_marker)
            async with self._member_lock(group, index):
                return await runner.alone(key)

        return await self._run_owned(work())

    @with_renamed_parameters
    async def run_group(
        self,
        row: Row | str,
        n: int,
        policy: Policy | None = None,
        group: str | None = None,
        split: str = "train",
        sampling: Settings | None = None,
        retries: int = RETRIES,
    ) -> Group:
        """Run `n` rollouts of one row as a group to compare; see `run`.

        A group is complete or dropped: if a member's retries are exhausted, the others stop, `dropped` is its stop
        reason and `detail` the cause. With `on_stop: {retries_exhausted: worst}` such a member stays in its group
        without a score, is not trained on, and counts as the worst of the others in `Group.scores` and
        `Group.advantages`.
        """
        self._require_open()
        _require_size(n)
        row = self._row(row)
        group, id_marker = self._identify_group(row, group)

        async def work() -> Group:
            runner = await self._runner(policy, n, split, sampling, retries, id_marker)
            encoder = await self._encoder(policy)

            async def prepare(played: Group) -> None:
                if played.dropped is None:
                    await encoder.encode_group(played)

            return await runner.start(row, group, n, keep_lost=self._keeps_lost, prepare=prepare)

        return await self._run_owned(work())

    @with_renamed_parameters
    def groups(
        self,
        n: int,
        policy: Policy | None = None,
        rows: Iterable[Row | str] | AsyncIterable[Row] | None = None,
        concurrency: int | None = None,
        ahead: int = 0,
        drop_uniform: bool = False,
        max_staleness: int | None = None,
        split: str = "train",
        sampling: Settings | None = None,
        retries: int = RETRIES,
        batch: str | None = None,
    ) -> Groups:
        """Return groups of `n` rollouts, in the order of completion: `async for group in env.groups(8): …`.

        Nothing starts before the first group is requested, and no group starts while none is requested, except those
        `ahead`; started groups run to their end. Failed groups are returned as well, with `dropped` and without scores.
        With a record, the same call at the same position of the program, or with the same `batch`, returns the recorded
        groups without running them again, and continues.

        Excluded groups are counted in `excluded` of the returned object: "uniform" and "stale". A recorded group that
        has become stale runs again under another name, after the others.

        Args:
            n: rollouts of a group.
            policy: the acting model; default: the spec's.
            rows: rows or their keys, each used once; default: all rows of the split, repeatedly.
            concurrency: maximum number of concurrent rollouts; default: as many as the host and the servers allow.
            ahead: number of finished groups that may wait for a request, while further ones run.
            drop_uniform: exclude groups whose scores are all equal.
            max_staleness: exclude a group if its oldest weights are, when it is returned, more than this number of
                versions older than the policy's.
            split: "train" or "eval".
            sampling, retries: as in `run`.
            batch: id of the call, such as "step-12", for a record; default: the index of the call.

        Raises:
            UserError: an argument is invalid; during iteration, also if `max_staleness` is set and the policy does not
                report the version of its weights.
            RunError: more groups failed than the spec's budget allows.
        """
        self._require_open()
        _require_size(n)
        if (concurrency is not None and concurrency < 1) or ahead < 0:
            raise UserError("`concurrency` is at least 1, and `ahead` at least 0")
        if max_staleness is not None and self.spec.other_policies:
            raise UserError(
                f"max_staleness: it cannot be checked for {self.spec.other_policies}, which is trained too; check the "
                "`weights` of each rollout's examples instead"
            )

        _require_whole("retries", retries, 0)
        if max_staleness is not None:
            _require_whole("max_staleness", max_staleness, 0)
        id_marker, role = self._batch_suffix(batch), self._role(policy)
        # Invalid arguments are reported now, and not with the first group.
        compiled = self._compiled if policy is None else self._compiled.with_policy(role)
        options = compiled.options(split, sampling)
        self._workers_for(policy, options)

        budgets: list[RunBudget] = []

        async def run(repeated_rows: Sequence[Row] | None, repeat_index: int) -> Run:
            if not budgets:
                budgets.append(budget_of(self.spec, "serve", self._meter))
            plan = Plan(
                size=n,
                split=split,
                repeat=rows is None and repeated_rows is None,
                keep_lost=self._keeps_lost,
                drop_uniform=drop_uniform,
                prefer_differing=self.spec.dataset.row_selection == "skip_uniform",
                concurrency=concurrency,
                retries=retries,
                id_marker=id_marker + "+" * repeat_index,
            )
            self._use_policy(policy)
            started = Run(
                compiled,
                repeated_rows or (self.rows(split) if rows is None else self._named_rows(rows)),
                plan,
                encoder=await self._encoder(policy),
                store=await self._opened_store(n),
                budget=budgets[0],
                progress=_Logged(quiet=True),
                policy=role,
                options=options,
                exclusive=lambda group: self._member_lock(group, None),
                workers=self._workers_for(policy, options),
            )
            self._runners.add(started.runner)
            return started

        stream = Groups(
            run,
            ahead=ahead,
            weights=role.weights,
            max_staleness=max_staleness,
            endless=rows is None,
        )
        self._groups.add(stream)
        return stream

    async def session(
        self,
        row: Row | str,
        *,
        group: str | None = None,
        split: str = "train",
        sampling: Settings | None = None,
        tokenizer: Any = None,
        renderer: str | Mapping[str, Any] | None = None,
        context: int | None = None,
    ) -> Session:
        """Return a rollout whose turns come from the caller; tools, user, budgets, stop reasons and rewards are the
        spec's.

        With several agents, those whose server is `policy` are stepped; each turn contains its `seat`.

        Args:
            row, group, split, sampling: as in `run`; it is the only member of its group.
            tokenizer: a hub name, a directory or a tokenizer object of `transformers`, so that a turn may be token ids;
                default: the tokenizer of the spec's policy if it is token-level or scripted, else a turn is a message.
            renderer: same as `renderer` of a server in a spec; its name is enough.
            context: maximum tokens of a conversation; None: no limit.

        Raises:
            UserError: an argument is invalid, or the tokenizer is not available.
        """
        self._require_open()
        row = self._row(row)
        name, id_marker = self._identify_group(row, group)
        stepped = await ExternalPolicy.make(self.spec, tokenizer, renderer, context)
        compiled = self._compiled.with_policy(stepped.role)
        runner = RolloutRunner(
            compiled,
            split=split,
            options=compiled.options(split, sampling),
            store=await self._opened_store(1),
            encoder=stepped,
            retries=0,
        )
        session = Session(
            stepped, lambda: self._run_owned(runner.alone(RolloutKey(row, name, 0, 1, id_marker=id_marker)))
        )
        self._sessions.add(session)
        return session

    # ------------------------------------------------------------------ parts of a rollout

    async def _runner(
        self,
        policy: Policy | None,
        size: int,
        split: str,
        sampling: Settings | None,
        retries: int,
        id_marker: str,
    ) -> RolloutRunner:
        _require_whole("retries", retries, 0)
        role = self._role(policy)
        compiled = self._compiled if policy is None else self._compiled.with_policy(role)
        options = compiled.options(split, sampling)
        self._use_policy(policy)
        runner = RolloutRunner(
            compiled,
            split=split,
            options=options,
            encoder=await self._encoder(policy),
            store=await self._opened_store(size),
            retries=retries,
            id_marker=id_marker,
            exclusive=lambda group: self._member_lock(group + id_marker, None),
            elsewhere=self._workers_for(policy, options),
        )
        self._runners.add(runner)
        return runner

    def _use_policy(self, policy: Policy | None) -> None:
        """Register the first use of a policy, whose connections close with the environment."""
        if policy is not None and not policy.captured and policy not in self._policies:
            self._policies.add(policy)
            policy.enter()

    def _workers_for(self, policy: Policy | None, options: LoopOptions) -> PolicyWorkers | None:
        """Return the workers for this policy, or None if this process runs rollouts."""
        return self._workers.using(policy, options) if self._workers is not None else None

    def _role(self, policy: Policy | None) -> ModelClient:
        if policy is not None and not isinstance(policy, Policy):
            raise UserError(
                f"expected a policy made with hermes_rl.Policy.sampling, .chat or .server, got {type(policy).__name__}"
            )
        return policy.role if policy is not None else self._compiled.policy

    async def _encoder(self, policy: Policy | None) -> Encoder:
        """Return the encoder for the rollouts of this policy, created once. Workers set the tokens themselves."""
        if self._workers is not None:
            return Encoder(None)
        async with self._preparing:
            cached_encoder = self._own_encoder if policy is None else self._encoders.get(policy)
            if cached_encoder is not None:
                return cached_encoder
            encoder = await encoder_with(policy, self._role(policy).configs[0])
            if policy is None:
                self._own_encoder = encoder
            else:
                self._encoders[policy] = encoder
            return encoder

    async def _opened_store(self, size: int) -> RolloutStore | None:
        """Return the store, opened with the first rollout, or None if nothing is recorded."""
        directory = self._directory
        if directory is None:
            return None
        async with self._preparing:
            compared = self._compiled.has_group_rewards
            recorded_size = (
                self._store.size if self._store is not None else directory.read_run_info().get("group_size", size)
            )
            if compared and recorded_size != size:
                raise UserError(
                    f"{directory.path} contains groups of {recorded_size}, whose members "
                    f"{', '.join(self.comparing)} compares; "
                    f"record groups of {size} in another directory"
                )
            if self._store is None:
                # Both splits, so that a changed reward finds the rows of recorded rollouts.
                rows, progress = self._rows["train"], _Logged(quiet=True)
                if rows.length is not None:
                    finite = [each for each in self._rows.values() if each.length is not None]
                    rows = Rows.from_sequence(list(chain.from_iterable(finite)), fingerprint=rows.fingerprint)
                # As for evaluate, there is no groups.jsonl: groups are returned to the caller instead.
                opening = open_records(directory, self._compiled, rows, "evaluate", size, progress, self._meter)
                records = await self._stack.enter_async_context(opening)
                made_with = provenance(
                    self.spec, "process", rows.fingerprint, tool_servers=self._compiled.tooling.fingerprints
                )
                directory.describe(self.spec, {**made_with, "grading": records.grading.record(), "group_size": size})
                self._store = records.store
            return self._store

    def _identify_group(self, row: Row, group: str | None) -> tuple[str, str]:
        """Return the id of a group, and a mark that distinguishes this call; records are found by the id alone."""
        if group is None:
            return f"{row.key}~{self._fresh_suffix(row.key)}", ""
        if not isinstance(group, str) or replace_surrogates(group) != group:
            raise UserError(f"group is {group!r:.60}, and not a text")
        return group, "" if self._directory is not None else f"~{self._fresh_suffix(group)}"

    def _fresh_suffix(self, name: str) -> str:
        """Return a suffix that distinguishes a call from others with its row or group: random, or their count."""
        if not self._repeatable:
            return uuid.uuid4().hex[:8]
        self._plays[name] += 1
        return str(self._plays[name])

    def _batch_suffix(self, name: str | None) -> str:
        """Return the suffix of the group ids of one call of `groups`."""
        if self._directory is None:
            return f"~groups{self._fresh_suffix('groups')}"
        if name is not None:
            return f"@{name}"
        self._batches += 1
        return f"~{self._batches}" if self._batches > 1 else ""

    def _member_lock(self, group: str, index: int | None) -> asyncio.Lock:
        """Return the lock held while a member runs, so that a concurrent request for it uses the record."""
        return self._members.setdefault((group, index), asyncio.Lock())

    def _named_rows(self, rows: Iterable[Row | str] | AsyncIterable[Row]) -> Rows | Iterator[Row] | AsyncIterable[Row]:
        if isinstance(rows, Rows | AsyncIterable):
            return rows
        return (self._row(row) for row in rows)

    async def _run_owned(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work that is cancelled when the environment closes."""
        with self._meter.counting():
            task = asyncio.create_task(work)
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            if self._closed:
                raise UserError("the environment was closed while this was running") from None
            if self._meter.closed:
                raise RunError("a budget of the spec is used up, so that no further call to a model starts") from None
            raise


class _Logged(Progress):
    """Progress reporter that sends user messages to Python's own log."""

    def note(self, message: str) -> None:
        logger.warning(message)


def _require_size(n: int) -> None:
    if not hasattr(n, "__index__") or not 1 <= n <= LARGEST_GROUP:
        raise UserError(f"a group has at least 1 rollout, and at most {LARGEST_GROUP}, not {n!r:.60}")


def _require_whole(name: str, value: int, minimum: int) -> None:
    if not hasattr(value, "__index__") or value < minimum:
        raise UserError(f"{name} is at least {minimum}, not {value!r:.60}")
