"""Artifacts of a rollout's sandbox: saved when the agent has ended, and restored in the fresh sandboxes of rewards.

The processes of a command are killed when it ends, so that no process of the agent runs while rewards look. Symlinks
inside a directory are omitted: they could point at files elsewhere that are not the agent's. A failure to save an
artifact is caused by the agent: the artifact has a `problem`, which rewards that need it see.
"""

from __future__ import annotations

import errno
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.base import Sandbox

# ------------------------------------------------------------ git without the agent's configuration
# A repository's configuration names programs: file system monitors, filters, hooks, differs. Here `git` is a shell
# function that reads the repository's objects, references and index through a separate directory with a separate
# configuration; only keys that define how the repository is stored and compared are copied. No configuration of a home
# or system is read. The copy of the index keeps its time (`cp -p`): git uses it to decide which files it must read,
# because they were changed in the second in which the index was written.

_CORE = "repositoryformatversion|filemode|symlinks|ignorecase|autocrlf|eol"
KEPT = rf"^(core\.({_CORE})|extensions\.(objectformat|refstorage))$"
SETTINGS = {
    "safe.directory": "*",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.attributesFile": "/dev/null",
    "diff.ignoreSubmodules": "dirty",  # to detect changes there, git would run with their configuration
    "gc.auto": "0",
    "maintenance.auto": "false",
}
_VARIABLES = " ".join(
    f"GIT_CONFIG_KEY_{index}={name} GIT_CONFIG_VALUE_{index}='{value}'"
    for index, (name, value) in enumerate(SETTINGS.items())
)
PRELUDE = f"""
_clean_git=FOLDER
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_COUNT={len(SETTINGS)} {_VARIABLES}
export GIT_PAGER=cat GIT_EDITOR=: GIT_AUTHOR_NAME=agent GIT_COMMITTER_NAME=agent
export GIT_AUTHOR_EMAIL=agent@localhost GIT_COMMITTER_EMAIL=agent@localhost
git() {{
  if [ "$1" = -C ]; then ( cd "$2" && shift 2 && git "$@" ); return; fi
  _top=$(pwd -P)
  while [ -n "$_top" ] && [ ! -e "$_top/.git" ]; do _top=${{_top%/*}}; done
  if [ ! -d "$_top/.git" ] || [ -h "$_top/.git" ]; then HOME=$_clean_git command git "$@"; return; fi
  for _name in mkdir ln cp; do
    if ! command -v $_name >/dev/null; then HOME=$_clean_git command git "$@"; return; fi
  done
  _own=$_clean_git/$(set -f; IFS=/; set -- $_top; IFS=_; printf %s "$*")
  if [ ! -d "$_own" ]; then
    mkdir -p "$_own"
    for _name in objects refs packed-refs shallow info reftable; do
      if [ -e "$_top/.git/$_name" ]; then ln -s "$_top/.git/$_name" "$_own/$_name"; fi
    done
    for _name in HEAD index; do
      if [ -f "$_top/.git/$_name" ]; then cp -p "$_top/.git/$_name" "$_own/$_name"; fi
    done
    ( cd / && HOME=$_clean_git command git config --file "$_top/.git/config" --get-regexp '{KEPT}' ) |
    while read -r _key _value; do
      ( cd / && HOME=$_clean_git command git config --file "$_own/config" "$_key" "$_value" )
    done
  fi
  HOME=$_clean_git GIT_DIR=$_own GIT_WORK_TREE=$_top command git "$@"
}}
"""


def with_clean_git(command: str) -> str:
    """Return the command with the shell function `git` before it, if it uses git at all.

    In an image without mkdir, ln or cp that function cannot make its directory, and runs git with the settings alone.
    """
    if not re.search(r"(?<![\w.-])git\s", command):
        return command
    return PRELUDE.replace("FOLDER", f"/tmp/git-{secrets.token_hex(16)}") + command


