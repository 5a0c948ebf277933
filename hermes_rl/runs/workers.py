"""Workers of a run, which run rollouts on more cores than one Python process can use, and on several machines.

The run stays the only one that decides and writes. It sends a worker the key of a rollout, and gets back the record.
Owns choosing a worker for a rollout, replacing one that died, and their end. A dead worker costs its running rollouts,
which another worker runs again as the same attempt, since no part of them was recorded. The kind of a worker, a process
of this machine or an actor of a Ray cluster, belongs to `WorkerHandle` and its source.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import ManagedState
from hermes_rl.errors import Failure, RunError, UserError
from hermes_rl.rollouts.admission import (
    Admission,
    DescriptorShare,
    ModelCallLoad,
    admission,
    processor_seconds,
    usable_cores,
)
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.rollouts.runner import WorkerLostError
from hermes_rl.runs.cluster import RayConnection, open_cluster
from hermes_rl.runs.handles import CLOSING, DiedError, Heard, ProcessHandle, WorkerHandle
from hermes_rl.runs.rollout_worker import OWN, PlaySettings, WorkerSetup, error_of
from hermes_rl.runs.store import Line, rollout_of, rollout_record
from hermes_rl.scoring.reward_value import reward_of
from hermes_rl.servers.policy import Policy
from hermes_rl.servers.usage import Meter, Usage
from hermes_rl.spec.model import Spec
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import end_tasks, run_exclusively
from hermes_rl.tokens.transcript import packed, unpacked
from hermes_rl.tools.artifacts import TakenArtifact

T = TypeVar("T")
log = logging.getLogger(__name__)

DEATHS = 3
"""Workers that may die with the same rollout, and workers that may die one after the other on a machine, or in a
worker's slot on this one, before one of them has answered anything.
"""
LARGE = 1 << 16
"""Bytes of a response from which it is parsed in a thread."""
SAME = 30.0
"""Seconds in which the same message of several workers is shown once."""
ROOM = 600.0
"""Seconds without any worker that can run rollouts after which the run ends: a cluster has had no room for that
long.
"""
LOOK = 2.0
"""Seconds between two checks of the number of workers that there is room for."""
NEWS = 0.02
"""Seconds between two checks for new weights that trainers have announced for the acting policies."""
TAKEN = 5.0
"""Seconds in which workers have applied an announcement."""


class WorkerSource(Protocol):
    """Creates workers, and decides how many may run and where: on this machine or on a Ray cluster."""

    worker_count: int
    """Requested number of workers."""

    def handle(self, worker_index: int, on_message: Heard) -> WorkerHandle:
        """Return another worker, which has not been started."""

    async def look(self) -> None:
        """Update the requested number of workers."""

    def surplus(self, handles: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        """Return the workers that must end because there is no room for them any more."""

    def exclude(self, handle: WorkerHandle) -> bool:
        """Start no worker any more where this one could not run; return True if another may start elsewhere."""

    def explain(self) -> str:
        """Return why no worker has a node to run on."""


@dataclass
class LocalWorkers:
    """Workers that are processes of this machine, started with the run, in the requested number."""

    opening: WorkerSetup
    worker_count: int
    artifacts: Path | None

    def handle(self, worker_index: int, on_message: Heard) -> WorkerHandle:
        return ProcessHandle(
            self.opening, self.artifacts, f"worker {worker_index + 1} of {self.worker_count}", on_message
        )

    async def look(self) -> None:
        """Keep the number: it never changes."""

    def surplus(self, handles: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        return ()

    def exclude(self, handle: WorkerHandle) -> bool:
        self.worker_count -= 1
        return False

    def explain(self) -> str:
        return "no worker process has become ready"


@asynccontextmanager
async def open_workers(
    opening: WorkerSetup,
    worker_count: int | None,
    compiled: CompiledSpec,
    artifacts: Path | None,
    note: Callable[[str], None],
    ray: str | RayConnection | None = None,
    meter: Meter | None = None,
) -> AsyncIterator[Workers | None]:
    """Start the workers of a run, and end them afterwards; yields None for one on this machine, which is this process
    itself.

    Args:
        opening: setup of each worker.
        worker_count: number of workers; None: as many as the Ray cluster has room for.
        compiled: the environment of this process.
        artifacts: directory for artifacts of sandboxes; None: they are not stored.
        ray: the Ray cluster that runs the rollouts: its address, or a shared connection; None: this machine.
        meter: counts the calls of the workers; None: another one.

    Raises:
        UserError, RunError: an error that a worker found in the spec, or they cannot be started.
    """
    if worker_count == 1 and ray is None:
        yield None
        return
    async with AsyncExitStack() as stack:
        source: WorkerSource
        if ray is None:
            assert worker_count is not None
            source = LocalWorkers(opening, worker_count, artifacts)
        else:
            source = await stack.enter_async_context(open_cluster(opening, ray, worker_count, note))
        workers = Workers(source, compiled, note, meter or Meter())
        stack.push_async_callback(workers.close)
        await workers.start()
        yield workers


def require_shares(spec: Spec, worker_count: int) -> None:
    """Raise UserError for a server that accepts fewer concurrent calls than there are workers: each gets a share of
    them.
    """
    for role, servers in spec.servers.items():
        for server in servers:
            if server.max_concurrency < worker_count:
                raise UserError(
                    f"servers.{role}.max_concurrency is {server.max_concurrency}, and each of {worker_count} "
                    "workers needs a "
                    "part of it: use fewer workers"
                )


class WorkersDied(WorkerLostError):
    """Workers died one after the other while they had one and the same request."""


class Workers:
    """Workers of a run; implements `hermes_rl.rollouts.runner.RemoteExecutor` and `rollouts.admission.Calls`.

    `compiled` is the environment of this process, and `meter` the run's.
    """

    def __init__(self, source: WorkerSource, compiled: CompiledSpec, note: Callable[[str], None], meter: Meter) -> None:
        self._source, self._compiled, self._note, self._meter = source, compiled, note, meter
        self._handles: dict[int, WorkerHandle] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        """Reason why the workers cannot continue."""
        self._fixed: set[int] = set()
        """Numbers of the policies whose servers get their maximum of concurrent calls."""
        self._closing = self._refusing = False
        self._in_vain: Counter[str | int] = Counter()
        """Workers that died, one after the other, before they had answered anything: by the machine, or the number."""
        self._excluded_for: set[str] = set()
        """Reasons for excluding machines that were shown to the user."""
        self.died = self.replayed = 0
        """Workers that died, and rollouts that were run again because of it."""
        self._seconds_of_dead = 0.0
        self._retries_of_dead: Counter[str] = Counter()
        self._passed_on: dict[str, float] = {}
        self._acting: Counter[Policy] = Counter()
        """Number of running rollouts for each policy that the spec does not name."""
        self._announced: dict[int, int] = {}
        """Last weight update (`WeightUpdate.order`) that was sent to all workers, by policy."""
        self._announcing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait until all processes, or the first worker of a cluster, can run.

        Raises the error that one of them found.
        """
        self._fill()
        self._looking = asyncio.create_task(self._adjust_count())
        while not (all if isinstance(self._source, LocalWorkers) else any)(
            handle.ready for handle in self._handles.values()
        ):
            await self._wait_for_change()

    async def close(self) -> None:
        """End the workers with their rollouts, and wait until their resources are released."""
        self._closing = True
        background_tasks = [task for task in (self._looking, self._announcing) if task is not None]
        await end_tasks(background_tasks)
        for handle in self._handles.values():
            handle.close()
        lives = list(self._lives.values())
        try:
            if lives:
                await asyncio.wait(lives, timeout=CLOSING)
        finally:
            for handle in self._handles.values():
                handle.kill()
        await asyncio.gather(*lives)

    async def watch(self) -> None:
        """Wait until the workers cannot continue, and raise why: they die again and again, or one found something
        wrong.
        """
        while True:
            await self._wait_for_change()

    # ------------------------------------------------------------------ for the runner

    async def run(
        self, key: RolloutKey, split: str, settings: PlaySettings | None = None, deaths: int = DEATHS
    ) -> Rollout:
        """Run one attempt; `settings` are its settings if they differ from the run's.

        Raises:
            UserError, RunError: an error that would end a run without workers too, or `deaths` workers have died with
                it.
        """
        answer, size = await self._ask_any(f"rollout {key.id}", deaths, "play", key, split, settings)
        if "line" not in answer:
            raise asyncio.CancelledError  # the worker let none of its calls start; see `refuse_calls`
        rollout = await _off_the_loop(size, lambda: rollout_of(answer["line"], key))
        rollout.line, rollout.no_tokens = answer["line"], answer.get("no_tokens")
        for other, line in zip(rollout.others, answer["line"].get("others", ()), strict=True):
            other.line = line
        if "tokens" in answer and rollout.result is not None:
            sequences = [unpacked(sequence) for sequence in answer["tokens"]]
            rollout.result.managed_state = ManagedState(lambda: sequences)
        return rollout

    async def compare(self, rollouts: list[Rollout]) -> None:
        """Add the rewards that need the whole group. Raises Failure."""
        members = await run_exclusively(
            lambda: pickle.dumps([(rollout.key, _told_of(rollout)) for rollout in rollouts])
        )
        answer, _ = await self._ask_any(f"the comparison of group {rollouts[0].key.group}", DEATHS, "compare", members)
        if "rewards" not in answer:
            raise asyncio.CancelledError
        for rollout, values in zip(rollouts, answer["rewards"], strict=True):
            rollout.rewards.update({name: reward_of(value) for name, value in values.items()})
        rollouts[0].add_usage(
            {role: Usage.from_record(counts) for role, counts in answer["asked"].items()}, played=False
        )
        if "failed" in answer:
            stop_reason, detail = answer["failed"]
            raise Failure(detail, stop_reason=StopReason(stop_reason))

    def refuse_calls(self) -> None:
        """Let workers start no further call to a model; what needs one is cancelled."""
        self._refusing = True
        for handle in self._ready:
            handle.send(0, "refuse")

    def using(self, policy: Policy | None, options: LoopOptions) -> PolicyWorkers:
        """Return the same workers for another policy and settings.

        Raises UserError if the policy is bound to this process.
        """
        return PolicyWorkers(self, policy, options)

    # ------------------------------------------------------------------ for policies whose weights change

    @contextmanager
    def acting(self, policy: Policy) -> Iterator[None]:
        """Keep workers informed of the policy's weights while a rollout runs with it."""
        if policy not in self._acting:
            self._announced[policy.policy_id] = (
                policy.get_weight_update().order
            )  # a request to run a rollout contains the same
        self._acting[policy] += 1
        if self._announcing is None:
            self._announcing = asyncio.create_task(self._announce_again_and_again())
        try:
            yield
        finally:
            self._acting[policy] -= 1
            if not self._acting[policy]:
                del self._acting[policy]
                self._announced.pop(policy.policy_id, None)

    async def announce(self) -> None:
        """Wait until workers know the current announcements of trainers: they apply to every call that starts
        afterwards.
        """
        news = {policy.policy_id: policy.get_weight_update() for policy in self._acting}
        asking = [asyncio.create_task(handle.ask("told", news)) for handle in self._ready if news]
        if not asking:
            return  # a rollout that starts brings the announcement with it
        # A worker that does not listen now (its code holds the interpreter) gets it before it makes another call.
        await asyncio.wait(asking, timeout=TAKEN)
        await end_tasks(asking)

    async def _announce_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(NEWS)
            try:
                current = {policy.policy_id: policy.get_weight_update() for policy in self._acting}
            except Exception:
                # A trainer's function returns the version; the rollouts that start raise its error.
                log.exception("sending the version of the weights or the model's name failed")
                await asyncio.sleep(SAME)
                continue
            news = {
                policy_id: weight_update
                for policy_id, weight_update in current.items()
                if self._announced.get(policy_id) != weight_update.order
            }
            if news:
                self._announced |= {policy_id: announced.order for policy_id, announced in news.items()}
                for handle in self._ready:
                    handle.send(0, "told", news)

    # ------------------------------------------------------------------ for admission

    def admission(self, concurrency: int | None, calls: ModelCallLoad | None = None) -> Admission:
        """Return the admission that decides if another rollout may start, on any worker.

        `calls` are the calls of the policy that acts; default: the spec's policy.
        """
        return admission(
            concurrency,
            calls or self,
            used=lambda: processor_seconds() + self._seconds_of_dead + sum(h.seconds for h in self._handles.values()),
            free=lambda: min((handle.free for handle in self._ready), default=1.0),
            # Of all machines that have a worker.
            cores=lambda: sum({handle.machine: handle.cores for handle in self._ready}.values()) or usable_cores(),
            # The load of other programs on a cluster's machines is not measured; the cluster gives each worker its
            # cores.
            machine=None if isinstance(self._source, LocalWorkers) else list,
            descriptors=_Shared(self),
        )

    def fix(self, policy_id: int = OWN) -> None:
        """Give a policy's servers their maximum of concurrent calls, whatever they report."""
        if policy_id not in self._fixed:
            self._fixed.add(policy_id)
            for handle in self._ready:
                handle.send(0, "fix", policy_id)

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot at the servers of the spec's policy; while some wait, further calls bring
        nothing.
        """
        return self.waiting_for(OWN)

    def waiting_for(self, policy_id: int) -> int:
        """Return how many calls wait for a slot at the servers of the policy of this number."""
        return sum(handle.waiting[str(policy_id)] for handle in self._ready)

    @property
    def descriptors(self) -> int:
        """Highest number of open descriptors of a worker."""
        return max((handle.descriptors for handle in self._ready), default=0)

    def __len__(self) -> int:
        return max(1, len(self._ready))

    @property
    def _ready(self) -> list[WorkerHandle]:
        return [handle for handle in self._handles.values() if handle.ready and not handle.closed]

    @property
    def phases(self) -> Counter[str]:
        """Number of running rollouts by phase."""
        return sum((handle.phases for handle in self._ready), Counter[str]())

    # ------------------------------------------------------------------ for the user

    @property
    def retries(self) -> Counter[str]:
        """Calls that were retried, by the role of the server."""
        retries = Counter(self._retries_of_dead)
        for handle in self._handles.values():
            retries.update(handle.retries)
        return retries

    @property
    def ready(self) -> int:
        """Number of workers that can run now."""
        return len(self._ready)

    def _handle_message(self, handle: WorkerHandle, news: Mapping[str, Any]) -> None:
        if "log" in news:
            name, level, text = news["log"]
            logging.getLogger(name).log(level, "%s: %s", handle.name, text)
        elif "note" in news:
            self._pass_on(news["note"])
        elif "usage" in news:
            self._count_use(handle, news["usage"])
        elif "ready" in news:
            self._share()
            self._announced.clear()
            for policy_id in self._fixed:
                handle.send(0, "fix", policy_id)
            if self._refusing:
                handle.send(0, "refuse")
            self._changed.set()

    def _count_use(self, handle: WorkerHandle, reported: Mapping[str, Mapping[str, float]]) -> None:
        """Add what a worker has used since it was counted last; reports may arrive in another order."""
        for role, counts in reported.items():
            usage, previous_usage = Usage.from_record(counts), handle.usage.get(role, Usage())
            if (usage.sent, usage.calls) > (previous_usage.sent, previous_usage.calls):
                handle.usage[role] = usage
                self._meter.add(role, usage - previous_usage)

    def _share(self) -> None:
        """Give each running worker an equal share of the calls that servers accept at a time."""
        ready = self._ready
        for index, handle in enumerate(ready):
            handle.send(0, "share", index, len(ready))

    def _pass_on(self, text: str) -> None:
        """Show the user a worker's message; all workers notice if a server is down."""
        now = time.monotonic()
        if now - self._passed_on.get(text, -SAME) >= SAME:
            self._note(text)
        self._passed_on = {message: when for message, when in self._passed_on.items() if now - when < SAME} | {
            text: now
        }

    # ------------------------------------------------------------------ asking them, and keeping them alive

    async def _ask_any(self, request_label: str, deaths: int, *request: Any) -> tuple[dict[str, Any], int]:
        """Return a response and its size; if the worker dies, ask another one, until `deaths` workers have died."""
        handle = None
        died_on = Counter[str]()
        for _ in range(deaths):
            while not (ready := self._ready):
                await self._wait_for_change()
            handle = min(ready, key=lambda handle: (died_on[handle.machine], len(handle.pending_requests)))
            died_on[handle.machine] += 1  # looked at only if it dies there
            if self._error is not None:
                raise self._error
            try:
                answer = await handle.ask(*request)
                content = await _off_the_loop(len(answer.message), partial(json.loads, answer.message))
                if answer.artifacts is not None and "line" in content:
                    await run_exclusively(self._keep_artifacts, content["line"], answer.artifacts)
            except DiedError:
                continue
            handle.retries = Counter(content["retries"])
            self._count_use(handle, content.get("usage", {}))
            for name, digests in content.get("images", {}).items():
                self._compiled.images.setdefault(name, set()).update(digests)
            if "raised" in content:
                raise error_of(*content["raised"])
            if not self._refusing and not {"line", "rewards"} & content.keys():
                continue  # the worker has cancelled its work, because a signal ends it
            return content, len(answer.message)
        assert handle is not None
        several = f"{deaths} workers died one after the other while they had"
        died = "a worker died while it had" if deaths == 1 else several
        raise WorkersDied(
            f"{died} {request_label} ({handle.ended}). This rollout, or another one of theirs, may kill its worker; "
            "complete results are saved"
        )

    def _keep_artifacts(self, line: Line, get: Callable[[], Mapping[str, TakenArtifact]]) -> None:
        """Write the artifacts that came with a response, and put their paths into its record; blocks."""
        if self._compiled.keep is not None and (artifacts := get()):
            line["artifacts"] = self._compiled.keep(line["id"], artifacts)

    async def _wait_for_change(self) -> None:
        """Wait until another worker is ready. Raises the error that keeps all of them from continuing."""
        if self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def _fill(self) -> None:
        """Start workers up to the requested number."""
        while len(self._handles) < self._source.worker_count:
            worker_index = next(worker_index for worker_index in count() if worker_index not in self._handles)
            self._handles[worker_index] = self._source.handle(worker_index, self._handle_message)
            self._lives[worker_index] = asyncio.create_task(self._keep_alive(worker_index))

    async def _adjust_count(self) -> None:
        """Follow the number of workers that there is room for; end the run if there has been no room for long."""
        without = time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            try:
                await self._source.look()
            except Exception as error:  # noqa: BLE001 - carried to those who wait
                self._give_up(error)
                return
            self._fill()
            for handle in self._source.surplus(list(self._handles.values())):
                handle.make_room()
            now = time.monotonic()
            without = now if self._ready else without
            if now - without > ROOM:
                self._give_up(RunError(f"no worker was available for {ROOM:.0f} s: {self._source.explain()}"))
                return

    async def _keep_alive(self, worker_index: int) -> None:
        """Keep a worker of this number alive; any error ends the run, which would otherwise wait forever."""
        try:
            await self._replace(worker_index)
        except Exception as error:  # noqa: BLE001 - carried to those who wait
            self._give_up(error)

    async def _replace(self, worker_index: int) -> None:
        """Run a worker under this number, and a new one whenever it dies, while there is room for it."""
        while True:
            handle = self._handles[worker_index]
            await handle.live()
            if self._closing or self._error is not None:
                return
            self._seconds_of_dead += handle.seconds
            self._retries_of_dead.update(handle.retries)
            if handle.closed:  # there is no room for this worker any more
                del self._handles[worker_index], self._lives[worker_index]
                self._share()
                return
            if self._is_broken(handle, worker_index) and not self._exclude(handle):
                del self._handles[worker_index], self._lives[worker_index]
                self._share()
                self._changed.set()
                return
            if handle.placed and handle.error is None:  # else it has not even started
                self.died += 1
                self.replayed += handle.unanswered_rollouts
                retry_note = (
                    f", retrying its {handle.unanswered_rollouts} rollouts" if handle.unanswered_rollouts else ""
                )
                self._note(f"replacing {handle.name}, which died ({handle.ended}){retry_note}")
            self._handles[worker_index] = self._source.handle(worker_index, self._handle_message)
            self._share()

    def _is_broken(self, handle: WorkerHandle, worker_index: int) -> bool:
        """Count a death; return True if no worker should start there again.

        A rollout may kill the worker that runs it, so workers that died at work count against their machine only while
        workers of other machines run rollouts.
        """
        machine_key = handle.machine or worker_index
        self._in_vain[machine_key] = 0 if handle.finished else self._in_vain[machine_key] + 1
        if handle.error is not None:
            return True
        others_play = any(other.finished and other.machine != handle.machine for other in self._others(handle))
        return self._in_vain[machine_key] >= DEATHS and (others_play or not handle.unanswered_rollouts)

    def _exclude(self, handle: WorkerHandle) -> bool:
        """Exclude the location where a worker could not run; return True if another may replace it elsewhere.

        If no worker is left, the reason ends the run.
        """
        elsewhere = self._source.exclude(handle)
        others = self._others(handle)
        if handle.error is None:  # a worker that has not started yet may succeed
            others = [other for other in self._handles.values() if other is not handle and other.placed]
        count = self._in_vain.total()
        if not elsewhere and not others:
            in_vain = RunError(
                f"{count} workers ended one after the other before they had finished a rollout (the last: "
                f"{handle.ended}). Complete results are saved; without workers the same command resumes the run"
            )
            self._give_up(handle.error or in_vain)
            return False
        reason = str(handle.error) if handle.error is not None else f"{DEATHS} workers died there ({handle.ended})"
        text = f"excluded {handle.location}, the other workers continue: {reason}"
        if reason not in self._excluded_for:
            self._note(text)
        else:
            log.info("%s", text)
        self._excluded_for.add(reason)
        return elsewhere

    def _others(self, handle: WorkerHandle) -> list[WorkerHandle]:
        return [other for other in self._ready if other is not handle]

    def _give_up(self, error: Exception) -> None:
        self._error = error
        self._changed.set()
        for handle in self._handles.values():
            handle.fail(error)


