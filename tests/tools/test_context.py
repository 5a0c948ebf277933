"""ToolContext: what rewards do with a rollout's sandbox, from their own thread."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from hermes_rl.errors import AgentFault, UserError
from hermes_rl.plugins import Code
from hermes_rl.sandbox.base import FileInfo, SandboxConfig
from hermes_rl.tools.artifacts import ArtifactFile, TakenArtifact
from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.context import ToolContext
from hermes_rl.user_code.pool import POOL
from tests.tools.calling import Player


@pytest.fixture
def ctx(runtime: ToolRuntime) -> ToolContext:
    return ToolContext(runtime.task_id)


async def test_terminal(ctx: ToolContext) -> None:
    assert await asyncio.to_thread(ctx.terminal, "echo hi; exit 3") == {"exit_code": 3, "output": "hi\n"}
    slow = await asyncio.to_thread(ctx.terminal, "sleep 30", timeout=0.2)
    assert (slow["exit_code"], slow["timed_out"]) == (124, True)


async def test_environment_is_not_the_agents(ctx: ToolContext, play: Player) -> None:
    await play("terminal", command="export PATH=/tmp; cd /tmp; echo 'alias ls=false' > ~/.bashrc")
    assert await asyncio.to_thread(ctx.terminal, "ls; pwd") == {"exit_code": 0, "output": "/home/user\n"}


async def test_loop_is_not_blocked(ctx: ToolContext) -> None:
    calls = [
        asyncio.create_task(asyncio.to_thread(ctx.terminal, f"touch {n}; until [ -e go ]; do sleep 0.01; done"))
        for n in range(3)
    ]
    # Each of them goes on because of another command, which is asked for when all have begun.
    all_of_them = "until [ -e 0 ] && [ -e 1 ] && [ -e 2 ]; do sleep 0.01; done; touch go"
    assert (await asyncio.to_thread(ctx.terminal, all_of_them))["exit_code"] == 0
    assert [call["exit_code"] for call in await asyncio.gather(*calls)] == [0, 0, 0]


async def test_blocking_call_on_the_event_loop_thread_is_refused(ctx: ToolContext) -> None:
    with pytest.raises(UserError, match="to_thread"):
        ctx.terminal("true")


async def test_inside_another_event_loop(ctx: ToolContext) -> None:
    """As an async reward runs: on a loop of its own, in a thread of its own."""

    async def reward() -> str:
        return str(ctx.terminal("echo from a reward")["output"])

    assert await asyncio.to_thread(lambda: asyncio.run(reward())) == "from a reward\n"


async def test_read_and_write(ctx: ToolContext) -> None:
    def reward() -> None:
        assert ctx.write_file("a/größe 1.txt", "x\ny") == {"bytes_written": 3}
        assert ctx.read_file("a/größe 1.txt") == {"content": "x\ny"}
        assert ctx.read_file("missing") == {"content": "", "error": "missing: No such file or directory"}
        assert ctx.search("y", "a")["matches"][0]["line"] == 2

    await asyncio.to_thread(reward)


ASKS = """
import sys

def asks(ctx):
    before, caught = set(sys.modules), []
    for ask in (ctx.read_bytes, ctx.artifact):
        try:
            ask("missing")
        except Exception as error:
            caught.append(type(error).__name__)
    return [caught, sorted(set(sys.modules) - before)]