# -------------------------------------------------------------------------------------------- Taking and placing

LIMIT = 64 << 20
"""Maximum total bytes of all artifacts of one rollout."""
MOST_FILES = 10_000
TOO_MUCH = f"more than {LIMIT >> 20} MiB or {MOST_FILES} files and folders"
OUTPUTS = "~/.artifacts"
"""Directory where a fresh sandbox finds the output of commands, each under its artifact's name."""


@dataclass(frozen=True)
class ArtifactRequest:
    """An artifact that the spec requests: exactly one of `path`, `command`."""

    name: str
    path: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class ArtifactFile:
    """A file; `path` is relative to the artifact's path, and empty for the artifact itself."""

    path: str
    data: bytes
    mode: int


@dataclass(frozen=True)
class TakenArtifact:
    """A saved artifact; `target` is its path in a sandbox."""

    name: str
    target: str
    files: tuple[ArtifactFile, ...] = ()
    problem: str | None = None

    @property
    def size(self) -> int:
        return sum(len(file.data) for file in self.files)

    @property
    def digest(self) -> str:
        """SHA-256 over names and contents, independent of their order."""
        hasher = hashlib.sha256()
        for file in sorted(self.files, key=lambda file: file.path):
            hasher.update(f"{len(file.path)} {file.path} {len(file.data)}\n".encode("utf-8", "surrogateescape"))
            hasher.update(file.data)
        return hasher.hexdigest()


@dataclass
class _Budget:
    remaining_bytes: int = LIMIT
    files: int = MOST_FILES

    def spend(self, size: int) -> None:
        self.remaining_bytes -= size
        self.files -= 1
        if self.remaining_bytes < 0 or self.files < 0:
            raise OSError(errno.E2BIG, TOO_MUCH)


async def collect(sandbox: Sandbox, requests: Sequence[ArtifactRequest], timeout: float) -> dict[str, TakenArtifact]:
    """Save artifacts in order; `timeout` in seconds is for each command.

    Raises `SandboxFailure` for infrastructure failures.
    """
    budget = _Budget()
    artifacts = {}
    for request in requests:
        target = f"{OUTPUTS}/{request.name}" if request.path is None else request.path
        try:
            files = [file async for file in _files(sandbox, request, budget, timeout)]
            artifacts[request.name] = TakenArtifact(request.name, target, tuple(files))
        except OSError as error:
            problem = TOO_MUCH if error.errno == errno.E2BIG else f"{error.filename}: {error.strerror}"
            artifacts[request.name] = TakenArtifact(request.name, target, problem=problem)
        except SandboxFailure as failure:
            if not failure.stop_reason.graded:
                raise
            artifacts[request.name] = TakenArtifact(request.name, target, problem=failure.detail)
    return artifacts


async def _files(
    sandbox: Sandbox, request: ArtifactRequest, budget: _Budget, timeout: float
) -> AsyncIterator[ArtifactFile]:
    if request.path is None:
        assert request.command is not None
        yield ArtifactFile("", await _output(sandbox, request.command, budget, timeout), 0o644)
        return
    info = await sandbox.stat(request.path)
    if info.kind != "directory":
        yield await _file(sandbox, request.path, "", info.mode, budget)
        return
    async for path, info in sandbox.walk(request.path, limit=MOST_FILES):
        if info.kind == "directory":
            budget.spend(0)  # each directory costs a separate call
        elif info.kind == "file":
            yield await _file(sandbox, f"{request.path}/{path}", path, info.mode, budget)


async def _file(sandbox: Sandbox, source: str, path: str, mode: int, budget: _Budget) -> ArtifactFile:
    data = await sandbox.read_file(source, limit=max(budget.remaining_bytes, 0))
    budget.spend(len(data))
    return ArtifactFile(path, data, mode & 0o777)


