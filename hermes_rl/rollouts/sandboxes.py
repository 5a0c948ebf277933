"""Build the sandbox configuration, the tools and the reward sandboxes of a rollout from a spec and a row."""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import os
import shlex
import shutil
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.errors import Problem, RunError, SandboxFailure, UserError
from hermes_rl.others_files import LARGEST_DIRECTORY, open_file, read_file, read_regular
from hermes_rl.plugins import Code
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import ResourceLimits, SandboxConfig, SandboxFile, SandboxService
from hermes_rl.scoring.grader import GradedReward
from hermes_rl.servers.factory import variable
from hermes_rl.spec.argument_types import ToolSchemas
from hermes_rl.spec.model import Spec
from hermes_rl.spec.row_files import (
    LOCATED_ARGUMENTS,
    PlacedFile,
    image_path,
    located_files,
    placed_files,
    require_in_home,
)
from hermes_rl.spec.rules import no_copies
from hermes_rl.spec.sections.common import File
from hermes_rl.spec.sections.sandbox import ServiceSection
from hermes_rl.spec.sections.tools import Mcp, TextFile, ToolSection, Toolsets
from hermes_rl.spec.templates import coerce, has_template, render, render_section
from hermes_rl.threads import PerLoopSemaphore, run_in_thread
from hermes_rl.tools.artifacts import ArtifactFile, ArtifactRequest, TakenArtifact, collect
from hermes_rl.tools.base import Tool, Toolkit, ToolRuntime, free_task_id, require_usable
from hermes_rl.tools.catalogue import DISTRIBUTIONS, resolve_toolsets, sample_distribution
from hermes_rl.tools.context import ToolContext
from hermes_rl.tools.hermes_toolsets import NAMES, HermesToolsets
from hermes_rl.tools.mcp_server import McpSettings
from hermes_rl.tools.mcp_tools import McpSource
from hermes_rl.tools.python_tools import functions_of, python_tool, tools_of_state
from hermes_rl.tools.recording import Recorder, Replay, canned_tools
from hermes_rl.tools.rollout_process import PoolTool, RolloutProcess, RolloutTool, SandboxedTool
from hermes_rl.values import safe_name

# ------------------------------- Artifacts on the host: a directory per rollout, with a file or directory per artifact
# The agent's file names never become names on the host, where they could be too long or point outside: an artifact that
# is a directory is stored as one archive. None of its files is executed.


Keep = Callable[[str, Mapping[str, TakenArtifact]], dict[str, Any]]
"""Stores the artifacts of a rollout, given its id, and returns their descriptions for its record; blocks."""
ARCHIVE = "files.tar"
"""Name of the archive of an artifact that is a directory, inside the directory named after the artifact."""
_EXECUTABLE = 0o111


def keep_artifacts(folder: Path, rollout: str, artifacts: Mapping[str, TakenArtifact]) -> dict[str, Any]:
    """Write a rollout's artifacts below `folder` and return their descriptions for its record; blocks.

    An attempt of an earlier run with the same id is replaced.

    Raises:
        RunError: the artifacts cannot be written.
    """
    rollout_directory = folder / safe_name(rollout)
    shutil.rmtree(rollout_directory, ignore_errors=True)
    try:
        rollout_directory.mkdir(parents=True)
        return {
            name: _keep_artifact(rollout_directory / safe_name(name), each, folder.parent)
            for name, each in artifacts.items()
        }
    except OSError as error:
        raise RunError(f"artifacts cannot be written to {folder}: {error.strerror}") from error


def kept_artifacts(run: Path, record: Mapping[str, Any], names: Iterable[str]) -> dict[str, TakenArtifact]:
    """Return the stored artifacts of a rollout from their descriptions in its record; blocks.

    Args:
        run: the run directory.

    Raises:
        UserError: an artifact was not taken, is missing, or was changed.
    """
    missing = [name for name in names if name not in record]
    if missing:
        raise UserError(f"the artifact {missing[0]} was not taken when the rollouts ran; use --fresh")
    return {name: _load_artifact(run, name, record[name]) for name in names}


