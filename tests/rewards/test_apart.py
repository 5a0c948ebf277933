"""`tests_pass: {apart: true}`: the code under test lives in another sandbox than its tests."""

# ruff: noqa: E501

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from hermes_rl.errors import RewardFailure, UserError
from hermes_rl.sandbox.base import SandboxFile
from hermes_rl.scoring import isolated_import as apart_tests
from hermes_rl.scoring import isolated_protocol, isolated_relay, isolated_server
from hermes_rl.scoring.isolated_import import Asking
from hermes_rl.scoring.isolated_protocol import GoneError
from hermes_rl.scoring.isolated_server import Answering
from tests.rewards.cheating import CASE, PLAIN, PYTEST, RIGHT, UNITTEST, WRONG, Case, in_turn, judged
from tests.rewards.crossing import FUNCTIONS, SHAPES, TESTS_OF_SHAPES, checks_of_functions
from tests.rewards.inside import inside
from tests.rewards.planted import IN_PROCESS, odd, planted
from tests.rewards.test_cheats import HONEST, SCRIPTS, cheats

EVIL = """class Equal:
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    __hash__ = object.__hash__
"""
LOOKS = """import os
def add(a, b):
    places = []
    for top in ("/home", "/tmp", "/proc"):
        for folder, _, names in os.walk(top):
            if folder.count("/") > 4: continue
            for name in names:
                if name in ("environ", "cmdline") or name.endswith(".py"):
                    try: text = open(os.path.join(folder, name), errors="replace").read()
                    except OSError: continue
                    if "Test" + "Add" in text or "test_" + "hidden" in text: places.append(folder + "/" + name)
    if places: return a + b
    raise RuntimeError("no test is there")
"""


def apart(solution: str, tests: str | None = None, **more: Any) -> Case:
    given = {} if tests is None else {"tests": {"test_hidden.py": tests}}
    return Case("apart", "", {"solution.py": solution}, more={"apart": True, **more}, **given)


@pytest.mark.parametrize(("solution", "value"), [(RIGHT, 1.0), (WRONG, 0.0)])
async def test_a_function_is_tested_from_another_sandbox(solution: str, value: float) -> None:
    score = await judged(apart(solution), ())
    assert score.value == value, score.reason


@pytest.mark.slow
async def test_pytest_runs_isolated_from_the_solution(library_of_pytest: tuple[SandboxFile, ...]) -> None:
    case = replace(apart(RIGHT), tests={"tests/test_hidden.py": PLAIN}, command=PYTEST)
    score = await judged(case, library_of_pytest)
    assert score.value == 1.0, score.reason
    assert (
        await judged(replace(case, files={"solution.py": EVIL + "add = lambda *_: Equal()\n"}), library_of_pytest)
    ).value == 0


async def test_forty_functions_pass_unchanged() -> None:
    score = await judged(apart(FUNCTIONS, checks_of_functions()), ())
    assert score.value == 1.0, score.reason


@pytest.mark.slow
async def test_isolated_checks_follow_the_operations_of_the_reference() -> None:
    reference = [{"to": "solution.py", "content": SHAPES}]
    score = await judged(apart(SHAPES, TESTS_OF_SHAPES, reference=reference), ())
    assert score.value == 1.0, score.reason
    strict = await judged(apart(SHAPES, TESTS_OF_SHAPES), ())
    assert strict.value == 0.0  # `Money(5) == 5` and `1 in Stack.of(1, 2)` are not asked by default
    cheat = SHAPES.replace("def fill(d, k, v):", EVIL + "def fill(d, k, v): return Equal()\ndef other(d, k, v):")
    assert (await judged(apart(cheat, TESTS_OF_SHAPES, reference=reference), ())).value == 0.0


async def test_solution_process_contains_no_trace_of_the_tests() -> None:
    score = await judged(apart(LOOKS), ())
    assert score.value == 0.0


async def test_reference_that_fails_isolated_tests_is_a_reward_failure() -> None:
    derived = "import unittest, solution\nclass Mine(solution.A): pass\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(Mine().one(), 1)\n"
    code = "class A:\n    def one(self): return 1\n"
    with pytest.raises(RewardFailure, match="reference does not pass with its tests in another sandbox"):
        await judged(apart(code, derived, reference=[{"to": "solution.py", "content": code}]), ())


async def test_what_equals_everything_is_not_asked_whether_it_is_equal() -> None:
    assert (await judged(apart(EVIL + "add = lambda *_: Equal()\n"), ())).value == 0


async def test_star_import_does_not_override_names_of_the_tests() -> None:
    tests = "import unittest, math\nfrom solution import *\nclass T(unittest.TestCase):\n    def test_add(self):\n        assert {}\n"
    cheat = (
        "def all(_): return True\ndef add(a, b): return 0\nclass math:\n    isclose = staticmethod(lambda *_: True)\n"
    )
    for check in ("all(add(a, b) == a + b for a, b in [(2, 3), (0, 3)])", "math.isclose(add(2, 3), 5)"):
        assert (await judged(apart(cheat, tests.format(check)), ())).value == 0
        assert (await judged(apart(RIGHT, tests.format(check)), ())).value == 1


async def test_command_that_is_not_a_test_runner_is_refused() -> None:
    with pytest.raises((UserError, RewardFailure), match="pytest or unittest"):
        await judged(replace(apart(RIGHT), command="python3 test_hidden.py"), ())


