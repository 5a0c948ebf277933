"""`tests_pass` in a real sandbox: hidden tests decide, and what the agent planted does not."""

from __future__ import annotations

import asyncio
from typing import Any
from xml.etree import ElementTree

import pytest

from hermes_rl.errors import RewardFailure, UserError
from hermes_rl.sandbox.base import ResourceLimits, SandboxConfig, SandboxFile
from hermes_rl.scoring.reward_function import find_reward
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.tools.artifacts import ArtifactFile, TakenArtifact
from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.context import ToolContext
from tests.rewards.played import graded, write

RIGHT = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a - b"
TEST = "from solution import add\nassert add(2, 3) == 5\n"
PYTEST = "python3 -m pytest -q -p no:cacheprovider"

SUITE = """
import pytest
from solution import add

class TestAdd:
    def test_small(self):
        assert add(2, 3) == 5

@pytest.mark.parametrize("a", [1, 2])
def test_each(a):
    assert add(a, 0) == a

def test_unrelated():
    assert False

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected_to_fail():
    assert False
"""


async def plain(ctx: ToolContext, **args: Any) -> RewardValue:
    files = [{"to": "hidden/check.py", "content": TEST}]
    return await graded(
        "tests_pass", ctx=ctx, **{"command": "PYTHONPATH=. python3 hidden/check.py", "files": files, **args}
    )


async def test_the_right_solution_passes(ctx: ToolContext) -> None:
    await write(ctx, solution=RIGHT)
    assert (await plain(ctx)).value == 1


async def test_wrong_or_missing_solution_scores_zero_with_the_output(ctx: ToolContext) -> None:
    value = await plain(ctx)
    assert (value.value, "No module named 'solution'" in str(value.reason)) == (0, True)
    await write(ctx, solution=WRONG)
    value = await plain(ctx)
    assert (value.value, "exit status 1" in str(value.reason)) == (0, True)


async def test_planted_test_is_replaced_and_restored_after_the_reward(ctx: ToolContext) -> None:
    await write(ctx, solution=WRONG)
    await asyncio.to_thread(ctx.terminal, "mkdir hidden && echo pass > hidden/check.py")
    assert (await plain(ctx)).value == 0
    await asyncio.to_thread(ctx.restore)
    assert (await asyncio.to_thread(ctx.read_file, "hidden/check.py"))["content"] == "pass\n"


async def test_a_command_past_its_time_scores_0(ctx: ToolContext) -> None:
    value = await plain(ctx, command="sleep 30", timeout=0.3)
    assert (value.value, value.reason) == (0, "no end within 0.3 s")


async def test_an_artifact_that_the_spec_does_not_have(ctx: ToolContext) -> None:
    with pytest.raises(UserError, match="no artifact 'patch'"):
        await plain(ctx, apply="patch")


async def test_a_disk_that_the_agent_has_filled_passes_nothing() -> None:
    async with ToolRuntime(SandboxConfig(limits=ResourceLimits(disk=1 << 20))) as runtime:
        ctx = ToolContext(runtime.task_id)
        await write(ctx, solution=RIGHT)
        await asyncio.to_thread(ctx.terminal, "mkdir hidden; echo > hidden/check.py; cat /dev/zero > full")
        value = await plain(ctx)
    assert value.value == 0
    assert "cannot be put in place" in str(value.reason)


async def suite(ctx: ToolContext, *expected: str, command: str = f"{PYTEST} hidden/test_hidden.py") -> RewardValue:
    files = [{"to": "hidden/test_hidden.py", "content": SUITE}]
    return await graded(
        "tests_pass", ctx=ctx, command=f"PYTHONPATH=.:$PYTHONPATH {command}", files=files, expected=list(expected)
    )


@pytest.mark.slow
async def test_expected_tests_decide_by_their_own_outcome(ctx_with_pytest: ToolContext) -> None:
    """Many names at one go, since each starts a pytest."""
    await write(ctx_with_pytest, solution=RIGHT)
    small = [
        "test_small",
        "TestAdd::test_small",
        "hidden/test_hidden.py::TestAdd::test_small",
        "test_hidden.py::TestAdd::test_small",
    ]
    passed = [*small, "test_each", "test_each[1]", "hidden/test_hidden.py::test_each[2]"]
    assert (await suite(ctx_with_pytest, *passed)).value == 1
    not_passed = ["test_unrelated", "test_skipped", "test_expected_to_fail", "test_nowhere"]
    value = await suite(ctx_with_pytest, *passed, *not_passed)
    assert (value.value, value.metrics["missing"]) == (0, 4)
    assert value.reason == f"not passed: {', '.join(not_passed)}"
    elsewhere = ["other.py::test_each", "Other::test_small", "test_each[3]", "n.py::TestAdd::test_small"]
    assert (await suite(ctx_with_pytest, *elsewhere)).metrics["missing"] == 4


