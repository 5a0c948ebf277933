"""Tools, the toolkit of a group, and the runtime of a rollout that they act on.

A `ToolRuntime` holds what the tools of one rollout keep between calls (sandbox, working directory, background
processes, to-do list), so that a tool itself has no state and two rollouts never meet.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
import posixpath
import re
import shlex
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.json_schema import CompiledSchema, InvalidSchemaError
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import STATE, BackgroundProcess, Sandbox, SandboxConfig
from hermes_rl.sandbox.isolation import require_by_hand
from hermes_rl.tools.artifacts import Laid, TakenArtifact
from hermes_rl.tools.staging import Staging

# ------------------------------------------------ Mistakes in a call: recorded, told to the model, never a crash


class ToolInputError(Exception):
    """The arguments of a call are not what the tool takes; the message is meant for the model."""


class ToolFailedError(Exception):
    """A tool raised or hung. The message is for the model, `detail` for the record."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


# ------------------------------------------------------------------------- Answers: JSON texts of a bounded size
# Nothing of the host (paths, tracebacks) may be in them.

RESULT_LIMIT = 100_000
"""Characters that the model is told for one call; of more, head and tail are kept."""
OUTPUT_LIMIT = 50_000
"""Characters of a command's output; less than `RESULT_LIMIT`, so that the JSON around it stays whole."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_HOST_PATH = re.compile(r"(?<![\w.])/(?:[^\s/'\"`:,;()<>\[\]]+/)+(?=[^\s/])")


def as_json(value: Any) -> str:
    """JSON as models read it best: text as it is, not escaped."""
    return json.dumps(value, ensure_ascii=False)


def error_json(message: str) -> str:
    """Return the answer to a call that failed."""
    return as_json({"error": message})


def capped(text: str, limit: int) -> str:
    """`text`, or its head (40 %) and tail with a line between them that says how much is missing."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 5
    dropped = len(text) - limit
    return f"{text[:head]}\n[... {dropped} characters left out ...]\n{text[-(limit - head) :]}"


def readable(output: bytes) -> str:
    """Return a command's output for the model: text without terminal control sequences."""
    return capped(_ANSI.sub("", output.decode("utf-8", "replace")).rstrip(), OUTPUT_LIMIT)


def describe(error: BaseException) -> str:
    """Return an exception in one line, without the folders of files on the host."""
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.strerror}"
    return _HOST_PATH.sub("", f"{type(error).__name__}: {error}".removesuffix(": "))


# -------------------------------------------------------------------------- An event loop in a thread of its own
# An `evaluate` written by hand calls ``ctx.terminal(…)`` without await on the event loop's own thread. Were the sandbox
# on that loop, the call would wait for itself for ever; on this one it holds up the caller and nobody else's sandbox.


@functools.cache
def own_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, started on first use; it ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="hermes-rl-machines", daemon=True).start()
    return loop


# --------------------------------------------------------- Background processes, by the ids that the model knows


@dataclass
class ListedProcess:
    """A process, and the command by which the model started it."""

    id: str
    command: str
    cwd: str
    process: BackgroundProcess
    began: float = field(default_factory=time.monotonic)
    killed: bool = False

    @property
    def status(self) -> str:
        return "running" if self.process.poll() is None else "exited"

    @property
    def uptime(self) -> int:
        return int(time.monotonic() - self.began)


MOST_LISTED = 32
"""Background processes of a rollout whose output is held for it."""
LISTED_OUTPUT = 4 * OUTPUT_LIMIT
"""Bytes that are held of the output of each."""


class ProcessTable:
    """Each rollout has its own, so that an id of another rollout means nothing here."""

    def __init__(self) -> None:
        self._entries: dict[str, ListedProcess] = {}
        self._begun = self._starting = 0

    @contextmanager
    def room(self) -> Iterator[None]:
        """Keep a place for a process that the block starts; `ToolInputError` where as many run as may be.

        What processes write lies in the runner's memory, so that no rollout may have it hold any number of them. The
        oldest one that has ended is forgotten for the new one.
        """
        if len(self._entries) + self._starting >= MOST_LISTED:
            ended = next((entry.id for entry in self._entries.values() if entry.status == "exited"), None)
            if ended is None:
                raise ToolInputError(f"{MOST_LISTED} processes run in the background already; end one of them first")
            del self._entries[ended]
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1

    def add(self, command: str, cwd: str, process: BackgroundProcess) -> ListedProcess:
        self._begun += 1
        entry = ListedProcess(f"proc_{self._begun}", command, cwd, process)
        self._entries[entry.id] = entry
        return entry

    def all(self) -> list[ListedProcess]:
        return list(self._entries.values())

    def get(self, identity: str) -> ListedProcess:
        """Return the process with this id; raises `ToolInputError` that names those there are."""
        if identity not in self._entries:
            known = ", ".join(self._entries) or "none"
            dropped = (
                f"; of those that have ended, only the last of {MOST_LISTED} are kept"
                if self._begun > len(self._entries)
                else ""
            )
            raise ToolInputError(f"no process has the session_id {identity!r} (there are: {known}{dropped})")
        return self._entries[identity]


