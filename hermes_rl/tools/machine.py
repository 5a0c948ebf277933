"""Everything that one rollout's tools act on, and the registry that finds it by task id.

Owns the life of a rollout's sandbox: it is started when something first uses it, once, and released by
`close`. What the tools keep between calls (to-do list, background processes, working directory of the
shell) lives here, so that a tool itself has no state and two rollouts never meet.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.tools.artifacts import Laid, TakenArtifact
from hermes_rl.tools.own_loop import own_loop
from hermes_rl.tools.processes import ProcessTable
from hermes_rl.tools.shell import ShellState
from hermes_rl.tools.staging import Staging
from hermes_rl.tools.toolkit import Toolkit

T = TypeVar("T")
SandboxFactory = Callable[[SandboxConfig], Sandbox]
"""Gives a sandbox that is still to be started."""

_live: dict[str, ToolRuntime] = {}
"""Runtimes by task id, from the moment they are made until they are closed."""


class Held(Protocol):
    """Something that a tool keeps open between calls."""

    async def close(self) -> None:
        """Release it; may be called twice."""


class ToolRuntime:
    """One rollout's machine and memory, shared by its tools, its rewards and `ToolContext`."""

    def __init__(
        self,
        sandbox: SandboxConfig | None = None,
        *,
        task_id: str | None = None,
        toolkit: Toolkit | None = None,
        state: Any = None,
        factory: SandboxFactory = create_sandbox,
        loop: asyncio.AbstractEventLoop | None = None,
        run: bool = False,
    ) -> None:
        self.task_id = task_id or f"task-{uuid.uuid4().hex[:12]}"
        self.config = sandbox or SandboxConfig()
        self.toolkit = toolkit or Toolkit()
        self.state = state
        self.todos: list[dict[str, str]] = []
        self.processes = ProcessTable()
        self.shell = ShellState()
        self.staging = Staging()
        """Files that a reward has put in place."""
        self.held: dict[str, Held] = {}
        """What tools opened for this rollout, by name; closed with it."""
        self.artifacts: Mapping[str, TakenArtifact] = {}
        """What was taken of the sandbox when the agent had ended."""
        self.laid = Laid()
        """The artifacts that lie in this sandbox, where it is a fresh one for a reward."""
        self.start_seconds = 0.0
        """Seconds that starting the sandbox took; 0 where nothing used it."""
        self.loop: asyncio.AbstractEventLoop | None = loop or _running_loop()
        """The loop that the sandbox lives on."""
        self.factory = factory
        """Where its sandbox comes from, new or waiting."""
        self.of_a_run = run
        """A run plays the rollout, and releases its sandbox itself once all rewards have looked at it."""
        self._sandbox: Sandbox | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        _register(self)

    @property
    def started(self) -> bool:
        """True when something has used the sandbox."""
        return self._sandbox is not None

    @property
    def image_digest(self) -> str | None:
        """See `Sandbox.image_digest`; None where nothing used the sandbox."""
        return self._sandbox.image_digest if self._sandbox is not None else None

    @property
    def killed_by_agent(self) -> bool:
        """True when the sandbox is gone because of the agent's own commands."""
        return self._sandbox is not None and self._sandbox.killed_by_agent

    async def sandbox(self) -> Sandbox:
        """The rollout's sandbox, started on first use; raises `SandboxFailure` when that fails."""
        async with self._starting:
            if self._closed:
                raise self._released()
            if self._sandbox is None:
                self._sandbox = await self._start()
            return self._sandbox

    async def at_home(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop that the sandbox lives on, from any loop."""
        if self.loop is None or self.loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def settle(self) -> None:
        """The agent has ended: kill its processes, unless the spec keeps them. Rewards look after this."""
        if self._sandbox is None or not self._sandbox.alive:
            return
        try:
            await self._sandbox.end_shells()
            if not self.config.keep_processes:
                await self._sandbox.kill_all()
        except SandboxFailure as failure:
            # What the agent did to its sandbox is graded: rewards find that the sandbox is gone.
            if not failure.ending.graded:
                raise

    async def release(self) -> None:
        """Give the sandbox back before the end; what is asked of it from now on is a mistake of ours."""
        self._closed = True
        try:
            for held in self.held.values():
                await held.close()
        finally:
            if self._sandbox is not None:
                await self._sandbox.close()

    async def close(self) -> None:
        """Release the sandbox and leave the registry; may be called twice, and while being cancelled."""
        if _live.get(self.task_id) is self:
            del _live[self.task_id]
        await self.release()

    async def _start(self) -> Sandbox:
        self.loop = asyncio.get_running_loop()
        began = time.perf_counter()
        try:
            sandbox = self.factory(self.config)
            await sandbox.start()
        except OSError as error:
            raise SandboxFailure(f"the sandbox did not start: {error}") from error
        if self._closed:
            # Another task closed the runtime meanwhile and could not see this sandbox yet.
            await sandbox.close()
            raise self._released()
        self.start_seconds = time.perf_counter() - began
        return sandbox

    def _released(self) -> UserError:
        return UserError(f"the sandbox of task {self.task_id!r} was released already")

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def find_runtime(task_id: str) -> ToolRuntime | None:
    """The live runtime of a task."""
    return _live.get(task_id)


def runtime_for(
    task_id: str | None, toolkit: Toolkit | None = None, sandbox: SandboxConfig | None = None
) -> ToolRuntime:
    """The live runtime of a task; a new one with this sandbox (None: the default one) where there is none yet.

    A runtime made here lives on `own_loop`, so that a `ToolContext` may be used on any thread. It is released by
    `ToolContext(task_id).cleanup()`.
    """
    runtime = _live.get(task_id) if task_id is not None else None
    if runtime is not None:
        return runtime
    return ToolRuntime(_overridden(task_id, sandbox), task_id=task_id, toolkit=toolkit, loop=own_loop())


_OVERRIDES: dict[str, dict[str, Any]] = {}
_IMAGES = ("docker_image", "modal_image", "singularity_image", "daytona_image")


def register_task_env_overrides(task_id: str, overrides: Mapping[str, Any]) -> None:
    """Say what the sandbox of a task is to be like, before its first tool call; hermes-agent's name for it.

    Args:
        task_id: of the task, as it is given to `HermesAgentLoop` or `ToolContext`.
        overrides: `env_type` is the backend; `docker_image`, `modal_image`, `singularity_image` or `daytona_image` the
            image; `cwd` the working directory.

    Raises:
        UserError: an override is not known.
    """
    unknown = sorted(set(overrides) - {"env_type", "cwd", *_IMAGES})
    if unknown:
        known = ", ".join(("env_type", "cwd", *_IMAGES))
        raise UserError(f"task {task_id!r}: unknown override {unknown[0]!r}; known are {known}")
    _OVERRIDES[task_id] = dict(overrides)


def clear_task_env_overrides(task_id: str) -> None:
    """Forget what `register_task_env_overrides` said."""
    _OVERRIDES.pop(task_id, None)


def _overridden(task_id: str | None, sandbox: SandboxConfig | None) -> SandboxConfig | None:
    given = _OVERRIDES.get(task_id or "")
    if not given:
        return sandbox
    found: dict[str, Any] = {}
    if "cwd" in given:
        found["workdir"] = given["cwd"]
    image = next((given[name] for name in _IMAGES if given.get(name)), None)
    if image is not None:
        found["image"] = image
    backend = given.get("env_type") or next((n.removesuffix("_image") for n in _IMAGES if given.get(n)), None)
    if backend is not None:
        found["backend"] = "bubblewrap" if backend == "local" else backend
        found["network"] = True if backend in ("modal", "daytona") else (sandbox or SandboxConfig()).network
    return replace(sandbox or SandboxConfig(), **found)


def _register(runtime: ToolRuntime) -> None:
    if runtime.task_id in _live:
        raise UserError(f"task id {runtime.task_id!r} is in use by another rollout")
    _live[runtime.task_id] = runtime


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
