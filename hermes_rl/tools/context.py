"""`ToolContext`: a rollout's sandbox as rewards see it, without await.

Owns the bridge from the threads in which rewards run to the event loop that the sandbox belongs to, and
the answers that rewards read. What the agent did wrong (a file that is not there, a command that fails) is
in the answer; what we did wrong is raised."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox.base import Sandbox
from hermes_rl.threads import wait_for_loop
from hermes_rl.tools.base import Toolkit, ToolRuntime, find_runtime, own_runtimes
from hermes_rl.tools.catalogue import toolsets
from hermes_rl.tools.execute import execute_calls
from hermes_rl.tools.search import Query, search
from hermes_rl.tools.staging import Staging

# -------------------------- Copying folders between this machine and a sandbox, byte by byte and without a shell


async def upload_tree(
    sandbox: Sandbox, staging: Staging, local: Path, remote: str, *, replace: bool = False
) -> AsyncIterator[tuple[str, int]]:
    """Copy a folder into the sandbox with the permissions of its files; path and size of each file that is there."""
    if replace:
        await staging.clear(sandbox, remote)
    await staging.make_dir(sandbox, remote)
    for path in await asyncio.to_thread(_inside, local):
        target = f"{remote}/{path.relative_to(local)}"
        content = await asyncio.to_thread(_content, path)
        if content is None:
            await staging.make_dir(sandbox, target)
        else:
            await staging.write(sandbox, target, *content)
            yield target, len(content[0])


async def download_tree(sandbox: Sandbox, remote: str, local: Path) -> AsyncIterator[tuple[str, int]]:
    """Copy a folder out of the sandbox, regular files and folders only; path there and size of each file."""
    entries = await sandbox.list_dir(remote)
    await asyncio.to_thread(local.mkdir, parents=True, exist_ok=True)
    for info in entries:
        source = f"{sandbox.resolve(remote)}/{info.name}"
        if info.kind == "directory":
            async for found in download_tree(sandbox, source, local / info.name):
                yield found
        elif info.kind == "file":
            data = await sandbox.read_file(source)
            await asyncio.to_thread((local / info.name).write_bytes, data)
            yield source, len(data)


def _inside(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))
    return sorted(folder.rglob("*"))


def _content(path: Path) -> tuple[bytes, int] | None:
    """Bytes and permissions of a file; None for a folder."""
    if path.is_dir():
        return None
    return path.read_bytes(), path.stat().st_mode & 0o777


# -------------------------------------------------------------------------------- context

T = TypeVar("T")


TIMED_OUT = 124
"""Exit code of a command for which there was no time, as `timeout` has it."""
KILLED = 137
"""Exit code of a command in a sandbox that is gone: 128 + SIGKILL, as a shell has it."""


FULL = frozenset({errno.ENODEV, errno.ENOSPC, errno.EDQUOT})
"""What the agent does by using up its disk, or by ending its sandbox."""


class KilledByAgentError(OSError):
    """The agent's own commands ended the sandbox: there is nothing to look at, and rewards are to see that."""

    def __init__(self) -> None:
        super().__init__(errno.ENODEV, "the agent's own commands ended its sandbox")

    def __str__(self) -> str:
        return str(self.strerror)