# -------------------------------------------------------------------- What a terminal remembers between commands
# Every command gets a shell of its own, so that commands can run side by side and one that hangs harms no other; the
# state is kept on the host, where nothing in the sandbox can change it behind the model's back.

STATE_LIMIT = 100_000
"""Bytes of exported variables that are remembered; a shell that exports more keeps its former state."""


@dataclass
class ShellState:
    """Empty until a command has run."""

    cwd: str | None = None
    exports: str = ""

    def script(self, command: str, workdir: str | None, *, report: bool = True) -> str:
        """Return the command, for `Sandbox.run_reporting` with `exports`; `workdir` is for this command alone.

        Without `report` it is to be run with `variables`, and tells nothing of how it ended.
        """
        parts = [f'eval "${STATE}"; unset {STATE}']
        if workdir is not None:
            parts.append(f"cd -- {shlex.quote(workdir)} || exit 126")
        elif self.cwd is not None:
            # A folder that was removed meanwhile is no reason to refuse every command from now on.
            parts.append(f"cd -- {shlex.quote(self.cwd)} 2>/dev/null || true")
        return "; ".join([*parts, f"eval {shlex.quote(command)}" + (" 3>&-" if report else "")])

    def variables(self) -> dict[str, str]:
        """Return what a script without report needs in its environment."""
        return {STATE: self.exports}

    def learn(self, report: bytes, *, keep_cwd: bool) -> None:
        """Take over what a command reported; one that was killed reports nothing and changes nothing."""
        text = report.decode("utf-8", "surrogateescape")
        cwd, _, exports = text.partition("\n")
        if len(report) >= STATE_LIMIT or not cwd.startswith("/") or not exports.endswith("\n.\n"):
            return
        self.exports = exports.removesuffix(".\n").rstrip("\n")
        if not keep_cwd:
            self.cwd = cwd


# --------------------------------------------------------------------------------------- The interface of a tool

__all__ = ["CALL_TIMEOUT", "Tool", "ToolInputError", "Toolset", "function_schema"]

CALL_TIMEOUT: ContextVar[float | None] = ContextVar("CALL_TIMEOUT", default=None)
"""Seconds that the call now running may take, so that a tool can end its own work in time and say so."""


ArgumentRule = Literal["strict", "repair"]
"""What becomes of arguments: `strict` ones are handed on as sent, `repair` converts them to the schema."""


class Tool(ABC):
    """Something that the model can call. One object serves all rollouts: what differs is in the runtime."""

    name: str
    parallel: bool = True
    """May run beside other calls of the same turn. One that may not waits for those before it, and those
    after it wait for it, so that its effects keep their order."""
    on_sandbox: bool = False
    """Acts on the sandbox. It is started before the call's time begins: a slow start is not the policy's doing."""
    outside: bool = False
    """Acts on the world outside of the rollout's machine, so that its answers may be recorded and replayed."""
    timeout: float | None = None
    """Seconds for one call, where the tool has a bound of its own; the smaller of it and the spec's wins."""
    arguments: ArgumentRule | None = None
    """A rule of its own; None: as the spec's agent says."""
    checks_arguments: bool = True
    """Arguments are checked against `parameters` before a call; not those that a server checks."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """JSON Schema of the arguments, always of type object."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What the model is told about it."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's chat API takes it: ``{"type": "function", "function": {…}}``."""
        return function_schema(self.name, self.description, self.parameters)

    @functools.cached_property
    def compiled(self) -> CompiledSchema:
        """Its parameters, by which arguments are checked and coerced."""
        return CompiledSchema(self.parameters)

    async def prepare(self, runtime: ToolRuntime) -> None:
        """Start what it has in the sandbox, before the agent acts there and can break it."""
        return

    @abstractmethod
    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        """Act, and answer in text (JSON for the built-in tools).

        `args` are checked against `parameters` already. Raises `ToolInputError` for arguments that cannot
        be used; a `Failure` ends the rollout; any other exception becomes an error that the model is told.
        """


