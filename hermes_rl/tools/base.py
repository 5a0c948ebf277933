"""Define tools, the toolkit of a group, and the runtime of a rollout on which they act.

A `ToolRuntime` holds the data that the tools of one rollout keep between calls (sandbox, working directory, background
processes, to-do list), so a tool has no state and two rollouts never share any.
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
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import STATE, BackgroundProcess, Sandbox, SandboxConfig
from hermes_rl.sandbox.isolation import require_by_hand
from hermes_rl.spec.json_schema import CompiledSchema, InvalidSchemaError
from hermes_rl.tools.artifacts import RestoredArtifacts, TakenArtifact
from hermes_rl.tools.staging import Staging

# ------------------------------------------------ Errors in a call: recorded, shown to the model, never a crash


class ToolInputError(Exception):
    """The arguments of a call do not fit the tool; the message is meant for the model."""


class ToolFailedError(Exception):
    """A tool raised an exception or hung. The message is for the model, `detail` for the record."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


# ------------------------------------------------------------------------- Results: JSON texts of a bounded size
# They must not contain anything of the host (paths, tracebacks).

RESULT_LIMIT = 100_000
"""Maximum characters of a result that the model receives for one call; of a longer one, head and tail are sent."""
OUTPUT_LIMIT = 50_000
"""Maximum characters of a command's output; less than `RESULT_LIMIT`, so that the JSON around it stays complete."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_HOST_PATH = re.compile(r"(?<![\w.])/(?:[^\s/'\"`:,;()<>\[\]]+/)+(?=[^\s/])")


def as_json(value: Any) -> str:
    """Return JSON in the form that models read best: text without escapes."""
    return json.dumps(value, ensure_ascii=False)


def error_json(message: str) -> str:
    """Return the result of a call that failed."""
    return as_json({"error": message})


def capped(text: str, limit: int) -> str:
    """Return `text`, or its head (40 %) and tail with a line between them that gives the number of omitted
    characters.
    """
    if len(text) <= limit:
        return text
    head = limit * 2 // 5
    dropped = len(text) - limit
    return f"{text[:head]}\n[... {dropped} characters omitted ...]\n{text[-(limit - head) :]}"


def readable(output: bytes) -> str:
    """Return a command's output for the model: text without terminal control sequences."""
    return capped(_ANSI.sub("", output.decode("utf-8", "replace")).rstrip(), OUTPUT_LIMIT)


def describe(error: BaseException) -> str:
    """Return an exception in one line, without the directories of files on the host."""
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.strerror}"
    return _HOST_PATH.sub("", f"{type(error).__name__}: {error}".removesuffix(": "))


# -------------------------------------------------------------------------- An event loop in a separate thread
# An `evaluate` written by hand calls ``ctx.terminal(…)`` without await on the event loop's thread. If the sandbox were
# on that loop, the call would wait for itself forever; on this loop it blocks only the caller and no other sandbox.


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
    started_at: float = field(default_factory=time.monotonic)
    killed: bool = False

    @property
    def status(self) -> str:
        return "running" if self.process.poll() is None else "exited"

    @property
    def uptime(self) -> int:
        return int(time.monotonic() - self.started_at)


MOST_LISTED = 32
"""Maximum number of background processes of a rollout whose output is stored."""
LISTED_OUTPUT = 4 * OUTPUT_LIMIT
"""Bytes of the output that are stored for each."""