def of_each_kind() -> list[Case]:
    """The first cheat of each kind with unittest, and with pytest; what is meant for other programs as one of unittest."""
    first: dict[tuple[str, str], Case] = {}
    cases = [*cheats(), *planted(), *inside()]
    for case in cases:
        runner = next((name for name in ("pytest", "unittest") if name in case.command), None)
        if runner is not None:
            first.setdefault((case.kind, runner), case)
    heard = {kind for kind, _ in first}
    for case in (*cases, *SCRIPTS):
        if case.kind not in heard:
            first.setdefault((case.kind, ""), replace(case, tests={"test_hidden.py": CASE}, command=UNITTEST))
    return list(first.values())


@pytest.mark.slow
@in_turn
@pytest.mark.parametrize("case", of_each_kind(), ids=str)
async def test_cheats_fail_when_tests_are_isolated(case: Case, library_of_pytest: tuple[SandboxFile, ...]) -> None:
    more = {**case.more, "apart": True, "timeout": 20}
    score = await judged(replace(case, more=more), library_of_pytest)
    assert score.value == 0.0, score.reason


def test_every_kind_of_cheat_is_tested_isolated() -> None:
    assert {case.kind for case in of_each_kind()} == {
        case.kind for case in (*cheats(), *planted(), *inside(), *SCRIPTS)
    }


def fair() -> list[Case]:
    """Odd but honest solutions, but for code that lies in a package of the tests, which cannot be carried."""
    laid_out = [case for case in HONEST if "unittest" in case.command or "pytest" in case.command]
    apart_of_tests = [case for case in laid_out if not any(path.startswith("calc/") for path in case.tests)]
    return [*apart_of_tests, *(case for case in odd() if case.command == IN_PROCESS[0].command)]


@pytest.mark.slow
@in_turn
@pytest.mark.parametrize("case", fair(), ids=str)
async def test_honest_code_passes_when_tests_are_isolated(
    case: Case, library_of_pytest: tuple[SandboxFile, ...]
) -> None:
    score = await judged(replace(case, more={**case.more, "apart": True}), library_of_pytest)
    assert score.value == 1.0, score.reason


# ------------------------------------------------------------------ the wire alone


@pytest.fixture
def ends() -> Iterator[tuple[Asking, socket.socket]]:
    """The end of the tests, and what is to speak with it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    yield Asking(ours, frozenset({os.path.abspath(__file__)}), set()), theirs  # noqa: PTH100
    ours.close()
    theirs.close()


def says(end: socket.socket, *data: bytes) -> None:
    def speak() -> None:
        with contextlib.suppress(OSError):  # the tests' end may have closed the wire by then
            end.recv(1 << 16)
            for piece in data:
                end.sendall(piece)
            end.shutdown(socket.SHUT_WR)

    threading.Thread(target=speak, daemon=True).start()


def message(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("!I", len(data)) + data


HOSTILE = (
    message(["v", [], ["yours", 12345], []]),
    message(["v", [], ["shared", 5], []]),
    message(["v", [], ["no_such", 5], []]),
    message(["v", [], ["named", "eval"], []]),
    message(["x", [], 5, []]),
    message(["v", [[7, []]], 5, []]),
    message(["q", True, [], [], "call", [5]]),
    message(["q", False, [], [], "call"]),
    message(["v", [], ["object", 2, ["named", "int"], 5], []]),
    message(["v", [], ["text", "datetime", "x" * 1000], []]),
    message(["v", [], ["int", "0x" + "z" * 10], []]),
    message(b"[" * 200_000),
    message(b"\xff\xfe"),
    message(5),
    struct.pack("!I", 1 << 31),
    b"",
    b"\0\0",
)


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_odd_bytes_close_the_wire(ends: tuple[Asking, socket.socket], data: bytes) -> None:
    tests, other = ends
    says(other, data)
    with pytest.raises(GoneError):
        tests.ask("import", "solution", [])
    with pytest.raises(GoneError):
        tests.ask("import", "solution", [])


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "GeneratorExit"])
def test_an_exception_that_would_end_the_tests_is_another(ends: tuple[Asking, socket.socket], name: str) -> None:
    tests, other = ends
    says(other, message(["x", [], ["exception", 2, ["named", name], ["", [], None]], []]))
    with pytest.raises(GoneError):
        tests.ask("import", "solution", [])


def test_solution_can_call_test_functions_but_not_inspect_them(ends: tuple[Asking, socket.socket]) -> None:
    tests, other = ends
    asked: list[Any] = []

    class Prying(Answering):
        def do_call(self, function: Any, args: Any, more: Any) -> Any:
            for name in ("__globals__", "__code__", "__closure__", "__self__"):
                try:
                    asked.append(self.ask("get", function, name))
                except AttributeError:
                    asked.append(None)
            return function(*args)

    server = Prying(other, ".")
    thread = threading.Thread(target=lambda: server.serve(server.receive()), daemon=True)
    thread.start()
    given: Callable[[int], int] = lambda number: number + 1  # noqa: E731
    assert tests.ask("call", given, (4,), {}) == 5
    thread.join(5)
    assert asked == [None] * 4


@pytest.mark.parametrize("module", [apart_tests, isolated_relay, isolated_server, isolated_protocol])
def test_injected_modules_parse_as_python_3_8(module: ModuleType) -> None:
    ast.parse(inspect.getsource(module), feature_version=(3, 8))
