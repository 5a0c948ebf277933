"""Every call gets one answer; what went wrong is a ToolError that the model is told about."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from dataclasses import asdict, fields
from typing import Any

import pytest

from hermes_rl.errors import Failure, SandboxFailure, ToolError, UserError
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.tools.base import RESULT_LIMIT, Tool, ToolInputError, Toolkit, ToolRuntime
from hermes_rl.tools.execute import ToolOutcome, execute_calls
from tests.tools.calling import Player, call


class Scripted(Tool):
    """Does what the test says, and counts."""

    description = "A tool of the tests."
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "word": {"type": "string"}},
        "required": ["n"],
    }

    def __init__(self, name: str, act: Any, *, parallel: bool = True, timeout: float | None = None) -> None:
        self.name, self.act, self.parallel, self.timeout = name, act, parallel, timeout
        self.calls: list[dict[str, Any]] = []

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        self.calls.append(args)
        result = self.act(args)
        return str(await result if asyncio.iscoroutine(result) else result)


def echo(args: dict[str, Any]) -> str:
    return f"n={args['n']}"


async def hang(stopped: list[bool]) -> None:
    """Note that it was stopped, which is the only way for it to end soon."""
    try:
        await asyncio.sleep(60)
    finally:
        stopped.append(True)


async def play(
    tool: Tool | list[Tool], *calls: dict[str, Any], timeout: float | None = 5, repair: bool = False
) -> list[ToolOutcome]:
    toolkit = Toolkit(tool if isinstance(tool, list) else [tool])
    async with ToolRuntime(toolkit=toolkit) as runtime:
        return await execute_calls(calls, toolkit, runtime, turn=3, tool_timeout=timeout, repair=repair)


async def one(tool: Tool, arguments: object, timeout: float | None = 5) -> ToolOutcome:
    return (await play(tool, call(tool.name, arguments), timeout=timeout))[0]


def test_fields_of_a_tool_error() -> None:
    assert [field.name for field in fields(ToolError)] == [
        "turn",
        "tool_name",
        "arguments",
        "error",
        "tool_result",
    ]


async def test_a_good_call() -> None:
    outcome = await one(Scripted("t", echo), '{"n": 4}')
    assert (outcome.id, outcome.name, outcome.content, outcome.error) == ("id", "t", "n=4", None)
    assert outcome.arguments == {"n": 4}
    assert outcome.seconds >= 0


@pytest.mark.parametrize("raw", ["null", "[]", '"x"', "3", "true", "{", '{"n": 1', "not json", [], 7, "[" * 100_000])
async def test_arguments_that_are_not_an_object_are_an_error(raw: object) -> None:
    tool = Scripted("t", echo)
    outcome = await one(tool, raw)
    assert tool.calls == []
    assert outcome.error is not None
    assert (outcome.error.turn, outcome.error.tool_name) == (3, "t")
    assert isinstance(outcome.error.arguments, str)
    assert outcome.error.tool_result == outcome.content
    assert "arguments" in json.loads(outcome.content)["error"]


@pytest.mark.parametrize("raw", ["", " \n", None, {}, "{}"])
async def test_blank_arguments_are_an_empty_object(raw: object) -> None:
    tool = Scripted("t", str)
    tool.parameters = {"type": "object", "properties": {}}
    assert (await one(tool, raw)).error is None
    assert tool.calls == [{}]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({}, "'n' is missing"),
        ({"n": 1, "wrod": "x"}, "unknown parameter 'wrod'; did you mean `word`?"),
        ({"n": "three"}, "must be integer, not string"),
        ({"n": 1.5}, "must be integer, not number"),
        ({"n": True}, "must be integer, not boolean"),
        ({"n": None}, "must be integer, not null"),
        ({"n": 1, "word": 5}, "must be string, not integer"),
    ],
)
async def test_arguments_that_do_not_fit(raw: dict[str, Any], why: str) -> None:
    tool = Scripted("t", echo)
    outcome = await one(tool, raw)
    assert tool.calls == []
    assert outcome.error is not None
    assert why in json.loads(outcome.content)["error"]


@pytest.mark.parametrize("raw", ['{"n": "3"}', '{"n": 3.0}', '{"n": 3, "word": null}', {"n": 3}])
async def test_small_argument_mistakes_are_repaired_if_configured(raw: object) -> None:
    tool = Scripted("t", echo)
    (outcome,) = await play(tool, call("t", raw), repair=True)
    assert (outcome.content, outcome.arguments) == ("n=3", {"n": 3})
    assert tool.calls == [{"n": 3}]


@pytest.mark.parametrize("name", ["teminal", "rm -rf /", "", None, 5])
async def test_unknown_tools(name: object) -> None:
    outcome = (await play(Scripted("terminal", echo), {"id": "a", "function": {"name": name, "arguments": "{}"}}))[0]
    assert outcome.error is not None
    assert "there are: terminal" in outcome.content
    assert ("did you mean `terminal`" in outcome.content) == (name == "teminal")


@pytest.mark.parametrize("broken", [{}, {"function": None}, {"function": "x"}, {"id": None, "function": {}}])
async def test_calls_without_form(broken: dict[str, Any]) -> None:
    outcome = (await play(Scripted("t", echo), broken))[0]
    assert outcome.error is not None
    assert outcome.id == "call_3_0"


async def test_a_tool_that_is_not_enabled_cannot_be_called(play: Player) -> None:
    outcomes = await execute_calls(
        [call("terminal", {"command": "true"})], play.runtime.toolkit.only({"todo"}), play.runtime, turn=1
    )
    assert outcomes[0].error is not None
    assert not play.runtime.started


def raising(error: BaseException) -> Any:
    def act(args: dict[str, Any]) -> str:
        raise error

    return act


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), RuntimeError("no"), KeyError("no"), SystemExit(3), asyncio.CancelledError(), StopIteration()],
)
async def test_tools_that_raise(error: BaseException) -> None:
    tool = Scripted("t", raising(error))
    outcome = await one(tool, {"n": 1})
    assert len(tool.calls) == 1
    assert outcome.error is not None
    assert "tool 't'" in json.loads(outcome.content)["error"]


async def test_host_paths_and_tracebacks_are_hidden_from_the_model() -> None:
    for error in (
        FileNotFoundError(2, "No such file or directory", "/home/me/secret/data.json"),
        ValueError("cannot read '/home/me/secret/data.json', line 3"),
    ):
        outcome = await one(Scripted("t", raising(error)), {"n": 1})
        assert "/home/me" not in outcome.content
        assert "Traceback" not in outcome.content
        assert type(error).__name__ in outcome.content
        assert outcome.error is not None
        assert "/home/me" in outcome.error.error


async def test_tool_input_errors_reach_the_model_unchanged() -> None:
    outcome = await one(Scripted("t", raising(ToolInputError("n must be even"))), {"n": 1})
    assert json.loads(outcome.content) == {"error": "n must be even"}
    assert outcome.error is not None


async def test_a_tool_that_hangs() -> None:
    stopped: list[bool] = []
    began = time.perf_counter()
    outcome = await one(Scripted("t", lambda args: hang(stopped)), {"n": 1}, timeout=0.1)
    assert time.perf_counter() - began < 20
    assert outcome.error is not None
    assert "within 0.1 s" in outcome.content
    assert stopped == [True]


async def test_the_smaller_timeout_wins() -> None:
    tool = Scripted("t", lambda args: asyncio.sleep(60), timeout=0.1)
    assert "within 0.1 s" in (await one(tool, {"n": 1}, timeout=30)).content
    assert "within 0.1 s" in (await one(tool, {"n": 1}, timeout=None)).content


async def test_answers_are_in_order_and_calls_run_together() -> None:
    all_of_them, ended = asyncio.Barrier(3), list[int]()

    async def later(args: dict[str, Any]) -> str:
        await all_of_them.wait()
        while len(ended) < 2 - args["n"]:
            await asyncio.sleep(0)
        ended.append(args["n"])
        return f"n={args['n']}"

    tool = Scripted("t", later)
    outcomes = await play(tool, *(call("t", {"n": n}, str(n)) for n in range(3)), call("t", "null", "bad"), timeout=60)
    assert ended == [2, 1, 0]
    assert [(outcome.id, outcome.content) for outcome in outcomes[:3]] == [("0", "n=0"), ("1", "n=1"), ("2", "n=2")]
    assert outcomes[3].error is not None
    assert len(tool.calls) == 3


async def test_tools_that_are_not_parallel_keep_their_order() -> None:
    log: list[str] = []

    def logging(name: str, seconds: float) -> Any:
        async def act(args: dict[str, Any]) -> str:
            log.append(f"{name} begins")
            await asyncio.sleep(seconds)
            log.append(f"{name} ends")
            return name

        return act

    slow, alone = Scripted("slow", logging("slow", 0.05)), Scripted("alone", logging("alone", 0.01), parallel=False)
    arguments = {"n": 1}
    await play([slow, alone], call("slow", arguments), call("alone", arguments), call("slow", arguments))
    assert log == [f"{name} {what}" for name in ("slow", "alone", "slow") for what in ("begins", "ends")]


async def test_equal_ids_and_names_are_still_one_call_each() -> None:
    tool = Scripted("t", echo)
    outcomes = await play(tool, call("t", {"n": 1}), call("t", {"n": 2}))
    assert [outcome.content for outcome in outcomes] == ["n=1", "n=2"]
    assert len(tool.calls) == 2


async def test_failures_end_the_others_and_go_up() -> None:
    stopped: list[bool] = []

    async def fail() -> None:
        while not hanging.calls:
            await asyncio.sleep(0)
        raise SandboxFailure("lost")

    hanging = Scripted("hang", lambda args: hang(stopped))
    tools: list[Tool] = [hanging, Scripted("fail", lambda args: fail())]
    with pytest.raises(Failure, match="lost"):
        await play(tools, call("hang", {"n": 1}), call("fail", {"n": 1}))
    assert stopped == [True]


async def test_exhausted_descriptors_are_a_sandbox_failure_not_a_tool_error() -> None:
    with pytest.raises(SandboxFailure, match="no descriptors left"):
        await one(Scripted("t", raising(OSError(errno.EMFILE, "Too many open files"))), {"n": 1})
    outcome = await one(Scripted("t", raising(FileNotFoundError(errno.ENOENT, "No such file"))), {"n": 1})
    assert outcome.error is not None


async def test_mistakes_in_the_setup_go_up() -> None:
    with pytest.raises(UserError, match="setup"):
        await one(Scripted("t", raising(UserError("setup is wrong"))), {"n": 1})


async def test_a_sandbox_that_cannot_start_is_a_failure(runtime: ToolRuntime) -> None:
    config = SandboxConfig(setup=("false",))
    async with ToolRuntime(config, toolkit=runtime.toolkit) as broken:
        with pytest.raises(Failure):
            await execute_calls([call("terminal", {"command": "true"})], runtime.toolkit, broken, turn=1)


async def test_cancellation_goes_through_and_releases() -> None:
    stopped: list[bool] = []
    tool = Scripted("t", lambda args: hang(stopped))
    task = asyncio.create_task(play(tool, call("t", {"n": 1}), timeout=60))
    while not tool.calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped == [True]


async def test_results_are_bounded() -> None:
    outcome = await one(Scripted("t", lambda args: "x" * 1_000_000 + "end"), {"n": 1})
    assert len(outcome.content) < RESULT_LIMIT + 100
    assert outcome.content.endswith("end")
    assert "characters omitted" in outcome.content


async def test_no_calls() -> None:
    assert await play(Scripted("t", echo)) == []


def nested(depth: int) -> str:
    return '{"n": ' + "[" * depth + "]" * depth + "}"


HUGE = {
    "unknown keys": json.dumps({f"k{number}": 0 for number in range(200_000)}),
    "unknown keys in one another": json.dumps({"n": 1, "o": {"o" * 9: {str(n): n for n in range(100_000)}}}),
    "one long key": json.dumps({"k" * 1_000_000: 0}),
    "one long value": json.dumps({"n": "v" * 1_000_000}),
    "text that is no JSON": "{" * 1_000_000,
    "deep lists": nested(400_000),
    "controls": json.dumps({"n": 1, "word": 1, "x": "\x01" * 200_000}),
    "numbers": '{"n": [' + "1e15," * 200_000 + "0]}",
}


@pytest.mark.parametrize("way", HUGE)
async def test_error_record_size_is_proportional_to_the_arguments(way: str) -> None:
    """Of what is wrong the first are told; the arguments are there as they were written, and once more in the error."""
    outcome = (await play(Scripted("t", echo), call("t", HUGE[way])))[0]
    assert outcome.error is not None
    size = len(HUGE[way])
    assert len(outcome.error.error) + len(outcome.error.tool_result) + len(outcome.content) < 4 * RESULT_LIMIT
    record = json.dumps([asdict(outcome.error), outcome.arguments, outcome.content], ensure_ascii=False)
    assert len(record) < 5 * size + 4 * RESULT_LIMIT