class ProcessTable:
    """Processes of one rollout; each rollout has a separate table, so that an id of another rollout is unknown here."""

    def __init__(self) -> None:
        self._entries: dict[str, ListedProcess] = {}
        self._started_count = self._starting = 0

    @contextmanager
    def room(self) -> Iterator[None]:
        """Reserve a slot for a process that the block starts; raises `ToolInputError` if the maximum number is running.

        The output of processes is in the runner's memory, so a rollout must not have any number of them. The new
        process replaces the oldest one that has ended.
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
        self._started_count += 1
        entry = ListedProcess(f"proc_{self._started_count}", command, cwd, process)
        self._entries[entry.id] = entry
        return entry

    def all(self) -> list[ListedProcess]:
        return list(self._entries.values())

    def get(self, identity: str) -> ListedProcess:
        """Return the process with this id; raises `ToolInputError` that lists the existing ids."""
        if identity not in self._entries:
            ids = ", ".join(self._entries) or "none"
            dropped = (
                f"; of the ended ones, only the last of {MOST_LISTED} remain"
                if self._started_count > len(self._entries)
                else ""
            )
            raise ToolInputError(f"no process has the session_id {identity!r} (there are: {ids}{dropped})")
        return self._entries[identity]


# -------------------------------------------------------------------- State of a terminal between commands
# Every command gets a separate shell, so that commands can run concurrently and one that hangs harms no other; the
# state is stored on the host, where nothing in the sandbox can change it without the model's knowledge.

STATE_LIMIT = 100_000
"""Maximum bytes of exported variables that are stored; a shell that exports more keeps its former state."""


@dataclass
class ShellState:
    """State of a terminal; empty until a command has run."""

    cwd: str | None = None
    exports: str = ""

    def script(self, command: str, workdir: str | None, *, report: bool = True) -> str:
        """Return the command, for `Sandbox.run_reporting` with `exports`; `workdir` is for this command alone.

        Without `report` it must be run with `variables`, and does not report how it ended.
        """
        parts = [f'eval "${STATE}"; unset {STATE}']
        if workdir is not None:
            parts.append(f"cd -- {shlex.quote(workdir)} || exit 126")
        elif self.cwd is not None:
            # A working directory that was removed meanwhile must not make all further commands fail.
            parts.append(f"cd -- {shlex.quote(self.cwd)} 2>/dev/null || true")
        return "; ".join([*parts, f"eval {shlex.quote(command)}" + (" 3>&-" if report else "")])

    def variables(self) -> dict[str, str]:
        """Return the environment variables that a script without report needs."""
        return {STATE: self.exports}

    def learn(self, report: bytes, *, keep_cwd: bool) -> None:
        """Update the state from the report of a command; a killed command reports nothing and changes nothing."""
        text = report.decode("utf-8", "surrogateescape")
        cwd, _, exports = text.partition("\n")
        if len(report) >= STATE_LIMIT or not cwd.startswith("/") or not exports.endswith("\n.\n"):
            return
        self.exports = exports.removesuffix(".\n").rstrip("\n")
        if not keep_cwd:
            self.cwd = cwd


# --------------------------------------------------------------------------------------- The interface of a tool

CALL_TIMEOUT: ContextVar[float | None] = ContextVar("CALL_TIMEOUT", default=None)
"""Seconds that the running call may take, so that a tool can end its work in time and report that."""


ArgumentRule = Literal["strict", "repair"]
"""Handling of arguments: `strict` ones are passed on unchanged, `repair` converts them to the schema."""


class Tool(ABC):
    """An action that the model can call. One object serves all rollouts: all state is in the runtime."""

    name: str
    parallel: bool = True
    """True if it may run concurrently with other calls of the same turn. Another tool waits for the calls before it,
    and the calls after it wait for it, so that its effects keep their order.
    """
    on_sandbox: bool = False
    """True if it acts on the sandbox. The sandbox is started before the call's time starts: the policy does not cause a
    slow start.
    """
    outside: bool = False
    """True if it acts on systems outside the rollout's sandbox, so that its results may be recorded and replayed."""
    timeout: float | None = None
    """Seconds for one call, if the tool has its limit; the smaller of it and the spec's limit applies."""
    arguments: ArgumentRule | None = None
    """Rule of this tool; None: the rule of the spec's agent."""
    checks_arguments: bool = True
    """True if arguments are checked against `parameters` before a call; False if a server checks them."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """JSON Schema of the arguments, always of type object."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Description that the model receives."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's chat API: ``{"type": "function", "function": {…}}``."""
        return function_schema(self.name, self.description, self.parameters)

    @functools.cached_property
    def compiled(self) -> CompiledSchema:
        """Its parameters, by which arguments are checked and coerced."""
        return CompiledSchema(self.parameters)

    async def prepare(self, runtime: ToolRuntime) -> None:
        """Start its processes in the sandbox, before the agent acts there and can break them."""
        return

    @abstractmethod
    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        """Run the tool, and return a text (JSON for the built-in tools).

        `args` are checked against `parameters` already. Raises `ToolInputError` for arguments that cannot be used; a
        `Failure` ends the rollout; any other exception becomes an error result for the model.
        """


class DescribedTool(Tool):
    """A tool whose description and parameters are determined when it is made."""

    def __init__(self, name: str, description: str, parameters: dict[str, Any]) -> None:
        self.name, self._description, self._parameters = name, description, parameters

    @property
    def description(self) -> str:
        return self._description

    @property
    def parameters(self) -> dict[str, Any]:
        return self._parameters


