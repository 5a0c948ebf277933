"""Additional directories of sandboxes on this machine: packages that a spec lists, and a runtime for the helper.

`package_folder` makes a virtual environment once, by the host's pip and from wheels alone, and `npm_folder` a directory
of npm packages without their scripts, so that no code of a package runs while it is installed. Both programs read the
user's configuration, so an index, a proxy or a directory of wheels is set there. `runtime_folder` copies an interpreter
with its loader, its libraries and the few modules that the helper imports: an image may have no Python, or one that the
agent can replace. All are in the user's cache under a hash of their inputs, and sandboxes see them read-only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.sandbox.images import cached
from hermes_rl.sandbox.launcher import isolated, own_python, python_output, system_python

# -------------------------------------------------------------------------------- runtime of the helper
# It is started through its loader at a separate path, so that no file of the image takes part in it.

RUNTIME_FOLDER = "/.hermes-rl"
"""Path in a sandbox."""
PRELOAD, NO_PRELOAD = b"/etc/ld.so.preload", b"/.hermes-rl/.empty"
"""File in which glibc's loader finds libraries to load into every program, and a path of the same length, at which no
image has a file: the copied loader looks there.
"""

_LOOK = """
import __future__, _ctypes, _signal, _socket, errno, fnmatch, json, marshal, os, re, resource, select, stat, sys, time
maps = open("/proc/self/maps").read().split("\\n")
print(json.dumps({
    "python": os.path.realpath("/proc/self/exe"),
    "version": "python%d.%d" % sys.version_info[:2],
    "mapped": sorted({line.split(None, 5)[5] for line in maps if line.count("/") and " r-xp " in line}),
    "modules": [f for m in sys.modules.values() if (f := getattr(m, "__file__", None))] + [os.__file__],
    "library": os.path.dirname(os.__file__),
}))
"""


@functools.cache
def runtime_folder(python: str) -> Path:
    """Return the directory for an interpreter of this machine; raises `SandboxFailure` if it cannot be inspected."""
    description = json.loads(python_output(python, _LOOK, "be looked at"))
    stamps = [f"{path} {os.stat(path).st_mtime_ns}" for path in (description["python"], *description["mapped"])]  # noqa: PTH116
    key = hashlib.sha256("\n".join([*stamps, Path(__file__).read_text("utf-8")]).encode()).hexdigest()[:32]
    return cached(f"runtime/{key}", lambda folder: _copy_packages(description, folder))


def runtime_python(folder: Path) -> list[str]:
    """Return the command that runs Python code in a sandbox, given after `-c`, or after `-` on its input."""
    libraries = f"{RUNTIME_FOLDER}/lib"
    loader = f"{libraries}/{_loader(folder).name}"
    return [loader, "--library-path", libraries, *isolated(f"{RUNTIME_FOLDER}/bin/python3")]


def _loader(folder: Path) -> Path:
    return next(path for path in (folder / "lib").iterdir() if re.match(r"ld[-.].*\.so", path.name))


def _copy_packages(description: dict[str, Any], folder: Path) -> None:
    library = folder / "lib" / description["version"]
    (library / "lib-dynload").mkdir(parents=True)
    (folder / "bin").mkdir()
    shutil.copy(description["python"], folder / "bin" / "python3")
    for path in map(Path, description["mapped"]):
        if ".so" in path.name and "lib-dynload" not in path.parts:
            _copy_library(path, folder / "lib")
    loader = _loader(folder)
    loader.write_bytes(loader.read_bytes().replace(PRELOAD, NO_PRELOAD))
    for path in map(Path, description["modules"]):
        target = library / os.path.relpath(path, description["library"])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def _copy_library(path: Path, folder: Path) -> None:
    """Copy a library, with the shorter names under which it is requested: libz.so.1 is libz.so.1.2.13."""
    shutil.copy(path, folder / path.name)
    name = path.name
    while name.rpartition(".so.")[1]:
        name = name.rpartition(".")[0]
        if not (folder / name).exists():
            (folder / name).symlink_to(path.name)


# -------------------------------------------------------------------------------- packages

PACKAGES = "/python"
"""Path in a sandbox; the environment is made for this path. It is at the top, as the agent cannot rename a mount, but
could rename a parent directory.
"""
NPM = "/npm"
INSTALL_SECONDS = 1800.0
"""Timeout of pip or npm in seconds."""
WHEELS = (
    "Only wheels are installed; pip takes its index from its own configuration (pip config set global.index-url URL, "
    "or global.find-links FOLDER)"
)
REGISTRY = "npm takes its registry from its own configuration (npm config set registry URL)"


class Layers:
    """Packages of a sandbox: directories that it sees read-only, `python` and `npm` as in a spec's lists.

    Args:
        image: True if the sandbox has the files of an image. Programs of the image are then found before programs of
            the packages, since the agent's project was installed for them.
    """

    def __init__(self, python: tuple[str, ...], npm: tuple[str, ...], *, image: bool = False) -> None:
        self._python, self._npm, self._image = python, npm, image
        self.mount_paths = tuple(mount_path for mount_path, names in ((PACKAGES, python), (NPM, npm)) if names)
        """Paths in the sandbox."""

    def ensure_folders(self) -> dict[str, Path]:
        """Return the directory for each path, created if it does not exist; blocks. Raises `UserError`."""
        folders = {PACKAGES: package_folder(self._python, self._image)} if self._python else {}
        return folders | ({NPM: npm_folder(self._npm)} if self._npm else {})

    def path(self, search_path: str) -> str:
        """Return the search path of commands, with the programs of the packages added to the sandbox's."""
        programs = {PACKAGES: f"{PACKAGES}/bin", NPM: f"{NPM}/node_modules/.bin"}
        added = [programs[mount_path] for mount_path in self.mount_paths]
        return ":".join([search_path, *added] if self._image else [*added, search_path])


