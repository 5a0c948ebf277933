"""Python functions and methods of a state object as tools."""

from __future__ import annotations

import asyncio
import enum
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from hermes_rl.errors import RunError, UserError
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.execute import ToolOutcome, execute_calls
from hermes_rl.tools.python_tools import python_tool, state_tools
from tests.tools.calling import call


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    street: str
    number: int = 1


def everything(
    text: str,
    count: int,
    ratio: float,
    flag: bool,
    words: list[str],
    table: dict[str, int],
    maybe: int | None = None,
    kind: Literal["a", "b"] = "a",
    colour: Colour = Colour.RED,
    place: Place | None = None,
) -> dict[str, Any]:
    """Show what arrives.

    It is for tests only.

    Args:
        text: Some text,
            on two lines.
        count (int): How many.
    """
    return {"kinds": [type(each).__name__ for each in (text, count, ratio, words, table, colour, place)]}


FULL = {"text": "t", "count": 1, "ratio": 1, "flag": True, "words": ["a"], "table": {"a": 1}}


async def play(tool: Any, *calls: object, state: object = None, timeout: float = 5) -> list[ToolOutcome]:
    toolkit = Toolkit(tool if isinstance(tool, tuple) else [tool])
    async with ToolRuntime(toolkit=toolkit, state=state) as runtime:
        written = [
            each if isinstance(each, dict) and "function" in each else call(toolkit.tools[0].name, each)
            for each in calls
        ]
        return await execute_calls(written, toolkit, runtime, turn=1, tool_timeout=timeout)


def test_schema_from_signature_and_docstring() -> None:
    tool = python_tool(everything)
    assert tool.name == "everything"
    assert tool.description == "Show what arrives.\n\nIt is for tests only."
    properties = tool.parameters["properties"]
    assert properties["text"] == {"type": "string", "description": "Some text, on two lines."}
    assert properties["count"] == {"type": "integer", "description": "How many."}
    assert properties["words"] == {"type": "array", "items": {"type": "string"}}
    assert properties["kind"] == {"enum": ["a", "b"], "type": "string", "default": "a"}
    assert tool.parameters["required"] == ["text", "count", "ratio", "flag", "words", "table"]
    assert tool.parameters["additionalProperties"] is False


async def test_values_have_their_types() -> None:
    arguments = FULL | {"colour": "blue", "place": {"street": "s"}, "kind": "b", "count": 4}
    outcome = (await play(python_tool(everything), arguments))[0]
    assert json.loads(outcome.content)["kinds"] == ["str", "int", "float", "list", "dict", "Colour", "Place"]


@pytest.mark.parametrize(
    "change", [{"colour": "green"}, {"place": {}}, {"kind": "c"}, {"words": [1]}, {"more": 1}, {"table": {"a": "x"}}]
)
async def test_wrong_values_are_tool_errors(change: dict[str, Any]) -> None:
    outcome = (await play(python_tool(everything), FULL | change))[0]
    assert outcome.error is not None
    assert "error" in json.loads(outcome.content)


async def test_results() -> None:
    @dataclass
    class Point:
        x: int

    returned: Any = None

    def give() -> Any:
        """Give it back."""
        return returned

    for returned, expected in [  # noqa: B007 - `give` reads it
        ("text", "text"),
        (None, "null"),
        (3, "3"),
        ({"a": [1]}, '{"a": [1]}'),
        (Point(1), '{"x": 1}'),
        (Place(street="s"), '{"street": "s", "number": 1}'),
        ("ü", "ü"),
    ]:
        assert (await play(python_tool(give), {}))[0].content == expected


async def test_sync_functions_run_in_threads_and_together() -> None:
    threads, all_of_them = set(), threading.Barrier(8)

    def slow(n: int) -> int:
        """Wait for all others."""
        threads.add(threading.current_thread())
        all_of_them.wait(60)
        return n

    outcomes = await play(python_tool(slow), *({"n": n} for n in range(8)), timeout=60)
    assert [outcome.content for outcome in outcomes] == [str(n) for n in range(8)]
    assert threading.main_thread() not in threads


