"""Whatever reads what an agent writes does so in bounded time, and takes it as the agent's doing.

Each case is a hostile text and a reader. A reader on the event loop may hold it for 50 ms, by the processor time of its
thread, and any take two seconds in all; none takes much memory, or raises anything else than what tells the agent of
its mistake. The seed is printed: ``READERS_SEED=…`` repeats a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import inspect
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mcp_types import CallToolResult
from pydantic import ValidationError

from hermes_rl.agent.history import kept_message, sendable
from hermes_rl.analysis.audit import _added_lines
from hermes_rl.plugins import did_you_mean
from hermes_rl.sandbox.base import Conversation
from hermes_rl.sandbox.jobs import CHUNK
from hermes_rl.scoring.control_files import created
from hermes_rl.scoring.judge import number_in, verdict_in
from hermes_rl.scoring.reward_function import SHIPPED_SECONDS, find_reward
from hermes_rl.servers.base import without_thinking
from hermes_rl.shipped import shipped_rewards
from hermes_rl.terminal_text import escape_controls
from hermes_rl.threads import reduce_gc_pauses
from hermes_rl.tokens.parsers.base import parse_text
from hermes_rl.tokens.parsers.table import PARSERS, load_parser, unread_call
from hermes_rl.tools import editing
from hermes_rl.tools.base import Tool, ToolInputError, Toolkit, describe, readable
from hermes_rl.tools.catalogue import resolve_toolsets
from hermes_rl.tools.editing import NoMatchError, PatchFormError
from hermes_rl.tools.execute import checked_arguments
from hermes_rl.tools.mcp_client import _Pump, _result_text, require_mcp
from hermes_rl.tools.toolsets._patch import _diff_lines
from hermes_rl.values import too_many_values
from tests.attacks.known import WORDS
from tests.attacks.readers import arguments, patch, text, value
from tests.attacks.test_known_texts import Server, Session, Taking
from tests.rewards.played import said
from tests.tokens.families import MARKS_OF, renderer_of

HELD = 0.05
"""Seconds of processor time that a reader may take of the event loop at once."""
MARGIN = 2.0
"""How much longer it may be on a machine whose caches others use."""
ATTEMPTS = 3
"""How often a case is read before it counts as wrong: what takes long, or much memory, does so each time."""
LONGEST = 2.0
REWARD = 0.5
"""Seconds of processor time that a shipped reward may take in its process."""
HUNG = 60.0
"""Seconds after which a case that does not end ends the test's process, with the place where it hangs."""
TAKES = 1 << 26
"""Bytes by which the process may be larger while a case is read: texts have a few MiB, and of each some copies are made
at a time, or the values that it may have, which take some hundred bytes each."""
KEEPS = 1 << 28
"""Bytes by which it may be larger when all cases have been read."""
TOOLS = Toolkit(resolve_toolsets(["terminal", "file", "todo", "code_execution"])).tools
RECURSIVE = {
    "$defs": {
        "node": {
            "anyOf": [
                {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}, "b": {"type": "integer"}}},
                {"type": "object", "additionalProperties": {"$ref": "#/$defs/node"}},
                {"type": "array", "items": {"$ref": "#/$defs/node"}, "uniqueItems": True},
            ]
        }
    },
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/node"}, "b": {"enum": [1, 2]}, "c": {"type": "array", "uniqueItems": True}},
}
SCHEMA_OF_PARSERS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": ["integer", "array"]}}}}}
]
MISTAKES = (ToolInputError, NoMatchError, PatchFormError)
"""What tells the agent that it is wrong."""


Work = Callable[[], Any]
Draw = Callable[[random.Random], Work]
"""Draws a text, and gives what reads it."""


def parse(name: str) -> Draw:
    def draw(rng: random.Random) -> Work:
        said, prefilled = text(rng), rng.random() < 0.3
        return lambda: parse_text(load_parser(name), said, SCHEMA_OF_PARSERS, prefilled=prefilled)

    return draw


def check(tool: Tool) -> Draw:
    def draw(rng: random.Random) -> Work:
        written = arguments(rng, list(tool.parameters["properties"]))
        return lambda: checked_arguments(written, tool)

    return draw


def check_recursive(rng: random.Random) -> Work:
    written = json.dumps({"a": value(rng), "b": value(rng), "c": value(rng)})
    return lambda: checked_arguments(written, Taking(RECURSIVE))


def on_text(read: Callable[[str], Any]) -> Draw:
    def draw(rng: random.Random) -> Work:
        written = text(rng)
        return lambda: read(written)

    return draw


def judged(answer: str) -> float | None:
    try:
        return number_in(verdict_in(answer), "score", 0, 1)
    except ValueError:
        return None


