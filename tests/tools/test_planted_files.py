"""Files that a reward writes replace whatever the agent has planted there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.context import ToolContext

PLANTED = {
    "symlink": "ln -s /home/user/elsewhere tests",
    "symlink to itself": "ln -s tests tests",
    "file": "echo planted > tests",
    "fifo": "mkfifo tests",
    "closed folder": "mkdir -p tests; echo planted > tests/check.py; chmod 0 tests",
    "closed file": "mkdir tests; echo planted > tests/check.py; chmod 0 tests/check.py; chmod 0500 tests",
    "folder in its place": "mkdir -p tests/check.py/sub; chmod 0 tests/check.py/sub; chmod 0 tests/check.py",
    "link in its place": "mkdir tests; ln -s ../keep tests/check.py",
    "closed home": "mkdir tests; chmod 0500 . tests",
}


@pytest.fixture
async def ctx() -> AsyncIterator[ToolContext]:
    async with ToolRuntime() as runtime:
        yield ToolContext(runtime.task_id)


@pytest.mark.parametrize("plant", sorted(PLANTED))
async def test_it_is_replaced_and_comes_back(ctx: ToolContext, plant: str) -> None:
    look = "stat -c '%F %a %N' . tests tests/check.py keep 2>&1; cat keep"

    def play() -> tuple[str, str, str]:
        ctx.terminal(f"echo kept > keep; {PLANTED[plant]}")
        before = ctx.terminal(look)["output"]
        with ctx.staged():
            assert ctx.write_file("tests/check.py", "real") == {"bytes_written": 4}
            inside = ctx.read_file("tests/check.py")["content"]
        return before, inside, ctx.terminal(look)["output"]

    before, inside, after = await asyncio.to_thread(play)
    assert inside == "real"
    assert after == before


async def test_a_folder_of_tests_replaces_a_planted_one_whole(ctx: ToolContext, tmp_path: Path) -> None:
    (tmp_path / "check.sh").write_text("exit 1")

    def play() -> list[str]:
        found = []
        for plant in ("mkdir /tests; echo > /tests/conftest.py", "mkdir own; echo > own/x; ln -s ~/own /tests"):
            ctx.terminal(f"rm -rf /tests; {plant}")
            with ctx.staged():
                assert ctx.upload(tmp_path, "/tests") == {"files": 1}
                found.append(ctx.terminal("ls -A /tests")["output"])
            found.append(ctx.terminal("ls -A /tests")["output"])
        return found

    assert await asyncio.to_thread(play) == ["check.sh\n", "conftest.py\n", "check.sh\n", "x\n"]