@functools.cache
def package_folder(packages: tuple[str, ...], image: bool = False) -> Path:
    """Return the environment with these packages, created if it does not exist; blocks.

    One of them may be `python>=3.12`: it is made with an interpreter of this machine that is at least that new. If that
    is not an interpreter of the sandbox, as in an `image`, the environment contains the interpreter. Raises `UserError`
    with the end of pip's output if it cannot be created.
    """
    interpreters = [_INTERPRETER.fullmatch(package.strip()) for package in packages]
    min_version = max(((3, int(match[1] or 0)) for match in interpreters if match is not None), default=(3, 0))
    names = [package for package, match in zip(packages, interpreters, strict=True) if match is None]
    python = _find_interpreter(min_version)
    version = _run_command([python, "-I", "-c", "import sys, sysconfig; print(sys.version, sysconfig.get_platform())"])
    alone = image or python != (system_python() or own_python())
    code = [Path(__file__).read_text("utf-8")] if alone else []
    key = hashlib.sha256("\n".join([python, version, *sorted(names), *code]).encode()).hexdigest()[:32]

    def make(folder: Path) -> None:
        _make_environment(folder, python, names)
        if alone:
            _bring_interpreter(folder, python)
        _open_to_users(folder)

    return cached(f"python/{key}", make)


def _make_environment(folder: Path, python: str, packages: Sequence[str]) -> None:
    pip = find_pip()
    _run_command([python, "-I", "-m", "venv", "--without-pip", str(folder)])
    inside = str(folder / "bin" / "python")
    wheels = ["--only-binary=:all:", "--no-compile", "--no-input", "--disable-pip-version-check", "--quiet"]
    if packages:
        _run_command([*pip, "--python", inside, "install", *wheels, "--", *packages])
    _run_command(
        [inside, "-I", "-m", "compileall", "-q", "-s", str(folder), "-p", PACKAGES, str(folder / "lib")],
        status=(0, 1),
    )
    for path in (folder / "pyvenv.cfg", *(folder / "bin").iterdir()):
        if not path.is_symlink() and path.is_file():
            # Programs name the interpreter by the path at which the environment was made.
            path.write_bytes(path.read_bytes().replace(os.fsencode(folder), PACKAGES.encode()))


# A bundled interpreter runs under its loader with its libraries, so that neither the C library of an image nor its lack
# of Python matters.

