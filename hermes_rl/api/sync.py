"""Define `sync`: a blocking interface to an environment, on a loop in a separate thread; safe for several threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Self, TypeVar

from hermes_rl.api.environment import Env, EnvStatus
from hermes_rl.api.groups import Groups
from hermes_rl.api.session import Session, SessionTurn
from hermes_rl.data.rows import Row, Rows
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.spec.new_names import RenamedAttributes
from hermes_rl.threads import LEAVING, OfThisProcess, ended_within, wait_for_loop

T = TypeVar("T")
logger = logging.getLogger(__name__)


def sync(env: Env) -> SyncEnv:
    """Return a blocking interface with the same calls: `with hermes_rl.sync(hermes_rl.open_env(…)) as env: …`.

    An environment that is open already stays on its own loop, and must be called from other threads.
    """
    return SyncEnv(env)


class SyncEnv(OfThisProcess, RenamedAttributes):
    """Blocking version of `environment.Env`; methods return after completion. Ctrl-C cancels the call in progress."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._loop = env.loop
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._loop is None:
            self._process = os.getpid()
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="hermes-rl-sync", daemon=True)
            self._thread.start()
            try:
                self._call(self._env.open())
            except BaseException:  # also on Ctrl-C: the caller does not close an environment that it never entered
                self._end()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return  # the code that opened it closes it
        if os.getpid() != self._process:
            return  # a fork has only copies of the other process's resources
        try:
            self._call(self._env.close())
        finally:
            self._end()

    def rows(self, split: str = "train") -> Rows:
        """See `Env.rows`."""
        return self._env.rows(split)

    def row(self, key: str) -> Row:
        """See `Env.row`."""
        return self._env.row(key)

    def prompt(self, row: Row | str) -> list[dict[str, Any]]:
        """See `Env.prompt`."""
        return self._env.prompt(row)

    def tools(self, row: Row | str, group: str | None = None) -> list[dict[str, Any]]:
        """See `Env.tools`."""
        return self._env.tools(row, group)

    @property
    def comparing(self) -> list[str]:
        """See `Env.comparing`."""
        return self._env.comparing

    def status(self) -> EnvStatus:
        """See `Env.status`."""
        return self._call(_call_here(self._env.status))

    def sync_policies(self) -> None:
        """See `Env.sync_policies`."""
        self._call(self._env.sync_policies())

    def run(self, row: Row | str, *args: Any, **kwargs: Any) -> Rollout:
        """See `Env.run`, which has the same arguments."""
        return self._call(self._env.run(row, *args, **kwargs))

    def run_group(self, row: Row | str, n: int, *args: Any, **kwargs: Any) -> Group:
        """See `Env.run_group`, which has the same arguments."""
        return self._call(self._env.run_group(row, n, *args, **kwargs))

    def groups(self, n: int, *args: Any, **kwargs: Any) -> SyncGroups:
        """See `Env.groups`, which has the same arguments; a plain iterator."""
        return SyncGroups(self, self._call(_call_here(self._env.groups, n, *args, **kwargs)))

    def session(self, row: Row | str, **kwargs: Any) -> SyncSession:
        """See `Env.session`, which has the same arguments."""
        return SyncSession(self, self._call(self._env.session(row, **kwargs)))

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the environment's loop, for a caller that continues with other work.

        The coroutine must await the environment that was passed to `sync`. Cancelling the future cancels the coroutine.
        """
        return asyncio.run_coroutine_threadsafe(work, self._open_loop(work))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._open_loop(work)
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is loop:
                work.close()
                raise UserError("a blocking call on the environment's own loop would never end: await the environment")
        return wait_for_loop(work, loop)

    def _open_loop(self, work: Coroutine[Any, Any, T]) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            work.close()
            raise UserError("the environment is not open: use it within `with hermes_rl.sync(…) as env`")
        if os.getpid() != self._process:
            work.close()
            raise UserError(
                "this process was forked after the environment was opened, and has none of its threads: start "
                "processes with the method `spawn`, or open an environment in each"
            )
        return self._loop

    def _end(self) -> None:
        """Stop the loop after its remaining tasks were cancelled."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return  # another thread has ended it
        wait_for_loop(_cancel_the_rest(), loop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class SyncGroups(OfThisProcess, Iterator[Group], AbstractContextManager["SyncGroups"]):
    """Blocking version of `groups.Groups`."""

    def __init__(self, env: SyncEnv, groups: Groups) -> None:
        self._env, self._groups = env, groups
        self.excluded = groups.excluded

    def __next__(self) -> Group:
        group = self._env._call(_next_group(self._groups))
        if group is None:
            raise StopIteration
        return group

    def close(self) -> None:
        """See `Groups.close`."""
        self._env._call(self._groups.close())

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncSession(OfThisProcess, AbstractContextManager["SyncSession"]):
    """Blocking version of `session.Session`."""

    def __init__(self, env: SyncEnv, session: Session) -> None:
        self._env, self._session = env, session

    def start(self) -> SessionTurn | None:
        """See `Session.start`."""
        return self._env._call(self._session.start())

    def step(self, answer: Any, **kwargs: Any) -> SessionTurn | None:
        """See `Session.step`, which has the same arguments."""
        return self._env._call(self._session.step(answer, **kwargs))

    @property
    def rollout(self) -> Rollout | None:
        return self._session.rollout

    @property
    def done(self) -> bool:
        """See `Session.done`."""
        return self._session.done

    def close(self) -> None:
        """See `Session.close`."""
        self._env._call(self._session.close())

    def __exit__(self, *_: object) -> None:
        self.close()


async def _call_here(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return call(*args, **kwargs)


async def _next_group(groups: Groups) -> Group | None:
    return await anext(groups, None)


async def _cancel_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    # Tasks that continue nevertheless are user code, about which `Policy` has warned, or come from `submit`.
    for task in await ended_within(rest, LEAVING):
        logger.warning("%s still runs %g s after it was cancelled; no longer waiting for it", task, LEAVING)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
