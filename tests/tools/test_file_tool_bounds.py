"""The file tools have limits of time and memory, and never block other rollouts."""

from __future__ import annotations

import asyncio
import difflib
import json
import random
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.sandbox.base import ResourceLimits, SandboxConfig
from hermes_rl.tools import editing
from hermes_rl.tools.artifacts import ArtifactRequest, collect
from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.editing import NoMatchError, _replace_all, replace
from hermes_rl.tools.toolsets._patch import Patch, _common_length, _diff_lines
from hermes_rl.tools.toolsets.file import ReadFile, _page_of_lines


@asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """Seconds by which a timer of 5 ms was late, one by one."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            late.append(time.perf_counter() - began - 0.005)

    ticking = asyncio.create_task(tick())
    try:
        yield late
    finally:
        ticking.cancel()


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


WORK: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "a missing name": (
        "mkdir many; cd many; seq -f '%.0f-abcdefghijklmnopqrstuvwxyz' 1 20000 | xargs touch",
        ReadFile,
        {"path": "many/abcdefghijklmnopqrstuvwxyz"},
    ),
    "a short passage everywhere": (
        "head -c 1000000 /dev/zero | tr '\\0' a > big",
        Patch,
        {"path": "big", "old_string": "a", "new_string": "b", "replace_all": True},
    ),
    "every line everywhere": (
        "yes abc | head -c 8000000 > big",
        Patch,
        {"path": "big", "old_string": "c\n", "new_string": "d\n", "replace_all": True},
    ),
    "a lenient passage": (
        "yes 'a  b' | head -c 2000000 > big",
        Patch,
        {"path": "big", "old_string": "a b\n" * 1000 + "c", "new_string": "x"},
    ),
    "hunks that repeat": (
        "yes 'a b' | head -c 200000 > big",
        Patch,
        {"mode": "patch", "patch": "*** Update File: big\n" + "@@\n-a  b\n+a c\n" * 200},
    ),
    "short lines": ("yes '' | head -c 66000000 > big", ReadFile, {"path": "big", "offset": 65_000_000}),
    "one long line": ("head -c 66000000 /dev/zero | tr '\\0' a > big", ReadFile, {"path": "big"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", WORK)
async def test_tool_calls_do_not_block_the_event_loop(what: str) -> None:
    prepare, tool, args = WORK[what]
    async with ToolRuntime(SandboxConfig(limits=ResourceLimits(disk=1 << 28))) as runtime:
        sandbox = await runtime.sandbox()
        assert (await sandbox.run(prepare)).exit_code == 0
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        best = 1.0
        for _ in range(3):  # what else runs on this machine may hold up a loop too, but not each time
            async with lag() as late:
                answer = await tool().call(args, runtime)
                await asyncio.sleep(0.5)  # enough ticks for a share of them to mean something
            best = min(best, p99(late))
            if best < 0.05:
                break
            assert (await sandbox.run(f"rm -rf many big; {prepare}")).exit_code == 0
        assert len(answer) < 150_000
        assert json.loads(answer)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000
        assert best < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["files", "folders"])
async def test_an_artifact_of_a_great_many_names_is_refused_at_once(inside: str) -> None:
    make = {"files": "xargs touch", "folders": "xargs mkdir"}[inside]
    async with ToolRuntime(SandboxConfig(limits=ResourceLimits(disk=1 << 30, memory=1 << 32))) as runtime:
        sandbox = await runtime.sandbox()
        assert (await sandbox.run(f"mkdir many; cd many; seq 1 200000 | {make}")).exit_code == 0
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        best = 1.0
        for _ in range(3):  # as above
            async with lag() as late:
                found = await collect(sandbox, [ArtifactRequest("many", path="many")], 60)
                await asyncio.sleep(0.5)
            assert "files and folders" in str(found["many"].problem)
            best = min(best, p99(late))
            if best < 0.05:
                break
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
        assert best < 0.05


async def test_a_folder_of_more_names_than_asked_for_is_an_error() -> None:
    async with ToolRuntime() as runtime:
        sandbox = await runtime.sandbox()
        await sandbox.run("mkdir many; cd many; seq 1 50 | xargs touch")
        assert len(await sandbox.list_dir("many", limit=50)) == 50
        with pytest.raises(OSError, match="More than 49 entries"):
            await sandbox.list_dir("many", limit=49)


def test_a_file_may_not_grow_without_bound() -> None:
    with pytest.raises(NoMatchError, match="would grow by"):
        replace("a" * 1_000_000, "a", "b" * 1000, everywhere=True)
    with pytest.raises(NoMatchError, match="would grow by"):
        replace("a  b\n" * 50_000, "a b\n", "b" * 1000 + "\n", everywhere=True)


def test_lenient_matching_takes_time_in_proportion_to_the_text() -> None:
    began = time.process_time()
    text = "a  b\n" * 99_000
    with pytest.raises(NoMatchError, match="not found"):
        replace(text, "a b\n" * 40_000 + "c", "x")
    assert time.process_time() - began < 10
    assert replace(text, "a b\n" * 99_000, "x\n") == "x\n"


@pytest.mark.parametrize(("before", "after"), [("a\n\nb\n", "a\n\nnew\nb\n"), ("\n", "\nnew\n"), ("\nb", "\nnew\nb")])
def test_a_hunk_whose_only_line_is_empty_is_applied(before: str, after: str) -> None:
    change = editing.parse("*** Begin Patch\n*** Update File: x\n@@\n \n+new\n*** End Patch")[0]
    assert editing.update(before, change.hunks) == after


def test_too_many_hunks_for_a_large_file_are_refused() -> None:
    hunks = [editing.Hunk("", ["x"], ["y"])] * 2000
    with pytest.raises(NoMatchError, match="too many"):
        editing.update("x\n" * 4_000_000, hunks)


def applied(before: str, lines: list[str]) -> str:
    """What a unified diff makes of a text."""
    old, new, at = before.splitlines(), [], 0
    for line in lines[2:]:
        if line.startswith("@@"):
            first, count = (line.split()[1][1:] + ",1").split(",")[:2]
            begin = int(first) - (count != "0")
            new += old[at:begin]
            at = begin
        elif line[0] == "+":
            new.append(line[1:-1])
        else:
            assert old[at] == line[1:-1]
            at += 1
            new += [line[1:-1]] * (line[0] == " ")
    return "\n".join(new + old[at:])


def test_the_diff_of_a_part_is_a_diff_of_the_whole() -> None:
    rng = random.Random(4)
    for _ in range(300):
        before = [rng.choice("abc") for _ in range(rng.randrange(1, 40))]
        after = list(before)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(after) + 1)
            after[at : at + rng.randrange(3)] = [rng.choice("abcd") for _ in range(rng.randrange(3))]
        texts = "\n".join(before) + "\n", "\n".join(after) + "\n" if after else ""
        lines = list(_diff_lines(*texts, "a", "b"))
        if texts[0] == texts[1]:
            assert lines == []
            continue
        assert applied(texts[0], lines) == texts[1].removesuffix("\n")
        whole = list(difflib.unified_diff(texts[0].splitlines(True), texts[1].splitlines(True)))
        assert len(lines) <= 2 * len(whole)


def test_a_page_is_what_splitting_the_file_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    monkeypatch.setattr("hermes_rl.tools.toolsets.file.PIECE", 7)
    for _ in range(300):
        data = b"".join(rng.choice([b"\n", b"a", b"\xc3\xa4", b"\xff", b"\r"]) for _ in range(rng.randrange(60)))
        lines = data.decode("utf-8", "replace").split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines
        offset, limit = rng.randrange(1, 12), rng.randrange(1, 6)
        page = _page_of_lines(data, offset, limit)
        wanted = lines[offset - 1 : offset - 1 + limit]
        assert page["content"] == "\n".join(f"{number}|{line}" for number, line in enumerate(wanted, offset))
        assert page["total_lines"] == len(lines)


@given(st.text("ab\n", max_size=60), st.text("ab\n", min_size=1, max_size=5), st.text("abc", max_size=3))
def test_a_passage_is_replaced_in_pieces_as_in_one(text: str, old: str, new: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hermes_rl.tools.editing.PIECE", 4)
        assert _replace_all(text, old, new) == (text.count(old), text.replace(old, new))


def test_a_bound_on_what_is_added_cuts_no_line_break_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.tools.editing.MOST_ADDED", 2)
    assert replace("x\r\n" * 10, "x", "y", everywhere=True) == "y\r\n" * 10
    with pytest.raises(NoMatchError, match="would grow by 10 "):
        replace("x\r\n" * 10, "x", "yy", everywhere=True)


@given(st.text("ab", max_size=9), st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_what_two_texts_have_in_common(same: str, before: str, after: str) -> None:
    texts = same + before, same + after
    length = _common_length(*texts)
    assert texts[0][:length] == texts[1][:length]
    assert length in map(len, texts) or texts[0][length] != texts[1][length]
    assert _common_length(*(text[::-1] for text in texts), end=True) == length
