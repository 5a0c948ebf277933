"""`file_matches` in a real sandbox."""

from __future__ import annotations

import asyncio
import resource

import pytest

from hermes_rl.tools.context import ToolContext
from tests.rewards.played import graded


async def run(ctx: ToolContext, command: str) -> None:
    assert (await asyncio.to_thread(ctx.terminal, command))["exit_code"] == 0


@pytest.mark.parametrize(
    ("command", "content", "exact", "expected"),
    [
        ("printf 'hello\\n' > greeting.txt", "hello", False, 1),
        ("printf 'hello' > greeting.txt", "hello\n", False, 1),
        ("printf 'hello\\n' > greeting.txt", "hello\n", True, 1),
        ("printf '\\342\\202\\254 5' > greeting.txt", "€ 5", False, 1),
        ("ln -s other.txt greeting.txt; printf hello > other.txt", "hello", False, 1),
        ("printf 'hello\\n' > greeting.txt", "hello", True, 0),
        ("printf 'hello\\n\\n' > greeting.txt", "hello", False, 0),
        ("printf 'hello \\n' > greeting.txt", "hello", False, 0),
        ("printf 'Hello\\n' > greeting.txt", "hello", False, 0),
        ("printf 'a\\377' > greeting.txt", "a\N{REPLACEMENT CHARACTER}", False, 0),
        ("printf hello > Greeting.txt", "hello", False, 0),
        ("mkdir greeting.txt", "hello", False, 0),
        ("true", "hello", False, 0),
        ("true", "", False, 0),
    ],
)
async def test_the_content_decides(ctx: ToolContext, command: str, content: str, exact: bool, expected: float) -> None:
    await run(ctx, command)
    value = await graded("file_matches", ctx=ctx, path="greeting.txt", content=content, exact=exact)
    assert value.value == expected
    assert (value.reason is None) == bool(expected)


async def test_path_may_be_absolute_or_relative_to_home(ctx: ToolContext) -> None:
    await run(ctx, "printf hello > /tmp/greeting.txt; cp /tmp/greeting.txt ~/there.txt")
    for path in ("/tmp/greeting.txt", "~/there.txt"):
        assert (await graded("file_matches", ctx=ctx, path=path, content="hello")).value == 1


async def test_the_reason_names_what_was_wrong(ctx: ToolContext) -> None:
    value = await graded("file_matches", ctx=ctx, path="greeting.txt", content="hello")
    assert value.reason == "greeting.txt: No such file or directory"


async def test_in_a_sandbox_that_the_agent_killed_there_is_no_file(killed_ctx: ToolContext) -> None:
    value = await graded("file_matches", ctx=killed_ctx, path="greeting.txt", content="")
    assert (value.value, "ended its sandbox" in str(value.reason)) == (0, True)


async def test_no_more_is_read_than_is_compared(ctx: ToolContext) -> None:
    await run(ctx, "truncate -s 500M big")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = [await graded("file_matches", ctx=ctx, path="big", content=text) for text in ("", "x", "x" * 1000)]
    assert {(value.value, value.reason) for value in values} == {(0, "the content of big differs: it is longer")}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