def in_history(rng: random.Random) -> Work:
    written = [(text(rng, 50), arguments(rng, ["a"])) for _ in range(rng.randint(0, 5))]
    calls = [{"function": {"name": name, "arguments": given}} for name, given in written]
    message = {"content": text(rng), "tool_calls": calls}
    return lambda: sendable([kept_message(message, 1)])


def replaced(rng: random.Random) -> Work:
    content, old, new = rng.choice(("a\nb  \n" * 1000, text(rng))), text(rng, 3000), text(rng, 3000)
    return lambda: editing.replace(content, old, new, everywhere=True)


def patched(rng: random.Random) -> Work:
    content, written = rng.choice(("a\nb  \n" * 1000, text(rng))), patch(rng)
    return lambda: [editing.update(content, change.hunks) for change in editing.parse(written)]


def compared(rng: random.Random) -> Work:
    before, after = text(rng, 200_000), text(rng, 200_000)
    return lambda: list(_diff_lines(before, after, "a", "b"))


def rewarded(name: str) -> Draw:
    def draw(rng: random.Random) -> Work:
        function, result = find_reward(name, None).function, said(text(rng), calls=("f",) * int(200 ** rng.random()))
        return lambda: function(result, **REWARDS[name])

    return draw


def in_family(rng: random.Random) -> Work:
    name = rng.choice(list(MARKS_OF))
    renderer = renderer_of(name)
    begun, ended = rng.choice((("", ""), ("</think>", ""), ("<tool_call>\n<function=f>\n", "</function></tool_call>")))
    said = renderer.tokenizer.encode(begun + text(rng, 100_000) + ended)
    return lambda: renderer.parse(said, [], SCHEMA_OF_PARSERS)


def from_server(rng: random.Random) -> Work:
    require_mcp()  # which the runner imports before there is a server
    blocks = [{"type": "text", "text": text(rng, 10_000)} for _ in range(int(2_000 ** rng.random()))]
    result = {"content": blocks[: rng.choice((0, len(blocks)))], "structuredContent": {"a": value(rng)}}
    line = json.dumps({"jsonrpc": "2.0", "id": 1, "result": result})
    sent = rng.choice((line, line, text(rng).replace("\n", " "))).encode("utf-8", "replace") + b"\n"
    pieces = [sent[place : place + CHUNK] for place in range(0, len(sent), CHUNK)]

    async def receive() -> None:
        session = Session()
        conversation = cast(Conversation, Server(pieces.copy()))
        await _Pump(conversation, cast(Any, SimpleNamespace()), session, None).receive()
        for each in cast(list[Any], session.messages):
            with contextlib.suppress(ValidationError):  # as the session has it, which tells the model
                _result_text(CallToolResult.model_validate(getattr(each.message, "result", None)))

    return receive


def taken_patch(rng: random.Random) -> Work:
    words = (
        "diff --git a/f b/f",
        "new file mode 100644",
        "--- /dev/null",
        "+++ b/f",
        "@@ -0,0 +1,2 @@",
        text(rng, 1000),
    )
    lines = [rng.choice(words) + rng.choice(("", text(rng, 50))) for _ in range(int(20_000 ** rng.random()))]
    written = rng.choice(("\n".join(lines), patch(rng), text(rng)))
    return lambda: [created(written), list(_added_lines(None, written))]


ON_THE_LOOP: dict[str, Draw] = {
    **{f"arguments of {tool.name}": check(tool) for tool in TOOLS},
    "arguments of a schema that refers to itself": check_recursive,
    "a name that there is not": on_text(lambda name: did_you_mean(name, ["read_file", "write_file"])),
    "an answer of a simulated user": on_text(without_thinking),
    "a call that was not read": on_text(unread_call),
    "an error": on_text(lambda words: describe(ValueError(words))),
    "a turn in a family's own form": in_family,
    "an answer of an MCP server": from_server,
}
"""What the event loop reads, or has read in a thread where it is long: the time of its own thread counts."""
IN_THREADS: dict[str, Draw] = {
    **{f"the parser {name}": parse(name) for name in PARSERS},
    "a passage of a file": replaced,
    "a patch": patched,
    "a diff": compared,
    "an answer of a judge": on_text(judged),
    "what a command printed": on_text(lambda printed: readable(printed.encode("utf-8", "replace"))),
    "the history": in_history,
    "a patch that was taken": taken_patch,
    "what is shown": on_text(escape_controls),
    "the values of a message": on_text(too_many_values),
}
"""What is read in threads where it is long; it lets the event loop have its turn."""
REWARDS: dict[str, dict[str, Any]] = {
    "citations": {},
    "contains_all": {"values": ["answer", "x"]},
    "exact_match": {"target": "a", "ignore_case": True},
    "format_tags": {"tags": ["t", "u"]},
    "fuzzy_match": {"target": "the answer is 1, or a word " * 400},
    "json_matches": {
        "schema": {"properties": {"a": {"type": "array", "uniqueItems": True}}, "uniqueItems": True},
        "equals": {"a": [1]},
    },
    "keyword_overlap": {"reference": "the answer is word"},
    "length_penalty": {"soft_limit": 5, "hard_limit": 10, "unit": "characters"},
    "multiple_choice": {"target": "A", "choices": ["a word", "1,1"]},
    "numeric_close": {"target": 5.0},
    "repetition_penalty": {},
    "regex_match": {"pattern": "answer is ([A-D])"},
    "regex_count": {"pattern": "https?://"},
    "tool_calls_match": {"calls": [{"name": "f", "args": {"a": 1}}]},
    "tool_usage": {},
}
"""Shipped rewards that look at what was said, with arguments; each runs in a process of its own."""
READERS: dict[str, tuple[Draw, float]] = {
    **{name: (draw, HELD) for name, draw in ON_THE_LOOP.items()},
    **{name: (draw, LONGEST) for name, draw in IN_THREADS.items()},
    **{name: (rewarded(name), REWARD) for name in REWARDS},
}
"""All readers, each with the seconds that it may take."""