class DescribedTool(Tool):
    """A tool whose description and parameters are found out when it is made."""

    def __init__(self, name: str, description: str, parameters: dict[str, Any]) -> None:
        self.name, self._description, self._parameters = name, description, parameters

    @property
    def description(self) -> str:
        return self._description

    @property
    def parameters(self) -> dict[str, Any]:
        return self._parameters


def require_usable(tool: Tool) -> Tool:
    """Return a tool whose schema came from a user; raises `UserError` where nothing can be checked against it."""
    if tool.arguments != "strict" and (problem := _problem_of(json.dumps(tool.parameters, default=str))) is not None:
        raise UserError(f"the parameters of the tool `{tool.name}` are no JSON Schema that can be used: {problem}")
    return tool


@functools.lru_cache(maxsize=1024)  # rollouts of one row, and most rows, have the same tools
def _problem_of(parameters: str) -> str | None:
    try:
        CompiledSchema(json.loads(parameters)).check()
    except InvalidSchemaError as error:
        return str(error)
    return None


def arguments(required: Iterable[str] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments, made of the schemas of each argument."""
    return {"type": "object", "properties": properties, "required": list(required)}


def typed(kind: str, description: str, **more: Any) -> dict[str, Any]:
    """Return the JSON Schema of one argument."""
    return {"type": kind, "description": description, **more}


@dataclass(frozen=True)
class Toolset:
    """Tools that are switched on together by one name."""

    name: str
    description: str
    tools: tuple[Tool, ...]


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's schema in the form of OpenAI's chat API."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


# ---------------------------------------------------------------------------------------- The toolkit of a group


class Schemas(list[dict[str, Any]]):
    """OpenAI tool schemas, with the toolkit that they describe: code which only passes schemas on loses nothing."""

    def __init__(self, toolkit: Toolkit, schemas: Iterable[dict[str, Any]]) -> None:
        self.toolkit = toolkit
        super().__init__(schemas)

    def __reduce__(self) -> tuple[type, tuple[list[dict[str, Any]]]]:
        return list, (list(self),)  # in another process tools could not be called: they belong to what runs here

    def __copy__(self) -> Schemas:
        return Schemas(self.toolkit, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Schemas:
        return Schemas(self.toolkit, copy.deepcopy(list(self), memo))


class Toolkit:
    """Tools by name, in order; immutable, shared by the rollouts of a group.

    Args:
        tools: the tools.
        schemas: what the model is told about each, in the same order; None: what each tool says of itself.
    """

    def __init__(self, tools: Iterable[Tool] = (), schemas: Iterable[dict[str, Any]] | None = None) -> None:
        self.tools: tuple[Tool, ...] = tuple(tools)
        self._by_name: dict[str, Tool] = {}
        for tool in self.tools:
            if tool.name in self._by_name:
                raise UserError(f"two tools are named {tool.name!r}; rename one, or disable its toolset")
            self._by_name[tool.name] = tool
        self.schemas = Schemas(self, (tool.schema for tool in self.tools) if schemas is None else schemas)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def get(self, name: str) -> Tool | None:
        return self._by_name.get(name)

    def only(self, names: Collection[str] | None) -> Toolkit:
        """Return the tools among these with one of `names`; None keeps all."""
        if names is None or self.names <= set(names):
            return self
        pairs = [pair for pair in zip(self.tools, self.schemas, strict=True) if pair[0].name in names]
        return Toolkit((tool for tool, _ in pairs), (schema for _, schema in pairs))


# -------------------------------------------------------------------------------------- The runtime of a rollout

T = TypeVar("T")
SandboxFactory = Callable[[SandboxConfig], Sandbox]
"""Gives a sandbox that is still to be started."""

_live: dict[str, ToolRuntime] = {}
"""Runtimes by task id, from the moment they are made until they are closed."""


class Held(Protocol):
    """Something that a tool keeps open between calls."""

    async def close(self) -> None:
        """Release it; may be called twice."""


class TimeLeft:
    """Seconds that the commands of a rollout's rewards still have."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._worked = 0.0

    def work(self, seconds: float) -> None:
        """Take the working time of an agent; of several that share the machine the longest counts."""
        self.seconds -= max(0.0, seconds - self._worked)
        self._worked = max(self._worked, seconds)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Take the time that the block lasts."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds -= time.monotonic() - began


Phase = Literal["model", "tools", "rewards"]
"""What a rollout is at: its model is asked, its tools work, or its rewards do."""


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
        self.is_over: Callable[[], Awaitable[Any]] | None = None
        """Says by a true value that the world on which the agent acts is over; None where nobody can say it."""
        self.apart: dict[str, ToolRuntime] = {}
        """The machines of those seats of an episode that have one of their own."""
        self.process: Any = None
        """The `RolloutProcess` of the rollout, where the spec has one."""
        self.todos: list[dict[str, str]] = []
        self.held: dict[str, Held] = {}
        """What tools opened for this rollout, by name; closed with it."""
        self.artifacts: Mapping[str, TakenArtifact] = {}
        """What was taken of the sandbox when the agent had ended."""
        self.fault: str | None = None
        """What the agent has left that is in the way of every look into this sandbox; None: nothing."""
        self.time_left: TimeLeft | None = None
        """Of the commands of rewards; None: as long as each takes."""
        self.start_seconds = 0.0
        """Seconds that starting the sandbox took; 0 where nothing used it."""
        self.acts = 0
        """How often the agent has acted on the sandbox."""
        self._prepared = not run
        self._preparing = asyncio.Lock()
        self.phase: Phase = "model"
        """What the rollout is at, for those who watch the run."""
        self.loop = loop
        """The loop that the sandbox lives on."""
        if loop is None:
            with suppress(RuntimeError):  # there is none here: the sandbox's first user says which
                self.loop = asyncio.get_running_loop()
        self.factory = factory
        """Where its sandbox comes from, new or waiting."""
        self.of_a_run = run
        """A run plays the rollout, and releases its sandbox itself once all rewards have looked at it."""
        self._sandbox: Sandbox | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        if self.task_id in _live:
            raise UserError(f"task id {self.task_id!r} is in use by another rollout")
        _live[self.task_id] = self

    # Not before they are used: thousands of rollouts may wait for their models.

    @functools.cached_property
    def processes(self) -> ProcessTable:
        return ProcessTable()

    @functools.cached_property
    def shell(self) -> ShellState:
        return ShellState()

    @functools.cached_property
    def staging(self) -> Staging:
        """Files that a reward has put in place."""
        return Staging()

    @functools.cached_property
    def laid(self) -> Laid:
        """The artifacts that lie in this sandbox, where it is a fresh one for a reward."""
        return Laid()

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

    def overslept(self, waited: float) -> bool:
        """Whether the sandbox, in which nothing ran, has reached the end of its lifetime by the agent's doing.

        That is so where the agent did not spend most of the lifetime waiting for others (`waited` seconds), but used it
        up itself, as by long answers. From then on the sandbox says so too.
        """
        lifetime, sandbox = self.config.lifetime, self._sandbox
        if sandbox is None or lifetime is None or not sandbox.expired or waited > lifetime / 2:
            return False
        sandbox.blame_agent()
        return True

    async def sandbox(self) -> Sandbox:
        """Return the rollout's sandbox, started on first use; raises `SandboxFailure` when that fails."""
        async with self._starting:
            if self._closed:
                raise self._released()
            if self._sandbox is None:
                self._sandbox = await self._start()
            return self._sandbox

    def adopt(self, sandbox: Sandbox) -> None:
        """Take a sandbox that is started for the runtime's own, which closes it from now on."""
        self._sandbox, self.loop = sandbox, asyncio.get_running_loop()

    async def sandbox_for_agent(self) -> Sandbox:
        """Return the sandbox for the agent to act on, once what tools have there is started. Raises as `sandbox`, and
        `ToolServerFailure`."""
        sandbox = await self.sandbox()
        async with self._preparing:
            if not self._prepared:
                began = time.perf_counter()
                for tool in self.toolkit.tools:
                    await tool.prepare(self)
                self.start_seconds += time.perf_counter() - began
                self._prepared = True
        return sandbox

    async def at_home(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop that the sandbox lives on, from any loop."""
        if self.loop is None or self.loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def settle(self, *, over: bool = True) -> None:
        """Kill the agent's processes once it has ended, unless the spec keeps them. Rewards look after this.

        Not `over`: it has ended its turn, and the sandbox's lifetime goes on.
        """
        if self._sandbox is None or not self._sandbox.alive:
            return
        try:
            await self._sandbox.end_shells()
            if not self.config.keep_processes:
                await self._sandbox.kill_all(over=over)
        except SandboxFailure as failure:
            # What the agent did to its sandbox is graded: rewards find that the sandbox is gone.
            if not failure.ending.graded:
                raise

    async def release(self) -> None:
        """Release the sandbox before the end of the runtime; who asks for it afterwards makes a mistake."""
        self._closed = True
        try:
            for entry in self.held.values():
                await entry.close()
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

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def find_runtime(task_id: str) -> ToolRuntime | None:
    """Return the live runtime of a task."""
    return _live.get(task_id)


def free_task_id(name: str) -> str:
    """Return this name, or one like it where another rollout of this process has it: two runs may play one row."""
    numbered = (f"{name}~{number}" for number in itertools.count(2))
    return next(name_tried for name_tried in itertools.chain((name,), numbered) if name_tried not in _live)


def own_runtimes() -> list[ToolRuntime]:
    """Return the live runtimes that no run releases."""
    return [runtime for runtime in _live.values() if not runtime.of_a_run]


def runtime_for(
    task_id: str | None, toolkit: Toolkit | None = None, sandbox: SandboxConfig | None = None
) -> ToolRuntime:
    """Return the live runtime of a task; a new one with this sandbox (None: the default one) where there is none yet.

    A runtime made here lives on `own_loop`, so that a `ToolContext` may be used on any thread. It is released by
    `ToolContext(task_id).cleanup()`.
    """
    runtime = _live.get(task_id) if task_id is not None else None
    if runtime is not None:
        return runtime
    return ToolRuntime(_overridden(task_id, sandbox), task_id=task_id, toolkit=toolkit, loop=own_loop())


_OVERRIDES: dict[str, dict[str, Any]] = {}
_IMAGES = ("docker_image", "modal_image", "singularity_image", "daytona_image")
CLOUD = ("modal", "daytona")
"""Backends whose sandboxes are far from this machine and its network: they have a network of their own."""


def register_task_env_overrides(task_id: str, overrides: Mapping[str, Any]) -> None:
    """Say what the sandbox of a task is to be like, before its first tool call; hermes-agent's name for it.

    Args:
        task_id: of the task, as it is given to `HermesAgentLoop` or `ToolContext`.
        overrides: `env_type` is the backend; `docker_image`, `modal_image`, `singularity_image` or `daytona_image` the
            image; `cwd` the working directory; `env` variables, which the reference design has not. In an environment
            whose `terminal_backend` takes images, the image is for that backend, whichever name it has.

    Raises:
        UserError: an override is not known.
    """
    unknown = sorted(set(overrides) - {"env_type", "cwd", "env", *_IMAGES})
    if unknown:
        known = ", ".join(("env_type", "cwd", "env", *_IMAGES))
        raise UserError(f"task {task_id!r}: unknown override {unknown[0]!r}; known are {known}")
    _OVERRIDES[task_id] = dict(overrides)


def clear_task_env_overrides(task_id: str) -> None:
    """Forget what `register_task_env_overrides` said."""
    _OVERRIDES.pop(task_id, None)


def _overridden(task_id: str | None, sandbox: SandboxConfig | None) -> SandboxConfig | None:
    overrides = _OVERRIDES.get(task_id or "")
    if not overrides:
        return sandbox
    own = sandbox or SandboxConfig()
    backend = overrides.get("env_type") or (own.backend if sandbox is not None else None)
    backend = "bubblewrap" if backend == "local" else backend
    require_by_hand(backend or "", f"task {task_id!r}")
    own_image = f"{backend}_image"
    named = own_image if own_image in overrides else next((n for n in _IMAGES if overrides.get(n)), None)
    image = overrides[named] if named is not None else None
    if backend is None and named is not None:
        backend = named.removesuffix("_image")
    if image is not None:
        _require_image(task_id or "", image, backend)
    return replace(
        own,
        backend=backend or own.backend,
        image=image or own.image,
        workdir=overrides.get("cwd", own.workdir),
        env={**own.env, **overrides.get("env", {})},
        network=own.network or (backend in CLOUD and (sandbox is None or backend != own.backend)),
    )


def _require_image(task_id: str, image: str, backend: str | None) -> None:
    """Raise `UserError` for an image that the backend cannot have: an agent without it would fail every task of its
    kind."""
    if posixpath.basename(image) == "Dockerfile":
        raise UserError(f"task {task_id!r}: {image} is no image: build it, and register the name of what was built")
    if backend == "none" or (backend == "bubblewrap" and not Path(image).exists()):
        raise UserError(
            f"task {task_id!r} has the image {image!r}, which the backend {backend} cannot have: set terminal_backend "
            "to docker, modal, daytona or singularity, or register an unpacked image for local"
        )