"""


async def test_a_process_that_asks_loads_nothing_for_the_answer(ctx: ToolContext, tmp_path: Path) -> None:
    """Each process would load it anew: the tools and sandboxes of the runner take longer than many a reward."""
    (tmp_path / "asks.py").write_text(ASKS)
    ctx.runtime.artifacts = {"missing": TakenArtifact("missing", "missing", problem="it is missing")}
    code = Code.from_ref(f"{tmp_path / 'asks.py'}:asks")
    caught, loaded = await POOL.call(code, {"ctx": ctx}, "hermes_rl.plugins:identity", 60)
    assert caught == ["FileNotFoundError", "OSError"] and not [name for name in loaded if "hermes_rl" in name]
    assert "asyncio" not in loaded


async def test_files_and_folders_go_in_and_out(ctx: ToolContext, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    odd = "new\nline 'and' größe"
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / odd).write_bytes(data)
    (tmp_path / "tree" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "tree" / "run.sh").chmod(0o755)

    def reward() -> None:
        sent = ctx.upload_dir(tmp_path / "tree", "tests")
        assert [(one["exit_code"], one["output"], one["path"]) for one in sent] == [
            (0, "", "tests/run.sh"),
            (0, "", f"tests/sub/{odd}"),
        ]
        assert ctx.terminal("tests/run.sh")["output"] == "ran\n"
        back = ctx.download_dir("tests", tmp_path / "back")
        assert sorted((one["success"], one["bytes"]) for one in back) == [(True, 19), (True, len(data))]
        assert (tmp_path / "back" / "sub" / odd).read_bytes() == data
        assert ctx.upload_file(tmp_path / "tree" / "sub" / odd, "one")["exit_code"] == 0
        assert ctx.download_file("one", tmp_path / "new" / "one") == {"success": True, "bytes": len(data)}
        assert (tmp_path / "new" / "one").read_bytes() == data
        assert not ctx.download_file("missing", tmp_path / "x")["success"]
        (missing,) = ctx.download_dir("missing", tmp_path / "x")
        assert not missing["success"] and "missing" in missing["error"]
        ctx.terminal("mkdir empty")
        assert ctx.download_dir("empty", tmp_path / "y")[0]["success"] is False
        assert ctx.upload_file(tmp_path / "none", "x")["exit_code"] == -1
        assert [one["exit_code"] for one in ctx.upload_dir(tmp_path / "none", "x")] == [-1]
        with pytest.raises(FileNotFoundError):
            ctx.upload(tmp_path / "none", "x")

    await asyncio.to_thread(reward)


async def test_symlinks_of_the_agent_are_not_followed_out(ctx: ToolContext, play: Player, tmp_path: Path) -> None:
    await play("terminal", command="mkdir d; ln -s /etc/passwd d/link; ln -s . d/loop; echo x > d/real")
    await asyncio.to_thread(ctx.download_dir, "d", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["real"]


async def test_a_listed_name_that_leads_out_is_not_written(
    ctx: ToolContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sandbox = await ctx.runtime.sandbox()
    await sandbox.write_file("outside", b"of the agent")

    async def listed(path: str, *, limit: int = 0) -> list[FileInfo]:
        return [FileInfo("../outside", "file", 12, 0o644, 0.0)]

    monkeypatch.setattr(sandbox, "list_dir", listed)
    (answer,) = await asyncio.to_thread(ctx.download_dir, "d", tmp_path / "in")
    assert (answer["success"], "no file can be named" in answer["error"]) == (False, True)
    assert not (tmp_path / "outside").exists()


PLANTS = {
    "file": "mkdir tests; echo planted > tests/check.py",
    "symlink": "mkdir tests; echo planted > target; ln -s ../target tests/check.py",
    "symlinked folder": "mkdir elsewhere; echo planted > elsewhere/check.py; ln -s elsewhere tests",
    "folder": "mkdir -p tests/check.py; echo planted > tests/check.py/x",
    "fifo": "mkdir tests; mkfifo tests/check.py",
    "read-only file": "mkdir tests; echo planted > tests/check.py; chmod 400 tests/check.py",
    "file as folder": "echo planted > tests",
    "nothing": "true",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda name: name.replace(" ", "-"))
async def test_staged_files_replace_what_was_planted_and_go_again(ctx: ToolContext, play: Player, plant: str) -> None:
    await play("terminal", command=PLANTS[plant])
    state = "find . -printf '%P %y %l\\n' | sort; cat target elsewhere/check.py 2>/dev/null; ls -A /home"
    before = (await play("terminal", command=state))["output"]

    def reward() -> None:
        with ctx.staged():
            ctx.write_file("tests/check.py", "mine")
            ctx.write_file("tests/check.py", "mine again")
            ctx.write_file("tests/deep/er/x", "x")
            assert ctx.terminal("cat tests/check.py; stat -c %F tests/check.py tests")["output"] == (
                "mine againregular file\ndirectory\n"
            )
            assert "planted" not in ctx.terminal("cat tests/check.py")["output"]
            ctx.terminal("mkdir -p tests/__pycache__; touch tests/__pycache__/x tests/deep/report")

    await asyncio.to_thread(reward)
    after = (await play("terminal", command=state + "; rm -rf tests/__pycache__"))["output"]
    assert [line for line in after.split("\n") if "__pycache__" not in line] == before.split("\n")


async def test_restore_after_an_error(ctx: ToolContext, play: Player) -> None:
    def reward() -> None:
        with ctx.staged():
            ctx.write_file("tests/x", "mine")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(reward)
    assert (await play("terminal", command="ls"))["output"] == ""


async def test_restore_without_a_sandbox_starts_none(ctx: ToolContext, runtime: ToolRuntime) -> None:
    ctx.restore()
    assert not runtime.started


async def test_call_tool(ctx: ToolContext) -> None:
    answer = await asyncio.to_thread(ctx.call_tool, "terminal", {"command": "echo hi"})
    assert json.loads(answer)["output"] == "hi"
    with pytest.raises(UserError, match="the rollout has no tool 'nope'"):
        await asyncio.to_thread(ctx.call_tool, "nope", {})


@pytest.mark.parametrize("name", ["web_search", "web_extract", "browser_navigate", "browser_snapshot"])
async def test_reward_may_call_external_tools_only_if_the_rollout_has_them(name: str) -> None:
    arguments = {"web_extract": [["https://a.example"]], "browser_snapshot": []}.get(name, ["x"])
    async with ToolRuntime() as bare:
        with pytest.raises(UserError, match=f"the rollout has no tool '{name}', so a reward cannot call it"):
            await asyncio.to_thread(getattr(ToolContext(bare.task_id), name), *arguments)


async def test_after_release(ctx: ToolContext) -> None:
    await asyncio.to_thread(ctx.terminal, "true")
    await asyncio.to_thread(ctx.cleanup)
    await asyncio.to_thread(ctx.cleanup)
    with pytest.raises(UserError, match="no live sandbox"):
        await asyncio.to_thread(ctx.terminal, "true")


async def test_sandbox_ended_by_the_agent_gives_results_not_failures() -> None:
    async with ToolRuntime(SandboxConfig(lifetime=0.5)) as runtime:
        ctx = ToolContext(runtime.task_id)
        assert (await asyncio.to_thread(ctx.terminal, "sleep 20"))["exit_code"] == 137
        assert "ended its sandbox" in (await asyncio.to_thread(ctx.terminal, "true"))["output"]
        assert "ended its sandbox" in (await asyncio.to_thread(ctx.read_file, "a"))["error"]
        assert "ended its sandbox" in (await asyncio.to_thread(ctx.write_file, "a", "b"))["error"]
        await asyncio.to_thread(ctx.restore)


FILES_IN_THE_WAY = {
    "missing": ("true", FileNotFoundError),
    "a folder": ("mkdir x", IsADirectoryError),
    "a loop": ("ln -s x x", OSError),
    "closed": ("echo > x; chmod 0 x", PermissionError),
    "below a file": ("echo > y; ln -s y/z x", NotADirectoryError),
    "a pipe": ("mkfifo x", OSError),
}


@pytest.mark.parametrize("how", sorted(FILES_IN_THE_WAY))
async def test_unreadable_file_is_an_agent_fault_with_the_original_error(ctx: ToolContext, how: str) -> None:
    command, kind = FILES_IN_THE_WAY[how]
    await asyncio.to_thread(ctx.terminal, command)
    with pytest.raises(kind) as raised:
        await asyncio.to_thread(ctx.read_bytes, "x")
    assert isinstance(raised.value, AgentFault)
    assert str(raised.value).startswith("x: ")


async def test_files_are_read_up_to_a_bound(ctx: ToolContext, tmp_path: Path) -> None:
    await asyncio.to_thread(ctx.terminal, "truncate -s 500M big; mkdir d; truncate -s 600M d/a d/b; echo small > small")
    for limit, path in ((None, "big"), (5, "small")):
        given = {} if limit is None else {"limit": limit}
        with pytest.raises(OSError, match="too large") as raised:
            await asyncio.to_thread(ctx.read_bytes, path, **given)
        assert raised.value.errno == errno.EFBIG
        assert "too large" in (await asyncio.to_thread(ctx.read_file, path, **given))["error"]
        assert not (await asyncio.to_thread(ctx.download_file, path, tmp_path / "x", **given))["success"]
    assert await asyncio.to_thread(ctx.read_bytes, "small", 6) == b"small\n"
    answers = await asyncio.to_thread(ctx.download_dir, "d", tmp_path / "d", 1 << 20)
    assert [answer["success"] for answer in answers] == [False]


async def test_missing_or_directory_artifact_is_an_agent_fault(ctx: ToolContext, runtime: ToolRuntime) -> None:
    inside = (ArtifactFile("inside", b"", 0o644),)
    runtime.artifacts = {
        "folder": TakenArtifact("folder", "x", inside),
        "empty folder": TakenArtifact("empty folder", "x"),
        "nothing": TakenArtifact("nothing", "x", problem="x: No such file or directory"),
    }
    for name in runtime.artifacts:
        with pytest.raises(OSError, match="artifact") as raised:
            ctx.artifact(name)
        assert isinstance(raised.value, AgentFault)
    with pytest.raises(UserError, match="the spec has no artifact 'other'"):
        ctx.artifact("other")


async def test_what_the_agent_left_is_in_the_way_of_every_look(ctx: ToolContext, runtime: ToolRuntime) -> None:
    runtime.fault = "a file is in the way"
    for look in (lambda: ctx.terminal("true"), lambda: ctx.read_file("x"), lambda: ctx.call_tool("terminal", {})):
        with pytest.raises(AgentFault, match="a file is in the way"):
            await asyncio.to_thread(look)


async def test_missing_host_file_is_not_an_agent_fault(ctx: ToolContext, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match="No such file") as raised:
        await asyncio.to_thread(ctx.upload, tmp_path / "d", "d")
    assert not isinstance(raised.value, AgentFault)


def test_files_of_a_sandbox_that_was_released_need_not_be_taken_away() -> None:
    ToolContext("released").restore()