def require_usable(tool: Tool) -> Tool:
    """Return a tool whose schema came from a user.

    Raises `UserError` if the schema cannot be used to check arguments.
    """
    if tool.arguments != "strict" and (problem := _problem_of(json.dumps(tool.parameters, default=str))) is not None:
        raise UserError(f"the parameters of the tool `{tool.name}` are not a usable JSON Schema: {problem}")
    return tool


@functools.lru_cache(maxsize=1024)  # rollouts of one row, and most rows, have the same tools
def _problem_of(parameters: str) -> str | None:
    try:
        CompiledSchema(json.loads(parameters)).check()
    except InvalidSchemaError as error:
        return str(error)
    return None


def arguments(required: Iterable[str] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments, made from the schemas of the arguments."""
    return {"type": "object", "properties": properties, "required": list(required)}


def typed(kind: str, description: str, *choices: str, **more: Any) -> dict[str, Any]:
    """Return the JSON Schema of one argument."""
    enum = {"enum": list(choices)} if choices else {}
    return {"type": kind, **enum, "description": description, **more}


@dataclass(frozen=True)
class Toolset:
    """Tools that are enabled together by one name."""

    name: str
    description: str
    tools: tuple[Tool, ...]


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's schema in the form of OpenAI's chat API."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


# ---------------------------------------------------------------------------------------- The toolkit of a group


class Schemas(list[dict[str, Any]]):
    """OpenAI tool schemas, with the toolkit that they describe: code that only passes schemas on loses nothing."""

    def __init__(self, toolkit: Toolkit, schemas: Iterable[dict[str, Any]]) -> None:
        self.toolkit = toolkit
        super().__init__(schemas)

    def __reduce__(self) -> tuple[type, tuple[list[dict[str, Any]]]]:
        return list, (list(self),)  # another process cannot call tools: they belong to this process

    def __copy__(self) -> Schemas:
        return Schemas(self.toolkit, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Schemas:
        return Schemas(self.toolkit, copy.deepcopy(list(self), memo))


class Toolkit:
    """Tools by name, in order; immutable, shared by the rollouts of a group.

    Args:
        tools: the tools.
        schemas: schemas for the model, in the same order; None: the schema of each tool.
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
        """Return the tools among these with one of `names`; None selects all."""
        if names is None or self.names <= set(names):
            return self
        pairs = [pair for pair in zip(self.tools, self.schemas, strict=True) if pair[0].name in names]
        return Toolkit((tool for tool, _ in pairs), (schema for _, schema in pairs))


# -------------------------------------------------------------------------------------- The runtime of a rollout

T = TypeVar("T")

_live: dict[str, ToolRuntime] = {}
"""Runtimes by task id, from the moment they are made until they are closed."""


class ToolResource(Protocol):
    """A resource that a tool keeps open between calls."""

    async def close(self) -> None:
        """Release it; may be called twice."""


class RewardTimeBudget:
    """Remaining seconds for the commands of a rollout's rewards."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._worked = 0.0

    def work(self, seconds: float) -> None:
        """Subtract the working time of an agent; of several that share the sandbox the longest counts."""
        self.seconds -= max(0.0, seconds - self._worked)
        self._worked = max(self._worked, seconds)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Subtract the duration of the block."""
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.seconds -= time.monotonic() - started_at


Phase = Literal["model", "tools", "rewards"]
"""Phase of a rollout: a call of its model, its tools, or its rewards."""


class ToolRuntime:
    """Sandbox and memory of one rollout, shared by its tools, its rewards and `ToolContext`."""

    def __init__(
        self,
        sandbox: SandboxConfig | None = None,
        *,
        task_id: str | None = None,
        toolkit: Toolkit | None = None,
        state: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
        run: bool = False,
    ) -> None:
        self.task_id = task_id or f"task-{uuid.uuid4().hex[:12]}"
        self.config = sandbox or SandboxConfig()
        self.toolkit = toolkit or Toolkit()
        self.state = state
        self.is_over: Callable[[], Awaitable[Any]] | None = None
        """Returns a true value if the environment on which the agent acts is done; None if no code can tell."""
        self.apart: dict[str, ToolRuntime] = {}
        """Runtimes of the seats of an episode that have a separate sandbox."""
        self.process: Any = None
        """The `RolloutProcess` of the rollout, if the spec has one."""
        self.todos: list[dict[str, str]] = []
        self.held: dict[str, ToolResource] = {}
        """Resources that tools opened for this rollout, by name; closed with it."""
        self.copied_from: ToolRuntime | None = None
        """Runtime whose sandbox is copied here; its tool servers, whose state has no copy, are used here too."""
        self.artifacts: Mapping[str, TakenArtifact] = {}
        """Artifacts saved from the sandbox when the agent had ended."""
        self.fault: str | None = None
        """Description of a file of the agent that prevents all access to this sandbox; None: there is none."""
        self.time_left: RewardTimeBudget | None = None
        """Remaining time for the commands of rewards; None: unlimited."""
        self.start_seconds = 0.0
        """Seconds that starting the sandbox took; 0 if nothing used it."""
        self.sandbox_started_at: float | None = None
        """Start time of the sandbox, before it was ready, in seconds since 1970; None if nothing used it."""
        self.acts = 0
        """Number of the agent's actions on the sandbox."""
        self._prepared = not run
        self._preparing = asyncio.Lock()
        self.phase: Phase = "model"
        """Current phase of the rollout, for the display of the run."""
        self.loop = loop
        """Event loop of the sandbox."""
        if loop is None:
            with suppress(RuntimeError):  # there is no running loop: the first user of the sandbox sets it
                self.loop = asyncio.get_running_loop()
        self.of_a_run = run
        """True if a run executes the rollout, and releases its sandbox itself after all rewards have looked at it."""
        self._sandbox: Sandbox | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        if self.task_id in _live:
            raise UserError(f"task id {self.task_id!r} is in use by another rollout")
        _live[self.task_id] = self

    # Created on first use: thousands of rollouts may wait for their models.

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
    def laid(self) -> RestoredArtifacts:
        """Artifacts that are restored in this sandbox, if it is a fresh one for a reward."""
        return RestoredArtifacts()

    @property
    def started(self) -> bool:
        """True if the sandbox was used."""
        return self._sandbox is not None

    @property
    def image_digest(self) -> str | None:
        """See `Sandbox.image_digest`; None if nothing used the sandbox."""
        return self._sandbox.image_digest if self._sandbox is not None else None

    @property
    def killed_by_agent(self) -> bool:
        """True if the agent's commands destroyed the sandbox."""
        return self._sandbox is not None and self._sandbox.killed_by_agent

    def lifetime_expired(self, waited: float) -> bool:
        """Return True if the sandbox reached the end of its lifetime without a command running, caused by the agent.

        That is the case if the agent did not spend most of the lifetime waiting for others (`waited` seconds), but used
        it up itself, as by long replies. From then on the sandbox reports the same.
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
        """Use a started sandbox as the runtime's sandbox, which the runtime then closes."""
        self._sandbox, self.loop = sandbox, asyncio.get_running_loop()

    async def sandbox_for_agent(self) -> Sandbox:
        """Return the sandbox for the agent, after the start of the tools' processes there.

        Raises as `sandbox`, and `ToolServerFailure`.
        """
        sandbox = await self.sandbox()
        async with self._preparing:
            if not self._prepared:
                started_at = time.perf_counter()
                for tool in self.toolkit.tools:
                    await tool.prepare(self)
                self.start_seconds += time.perf_counter() - started_at
                self._prepared = True
        return sandbox

    async def on_sandbox_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the sandbox's event loop, from any loop."""
        if self.loop is None or self.loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def settle(self, *, agent_done: bool = True) -> None:
        """Kill the agent's processes after its end, unless the spec keeps them. Rewards look after this.

        Not `agent_done`: it has ended its turn, and the sandbox's lifetime continues.
        """
        if self._sandbox is None or not self._sandbox.alive:
            return
        try:
            await self._sandbox.end_shells()
            if not self.config.keep_processes:
                await self._sandbox.kill_all(agent_done=agent_done)
        except SandboxFailure as failure:
            # The agent's effects on its sandbox are graded: rewards find that the sandbox is gone.
            if not failure.stop_reason.graded:
                raise

    async def release(self) -> None:
        """Release the sandbox before the end of the runtime; a later request for it is a bug."""
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
        started_at, self.sandbox_started_at = time.perf_counter(), time.time()
        try:
            sandbox = create_sandbox(self.config)
            await sandbox.start()
        except OSError as error:
            raise SandboxFailure(f"the sandbox did not start: {error}") from error
        if self._closed:
            # Another task closed the runtime meanwhile and did not know this sandbox yet.
            await sandbox.close()
            raise self._released()
        self.start_seconds = time.perf_counter() - started_at
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
    """Return this name, or a variant if another rollout of this process has it: two runs may use one row."""
    numbered = (f"{name}~{suffix}" for suffix in itertools.count(2))
    return next(name_tried for name_tried in itertools.chain((name,), numbered) if name_tried not in _live)


def own_runtimes() -> list[ToolRuntime]:
    """Return the live runtimes that no run releases."""
    return [runtime for runtime in _live.values() if not runtime.of_a_run]


def runtime_for(
    task_id: str | None, toolkit: Toolkit | None = None, sandbox: SandboxConfig | None = None
) -> ToolRuntime:
    """Return the live runtime of a task, or a new one with this sandbox (None: the default one) if there is none yet.

    A runtime made here belongs to `own_loop`, so that a `ToolContext` may be used on any thread. It is released by
    `ToolContext(task_id).cleanup()`.
    """
    runtime = _live.get(task_id) if task_id is not None else None
    if runtime is not None:
        return runtime
    return ToolRuntime(_overridden(task_id, sandbox), task_id=task_id, toolkit=toolkit, loop=own_loop())


_OVERRIDES: dict[str, dict[str, Any]] = {}
_IMAGES = ("docker_image", "modal_image", "singularity_image", "daytona_image")
CLOUD = ("modal", "daytona")
"""Backends whose sandboxes are remote: they have a separate network."""


def register_task_env_overrides(task_id: str, overrides: Mapping[str, Any]) -> None:
    """Configure the sandbox of a task, before its first tool call; the name is from hermes-agent.

    Args:
        task_id: id of the task, as passed to `HermesAgentLoop` or `ToolContext`.
        overrides: `env_type` is the backend; `docker_image`, `modal_image`, `singularity_image` or `daytona_image` the
            image; `cwd` the working directory; `env` variables, which the reference design does not have. In an
            environment whose `terminal_backend` takes images, the image is for that backend, whichever name it has.

    Raises:
        UserError: an override is not known.
    """
    unknown = sorted(set(overrides) - {"env_type", "cwd", "env", *_IMAGES})
    if unknown:
        override_names = ", ".join(("env_type", "cwd", "env", *_IMAGES))
        raise UserError(f"task {task_id!r}: unknown override {unknown[0]!r}; known are {override_names}")
    _OVERRIDES[task_id] = dict(overrides)


def clear_task_env_overrides(task_id: str) -> None:
    """Remove the configuration of `register_task_env_overrides`."""
    _OVERRIDES.pop(task_id, None)


def _overridden(task_id: str | None, sandbox: SandboxConfig | None) -> SandboxConfig | None:
    overrides = _OVERRIDES.get(task_id or "")
    if not overrides:
        return sandbox
    config = sandbox or SandboxConfig()
    backend = overrides.get("env_type") or (config.backend if sandbox is not None else None)
    backend = "bubblewrap" if backend == "local" else backend
    require_by_hand(backend or "", f"task {task_id!r}")
    own_image = f"{backend}_image"
    image_key = own_image if own_image in overrides else next((n for n in _IMAGES if overrides.get(n)), None)
    image = overrides[image_key] if image_key is not None else None
    if backend is None and image_key is not None:
        backend = image_key.removesuffix("_image")
    if image is not None:
        _require_image(task_id or "", image, backend)
    return replace(
        config,
        backend=backend or config.backend,
        image=image or config.image,
        workdir=overrides.get("cwd", config.workdir),
        env={**config.env, **overrides.get("env", {})},
        network=config.network or (backend in CLOUD and (sandbox is None or backend != config.backend)),
    )


def _require_image(task_id: str, image: str, backend: str | None) -> None:
    """Raise `UserError` for an image that the backend cannot use: without it the agent would fail every such task."""
    if posixpath.basename(image) == "Dockerfile":
        raise UserError(
            f"task {task_id!r}: {image} is not an image: build it, and register the name of the built image"
        )
    if backend == "none" or (backend == "bubblewrap" and not Path(image).exists()):
        raise UserError(
            f"task {task_id!r} has the image {image!r}, which the backend {backend} cannot have: set terminal_backend "
            "to docker, modal, daytona or singularity, or register an unpacked image for local"
        )