async def _output(sandbox: Sandbox, command: str, budget: _Budget, timeout: float) -> bytes:
    limit = max(budget.remaining_bytes, 0) * 2
    try:
        done = await sandbox.run(with_clean_git(command), timeout=timeout, output_limit=limit, merge_stderr=False)
    finally:
        if sandbox.alive and not sandbox.config.keep_processes:
            await sandbox.kill_all()
    if done.exit_code != 0:
        tail = done.stderr.decode("utf-8", "replace")[-400:]
        raise OSError(0, f"exit status {done.exit_code}: {tail}", command)
    budget.spend(len(done.stdout))
    return done.stdout


@dataclass
class RestoredArtifacts:
    """Artifacts that were written into a fresh sandbox, and the files that they replaced there."""

    replaced: dict[str, ArtifactFile | None] = field(default_factory=dict)
    """Absolute path → the previous file, if any. A file that was removed to make room for a directory of the agent, and
    each file of a directory that was removed to make room for one of its files, is a separate entry.
    """

    async def lay(self, sandbox: Sandbox, artifacts: Mapping[str, TakenArtifact]) -> None:
        """Write all files of artifacts to their paths; raises an `OSError` caused by the agent if that is impossible.

        Files that the agent has removed remain.
        """
        folders = set[str]()
        for artifact in artifacts.values():
            for file in artifact.files:
                path = sandbox.resolve(f"{artifact.target}/{file.path}" if file.path else artifact.target)
                await self._make_room(sandbox, path, folders)
                await _write(sandbox, path, file)

    async def remove(self, sandbox: Sandbox, path: str) -> None:
        """Remove one file again, and restore the previous one. Raises `OSError` if that is impossible."""
        before = self.replaced.pop(path)
        blocking = await _not_a_folder(sandbox, path, set())
        info = await sandbox.stat_or_none(blocking)
        if before is not None:
            if info is not None and (blocking != path or info.kind == "directory"):
                await sandbox.remove(blocking)
            await _write(sandbox, path, before)
        elif blocking == path and info is not None and info.kind != "directory":
            await sandbox.remove(path)

    async def _make_room(self, sandbox: Sandbox, path: str, folders: set[str]) -> None:
        """Record the file that `path` replaces, and remove files that cannot be overwritten."""
        blocking = await _not_a_folder(sandbox, path, folders)
        info = await sandbox.stat_or_none(blocking)
        if info is not None and info.kind == "directory":
            try:
                request = ArtifactRequest("", path=blocking)
                below = [file async for file in _files(sandbox, request, _Budget(), timeout=0)]
            except OSError as error:
                if error.errno != errno.E2BIG:
                    raise
                raise OSError(errno.ENOTEMPTY, f"a directory exists there that contains {TOO_MUCH}", path) from error
            self.replaced.update({f"{blocking}/{file.path}": file for file in below})
        elif info is not None and info.kind == "file":
            self.replaced[blocking] = ArtifactFile("", await sandbox.read_file(blocking), info.mode)
        self.replaced.setdefault(path, None)
        if info is not None and (blocking != path or info.kind == "directory"):
            await sandbox.remove(blocking)


async def _not_a_folder(sandbox: Sandbox, path: str, folders: set[str]) -> str:
    """Return the first path above `path` that exists and is not a directory, else `path` itself.

    `folders` are paths that are known to be directories; directories found on the way are added.
    """
    above = ""
    for name in path.strip("/").split("/")[:-1]:
        above = f"{above}/{name}"
        if above in folders:
            continue
        info = await sandbox.stat_or_none(above)
        if info is None:
            break
        if info.kind != "directory":
            return above
        folders.add(above)
    return path


async def _write(sandbox: Sandbox, path: str, file: ArtifactFile) -> None:
    """Write a file, even over one that its owner may not write to."""
    try:
        await sandbox.write_file(path, file.data, file.mode)
    except OSError:
        await sandbox.remove(path)
        await sandbox.write_file(path, file.data, file.mode)