_INTERPRETER = re.compile(r"python(?:\s*>=\s*3\.(\d+))?")
_MANAGED = (".pyenv/versions/*/bin/python3", ".local/share/uv/python/*/bin/python3")
"""Interpreters in the home that are not on the path."""
_UNUSED = ("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "config-*", "__pycache__")
_OF_WHEELS = ("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0",
              "libresolv.so.2", "libutil.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libz.so.1")  # fmt: skip
"""Libraries that wheels may require, if this machine has them."""
_STARTS = f"""#!/bin/sh
base={PACKAGES}/base
exec $base/lib/LOADER --argv0 {PACKAGES}/bin/python --library-path $base/lib $base/bin/python3 "$@"
"""


def _find_interpreter(min_version: tuple[int, int]) -> str:
    """Return an interpreter of this machine that is at least that new: the sandbox's if possible."""
    sandbox_python = system_python() or own_python()
    if min_version == (3, 0):
        return sandbox_python
    path_interpreters = [shutil.which(f"python3.{minor}") for minor in range(min_version[1], min_version[1] + 6)]
    managed = [str(path) for pattern in _MANAGED for path in sorted(Path.home().glob(pattern))]
    for python in (sandbox_python, own_python(), *filter(None, path_interpreters), *managed):
        try:
            version = _run_command([python, "-I", "-c", "import sys, venv; print(*sys.version_info[:2])"]).split()
        except UserError:
            continue  # no Python at all, or one without its library
        if tuple(map(int, version)) >= min_version:
            return python
    raise UserError(
        f"sandbox.python asks for Python {min_version[0]}.{min_version[1]} or later, and this machine has none: "
        "install one from "
        "its packages, with pyenv or with uv"
    )


def _bring_interpreter(folder: Path, python: str) -> None:
    """Add an interpreter to an environment that was made for this machine's interpreter."""
    look = (
        "import json, os, sys, sysconfig; print(json.dumps([os.path.realpath('/proc/self/exe'), "
        "sysconfig.get_path('stdlib'), f'python{sys.version_info[0]}.{sys.version_info[1]}']))"
    )
    program, library, version = json.loads(_run_command([python, "-I", "-c", look]))
    base = folder / "base"
    (base / "bin").mkdir(parents=True)
    (base / "lib").mkdir()
    shutil.copy(program, base / "bin" / "python3")
    ignored = shutil.ignore_patterns(*_UNUSED, "site-packages", "dist-packages")
    shutil.copytree(library, base / "lib" / version, ignore=ignored, ignore_dangling_symlinks=True)
    built = [program, *map(str, (base / "lib" / version).glob("lib-dynload/*.so"))]
    needed = re.findall(r"(?:=> )?(/\S+) \(0x", _run_command(["ldd", *built], status=(0, 1)))
    loader = next((Path(path) for path in needed if re.match(r"ld[-.].*\.so", Path(path).name)), None)
    system = next((Path(path).parent for path in needed if Path(path).name == "libc.so.6"), None)
    if loader is None or system is None:
        raise UserError(f"sandbox.python cannot be made for an image: {python} does not use the GNU C library")
    extra_libraries = [system / name for name in _OF_WHEELS]
    extra_libraries += [Path("/usr") / path.relative_to("/") for path in extra_libraries]
    for path in {*map(Path, needed), *(path for path in extra_libraries if path.exists())}:
        if not (base / "lib" / path.name).exists():
            shutil.copy(path, base / "lib" / path.name)
    started = [str(base / "lib" / loader.name), "--argv0", str(base / "bin" / "python3"), "--library-path"]
    started += [str(base / "lib"), str(base / "bin" / "python3"), "-I", "-S"]
    code = ["-m", "compileall", "-q", "-s", str(folder), "-p", PACKAGES, str(base / "lib" / version)]
    _run_command([*started, *code], status=(0, 1))
    _run_command([*started, "-c", "import ctypes, ssl, sqlite3"])
    for path in (folder / "bin").glob("python*"):
        path.unlink()
    starts = folder / "bin" / "python"
    starts.write_text(_STARTS.replace("LOADER", loader.name), "utf-8")
    starts.chmod(0o755)
    for name in ("python3", version):
        (folder / "bin" / name).symlink_to("python")
    settings = (folder / "pyvenv.cfg").read_text("utf-8")
    (folder / "pyvenv.cfg").write_text(re.sub(r"(?m)^home = .*$", f"home = {PACKAGES}/base/bin", settings), "utf-8")


@functools.cache
def npm_folder(packages: tuple[str, ...]) -> Path:
    """Return the directory with these packages of npm, created if it does not exist; blocks.

    Raises `UserError` with the end of npm's output if that fails.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("sandbox.npm needs npm on this machine; install it (apt-get install npm), or name an image")
    versions = [_run_command([program, "--version"], key="sandbox.npm", hint=REGISTRY) for program in (npm, "node")]
    key = hashlib.sha256("\n".join([*versions, *sorted(packages)]).encode()).hexdigest()[:32]

    def make(folder: Path) -> None:
        quiet = ["--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--no-update-notifier"]
        _run_command(
            [npm, "install", *quiet, "--loglevel=error", "--prefix", str(folder), "--", *packages],
            key="sandbox.npm",
            hint=REGISTRY,
        )
        _open_to_users(folder)

    return cached(f"npm/{key}", make)


def _open_to_users(folder: Path) -> None:
    """Let all users read it: root's sandboxes have separate users, and the umask may be strict."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


@functools.cache
def find_pip() -> list[str]:
    """Return the command of a pip of this machine that installs for other interpreters.

    Raises `UserError` if there is none.
    """
    programs = [[path] for name in ("pip3", "pip") if (path := shutil.which(name)) is not None]
    for command in ([sys.executable, "-m", "pip"], *programs, [system_python() or sys.executable, "-m", "pip"]):
        try:
            version_fields = _run_command([*command, "--version"]).split()
        except UserError:
            continue  # a module or a program other than pip
        version = re.findall(r"\d+", version_fields[1])[:2] if len(version_fields) > 1 else ()
        if tuple(map(int, version)) >= (22, 3):  # the first with --python
            return command
    raise UserError("sandbox.python needs pip 22.3 or later on this machine; install it (python3 -m ensurepip)")


def _run_command(
    command: Sequence[str], *, status: Sequence[int] = (0,), key: str = "sandbox.python", hint: str = WHEELS
) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{key} cannot be made: {error}") from error
    if done.returncode not in status:
        message = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-5:])
        raise UserError(f"{key} cannot be made: {message}\n{hint}")
    return done.stdout