@pytest.mark.slow
async def test_a_test_of_the_same_name_that_passes_elsewhere_does_not_count(ctx_with_pytest: ToolContext) -> None:
    await write(ctx_with_pytest, solution=WRONG, test_mine="class TestAdd:\n    def test_small(self): pass")
    everything = f"{PYTEST} hidden/test_hidden.py test_mine.py"
    assert (await suite(ctx_with_pytest, "test_mine.py::TestAdd::test_small", command=everything)).value == 1
    assert (await suite(ctx_with_pytest, "test_hidden.py::TestAdd::test_small", command=everything)).value == 0
    assert (await suite(ctx_with_pytest, "test_small", command=everything)).value == 0


@pytest.mark.slow
async def test_tests_that_the_agent_made_to_be_skipped_did_not_pass(ctx_with_pytest: ToolContext) -> None:
    skip = "import pytest\ndef pytest_runtest_setup(item):\n    pytest.skip('no')"
    await write(ctx_with_pytest, solution=RIGHT, conftest=skip)
    value = await suite(ctx_with_pytest, "test_small")
    assert (value.value, value.reason) == (0, "not passed: test_small")


async def test_a_planted_report_is_not_read(ctx: ToolContext) -> None:
    """It could only be found under a name that is drawn after the agent has ended."""
    report = '<testsuite><testcase classname="hidden.test_hidden" name="test_small"/></testsuite>'
    plant = f"for n in /tmp/report.xml report.xml /tmp/report-.xml; do echo '{report}' > $n; done"
    await asyncio.to_thread(ctx.terminal, plant)
    value = await suite(ctx, "test_small", command="true")
    assert (value.value, value.reason) == (0, "the command wrote no pytest report")


@pytest.mark.parametrize("report", ["", "no xml", "<testsuite><testcase name='test_small'>"])
async def test_a_report_that_cannot_be_read_scores_0(ctx: ToolContext, report: str) -> None:
    write_report = f'echo "{report}" > "${{PYTEST_ADDOPTS#*--junitxml=}}"'
    value = await suite(ctx, "test_small", command=f"true; {write_report}")
    assert (value.value, "cannot be read" in str(value.reason)) == (0, True)


def test_possible_names_of_a_reported_test_are_few() -> None:
    """Each is as long as the class name, so that a long one with a name for each dot would fill the memory."""
    called = find_reward("tests_pass", None).function.__globals__["_called"]
    case = ElementTree.Element("testcase", {"classname": "a." * 2000, "name": "test_small"})
    assert len(called(case)) < 100


async def test_pytest_options_of_the_sandbox_are_preserved() -> None:
    async with ToolRuntime(SandboxConfig(env={"PYTEST_ADDOPTS": "-x --co"})) as runtime:
        value = await suite(ToolContext(runtime.task_id), "test_small", command="sh -c 'echo $PYTEST_ADDOPTS; exit 3'")
    assert "-x --co --junitxml=/tmp/report-" in str(value.reason)


async def test_in_a_sandbox_that_the_agent_killed_no_test_passes(killed_ctx: ToolContext) -> None:
    assert (await plain(killed_ctx, command="true")).value == 0
    assert (await suite(killed_ctx, "test_small")).value == 0


BROKEN = {
    "no such program": "phpunit hidden/check.py",
    "no such module": "PYTHONPATH=. python3 -m nose2 hidden",
    "in a pipe": "phpunit hidden/check.py 2>&1 | tee log; exit 1",
    "not to be executed": "chmod -x hidden/check.py; mv hidden/check.py hidden/jest; hidden/jest",
}


@pytest.mark.parametrize("what", BROKEN)
async def test_test_command_missing_from_the_image_is_a_reward_failure(ctx: ToolContext, what: str) -> None:
    await write(ctx, solution=RIGHT)
    with pytest.raises(
        RewardFailure, match=r"the image lacks '(phpunit|nose2|jest)' .*: .*(not found|No module|denied)"
    ):
        await plain(ctx, command=BROKEN[what])


