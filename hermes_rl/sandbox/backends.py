"""Create a sandbox from a configuration: the one module that knows which backends exist.

`create_sandbox` creates one that has not been started; `Pool` provides started sandboxes of the default backend. A
package provides a backend as an entry point of the group `hermes_rl.sandboxes`: a callable that takes a `SandboxConfig`
and returns a `Sandbox`. Names of built-in backends cannot be used.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import replace
from typing import Any, cast

from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.plugins import SANDBOXES, did_you_mean, load_published, published
from hermes_rl.sandbox.base import BACKENDS, Sandbox, SandboxConfig
from hermes_rl.sandbox.bubblewrap import Bubblewrap
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.sandbox.remote import NAMES as REMOTE
from hermes_rl.threads import end_tasks


def create_sandbox(config: SandboxConfig) -> Sandbox:
    """Return a sandbox that is not started yet.

    Raises `UserError` for a configuration that this backend, or this machine, can never run.
    """
    if config.backend == "none":
        from hermes_rl.sandbox.none import NoIsolation

        return HelperSandbox(config, NoIsolation(config))
    if config.backend == "bubblewrap":
        return HelperSandbox(config, Bubblewrap(config))
    if config.backend == "docker":
        from hermes_rl.sandbox.docker import Docker

        return HelperSandbox(config, Docker(config))
    if config.backend in REMOTE:
        from hermes_rl.sandbox.remote import RemoteSandbox

        return RemoteSandbox(config)
    return _of_a_package(config.backend)(config)


def _of_a_package(name: str) -> Callable[[SandboxConfig], Sandbox]:
    points = published(SANDBOXES, "sandbox backend", BACKENDS)
    if name not in points:
        known = [*BACKENDS, *points]
        raise UserError(
            f"no sandbox backend is named {name!r}{did_you_mean(name, known)} (there are {', '.join(known)})"
        )
    return cast(Callable[[SandboxConfig], Sandbox], load_published(points[name], "sandbox backend"))


# -------------------------------------------------------------------------------- pool
# A spare is a sandbox without any data of a rollout: no files, no setup, no command has run. It gets the parts that
# differ between the sandboxes of a run (files, setup, environment, times) when it is taken; if more differs (image,
# limits, network), it is another kind.

log = logging.getLogger(__name__)

SPARES = 2
"""Waiting sandboxes of one kind."""
HEAD_START = 0.02
"""Seconds between handing out a sandbox and starting another: both at once would take the first ten times as long."""
MOST = 8
"""Maximum number of waiting sandboxes of all kinds together; the kind that was not requested for longest is dropped
first.
"""


class Pool:
    """Provides sandboxes as `create_sandbox` does, some of them already started. It belongs to one event loop."""

    def __init__(self) -> None:
        self._spares: OrderedDict[Hashable, list[HelperSandbox]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refilling: set[Hashable] = set()
        """Kinds of which a spare is being made: a burst of rollouts must not start twice as many sandboxes."""
        self._closed = self._containers = False
        self.reused = 0
        """Number of requests that got a waiting sandbox."""

    def create(self, config: SandboxConfig) -> Sandbox:
        """Return a sandbox for `config`, which the caller starts; prepare another one for the next caller."""
        self._containers = self._containers or config.backend == "docker"
        if config.backend != "bubblewrap" or self._closed:
            return create_sandbox(config)
        kind = _kind(config)
        waiting = self._spares.setdefault(kind, [])
        self._spares.move_to_end(kind)
        if kind not in self._refilling:
            self._refilling.add(kind)
            self._later(self._refill(kind, config))
        while waiting:
            spare = waiting.pop(0)
            if spare.alive:
                spare.config = config
                self.reused += 1
                return spare
            self._later(spare.close())
        return create_sandbox(config)

    async def close(self) -> None:
        """End all waiting sandboxes; their users close the ones that were handed out."""
        self._closed = True
        if self._containers:
            from hermes_rl.sandbox.docker import remove_now

            await remove_now()
        await end_tasks(self._tasks)
        spares = [spare for waiting in self._spares.values() for spare in waiting]
        self._spares.clear()
        ended = await asyncio.gather(*(spare.close() for spare in spares), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refill(self, kind: Hashable, config: SandboxConfig) -> None:
        try:
            await asyncio.sleep(HEAD_START)
            while len(self._spares.get(kind, ())) < SPARES and not self._closed:
                spare = create_sandbox(replace(config, files=(), setup=(), env={}, lifetime=None))
                assert isinstance(spare, HelperSandbox)
                await spare.boot()
                self._spares.setdefault(kind, []).append(spare)
                while sum(map(len, self._spares.values())) > MOST:
                    await next(waiting for waiting in self._spares.values() if waiting).pop().close()
        except HermesRLError as error:
            # The next user starts a sandbox again and gets the error; this one has no user.
            log.debug("a spare sandbox did not start: %s", error)
        finally:
            self._refilling.discard(kind)


def _kind(config: SandboxConfig) -> Hashable:
    return config.image, config.packages, config.npm, config.workdir, config.network, config.limits
