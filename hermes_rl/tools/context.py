"""`ToolContext`: give rewards access to a rollout's sandbox, without await.

Errors of the agent (a missing file, a command that fails) are in the result, or an `OSError` that is an `AgentFault`
too: a reward that does not handle it gets the low end of its range. An infrastructure failure is raised.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from hermes_rl.errors import AgentFault, KilledByAgentError, SandboxFailure, UserError, agent_error
from hermes_rl.others_files import LARGEST_DIRECTORY, read_regular
from hermes_rl.sandbox.base import KILLED_EXIT_CODE, TIMEOUT_EXIT_CODE, CommandResult, Sandbox
from hermes_rl.sandbox.forwarding import connect_programs
from hermes_rl.sandbox.listener import Message
from hermes_rl.spec.new_names import RenamedAttributes
from hermes_rl.threads import may_wait_for, wait_for_loop
from hermes_rl.tools.base import Toolkit, ToolRuntime, find_runtime, own_runtimes
from hermes_rl.tools.catalogue import toolsets
from hermes_rl.tools.execute import execute_calls
from hermes_rl.tools.search import Query, search
from hermes_rl.user_code.proxies import lives_in_runner
from hermes_rl.values import read_json

T = TypeVar("T")

# ---------------------------------------------------------------------------------------- Files of this machine


class _OfThisMachineError(OSError):
    """A file of this machine cannot be read, which the agent has not caused."""


async def _read_host_file(read: Callable[[Path], T], path: Path) -> T:
    try:
        return await asyncio.to_thread(read, path)
    except OSError as error:
        raise _OfThisMachineError(error.errno, error.strerror, error.filename) from error


def _paths_inside(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))
    return sorted(folder.rglob("*"))


def _content(path: Path) -> tuple[bytes, int] | None:
    """Return bytes and permissions of a file, or None for a directory."""
    return None if path.is_dir() else _file_content(path)


def _file_content(path: Path) -> tuple[bytes, int]:
    return read_regular(path, LARGEST_DIRECTORY), path.stat().st_mode & 0o777


def _store(path: Path, data: bytes) -> None:
    """Write a file, and make its parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# -------------------------------------------------------------------------------- context


READ_BYTES = 16 << 20
"""Maximum bytes of a file that a reward gets, unless it sets another limit: files of the agent are read completely, and
by many rewards at a time.
"""
DOWNLOAD_BYTES = 1 << 30
"""Maximum bytes of a directory that are copied to this machine's disk."""


UNTOUCHED = "/untouched"
"""Suffix of the name of a sandbox that `ToolContext.pristine_sandbox` has opened."""
REMEMBERED = 10_000
"""Total number of stored values of `ToolContext.remember`; the oldest ones are removed."""
_remembered: dict[tuple[str, str], Any] = {}