class PolicyWorkers:
    """Workers for rollouts of one policy; implements `rollouts.runner.RemoteExecutor` and `rollouts.admission.Calls`.

    If a worker dies, its rollouts fail, and the caller decides how often they are retried: a trainer that captures its
    samples must know of each attempt. Without a `policy` the spec's policy acts.
    """

    def __init__(self, workers: Workers, policy: Policy | None, options: LoopOptions) -> None:
        self._workers, self._policy = workers, policy
        self._settings = PlaySettings(options, None if policy is None else policy.describe())

    async def run(self, key: RolloutKey, split: str) -> Rollout:
        """Run one attempt; see `Workers.run`."""
        policy = self._policy
        try:
            if policy is None or policy.captured:  # no trainer announces their weights
                return await self._workers.run(key, split, self._settings, deaths=1)
            with self._workers.acting(policy):
                return await self._workers.run(
                    key, split, replace(self._settings, weight_update=policy.get_weight_update()), deaths=1
                )
        except WorkersDied as died:
            rollout = Rollout(key, 0)
            rollout.fail(Failure(str(died), stop_reason=StopReason.SANDBOX_FAILURE))
            return rollout

    async def compare(self, rollouts: list[Rollout]) -> None:
        """Add the rewards that need the whole group. Raises Failure."""
        try:
            await self._workers.compare(rollouts)
        except WorkersDied as died:
            raise Failure(str(died), stop_reason=StopReason.REWARD_FAILURE) from died

    def refuse_calls(self) -> None:
        """Let workers start no further call to a model; what needs one is cancelled."""
        self._workers.refuse_calls()

    def admission(self, concurrency: int | None) -> Admission:
        """Return the admission that decides if another rollout may start."""
        return self._workers.admission(concurrency, self)

    def fix(self) -> None:
        """Give the policy's servers their maximum of concurrent calls, whatever they report."""
        self._workers.fix(self._policy_id)

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot at the policy's servers."""
        return self._workers.waiting_for(self._policy_id)

    @property
    def _policy_id(self) -> int:
        return OWN if self._policy is None else self._policy.policy_id


class _Shared:
    """Capacity check of the file descriptors that each worker may open."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._share = DescriptorShare(used=lambda: workers.descriptors)

    def carry(self, open_rollouts: int) -> bool:
        return self._share.carry(ceil(open_rollouts / len(self._workers)))


async def _off_the_loop(size: int, work: Callable[[], T]) -> T:
    return await run_exclusively(work) if size >= LARGE else work()


def _told_of(rollout: Rollout) -> Line:
    """Return the data that a worker needs to compare a rollout: its record, with the tokens that it does not hold."""
    line = rollout_record(rollout)
    state = rollout.result.managed_state if rollout.result is not None else None
    if line["sequences"] is None and isinstance(state, ManagedState):
        line["sequences"] = [packed(sequence) for sequence in state.sequences()]
    return line