def memory(what: str) -> int:
    """Return the bytes of this process that proc(5) has under this name."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) << 10


async def read(name: str, seed: str) -> tuple[float, str | None]:
    """Let a reader read what this seed draws; returns the seconds that it took, and what was wrong."""
    draw, most = READERS[name]
    work, problem = draw(random.Random(f"{seed} {name}")), None
    faulthandler.dump_traceback_later(HUNG, exit=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, without the drawing of the text
    small = memory("VmRSS")
    began, began_loop = time.perf_counter(), time.thread_time()
    try:
        answer = work()
        if inspect.isawaitable(answer):
            await answer
    except MISTAKES:
        pass
    except Exception as error:  # noqa: BLE001 - what is looked for
        problem = f"{type(error).__name__}: {error}"[:300]
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds = time.thread_time() - began_loop
    if (more := memory("VmHWM") - small) > TAKES:
        problem = f"{more >> 20} MiB more of memory"
    if seconds > most * MARGIN:
        problem = f"{seconds:.3f} s of processor time, {time.perf_counter() - began:.3f} s in all"
    return seconds, problem


async def play(cases: int, seed: str) -> None:
    """Read so many texts, divided among all readers."""
    before = 0
    slowest: dict[str, tuple[float, str]] = {}
    problems = []
    for number in range(cases):
        name = list(READERS)[number % len(READERS)]
        own = f"{seed}-{number}"
        if number == len(READERS):
            before = memory("VmRSS")  # by now each has imported what it needs
        for _ in range(ATTEMPTS):
            seconds, problem = await read(name, own)
            if problem is None:
                break
        slowest[name] = max(slowest.get(name, (0.0, "")), (seconds, own))
        if problem is not None:
            problems.append(f"{name}, {own}: {problem}")
    for name, (seconds, own) in sorted(slowest.items(), key=lambda item: -item[1][0])[:12]:
        sys.stdout.write(f"{seconds:.3f} s  {name}, {own}\n")
    assert not problems, f"READERS_SEED={seed}: " + "\n".join(problems[:20])
    # What the C library holds free between pieces in use was not kept: a third of a gigabyte behind 20,000 texts.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    assert memory("VmRSS") - before < KEEPS


def seed_of_today() -> str:
    seed = os.environ.get("READERS_SEED") or str(random.SystemRandom().randrange(1 << 32))
    sys.stdout.write(f"READERS_SEED={seed}\n")
    return seed


@pytest.mark.slow
async def test_hostile_texts_are_read_in_time() -> None:
    with reduce_gc_pauses():  # as in a run
        await play(len(READERS) * 2, seed_of_today())


TEXTS = int(os.environ.get("READERS_TEXTS", "7000"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.by_turns(2, 1)
async def test_thousands_of_hostile_texts_are_read_in_time() -> None:
    with reduce_gc_pauses():  # as in a run
        await play(TEXTS, seed_of_today())


@pytest.mark.parametrize("name", REWARDS)
def test_a_shipped_reward_reads_each_known_text_in_time(name: str) -> None:
    """The texts that once held the runner, which chance may not draw."""
    function = find_reward(name, None).function
    for attack in WORDS:
        began = time.thread_time()
        function(said(attack.say), **REWARDS[name])
        assert time.thread_time() - began < REWARD * MARGIN, attack.title


def test_every_shipped_reward_over_texts_is_read() -> None:
    known = {name for name in shipped_rewards() if find_reward(name, None).limit == SHIPPED_SECONDS}
    look_at_numbers_alone = {"token_efficiency", "turn_efficiency", "environment_rewards"}
    assert known - set(REWARDS) == look_at_numbers_alone, "REWARDS lacks arguments for a reward that reads texts"