@lives_in_runner("hermes_rl.user_code.proxies:ContextStandIn")
class ToolContext(RenamedAttributes):
    """The sandbox of the rollout `task_id`, during the lifetime of that rollout.

    Its methods block until the sandbox has replied, so call them where a reward runs: in a thread other than the event
    loop's. Paths are paths in the sandbox; commands have the sandbox's environment, not the variables that the agent
    exported.
    """

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id

    def stand_in_fields(self) -> dict[str, str]:
        """Return the fields of the proxy object for this one in a user code process."""
        return {"task_id": self.task_id}

    def terminal(self, command: str, timeout: float = 180) -> dict[str, Any]:
        """Run a shell command: ``{"exit_code", "output"}``, and ``"timed_out"`` if it was killed.

        Its time is limited to the time that `agent.task_timeout` leaves to the rewards of a rollout.
        """
        return self._run(timeout, lambda sandbox, seconds: sandbox.run(command, timeout=seconds), _result_fields)

    def terminal_heard(self, command: str, timeout: float = 180) -> dict[str, Any]:
        """Run a shell command as `terminal` does, and add ``"heard"``: the messages of its processes on `REPORT_FD`.

        It is a list of (process id, text), or None if the messages exceed the limit.
        """
        report = self._run(timeout, lambda sandbox, seconds: sandbox.run_heard(command, timeout=seconds), _add_messages)
        return {"heard": [], **report}

    def terminal_apart(
        self, command: str, *, local_command: Sequence[str], remote_command: Sequence[str], timeout: float = 180
    ) -> dict[str, Any]:
        """Run a command in this `pristine_sandbox` as `terminal_heard` does, with two programs connected to each
        other.

        Meanwhile the standard output of `local_command`, a program in this sandbox, is the standard input of
        `remote_command`, a program in the sandbox from which this one was opened, and the reverse. Add ``"seconds"``.
        """
        other = find_runtime(self.task_id.removesuffix(UNTOUCHED)) if self.task_id.endswith(UNTOUCHED) else None
        if other is None:
            raise UserError("terminal_apart is for a `pristine_sandbox`, while that it was opened from is there")

        async def run(sandbox: Sandbox, seconds: float) -> tuple[CommandResult, list[Message] | None]:
            self._require_no_fault(other)
            async with connect_programs(sandbox, local_command, await other.sandbox(), remote_command):
                return await sandbox.run_heard(command, timeout=seconds)

        report = self._run(timeout, run, lambda done: {**_add_messages(done), "seconds": done[0].duration})
        return {"heard": [], "seconds": 0.0, **report}

    def _run(
        self,
        timeout: float,
        run: Callable[[Sandbox, float], Awaitable[T]],
        answer: Callable[[T], dict[str, Any]],
    ) -> dict[str, Any]:
        time_left = self.runtime.time_left
        if time_left is not None and time_left.seconds <= 0:
            return {"exit_code": TIMEOUT_EXIT_CODE, "output": "agent.task_timeout is used up", "timed_out": True}

        async def work(sandbox: Sandbox) -> dict[str, Any]:
            if time_left is None:
                return answer(await run(sandbox, timeout))
            with time_left.spent():
                return answer(await run(sandbox, min(timeout, time_left.seconds)))

        try:
            return self._on_sandbox(work)
        except KilledByAgentError as error:
            return {"exit_code": KILLED_EXIT_CODE, "output": str(error)}

    def read_file(self, path: str, limit: int = READ_BYTES) -> dict[str, Any]:
        """Return the text of a file: ``{"content"}``, and an ``"error"`` if it cannot be read, or has more than `limit`
        bytes.
        """
        try:
            return {"content": self.read_bytes(path, limit).decode("utf-8", "replace")}
        except OSError as error:
            return {"content": "", "error": f"{path}: {error.strerror}"}

    def read_bytes(self, path: str, limit: int = READ_BYTES) -> bytes:
        """Return the bytes of a file; raises `OSError`, with EFBIG if there are more than `limit`."""
        return self._on_sandbox(lambda sandbox: sandbox.read_file(path, limit=limit))

    def write_file(self, path: str, content: str | bytes, mode: int | None = None) -> dict[str, Any]:
        """Write a file, whatever exists there; `restore` removes it again."""
        data = content.encode("utf-8") if isinstance(content, str) else content
        staging = self.runtime.staging
        try:
            self._on_sandbox(lambda sandbox: staging.write(sandbox, path, data, mode))
        except OSError as error:
            # Only an effect of the agent, such as a full disk, can prevent the file from being written.
            return {"bytes_written": 0, "error": f"{path}: {error.strerror}"}
        return {"bytes_written": len(data)}

    def artifact(self, name: str) -> bytes:
        """Return the content of the artifact with this name: a file, or the output of a command.

        Raises:
            OSError: it could not be saved from the agent's sandbox, or is a directory there, with the reason.
            UserError: the spec has no such artifact.
        """
        artifacts = self.runtime.artifacts
        if name not in artifacts:
            artifact_names = ", ".join(artifacts) or "none"
            raise UserError(f"the spec has no artifact {name!r} (there are: {artifact_names})")
        artifact = artifacts[name]
        if artifact.problem is not None:
            raise agent_error(OSError)(errno.ENODATA, artifact.problem, f"artifact {name}")
        if len(artifact.files) != 1 or artifact.files[0].path:
            problem = "it is a folder, whose files are in the fresh sandbox"
            raise agent_error(IsADirectoryError)(errno.EISDIR, problem, f"artifact {name}")
        return artifact.files[0].data

    def resolve(self, path: str) -> str:
        """Return the absolute form of a path of the sandbox."""
        return self._on_sandbox(_same_sandbox).resolve(path)

    def relative(self, path: str) -> str:
        """Return a path of the sandbox, relative to the working directory if it is below it."""
        return _relative_path(self._on_sandbox(_same_sandbox), path)

    def spec_files(self) -> list[str]:
        """Return the files that the spec itself writes into the sandbox, as `relative` paths."""
        sandbox = self._on_sandbox(_same_sandbox)
        return [_relative_path(sandbox, file.to) for file in self.runtime.config.files]

    def restored_files(self) -> dict[str, bool]:
        """Return the artifact files in this fresh sandbox, by `relative` path: True if the file replaced another."""
        replaced = self.runtime.laid.replaced

        async def work(sandbox: Sandbox) -> dict[str, bool]:
            return {_relative_path(sandbox, path): before is not None for path, before in replaced.items()}

        return self._on_sandbox(work)

    def withdraw(self, paths: Sequence[str]) -> None:
        """Remove these artifact files from this fresh sandbox; the files that they replaced are restored."""
        artifacts = self.runtime.laid

        async def work(sandbox: Sandbox) -> None:
            for path in paths:
                await artifacts.remove(sandbox, sandbox.resolve(path))

        self._on_sandbox(work)

    def recall(self, key: str) -> Any:
        """Return the value stored under this key for sandboxes of the same description, or None if there is none."""
        return _remembered.get((self._description(), key))

    def remember(self, key: str, value: Any) -> None:
        """Store a JSON value for all sandboxes of this description, for the lifetime of this process."""
        _remembered[self._description(), key] = value
        while len(_remembered) > REMEMBERED:
            _remembered.pop(next(iter(_remembered)), None)

    def _description(self) -> str:
        config = self.runtime.config
        parts = config.backend, config.image, config.workdir, config.packages, sorted(config.env.items()), config.setup
        files = [(file.to, hashlib.sha256(file.data).hexdigest()) for file in config.files]
        return hashlib.sha256(repr((parts, files, config.services)).encode("utf-8", "surrogatepass")).hexdigest()

    def search(self, query: str, path: str = ".") -> dict[str, Any]:
        """Return the lines that match a regular expression, in the form of the tool `search_files`."""
        search_query = Query(query, path=path)
        try:
            return self._on_sandbox(lambda sandbox: search(sandbox, search_query, cwd=None, timeout=60))
        except KilledByAgentError as error:
            return {"error": str(error)}

    def upload_file(self, local: str | Path, remote: str) -> dict[str, Any]:
        """Copy a file of this machine into the sandbox: ``{"exit_code", "output"}``, with exit code 0 if it exists.

        A file that this machine does not have gives a result too, with -1, as in the reference design.
        """
        source = Path(local)
        if not source.is_file():
            return _not_uploaded(-1, f"Local file not found: {local}")
        written = self.write_file(remote, *_file_content(source))
        if "error" in written:
            return _not_uploaded(1, written["error"])
        return _upload_result(remote, written["bytes_written"])

    def upload(self, local: str | Path, remote: str) -> dict[str, Any]:
        """Copy a file or a directory of this machine into the sandbox, replacing whatever exists there.

        Raises OSError if this machine does not have it, or it cannot be read.
        """
        source = Path(local)
        if not source.is_dir():
            return self.write_file(remote, *_file_content(source))
        sizes, problem = self._upload_folder(source, remote, replace=True)
        return {"files": len(sizes)} if problem is None else {"files": 0, "error": problem}

    def empty_dir(self, path: str) -> None:
        """Make an empty directory in the sandbox, in which a grader works, replacing whatever exists there.

        Nothing of the agent takes part in it: none of its programs, and no shell. Raises `AgentFault` if files of the
        agent prevent it, so that no file that the agent has put there is taken for the grader's.
        """
        with TemporaryDirectory() as empty:
            answer = ToolContext.upload(self, empty, path)
        if "error" in answer:
            raise AgentFault(f"the directory of the grader cannot be made: {answer['error']}")

    def upload_dir(self, local: str | Path, remote: str) -> list[dict[str, Any]]:
        """Copy a directory of this machine into the sandbox: return the result of `upload_file` for each file.

        Existing files are replaced. If something goes wrong, the last result contains the error.
        """
        if not Path(local).is_dir():
            return [_not_uploaded(-1, f"Local directory not found: {local}")]
        sizes, problem = self._upload_folder(Path(local), remote, replace=False)
        return [_upload_result(*file) for file in sizes.items()] + ([_not_uploaded(1, problem)] if problem else [])

    def _upload_folder(self, local: Path, remote: str, *, replace: bool) -> tuple[dict[str, int], str | None]:
        """Copy a directory, byte by byte, without a shell, and with the permissions of its files.

        Returns the size of each file that exists now, by its path, and the error in the sandbox.
        """
        staging, sizes = self.runtime.staging, dict[str, int]()

        async def work(sandbox: Sandbox) -> None:
            if replace:
                await staging.clear(sandbox, remote)
            await staging.make_dir(sandbox, remote)
            for path in await _read_host_file(_paths_inside, local):
                target = f"{remote}/{path.relative_to(local)}"
                content = await _read_host_file(_content, path)
                if content is None:
                    await staging.make_dir(sandbox, target)
                else:
                    await staging.write(sandbox, target, *content)
                    sizes[target] = len(content[0])

        try:
            self._on_sandbox(work)
        except _OfThisMachineError:
            raise
        except OSError as error:
            return sizes, f"{remote}: {error.strerror}"
        return sizes, None

    def download_file(self, remote: str, local: str | Path, limit: int = READ_BYTES) -> dict[str, Any]:
        """Copy a file of at most `limit` bytes to this machine; ``"success"`` is True if it existed."""
        try:
            data = self.read_bytes(remote, limit)
        except OSError as error:
            return {"success": False, "error": f"{remote}: {error.strerror}"}
        _store(Path(local), data)
        return {"success": True, "bytes": len(data)}

    def download_dir(self, remote: str, local: str | Path, limit: int = DOWNLOAD_BYTES) -> list[dict[str, Any]]:
        """Copy a directory of the sandbox to this machine: return the result of `download_file` for each file, and its
        path.

        A directory that does not exist, or has no file, gives one result without success. If all files have more than
        `limit` bytes, the last result is without success. Symlinks are omitted: they could point anywhere.
        """
        done: list[dict[str, Any]] = []

        async def work(sandbox: Sandbox) -> None:
            remaining, top = limit, sandbox.resolve(remote)
            async for path, info in sandbox.walk(top):
                target = Path(local, path)
                if info.kind == "directory":
                    await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
                elif info.kind == "file":
                    data = await sandbox.read_file(f"{top}/{path}", limit=remaining)
                    remaining -= len(data)
                    await asyncio.to_thread(_store, target, data)
                    done.append({"success": True, "bytes": len(data), "path": f"{top}/{path}"})
            await asyncio.to_thread(Path(local).mkdir, parents=True, exist_ok=True)

        try:
            self._on_sandbox(work)
        except OSError as error:
            done.append({"success": False, "error": f"{error.filename}: {error.strerror}"})
        return done or [{"success": False, "error": f"{remote}: the folder has no files"}]

    def call_tool(self, name: str, args: dict[str, Any]) -> str:
        """Return the result that the model would get for this call; built-in tools need not be among the rollout's."""
        runtime = self.runtime
        toolkit = runtime.toolkit
        if toolkit.get(name) is None:
            toolkit = Toolkit(tool for each in toolsets().values() for tool in each.tools)
        if toolkit.get(name) is None:
            # An error result would be taken for a result of the tool, and become a wrong score.
            raise UserError(
                f"the rollout has no tool {name!r}, so a reward cannot call it: add its toolset to the toolsets that "
                "are enabled"
            )
        self._require_no_fault(runtime)
        call = {"id": "reward", "function": {"name": name, "arguments": args}}
        outcomes = self._wait(runtime, execute_calls([call], toolkit, runtime, turn=0))
        return outcomes[0].content

    def play(self, turns: Sequence[Mapping[str, Any]]) -> None:
        """Run the tool calls of these turns, in the form of a spec's `solution`, and end as an agent ends."""
        for turn in turns:
            for call in turn.get("tools") or ():
                self.call_tool(call["name"], call.get("args") or {})
        runtime = self.runtime
        self._wait(runtime, runtime.settle())

    @contextmanager
    def staged(self) -> Iterator[None]:
        """Remove the files that the block puts in place at its end."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Remove every file that was put in place, and restore the previous files."""
        runtime = find_runtime(self.task_id)
        if runtime is None:  # released with all files that were put in place
            return
        if not runtime.staging.empty and not runtime.killed_by_agent:
            with suppress(KilledByAgentError):  # nothing is left to remove
                self._on_sandbox(runtime.staging.restore)

    @contextmanager
    def pristine_sandbox(self) -> Iterator[ToolContext]:
        """Open a new sandbox from the spec's description, for the block; it contains no file of the rollout."""
        rollout_runtime = self.runtime
        name = self.task_id + UNTOUCHED
        fresh = ToolRuntime(
            rollout_runtime.config, task_id=name, toolkit=rollout_runtime.toolkit, loop=rollout_runtime.loop
        )
        try:
            yield ToolContext(name)
        finally:
            self._wait(rollout_runtime, fresh.close())

    def cleanup(self) -> None:
        """Release the sandbox of a task that the caller created; the run releases the sandboxes of its rollouts."""
        runtime = find_runtime(self.task_id)
        if runtime is not None and not runtime.of_a_run:
            self._wait(runtime, runtime.close())

    def web_search(self, query: str, limit: int = 5) -> Any:
        """Return the result of the tool of that name, which the rollout must have, as a value."""
        return _parse_json_text(self.call_tool("web_search", {"query": query, "limit": limit}))

    def web_extract(self, urls: list[str]) -> Any:
        """See `web_search`."""
        return _parse_json_text(self.call_tool("web_extract", {"urls": urls}))

    def browser_navigate(self, url: str) -> Any:
        """See `web_search`; the page is the one that the model has open."""
        return _parse_json_text(self.call_tool("browser_navigate", {"url": url}))

    def browser_snapshot(self) -> Any:
        """See `web_search`."""
        return _parse_json_text(self.call_tool("browser_snapshot", {}))

    def confined(self) -> ToolContext:
        """Return the context for code in a sandbox, which may have run the text of the policy."""
        return ConfinedContext(self.task_id)

    @property
    def runtime(self) -> ToolRuntime:
        """Live runtime of the rollout; raises UserError if it was released."""
        runtime = find_runtime(self.task_id)
        if runtime is None:
            raise UserError(f"task {self.task_id!r} has no live sandbox: it was released, or never made")
        return runtime

    def _on_sandbox(self, work: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Run work on the sandbox; a sandbox that the agent killed gives a result (`KilledByAgentError`), not an
        infrastructure failure.
        """
        runtime = self.runtime
        self._require_no_fault(runtime)

        async def run() -> T:
            return await work(await runtime.sandbox())

        try:
            return self._wait(runtime, run())
        except SandboxFailure as failure:
            if failure.stop_reason.graded:
                raise KilledByAgentError from failure
            raise
        except OSError as error:
            if isinstance(error, _OfThisMachineError) or error.errno is None:
                raise
            kind: Any = type(error)
            raise agent_error(kind)(error.errno, error.strerror, error.filename) from error

    def _require_no_fault(self, runtime: ToolRuntime) -> None:
        if runtime.fault is not None:
            raise AgentFault(runtime.fault)

    def _wait(self, runtime: ToolRuntime, work: Coroutine[Any, Any, T]) -> T:
        loop = runtime.loop
        if loop is None or not loop.is_running():
            work.close()
            raise UserError(f"task {self.task_id!r}: the event loop of its sandbox is not running")
        if not may_wait_for(loop):
            work.close()
            raise UserError(
                "ToolContext was used on the event loop's own thread, where it would wait for itself; call it "
                "from a reward, or with `await asyncio.to_thread(ctx.terminal, …)`"
            )
        return wait_for_loop(work, loop)


class ConfinedContext(ToolContext):
    """A context without access to files of this machine and to resources of other rollouts."""

    def _refused(self, method: str) -> UserError:
        return UserError(
            f"ctx.{method}: user code with `isolate: sandbox` reaches no file of this machine; use ctx.write_file and "
            "ctx.read_bytes, or set `isolate: process`"
        )

    def upload_file(self, local: str | Path, remote: str) -> dict[str, Any]:
        """Refuse: the file belongs to this machine."""
        raise self._refused("upload_file")

    def upload(self, local: str | Path, remote: str) -> dict[str, Any]:
        """Refuse, as `upload_file` does."""
        raise self._refused("upload")

    def upload_dir(self, local: str | Path, remote: str) -> list[dict[str, Any]]:
        """Refuse, as `upload_file` does."""
        raise self._refused("upload_dir")

    def download_file(self, remote: str, local: str | Path, limit: int = READ_BYTES) -> dict[str, Any]:
        """Refuse, as `upload_file` does."""
        raise self._refused("download_file")

    def download_dir(self, remote: str, local: str | Path, limit: int = DOWNLOAD_BYTES) -> list[dict[str, Any]]:
        """Refuse, as `upload_file` does."""
        raise self._refused("download_dir")

    def read_bytes(self, path: str, limit: int = READ_BYTES) -> bytes:
        """Return the bytes of a file, of which no limit of the code allows more than `READ_BYTES`."""
        return super().read_bytes(path, int(min(limit, READ_BYTES)))  # int() refuses NaN

    def recall(self, key: str) -> Any:
        """Return None: what others have stored is theirs."""
        return None

    def remember(self, key: str, value: Any) -> None:
        """Store nothing: it would stay in the runner's memory, and might be of any size."""


def cleanup_vm(task_id: str) -> None:
    """Release the sandbox of a task that the caller created; the reference design's name for
    `ToolContext(task_id).cleanup()`.
    """
    ToolContext(task_id).cleanup()


def cleanup_all_environments() -> None:
    """Release the sandboxes of all tasks that callers created; the run releases the sandboxes of its rollouts."""
    for runtime in own_runtimes():
        cleanup_vm(runtime.task_id)


def _upload_result(path: str, size: int) -> dict[str, Any]:
    return {"exit_code": 0, "output": "", "bytes_written": size, "path": path}


def _not_uploaded(exit_code: int, problem: str) -> dict[str, Any]:
    return {"exit_code": exit_code, "output": problem, "bytes_written": 0, "error": problem}


def _result_fields(result: CommandResult) -> dict[str, Any]:
    answer = {"exit_code": result.exit_code, "output": result.output}
    answer |= {"timed_out": True} if result.timed_out else {}
    return answer | ({"truncated": True} if result.truncated else {})


def _add_messages(done: tuple[CommandResult, list[Message] | None]) -> dict[str, Any]:
    return {**_result_fields(done[0]), "heard": done[1]}


async def _same_sandbox(sandbox: Sandbox) -> Sandbox:
    return sandbox


def _relative_path(sandbox: Sandbox, path: str) -> str:
    return sandbox.resolve(path).removeprefix(f"{sandbox.workdir.rstrip('/')}/")


def _parse_json_text(answer: str) -> Any:
    """Return the value of a tool's JSON; other text is returned unchanged."""
    try:
        return read_json(answer)
    except ValueError:
        return answer