async def test_a_program_that_does_not_exist_is_named_whatever_its_name(ctx: ToolContext) -> None:
    await write(ctx, solution=RIGHT)
    with pytest.raises(RewardFailure, match="the image lacks 'pytst'"):
        await plain(ctx, command="pytst hidden/check.py")
    with pytest.raises(RewardFailure, match="the image lacks 'pytst'"):
        await plain(ctx, command="pytst hidden/check.py 2>/dev/null")


@pytest.mark.parametrize("quietly", ["", " 2>/dev/null"])
async def test_missing_program_that_the_agent_should_create_is_graded(ctx: ToolContext, quietly: str) -> None:
    """Fault 29: neither is there in an untouched sandbox, and the agent's program is not the image's to bring."""
    command = f"pytst{quietly} || ./made.py{quietly}"
    assert (await plain(ctx, command=command)).value == 0
    await write(ctx, made="#!/bin/sh\nexit 0\n")
    await asyncio.to_thread(ctx.terminal, "chmod +x made.py")
    assert (await plain(ctx, command=command)).value == 1


async def test_command_with_a_fallback_program_is_graded(ctx: ToolContext) -> None:
    run = "PYTHONPATH=. python3 -B hidden/check.py"
    assert (await plain(ctx, command=f"pytst hidden || {run}")).value == 0
    await write(ctx, solution=RIGHT)
    assert (await plain(ctx, command=f"pytst hidden || {run}")).value == 1
    cases = [{"to": "test_it.py", "content": CASE}]
    unit = {"command": "pytst || python3 -B -m unittest -q test_it", "files": cases}
    assert (await plain(ctx, **unit)).value == 1
    await write(ctx, solution=WRONG)
    assert (await plain(ctx, **unit)).value == 0


CASE = """import unittest
from solution import add

class TestAdd(unittest.TestCase):
    def test_small(self):
        self.assertEqual(add(2, 3), 5)

    def test_other(self):  # no reason to skip
        if add(1, 1) is None:
            self.skipTest("nothing here")
        self.assertEqual(add(1, 1), 2)
"""
REFERENCE = [{"to": "solution.py", "content": RIGHT}]
EQUAL = "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()"


async def by_reference(ctx: ToolContext, solution: str, **args: Any) -> RewardValue:
    await write(ctx, solution=solution)
    files = [{"to": "test_it.py", "content": CASE}]
    given = {"command": "python3 -B -m unittest -q test_it", "files": files, "reference": REFERENCE, **args}
    return await graded("tests_pass", ctx=ctx, **given)


async def test_canaries_detect_only_objects_that_equal_everything(ctx: ToolContext) -> None:
    value = await by_reference(ctx, RIGHT)
    assert (value.value, value.metrics["canaries"]) == (1, 0)
    assert value.metrics["canaries_planted"] > 0
    value = await by_reference(ctx, WRONG)
    assert (value.value, value.metrics["canaries"], "not passed" in str(value.reason)) == (0, 0, True)
    value = await by_reference(ctx, EQUAL)
    assert value.value == 0
    assert value.metrics["canaries"] > 0
    assert "which a right solution must fail" in str(value.reason)
    value = await by_reference(ctx, RIGHT, canaries=False)
    assert (value.value, value.metrics) == (1, {})


@pytest.mark.slow
async def test_without_a_reference_that_passes_canaries_never_decide(ctx: ToolContext) -> None:
    for reference in (None, [{"to": "solution.py", "content": WRONG}], "no patch"):
        value = await by_reference(ctx, RIGHT, reference=reference, canaries=True)
        assert (value.value, value.metrics) == (1, {"canaries": 0})


async def test_what_the_reference_skips_may_be_skipped_and_nothing_else(ctx: ToolContext) -> None:
    skips = "def add(a, b):\n    return None if a == b == 1 else a + b"
    value = await by_reference(ctx, skips)
    assert (value.value, value.reason) == (0, "not passed: test_it.py::TestAdd::test_other")
    assert (await by_reference(ctx, skips, reference=None)).value == 0
    reference = [{"to": "solution.py", "content": skips}]
    assert (await by_reference(ctx, skips, reference=reference)).value == 1
    assert (await by_reference(ctx, RIGHT, reference=reference)).value == 1


@pytest.mark.slow
async def test_broken_solution_scores_0_where_the_reference_passes(ctx_with_pytest: ToolContext) -> None:
    command = "pytst; python3 -m pytest -q test_it.py"
    assert (await by_reference(ctx_with_pytest, "import nothing_here", command=command)).value == 0
    with pytest.raises(RewardFailure, match="the image lacks 'pytst'"):
        await by_reference(ctx_with_pytest, "import nothing_here", command=command, reference=None)