async def test_async_functions_run_on_the_loop() -> None:
    async def where() -> bool:
        """Say where it runs."""
        await asyncio.sleep(0)
        return threading.current_thread() is threading.main_thread()

    assert (await play(python_tool(where), {}))[0].content == "true"


async def test_functions_that_raise_or_hang() -> None:
    def bad(how: str) -> str:
        """Do not work."""
        if how == "hang":
            time.sleep(2)
        if how == "exit":
            raise SystemExit(1)
        raise OSError(2, "No such file or directory", "/home/me/x")

    for how, why in [("hang", "within 0.2 s"), ("exit", "sys.exit"), ("raise", "No such file")]:
        outcome = (await play(python_tool(bad), {"how": how}, timeout=0.2))[0]
        assert outcome.error is not None
        assert why in outcome.content
        assert "/home/me" not in outcome.content


@pytest.mark.parametrize("error", [KeyboardInterrupt("x"), UserError("x"), RunError("x"), SystemExit("x")])
async def test_what_a_function_of_the_runner_raises_costs_its_call_alone(error: BaseException) -> None:
    def bad() -> str:
        """Do not work."""
        raise error

    async def bad_too() -> str:
        """Do not work."""
        raise error

    for function in (bad, bad_too):
        outcome = (await play(python_tool(function), {}))[0]
        assert outcome.error is not None
        assert "the tool" in outcome.content


def undocumented(x: int) -> int:
    return x


def untyped(x) -> int:  # type: ignore[no-untyped-def]
    """Say it."""
    return 1


def variadic(*x: int) -> int:
    """Say it."""
    return 1


def odd(x: threading.Thread) -> int:
    """Say it."""
    return 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (undocumented, "docstring"),
        (untyped, "'x' has no type"),
        (variadic, "name it"),
        (odd, "described"),
        (Place, "is not a function"),
    ],
)
def test_functions_that_cannot_be_tools(function: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        python_tool(function)


def test_by_reference(tmp_path: Path) -> None:
    (tmp_path / "calc.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    assert python_tool("calc.py:add", base=tmp_path).name == "add"
    with pytest.raises(UserError, match="did you mean `add`"):
        python_tool("calc.py:ad", base=tmp_path)


class Shop:
    """A state with methods for an agent and for a user."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.stock: dict[str, int] = dict(item["stock"])
        self.admin = Admin(self)

    user_tools = ("count",)

    def count(self, name: str) -> int:
        """Count what is in stock.

        :param name: What to count.
        """
        return self.stock[name]

    def take(self, name: str, number: int = 1) -> str:
        """Take something."""
        self.stock[name] -= number
        return "taken"

    def _secret(self) -> None:
        """Not for a model."""


class Admin:
    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    def refill(self, name: str) -> str:
        """Fill the stock up."""
        self._shop.stock[name] = 100
        return "filled"


async def test_methods_act_on_the_state_of_their_rollout() -> None:
    one, two = Shop({"stock": {"apple": 5}}), Shop({"stock": {"apple": 50}})
    tools = state_tools(one)
    assert [tool.name for tool in tools] == ["count", "take"]
    assert tools[0].parameters["properties"]["name"]["description"] == "What to count."
    take = call("take", {"name": "apple", "number": 2})
    assert [each.content for each in await play(tools, take, call("count", {"name": "apple"}), state=two)] == [
        "taken",
        "48",
    ]
    assert one.stock == {"apple": 5}
    outcome = (await play(tools, call("count", {"name": "pear"}), state=one))[0]
    assert outcome.error is not None


async def test_named_parts_of_a_state() -> None:
    shop = Shop({"stock": {"apple": 5}})
    assert [tool.name for tool in state_tools(shop, "user_tools")] == ["count"]
    admin = state_tools(shop, "admin")
    assert [each.content for each in await play(admin, {"name": "apple"}, state=shop)] == ["filled"]
    assert shop.stock == {"apple": 100}
    with pytest.raises(UserError, match="did you mean `admin`"):
        state_tools(shop, "admn")
    with pytest.raises(UserError, match="no public methods"):
        state_tools(object())
