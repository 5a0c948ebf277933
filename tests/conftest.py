"""What tests of several rooms share."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rootfs import make_rootfs

if TYPE_CHECKING:
    from hermes_rl.tools.base import ToolRuntime

# Where this machine is told to write no bytecode, each worker would rewrite all tests, and each process that a test
# starts would compile the package, at every run: a tenth of what all tests take.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Loading all tests makes millions of objects and hardly any garbage: a look for it took a fifth of the time.
gc.set_threshold(50_000, 20, 50)

pytest_plugins = ["tests.forks", "tests.thorough", "tests.budget"]

LONGEST_NAME = 60
"""Characters of a text that a test is named after."""


def pytest_collection_finish() -> None:
    """Let no look for garbage go through thousands of tests and the libraries that they have loaded."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer() -> Iterator[None]:
    """Let a test whose time is up say where its coroutines wait: the stacks of threads do not show it.

    A timer of its own would be a thread for each test.
    """
    answer = yield
    if callable(end := signal.getsignal(signal.SIGALRM)):
        signal.signal(signal.SIGALRM, lambda *given: (tell_waiting(), end(*given)))
    return answer


def tell_waiting() -> None:
    """Print where each task waits, the innermost place last."""
    for task in [thing for thing in gc.get_objects() if isinstance(thing, asyncio.Task) and not thing.done()]:
        places, waiting = [], task.get_coro()
        while waiting is not None:
            frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else repr(waiting)[:200])
            waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
        sys.stderr.write("\n    ".join([task.get_name(), *places, ""]))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return a short name for a long text: a test's name goes to every worker, report and child process."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_NAME:
        return f"{val[:LONGEST_NAME]!a}-and-so-on-{len(val)}"
    return None


@pytest.fixture(scope="session", autouse=True)
def own_cache() -> Iterator[Path]:
    """What tests unpack must not fill the cache of whoever runs them. Sandboxes of root enter it as another user."""
    folder = Path(tempfile.mkdtemp(prefix="cache-"))
    folder.chmod(0o755)
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    del os.environ["XDG_CACHE_HOME"]
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a root file system."""
    return make_rootfs(tmp_path_factory.mktemp("rootfs"), "one")


@pytest.fixture(scope="session")
def packed_rootfs(rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as an archive, with another word in /etc/issue."""
    archive = tmp_path_factory.mktemp("packed") / "two.tar.gz"
    plain = archive.with_suffix("")
    subprocess.run(["tar", "-cf", plain, "-C", rootfs, "--exclude", "./etc/issue", "."], check=True)
    (archive.parent / "etc").mkdir()
    (archive.parent / "etc/issue").write_text("image two\n")
    subprocess.run(["tar", "-rf", plain, "-C", archive.parent, "./etc/issue"], check=True)
    subprocess.run(["gzip", "-1", plain], check=True)
    return archive


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[ToolRuntime]:
    """Runtimes of the rollouts that the test starts in this process."""
    from hermes_rl.tools.base import ToolRuntime

    made: list[ToolRuntime] = []
    original = ToolRuntime.__init__

    def remember(self: ToolRuntime, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(ToolRuntime, "__init__", remember)
    return made


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Lays a package into a folder as pip would, and lets this process find it; the folder fits into PYTHONPATH."""

    def lay(name: str, source: str, points: Mapping[str, str]) -> Path:
        """`points` are group → the lines of its entry points."""
        site = tmp_path / "site"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        groups = (f"[{group}]\n{lines}\n" for group, lines in points.items())
        (info / "entry_points.txt").write_text("\n".join(groups))
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return site

    return lay