async def test_a_reference_may_be_turns_that_write_the_files(ctx: ToolContext) -> None:
    script = f"cat > solution.py <<'END'\n{RIGHT}\nEND\nsleep 100 &"
    for call in (
        {"name": "write_file", "args": {"path": "solution.py", "content": RIGHT}},
        {"name": "terminal", "args": {"command": script}},
    ):
        turns = [{"say": "I write it."}, {"tools": [call]}, {"say": "It is there."}]
        value = await by_reference(ctx, RIGHT, reference=turns)
        assert (value.value, value.metrics["canaries"], value.metrics["canaries_planted"] > 0) == (1, 0, True)
        value = await by_reference(ctx, EQUAL, reference=turns)
        assert (value.value, value.metrics["canaries"] > 0) == (0, True)


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m compileall -q . && python3 -B -m unittest -q test_it",
        "set -e\ntouch log\npython3 -B -m unittest -q test_it",
    ],
)
async def test_canaries_are_among_the_tests_of_the_last_of_several_commands(ctx: ToolContext, command: str) -> None:
    value = await by_reference(ctx, RIGHT, command=command)
    assert (value.value, value.metrics["canaries"], value.metrics["canaries_planted"] > 0) == (1, 0, True)
    value = await by_reference(ctx, EQUAL, command=command)
    assert (value.value, value.metrics["canaries"] > 0) == (0, True)
    assert (await by_reference(ctx, RIGHT, command=command.replace("&&", "&& false &&"))).value == float(
        "&&" not in command
    )


async def test_canaries_keep_commands_after_the_tests(ctx: ToolContext) -> None:
    value = await by_reference(ctx, RIGHT, command="python3 -B -m unittest -q test_it && false")
    assert value.value == 0
    value = await by_reference(ctx, RIGHT, command="python3 -B -m unittest -q test_it && true")
    assert (value.value, value.metrics) == (1, {})


async def test_expected_tests_that_no_runner_can_report_are_a_failure_too(ctx: ToolContext) -> None:
    if "No module" not in (await asyncio.to_thread(ctx.terminal, "python3 -m pytest --version"))["output"]:
        pytest.skip("this system has pytest of its own")
    with pytest.raises(RewardFailure, match="the image lacks 'pytest'"):
        await suite(ctx, "test_small")


PRETENDS = "print('No module named pytest')\nprint('python3: command not found')\nimport os; os._exit(127)"


async def test_a_solution_that_pretends_that_the_image_lacks_something_scores_0(ctx: ToolContext) -> None:
    await write(ctx, solution=PRETENDS)
    value = await plain(ctx, command="PYTHONPATH=. python3 hidden/check.py", needs=["python3", "pytest"])
    assert (value.value, "exit status 127" in str(value.reason)) == (0, True)


async def test_a_sandbox_from_which_the_agent_took_what_the_tests_need_scores_0() -> None:
    tool = SandboxFile("bin/jest", b"#!/bin/sh\nexit 0\n", 0o755)
    async with ToolRuntime(SandboxConfig(files=(tool,))) as runtime:
        ctx = ToolContext(runtime.task_id)
        run = {"command": 'PATH="$PWD/bin:$PATH"; jest hidden', "needs": ["jest"]}
        assert (await plain(ctx, **run)).value == 1
        await asyncio.to_thread(ctx.terminal, "rm -r bin")
        assert (await plain(ctx, **run)).value == 0


@pytest.mark.slow
async def test_what_the_agent_is_to_make_is_its_own_to_lack(ctx: ToolContext) -> None:
    for command in ("./solve", "bash solve.sh", "python3 solve.py", "python3 -m solve", "env ./solve", "cat python3"):
        assert (await plain(ctx, command=command)).value == 0
    assert (await plain(ctx, command="jest hidden", needs=[])).value == 0


@pytest.mark.slow
async def test_broken_git_of_the_agent_scores_zero() -> None:
    patch = TakenArtifact("patch", "patch", (ArtifactFile("", b"diff --git a/x b/x\n", 0o644),))
    async with ToolRuntime(SandboxConfig(env={"PATH": "own:/usr/bin:/bin"})) as runtime:
        runtime.artifacts = {"patch": patch}
        ctx = ToolContext(runtime.task_id)
        plant = "mkdir own && printf '#!/bin/sh\\nexit 127\\n' > own/git && chmod +x own/git"
        assert (await asyncio.to_thread(ctx.terminal, plant))["exit_code"] == 0
        value = await plain(ctx, apply="patch")
    assert (value.value, "cannot be applied" in str(value.reason)) == (0, True)
