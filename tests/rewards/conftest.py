"""Sandboxes for rewards to look into."""

from __future__ import annotations

import asyncio
import io
import re
import tarfile
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hermes_rl.sandbox.base import SandboxConfig, SandboxFile
from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.context import ToolContext

LANGUAGES = re.compile(r"\b(__init__|_mapping|python|diff)\.")


@pytest.fixture
async def ctx() -> AsyncIterator[ToolContext]:
    """A rollout's sandbox, as rewards see it."""
    async with ToolRuntime() as runtime:
        yield ToolContext(runtime.task_id)


@pytest.fixture
async def killed_ctx() -> AsyncIterator[ToolContext]:
    """A sandbox that the agent's own command has killed."""
    async with ToolRuntime(SandboxConfig(lifetime=0.4)) as runtime:
        ctx = ToolContext(runtime.task_id)
        await asyncio.to_thread(ctx.terminal, "sleep 30")
        assert runtime.killed_by_agent
        yield ctx


@pytest.fixture(scope="session")
def packed_pytest() -> bytes:
    """This very pytest with what it needs, as an archive to unpack in a sandbox.

    It comes with its bytecode, and not compressed: to compile or unpack it took longer than the tests that it runs.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None
            origin = Path(spec.origin)
            source = origin.parent if origin.name == "__init__.py" else origin
            archive.add(source, source.name, filter=_without_other_languages)
    return packed.getvalue()


def _without_other_languages(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out the languages that pytest colours nothing in: nine tenths of the files."""
    folder, _, name = entry.name.rpartition("/lexers/")
    unused = folder and not entry.isdir() and not LANGUAGES.search(name)
    return None if unused else entry


@pytest.fixture
async def ctx_with_pytest(packed_pytest: bytes) -> AsyncIterator[ToolContext]:
    """A sandbox with pytest in it, as `python3 -m pytest`."""
    config = SandboxConfig(
        env={"PYTHONPATH": "/tmp/lib", "PYTHONDONTWRITEBYTECODE": "1"},
        files=(SandboxFile("/tmp/lib.tar", packed_pytest),),
        setup=("mkdir /tmp/lib && tar xf /tmp/lib.tar -C /tmp/lib",),
    )
    async with ToolRuntime(config) as runtime:
        yield ToolContext(runtime.task_id)


@pytest.fixture(scope="session")
def library_of_pytest(packed_pytest: bytes) -> tuple[SandboxFile, ...]:
    return (SandboxFile("/tmp/lib.tar", packed_pytest),)