class ToolContext:
    """The sandbox of the rollout `task_id`, for as long as that rollout lives.

    Its methods block until the sandbox has answered, so call them where a reward runs: in a thread other
    than the event loop's. Paths are the sandbox's; relative ones start in its working directory. Commands
    have the sandbox's own environment, not what the agent exported.
    """

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id

    def terminal(self, command: str, timeout: float = 180) -> dict[str, Any]:
        """Run a shell command: ``{"exit_code", "output"}``, and ``"timed_out"`` where it was killed.

        It has no more time than `agent.task_timeout` leaves to the rewards of a rollout.
        """
        left = self.runtime.time_left
        if left is not None and left.seconds <= 0:
            return {"exit_code": TIMED_OUT, "output": "agent.task_timeout is used up", "timed_out": True}

        async def work(sandbox: Sandbox) -> dict[str, Any]:
            if left is None:
                result = await sandbox.run(command, timeout=timeout)
            else:
                with left.spent():
                    result = await sandbox.run(command, timeout=min(timeout, left.seconds))
            answer = {"exit_code": result.exit_code, "output": result.output}
            return answer | ({"timed_out": True} if result.timed_out else {})

        try:
            return self._on_sandbox(work)
        except KilledByAgentError as error:
            return {"exit_code": KILLED, "output": str(error)}

    def read_file(self, path: str) -> dict[str, Any]:
        """Return the text of a file as it is: ``{"content"}``; where it cannot be read, ``""`` and an ``"error"``."""
        try:
            return {"content": self.read_bytes(path).decode("utf-8", "replace")}
        except OSError as error:
            return {"content": "", "error": f"{path}: {error.strerror}"}

    def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file; raises `OSError`."""
        return self._on_sandbox(lambda sandbox: sandbox.read_file(path))

    def write_file(self, path: str, content: str | bytes, mode: int | None = None) -> dict[str, Any]:
        """Put a file in place, whatever is there; it is taken away again by `restore`."""
        data = content.encode("utf-8") if isinstance(content, str) else content
        staging = self.runtime.staging
        try:
            self._on_sandbox(lambda sandbox: staging.write(sandbox, path, data, mode))
        except OSError as error:
            # Nothing but the agent's own doing, such as a disk that it has filled, is in the way of a file.
            return {"bytes_written": 0, "error": f"{path}: {error.strerror}"}
        return {"bytes_written": len(data)}

    def artifact(self, name: str) -> bytes:
        """Return what was kept of the sandbox under this name: a file, or what a command printed.

        Raises:
            OSError: it could not be taken from the agent's sandbox, with the reason.
            UserError: the spec has no such artifact, or it is a folder.
        """
        artifacts = self.runtime.artifacts
        if name not in artifacts:
            known = ", ".join(artifacts) or "none"
            raise UserError(f"the spec has no artifact {name!r} (there are: {known})")
        found = artifacts[name]
        if found.problem is not None:
            raise OSError(errno.ENODATA, found.problem, f"artifact {name}")
        if len(found.files) != 1 or found.files[0].path:
            raise UserError(f"the artifact {name!r} is a folder; read its files in the fresh sandbox")
        return found.files[0].data

    def resolve(self, path: str) -> str:
        """Return a path of the sandbox made absolute."""
        return self._on_sandbox(_itself).resolve(path)

    def relative(self, path: str) -> str:
        """Return a path of the sandbox, relative to the working directory where it lies in it."""
        return _relative(self._on_sandbox(_itself), path)

    def provided(self) -> list[str]:
        """Return the files that the spec itself lays into the sandbox, as `relative` has them."""
        sandbox = self._on_sandbox(_itself)
        return [_relative(sandbox, file.to) for file in self.runtime.config.files]

    def brought(self) -> dict[str, bool]:
        """Return the files of artifacts in this fresh sandbox, by `relative` path: whether each replaced another."""
        laid = self.runtime.laid.replaced

        async def work(sandbox: Sandbox) -> dict[str, bool]:
            return {_relative(sandbox, path): before is not None for path, before in laid.items()}

        return self._on_sandbox(work)

    def withdraw(self, paths: Sequence[str]) -> None:
        """Take away these files of artifacts in this fresh sandbox; what they replaced is back."""
        laid = self.runtime.laid

        async def work(sandbox: Sandbox) -> None:
            for path in paths:
                await laid.withdraw(sandbox, sandbox.resolve(path))

        self._on_sandbox(work)

    def search(self, query: str, path: str = ".") -> dict[str, Any]:
        """Lines that match a regular expression, as the tool `search_files` answers."""
        wanted = Query(query, path=path)
        try:
            return self._on_sandbox(lambda sandbox: search(sandbox, wanted, cwd=None, timeout=60))
        except KilledByAgentError as error:
            return {"error": str(error)}

    def upload_file(self, local: str | Path, remote: str) -> dict[str, Any]:
        """Copy a file of this machine into the sandbox: ``{"exit_code", "output"}``; 0 where it is there, as a shell.

        A file that this machine does not have is an answer too, with -1, as in the reference design.
        """
        source = Path(local)
        if not source.is_file():
            return _not_uploaded(-1, f"Local file not found: {local}")
        written = self.write_file(remote, source.read_bytes(), source.stat().st_mode & 0o777)
        if "error" in written:
            return _not_uploaded(1, written["error"])
        return _uploaded(remote, written["bytes_written"])

    def upload(self, local: str | Path, remote: str) -> dict[str, Any]:
        """Copy a file or a folder of this machine into the sandbox, in the place of whatever is there.

        Raises:
            OSError: this machine does not have it, or it cannot be read.
        """
        source, staging = Path(local), self.runtime.staging
        if not source.is_dir():
            return self.write_file(remote, source.read_bytes(), source.stat().st_mode & 0o777)

        async def work(sandbox: Sandbox) -> int:
            return len([one async for one in upload_tree(sandbox, staging, source, remote, replace=True)])

        try:
            return {"files": self._on_sandbox(work)}
        except OSError as error:
            if error.errno not in FULL:
                raise
            return {"files": 0, "error": f"{remote}: {error.strerror}"}

    def upload_dir(self, local: str | Path, remote: str) -> list[dict[str, Any]]:
        """Copy a folder of this machine into the sandbox: for each file what `upload_file` answers.

        Files that are there already are replaced. Where something goes wrong, the last answer says what.
        """
        if not Path(local).is_dir():
            return [_not_uploaded(-1, f"Local directory not found: {local}")]
        staging, done = self.runtime.staging, list[dict[str, Any]]()

        async def work(sandbox: Sandbox) -> None:
            async for path, size in upload_tree(sandbox, staging, Path(local), remote):
                done.append(_uploaded(path, size))

        try:
            self._on_sandbox(work)
        except OSError as error:
            if error.errno not in FULL:
                raise
            done.append(_not_uploaded(1, f"{remote}: {error.strerror}"))
        return done

    def download_file(self, remote: str, local: str | Path) -> dict[str, Any]:
        """Copy a file of the sandbox to this machine, byte by byte; ``"success"`` says whether it was there."""
        try:
            data = self.read_bytes(remote)
        except OSError as error:
            return {"success": False, "error": f"{remote}: {error.strerror}"}
        Path(local).parent.mkdir(parents=True, exist_ok=True)
        Path(local).write_bytes(data)
        return {"success": True, "bytes": len(data)}

    def download_dir(self, remote: str, local: str | Path) -> list[dict[str, Any]]:
        """Copy a folder of the sandbox to this machine: for each file what `download_file` answers, and its path there.

        A folder that is not there, or has no file, is one answer without success. Symlinks are left out: they could
        point anywhere.
        """
        done: list[dict[str, Any]] = []

        async def work(sandbox: Sandbox) -> None:
            async for path, size in download_tree(sandbox, remote, Path(local)):
                done.append({"success": True, "bytes": size, "path": path})

        try:
            self._on_sandbox(work)
        except OSError as error:
            done.append({"success": False, "error": f"{error.filename}: {error.strerror}"})
        return done or [{"success": False, "error": f"{remote}: the folder has no files"}]

    def call_tool(self, name: str, args: dict[str, Any]) -> str:
        """Return what the model would be answered for this call; built-in tools need not be among the rollout's."""
        runtime = self.runtime
        toolkit = runtime.toolkit
        if toolkit.get(name) is None:
            toolkit = Toolkit(tool for each in toolsets().values() for tool in each.tools)
        if toolkit.get(name) is None:
            # An answer that says so would be taken for what the tool found, and become a wrong score.
            raise UserError(
                f"the rollout has no tool {name!r}, so a reward cannot call it: add its toolset to the toolsets that "
                "are enabled"
            )
        call = {"id": "reward", "function": {"name": name, "arguments": args}}
        outcomes = self._wait(runtime, execute_calls([call], toolkit, runtime, turn=0))
        return outcomes[0].content

    @contextmanager
    def staged(self) -> Iterator[None]:
        """Files put in place inside of this block are taken away at its end."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Take away every file that was put in place, and bring back what was there before."""
        runtime = self.runtime
        if not runtime.staging.empty and not runtime.killed_by_agent:
            with suppress(KilledByAgentError):  # nothing is left to take away
                self._on_sandbox(runtime.staging.restore)

    @contextmanager
    def untouched(self) -> Iterator[ToolContext]:
        """Open a new sandbox as the spec describes it, for the block; nothing of the rollout is in it."""
        own = self.runtime
        name = f"{self.task_id}/untouched"
        fresh = ToolRuntime(own.config, task_id=name, toolkit=own.toolkit, factory=own.factory, loop=own.loop)
        try:
            yield ToolContext(name)
        finally:
            self._wait(own, fresh.close())

    def cleanup(self) -> None:
        """Release the sandbox of a task of one's own; that of a rollout of a run is released by the run."""
        runtime = find_runtime(self.task_id)
        if runtime is not None and not runtime.of_a_run:
            self._wait(runtime, runtime.close())

    def web_search(self, query: str, limit: int = 5) -> Any:
        """Return what the tool of that name answers, which the rollout must have, as a value."""
        return _value(self.call_tool("web_search", {"query": query, "limit": limit}))

    def web_extract(self, urls: list[str]) -> Any:
        """See `web_search`."""
        return _value(self.call_tool("web_extract", {"urls": urls}))

    def browser_navigate(self, url: str) -> Any:
        """See `web_search`; the page is the one that the model has open."""
        return _value(self.call_tool("browser_navigate", {"url": url}))

    def browser_snapshot(self) -> Any:
        """See `web_search`."""
        return _value(self.call_tool("browser_snapshot", {}))

    @property
    def runtime(self) -> ToolRuntime:
        """The live machine of the rollout; raises UserError where it was released."""
        runtime = find_runtime(self.task_id)
        if runtime is None:
            raise UserError(f"task {self.task_id!r} has no live sandbox: it was released, or never made")
        return runtime

    def _on_sandbox(self, work: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Work on the sandbox; one that the agent killed is an answer (`KilledByAgentError`), not our failure."""
        runtime = self.runtime

        async def run() -> T:
            return await work(await runtime.sandbox())

        try:
            return self._wait(runtime, run())
        except SandboxFailure as failure:
            if failure.ending.graded:
                raise KilledByAgentError from failure
            raise

    def _wait(self, runtime: ToolRuntime, work: Coroutine[Any, Any, T]) -> T:
        loop = runtime.loop
        if loop is None or not loop.is_running():
            work.close()
            raise UserError(f"task {self.task_id!r}: the event loop of its sandbox is not running")
        if _current_loop() is loop:
            work.close()
            raise UserError(
                "ToolContext was used on the event loop's own thread, where it would wait for itself; call it "
                "from a reward, or with `await asyncio.to_thread(ctx.terminal, …)`"
            )
        return wait_for_loop(work, loop)


def cleanup_vm(task_id: str) -> None:
    """Release the sandbox of a task of one's own; the reference design's name for `ToolContext(task_id).cleanup()`."""
    ToolContext(task_id).cleanup()


def cleanup_all_environments() -> None:
    """Release the sandboxes of all tasks of one's own; those of rollouts of a run are released by the run."""
    for runtime in own_runtimes():
        cleanup_vm(runtime.task_id)


def _uploaded(path: str, size: int) -> dict[str, Any]:
    return {"exit_code": 0, "output": "", "bytes_written": size, "path": path}


def _not_uploaded(exit_code: int, problem: str) -> dict[str, Any]:
    return {"exit_code": exit_code, "output": problem, "bytes_written": 0, "error": problem}


async def _itself(sandbox: Sandbox) -> Sandbox:
    return sandbox


def _relative(sandbox: Sandbox, path: str) -> str:
    return sandbox.resolve(path).removeprefix(f"{sandbox.workdir.rstrip('/')}/")


def _value(answer: str) -> Any:
    """Return the value of a tool's JSON; text that is none as it is."""
    try:
        return json.loads(answer)
    except ValueError:
        return answer


def _current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