def _keep_artifact(path: Path, artifact: TakenArtifact, top: Path) -> dict[str, Any]:
    if artifact.problem is not None:
        return {"problem": artifact.problem}
    archived = [file.path for file in artifact.files] != [""]
    if archived:
        path.mkdir()
        with tarfile.open(path / ARCHIVE, "x", format=tarfile.GNU_FORMAT, **_NAMES) as archive:
            for file in artifact.files:
                entry = tarfile.TarInfo(file.path)
                entry.size, entry.mode = len(file.data), 0o600 | file.mode & _EXECUTABLE
                archive.addfile(entry, io.BytesIO(file.data))
    else:
        (file,) = artifact.files
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600 | file.mode & _EXECUTABLE)
        with os.fdopen(fd, "wb") as target:
            target.write(file.data)
    return {
        "path": str(path.relative_to(top)),
        "target": artifact.target,
        "files": len(artifact.files),
        "bytes": artifact.size,
        "sha256": artifact.digest,
        **({"archive": ARCHIVE} if archived else {}),
    }


_NAMES: Any = {"encoding": "utf-8", "errors": "surrogateescape"}
"""Encoding of names in archives: any bytes, as chosen by the agent."""


def _load_artifact(run: Path, name: str, record: Mapping[str, Any]) -> TakenArtifact:
    if "problem" in record:
        return TakenArtifact(name, "", problem=record["problem"])
    artifact_path = run / record["path"]
    try:
        if "archive" in record:
            with (
                open_file(artifact_path / record["archive"], run) as file,
                tarfile.open(fileobj=file, mode="r:", **_NAMES) as archive,
            ):
                if sum(entry.size for entry in archive) > LARGEST_DIRECTORY:
                    raise UserError(f"the artifact {artifact_path} has more than {LARGEST_DIRECTORY >> 20} MiB")
                files = tuple(_archived_file(archive, entry) for entry in archive)
        else:  # a file; in earlier versions, possibly a plain directory
            paths = sorted(path for path in (artifact_path, *artifact_path.rglob("*")) if path.is_file())
            files = tuple(_read_artifact(path, artifact_path, run) for path in paths)
    except (OSError, tarfile.TarError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the artifact {artifact_path} cannot be read: {reason}") from error
    artifact = TakenArtifact(name, record["target"], files)
    if artifact.digest != record["sha256"]:
        raise UserError(f"the artifact {artifact_path} was changed after the rollout")
    return artifact


def _archived_file(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> ArtifactFile:
    content = archive.extractfile(entry)
    return ArtifactFile(entry.name, content.read() if content is not None else b"", _laid_mode(entry.mode))


def _read_artifact(path: Path, artifact_path: Path, run: Path) -> ArtifactFile:
    relative_path = "" if path == artifact_path else str(path.relative_to(artifact_path))
    return ArtifactFile(relative_path, read_file(path, run), _laid_mode(path.stat().st_mode))


def _laid_mode(mode: int) -> int:
    return 0o644 | mode & _EXECUTABLE


# -------------------------------------------------------------------------------- sandboxes


def sandbox_config(spec: Spec, row: Row, environ: Mapping[str, str] | None = None) -> SandboxConfig:
    """Return the sandbox configuration for a row.

    Args:
        environ: variables with the addresses and keys of remote backends.

    Raises:
        TemplateError: a template does not work for this row.
        UserError: a file cannot be read, is outside the spec's directory, or has the target of another file.
    """
    section = render_section(spec.sandbox, row.columns, location="sandbox", key=row.key)
    if section.backend == "none":
        require_in_home(section.workdir, [file.to for file in section.files])
    return SandboxConfig(
        backend=section.backend,
        image=_backend_image(section.image, section.backend, spec),
        workdir=section.workdir,
        env=dict(section.env),
        packages=tuple(section.python),
        npm=tuple(section.npm),
        files=laid_files(section.files, spec.folder),
        setup=(*section.setup, *([_scrub_git()] if section.scrub_git else ())),
        services=tuple(_sandbox_service(name, service, spec) for name, service in section.services.items()),
        known_hosts=section.ssh.known_hosts,
        accept_unknown_host=section.ssh.accept_unknown_host,
        network=section.network,
        limits=ResourceLimits(**dict(section.limits)),
        timeout=spec.command_timeout,
        lifetime=section.lifetime,
        keep_processes=section.keep_processes,
        environ=environ,
    )


@functools.cache
def _scrub_git() -> str:
    script = resources.files("hermes_rl.sandbox").joinpath("scrub_git.sh").read_text("utf-8")
    return f"sh -c {shlex.quote(script)}"


def _sandbox_service(name: str, service: ServiceSection, spec: Spec) -> SandboxService:
    return SandboxService(
        name,
        str(_backend_image(service.image, "docker", spec)),
        command=tuple(service.command),
        env=dict(service.env),
        files=laid_files(service.files, spec.folder, f"sandbox.services.{name}.files"),
        healthy=service.healthy,
    )


def reward_args(folder: Path, args: Mapping[str, Any], columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a reward for a row; files given by `from` are located in the spec's directory.

    Raises:
        TemplateError: a template does not work for this row.
        UserError: a file is outside that directory.
    """
    values: Mapping[str, Any] = render(args, columns, location="args")
    file_arguments = [name for name in LOCATED_ARGUMENTS if name in values]
    return {**values, **{name: located_files(values[name], folder, f"args.{name}") for name in file_arguments}}


def _backend_image(image: str | None, backend: str, spec: Spec) -> str | None:
    """Return an image in the form that the backend takes.

    For bubblewrap this is a path, which a template may have made relative; for Docker a name, or for `./folder` the
    path of the directory to build; for other backends a name.

    Raises:
        UserError: the directory to build has no Dockerfile, or is outside the directory of the spec or of its tasks.
        TemplateError: as in `image_path`.
    """
    if image is not None and backend == "bubblewrap":
        return str(image_path(image, str(spec.sandbox.image), spec.folder, "sandbox.image"))
    if image is None or backend != "docker" or not image.startswith((".", "/")):
        return image
    top = spec.folder if spec.dataset.harbor is None else Path(spec.dataset.harbor)
    folder = (top / image).resolve()
    if not folder.is_relative_to(top.resolve()) or not (folder / "Dockerfile").is_file():
        raise UserError(f"image: {image} is not a directory with a Dockerfile in {top}")
    return str(folder)


def laid_files(files: tuple[File, ...], folder: Path, spec_key: str = "sandbox.files") -> tuple[SandboxFile, ...]:
    """Return the files that a spec writes; raise `UserError` if one is not available or two have the same target."""
    return tuple(_read_file(file, spec_key) for file in placed_files(files, folder, spec_key))


def _read_file(file: PlacedFile, spec_key: str) -> SandboxFile:
    if isinstance(file.data, bytes):
        return SandboxFile(file.to, file.data, 0o644 if file.mode is None else file.mode)
    try:
        mode = file.data.stat().st_mode & 0o777 if file.mode is None else file.mode
        return SandboxFile(file.to, read_regular(file.data), mode)
    except OSError as error:
        raise UserError(f"{spec_key}: {file.data} cannot be read: {error.strerror}") from error


# Sandboxes of rewards: the rollout's own, or a fresh one with a copy of the rollout's artifacts. This section owns
# their lifetime, and ensures that no agent process runs in the rollout's sandbox before a reward. Artifacts are taken
# before the first reward. The rollout's sandbox is released as soon as no remaining reward uses it; a fresh one lives
# as long as its reward.

log = logging.getLogger(__name__)

SOURCES = 64
"""Maximum number of cached tool lists of states, by their parameters in the row."""
PER_CORE = 2
"""Concurrent fresh sandboxes per core. They mostly run CPU-bound work with a time limit: exceeding it because too many
run concurrently would give a wrong score of 0.
"""

_sandbox_slots = PerLoopSemaphore(PER_CORE * len(os.sched_getaffinity(0)))


class RewardSandboxes:
    """The sandboxes of one rollout's rewards; calling it with a reward opens a sandbox while that reward runs.

    Args:
        runtime: the rollout's own sandbox.
        rewards: all rewards that will use it, in order; once per seat.
        only_kept: names of artifacts that are not copied into fresh sandboxes.
    """

    def __init__(self, runtime: ToolRuntime, rewards: Sequence[GradedReward], only_kept: Collection[str] = ()) -> None:
        self.runtime = runtime
        self._only_kept = only_kept
        self._waiting = [reward.name for reward in rewards if _uses_sandbox(reward) and not reward.fresh]

    async def take(self, requests: Sequence[ArtifactRequest], timeout: float) -> Mapping[str, TakenArtifact]:
        """Take the artifacts from the rollout's sandbox. Raises `SandboxFailure` if infrastructure failed."""
        if requests:
            sandbox = await self.runtime.sandbox()
            self.runtime.artifacts = await collect(sandbox, requests, timeout)
        return self.runtime.artifacts

    @asynccontextmanager
    async def __call__(self, reward: GradedReward) -> AsyncIterator[ToolContext]:
        if not self._waiting:
            await _release(self.runtime.release())
        if not reward.fresh or not _uses_sandbox(reward):
            if _uses_sandbox(reward):
                await self.runtime.settle()  # another reward's commands may have left processes of the agent
            yield ToolContext(self.runtime.task_id)
            if reward.name in self._waiting:
                self._waiting.remove(reward.name)
            return
        rollout_runtime = self.runtime
        name = free_task_id(f"{rollout_runtime.task_id}/{reward.name}")
        runtime = ToolRuntime(
            rollout_runtime.config, task_id=name, toolkit=rollout_runtime.toolkit, state=rollout_runtime.state
        )
        async with _fresh_sandbox(runtime, rollout_runtime.artifacts, self._only_kept) as context:
            runtime.time_left = rollout_runtime.time_left
            yield context


@asynccontextmanager
async def copied(source_runtime: ToolRuntime, reward: GradedReward) -> AsyncIterator[ToolContext | None]:
    """Open a copy of a rollout's sandbox for a reward, while the agent will continue in the sandbox itself.

    Therefore the agent never sees files written or processes started by the reward.
    """
    if not _uses_sandbox(reward):
        yield None
        return
    await source_runtime.settle()
    name = free_task_id(f"{source_runtime.task_id}/{reward.name}")
    runtime = ToolRuntime(
        source_runtime.config, task_id=name, toolkit=source_runtime.toolkit, state=source_runtime.state
    )
    async with _sandbox_slots.get_semaphore():
        try:
            runtime.time_left, runtime.copied_from = source_runtime.time_left, source_runtime
            await _copy_sandbox(source_runtime, runtime)
            yield ToolContext(name)
        finally:
            await _release(runtime.close())


async def _copy_sandbox(source_runtime: ToolRuntime, runtime: ToolRuntime) -> None:
    """Copy another runtime's sandbox; if the agent's files cannot be copied, set the `fault`."""
    sandbox = create_sandbox(replace(source_runtime.config, files=(), setup=()))  # the copy contains their effects
    try:
        await sandbox.start()
    except OSError as error:
        raise SandboxFailure(f"the sandbox did not start: {error}") from error
    runtime.adopt(sandbox)
    with _fault_of(runtime, "what the agent has left cannot be copied"):
        await (await source_runtime.sandbox()).copy_files(sandbox)


@contextmanager
def _fault_of(runtime: ToolRuntime, problem: str) -> Iterator[None]:
    """Set the runtime's `fault` if the agent's files cannot be transferred into its sandbox."""
    try:
        yield
    except OSError as error:
        location = f"{error.filename}: " if error.filename is not None else ""
        runtime.fault = f"{problem}: {location}{error.strerror}"
    except SandboxFailure as failure:
        if not failure.stop_reason.graded:
            raise
        runtime.fault = f"{problem}: {failure.detail}"


def require_copies(config: SandboxConfig, rewards: Iterable[GradedReward]) -> None:
    """Raise `UserError` if rewards for steps need copies of a sandbox that cannot be copied."""
    name = next((reward.name for reward in rewards if _uses_sandbox(reward)), None)
    problem = no_copies(config.backend, config.keep_processes, bool(config.services))
    if name is not None and problem is not None:
        raise UserError(f"rewards.{name}.per_step: {problem}")


class ArtifactSandboxes:
    """Sandboxes for the rewards of a finished rollout: always fresh ones, because its own no longer exists.

    Args:
        name: id of the rollout.
        config: configuration of its sandbox.
        toolkit: tools that a reward may call.
        artifacts: reads its stored artifacts; blocks.
        only_kept: names of artifacts that are not copied into fresh sandboxes.
    """

    def __init__(
        self,
        name: str,
        config: SandboxConfig,
        toolkit: Toolkit,
        artifacts: Callable[[], Mapping[str, TakenArtifact]],
        only_kept: Collection[str] = (),
    ) -> None:
        self._only_kept = only_kept
        self._name, self._config, self._toolkit, self._artifacts = name, config, toolkit, artifacts

    @asynccontextmanager
    async def __call__(self, reward: GradedReward) -> AsyncIterator[ToolContext | None]:
        if not _uses_sandbox(reward):
            yield None
            return
        artifacts = await asyncio.to_thread(self._artifacts)
        name = free_task_id(f"{self._name}/{reward.name}")
        runtime = ToolRuntime(self._config, task_id=name, toolkit=self._toolkit)
        async with _fresh_sandbox(runtime, artifacts, self._only_kept) as context:
            yield context


@asynccontextmanager
async def _fresh_sandbox(
    runtime: ToolRuntime, artifacts: Mapping[str, TakenArtifact], only_kept: Collection[str]
) -> AsyncIterator[ToolContext]:
    """Copy artifacts into the new sandbox of a runtime and keep it open while a reward uses it.

    The reward knows the `only_kept` artifacts, but their files are not in its sandbox.
    """
    async with _sandbox_slots.get_semaphore():
        try:
            runtime.artifacts = artifacts
            with _fault_of(runtime, "artifacts cannot be copied into a fresh sandbox"):
                fresh = {name: artifact for name, artifact in artifacts.items() if name not in only_kept}
                await runtime.laid.lay(await runtime.sandbox(), fresh)
            yield ToolContext(runtime.task_id)
        finally:
            await _release(runtime.close())


async def _release(releasing: Awaitable[None]) -> None:
    """Release a sandbox. A failure is logged and changes no reward, because an agent could provoke it."""
    try:
        await releasing
    except SandboxFailure as failure:
        log.error("a sandbox was not released: %s", failure.detail)


def _uses_sandbox(reward: GradedReward) -> bool:
    return reward.function.uses_context


# The tools of a spec's rollouts, from toolsets, functions, state objects and tool servers. This section owns the tools
# of each group, and the services that must be started once before any rollout. Compiling loads code and reads
# variables; `open` starts servers and lists their tools, so that errors occur there and not in the first rollout.

Place = tuple[str | int, ...]


class Outside:
    """Tools with external effects, in the mode of the spec: called, recorded, or replayed.

    Raises:
        UserError: there is no recording to read, or none can be created.
    """

    def __init__(self, spec: Spec, environ: Mapping[str, str]) -> None:
        record, replay = spec.toolsets.record, spec.toolsets.replay
        self.hermes = HermesToolsets(environ)
        self._canned = spec.toolsets.demo_answers if spec.demo else None
        self.replay = Replay(Path(replay)) if replay is not None else None
        self._recorder = Recorder(Path(record)) if record is not None else None

    def tools(self, source: str) -> tuple[Tool, ...]:
        """Return the tools of one of hermes-agent's toolsets."""
        if self._canned is not None:
            return canned_tools(source, self._canned)
        if self.replay is not None:
            return self.replay.tools(source)
        return self.recorded(self.hermes.tools(source), source)

    def recorded(self, tools: tuple[Tool, ...], source: str) -> tuple[Tool, ...]:
        """Return tools with external effects, wrapped for recording if the spec enables it."""
        recorder = self._recorder
        return tools if recorder is None else tuple(recorder.wrap(tool, source) for tool in tools)

    async def close(self) -> None:
        """Stop hermes-agent's process."""
        await self.hermes.close()


class Tooling:
    """Tools of a spec's agent or of its simulated user.

    Args:
        spec: the spec.
        environ: variables that hold the keys of tools and the values of headers.
        tools: entries that replace the agent's.
        toolsets: toolsets that replace the agent's.

    Raises:
        UserError: a function cannot be loaded, or a variable is missing.
    """

    def __init__(
        self,
        spec: Spec,
        environ: Mapping[str, str],
        tools: Sequence[ToolSection] | None = None,
        toolsets: Toolsets | None = None,
    ) -> None:
        self.spec = spec
        self._toolsets = spec.toolsets if toolsets is None else toolsets
        self._entries = spec.tools if tools is None else tools
        self._outside = Outside(spec, environ)
        self._functions = tuple(
            self._function(entry, reference)
            for entry in self._entries
            if entry.python
            for reference in functions_of(entry.python, entry.names, entry.decorated_with)
        )
        self._servers = tuple(
            _McpTools(_mcp_settings(tool.mcp, spec, environ, index), self._outside)
            for index, tool in enumerate(self._entries)
            if tool.mcp is not None
        )
        self._of_processes: dict[str, tuple[Tool, ...]] = {}
        self._fixed: tuple[Tool, ...] | None = None
        self._server_tools: tuple[Tool, ...] | None = None
        self._opening = asyncio.Lock()

    @property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of each contacted tool server's tool list, by server name."""
        return {name: digest for server in self._servers for name, digest in server.fingerprint.items()}

    async def open(self, sandbox: SandboxConfig) -> None:
        """Start the services that must exist before a rollout; does nothing the second time.

        Raises:
            RunError: a tool server cannot be started, in a sandbox like `sandbox` if it runs in one.
            UserError: a server lacks the tools that the spec allows, or a toolset lacks a key or an extra.
        """
        if self._server_tools is not None:
            return  # every rollout calls this: none must wait for the others
        async with self._opening:
            if self._server_tools is None:
                taken_names = {tool.name for tool in (*self._functions, *await run_in_thread(self._every_toolset))}
                listed_tools: list[Tool] = []
                for server in self._servers:
                    listed_tools += await server.list_tools(sandbox, taken_names | {tool.name for tool in listed_tools})
                self._server_tools = tuple(listed_tools)

    async def close(self) -> None:
        """Stop the tool servers that rollouts share."""
        await self._outside.close()
        for server in self._servers:
            await server.close()

    async def toolkit(self, group: str, state: Any, row: Row) -> Toolkit:
        """Return the tools of a rollout's group and of the rollout's state, which is an object or a process.

        Raises:
            UserError: the state or the row lacks something that an entry names.
        """
        shared = self.shared(group)
        top = "tools" if self._entries is self.spec.tools else "user.tools"
        state_tools = [
            require_usable(tool)
            for index, entry in enumerate(self._entries)
            if entry.state
            for tool in await self._tools_of(state, rendered_source(state_source(entry), row, f"{top}.{index}"))
        ]
        return Toolkit([*shared.tools, *state_tools]) if state_tools else shared

    async def _tools_of(self, state: Any, source: dict[str, Any]) -> tuple[Tool, ...]:
        """Return the tools of one entry; a process is queried once for all rows with equal parameters.

        Schemas defined by the state may differ between rows; methods belong to its class.
        """
        if not isinstance(state, RolloutProcess):
            return tools_of_state(state, **source)
        if isinstance(source["schemas"], str):
            return await state.tools(source)
        key = repr(source)
        tools = self._of_processes.get(key)
        if tools is None:
            tools = await state.tools(source)
            if len(self._of_processes) >= SOURCES:  # each row has different tools
                self._of_processes.clear()
            self._of_processes[key] = tools
        return tools

    def shared(self, group: str) -> Toolkit:
        """Return the tools that all rollouts of a group have; tools of tool servers only once they are open."""
        return Toolkit([*self._catalogue(group), *self._functions, *(self._server_tools or ())])

    def _catalogue(self, group: str) -> tuple[Tool, ...]:
        toolsets = self._toolsets
        if toolsets.distribution is not None:
            drawn = sample_distribution(toolsets.distribution, f"{self.spec.seed}:{group}")
            return resolve_toolsets(drawn, toolsets.disabled, self._outside)
        if self._fixed is None:
            self._fixed = resolve_toolsets(toolsets.enabled, toolsets.disabled, self._outside)
        return self._fixed

    def _every_toolset(self) -> tuple[Tool, ...]:
        """Return the tools of all toolsets that a group may get, so that missing ones are detected early."""
        if self._toolsets is not self.spec.toolsets:
            return ()
        needless = self._outside.replay is not None or self.spec.demo
        problems = [] if needless else toolset_problems(self.spec, self._outside.hermes)
        if problems:
            raise UserError("\n".join(map(str, problems)))
        return resolve_toolsets([name for _, name in named_toolsets(self.spec)], (), self._outside)

    @property
    def codes(self) -> list[Code]:
        """Code of the functions that run in processes of the pool."""
        return [tool.code for tool in self._functions if type(tool) is PoolTool]

    @property
    def sandboxed(self) -> list[tuple[Code, ...]]:
        """Code of each function whose calls run in sandboxed processes."""
        return [tool.codes for tool in self._functions if isinstance(tool, SandboxedTool)]

    def _function(self, entry: ToolSection, reference: str) -> Tool:
        tool = python_tool(reference)
        tool.arguments = entry.arguments
        if entry.isolate == "process":
            tool = RolloutTool.of_function(tool, reference)
        elif entry.isolate == "sandbox":
            tool = SandboxedTool(tool, reference)
        elif entry.isolate != "none":
            tool = PoolTool(tool, reference)
        if not entry.external:
            return tool
        if self._outside.replay is not None:
            return self._outside.replay.tools(f"python {tool.name}")[0]
        return self._outside.recorded((tool,), f"python {tool.name}")[0]


def state_source(entry: ToolSection) -> dict[str, Any]:
    """Return the arguments of `tools_of_state` for an entry that names tools of the state, not yet rendered."""
    source = {key: getattr(entry, key) for key in ("schemas", "arguments", "names", "decorated_with")}
    schemas = {"file": entry.schemas.file} if isinstance(entry.schemas, TextFile) else entry.schemas
    return {**source, "name": entry.state, "schemas": schemas}


def rendered_source(source: Mapping[str, Any], row: Row, spec_key: str) -> dict[str, Any]:
    """Return the arguments of `tools_of_state` for a row; raise `TemplateError` if a value has another type."""
    rendered: dict[str, Any] = render(source, row.columns, location=spec_key, key=row.key)
    for name, kind in (("names", list[str] | None), ("schemas", ToolSchemas)):
        if has_template(source[name]):
            rendered[name] = coerce(rendered[name], kind, location=f"{spec_key}.{name}", key=row.key)
    return rendered


class _McpTools:
    """The tools of one MCP server: called, recorded, or replayed without the server."""

    def __init__(self, settings: McpSettings, outside: Outside) -> None:
        self._name = f"mcp {settings.name}"
        self._outside = outside
        self._replay = None if settings.in_sandbox else outside.replay
        self._source = McpSource(settings) if self._replay is None else None

    @property
    def fingerprint(self) -> dict[str, str]:
        source = self._source
        return {source.settings.name: source.fingerprint} if source is not None and source.fingerprint else {}

    async def list_tools(self, sandbox: SandboxConfig, names: set[str]) -> tuple[Tool, ...]:
        if self._source is None:
            return self._replay.tools(self._name) if self._replay is not None else ()
        tools = await self._source.list_tools(sandbox, names)
        return tools if self._source.settings.in_sandbox else self._outside.recorded(tools, self._name)

    async def close(self) -> None:
        if self._source is not None:
            await self._source.close()


def named_toolsets(spec: Spec) -> list[tuple[Place, str]]:
    """Return every toolset that a rollout of the spec may have, with the key that names it; includes unknown names."""
    chances = spec.toolsets.distribution
    if chances is None:
        toolsets: list[tuple[Place, str]] = [
            (("toolsets", "enabled", n), s) for n, s in enumerate(spec.toolsets.enabled)
        ]
    elif isinstance(chances, str):
        toolsets = [(("toolsets", "distribution"), name) for name in DISTRIBUTIONS.get(chances, ())]
    else:
        toolsets = [(("toolsets", "distribution", name), name) for name, chance in chances.items() if chance > 0]
    return [(key, name) for key, name in toolsets if name not in spec.toolsets.disabled]


def toolset_problems(spec: Spec, hermes: HermesToolsets) -> list[Problem]:
    """Return the problems of the spec's toolsets on this host; each of hermes-agent's takes a second."""
    problems = [(key, hermes.problem(name)) for key, name in named_toolsets(spec) if name in NAMES]
    return [spec.problem(key, problem) for key, problem in problems if problem is not None]


def _mcp_settings(mcp: Mcp, spec: Spec, environ: Mapping[str, str], index: int) -> McpSettings:
    return McpSettings(
        name=mcp.name,
        command=tuple(mcp.command or ()),
        url=mcp.url,
        files=laid_files(mcp.files, spec.folder, f"tools.{index}.mcp.files"),
        shared=mcp.scope == "shared",
        on_host=mcp.where == "host",
        folder=spec.folder,
        allow=None if mcp.allow is None else tuple(mcp.allow),
        prefix=mcp.prefix,
        timeout=mcp.timeout,
        start_timeout=mcp.start_timeout,
        env=dict(mcp.env),
        headers={header: variable(environ, name, f"headers_env.{header}") for header, name in mcp.headers_env.items()},
    )
