"""Scripts in the sandbox that call the rollout's other tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.catalogue import resolve_toolsets
from hermes_rl.tools.python_tools import python_tool
from tests.tools.calling import Player


def shout(text: str, times: int = 1) -> str:
    """Say it loudly.

    Args:
        text: what to say.
        times: how often.
    """
    if times > 9:
        raise ValueError("too loud")
    return text.upper() * times


@pytest.fixture(params=["bubblewrap", "none"])
async def play(request: pytest.FixtureRequest) -> AsyncIterator[Player]:
    tools = [*resolve_toolsets(["terminal", "file", "code_execution"]), python_tool(shout)]
    config = SandboxConfig(backend=str(request.param), timeout=10)
    async with ToolRuntime(config, toolkit=Toolkit(tools)) as runtime:
        yield Player(runtime)


async def run(play: Player, code: str, timeout: float = 20) -> dict[str, Any]:
    outcome = await play.outcome("execute_code", json.dumps({"code": code}), timeout)
    assert outcome.error is None, outcome.error
    answer: dict[str, Any] = json.loads(outcome.content)
    return answer


async def test_what_a_script_prints_is_the_answer(play: Player) -> None:
    answer = await run(play, "import sys\nprint(6 * 7)\nprint('aside', file=sys.stderr)")
    assert (answer["status"], answer["output"], answer["tool_calls_made"]) == ("success", "42", 0)
    assert "error" not in answer


async def test_tools_answer_with_values(play: Player) -> None:
    await play("terminal", command="mkdir -p sub && cd sub && export WORD=yes")
    answer = await run(
        play,
        "from hermes_tools import shout, terminal, write_file, read_file\n"
        "write_file('a.txt', 'one\\ntwo\\n')\n"
        "print(read_file('a.txt')['content'])\n"
        "print(terminal('pwd; echo $WORD')['output'])\n"
        "print(shout('hi', times=2))",
    )
    assert answer["tool_calls_made"] == 4
    assert "two" in answer["output"]
    assert answer["output"].endswith("/sub\nyes\nHIHI")


async def test_tool_errors_are_returned_to_the_script(play: Player) -> None:
    answer = await run(
        play,
        "from hermes_tools import shout\nprint(shout('x', times='many'))\nprint(shout('x', times=10))\nprint(shout())",
    )
    told = answer["output"].splitlines()
    assert answer["status"] == "success"
    assert ["error" in line for line in told] == [True, True, True]
    assert "too loud" in told[1]


async def test_only_the_tools_of_the_rollout(play: Player) -> None:
    answer = await run(play, "import hermes_tools as h\nprint(h._call('execute_code', {'code': ''}), h._call('x', {}))")
    assert answer["output"].count("there is no tool named") == 2
    answer = await run(play, "from hermes_tools import todo")
    assert answer["status"] == "error"
    assert "ImportError" in answer["error"]


async def test_calls_are_bounded(play: Player) -> None:
    answer = await run(
        play, "from hermes_tools import shout\nanswers = [shout('a') for _ in range(60)]\nprint(answers.count('A'))"
    )
    assert answer["output"] == "50"


async def test_a_script_that_raises(play: Player) -> None:
    answer = await run(play, "print('before')\n1 / 0")
    assert (answer["status"], answer["output"]) == ("error", "before")
    assert "ZeroDivisionError" in answer["error"]


async def test_a_script_that_does_not_end(play: Player) -> None:
    answer = await run(play, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)", timeout=4)
    assert answer["status"] == "timeout"
    gone = await play("terminal", command=f"kill -0 {int(answer['output'])} 2>/dev/null || echo gone")
    assert gone["output"] == "gone"


async def test_floods_keep_head_and_tail(play: Player) -> None:
    answer = await run(play, "print('first')\nprint('x' * 5_000_000)\nprint('last')")
    assert answer["output"].startswith("first")
    assert answer["output"].endswith("last")
    assert len(answer["output"]) < 60_000


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.kill(os.getppid(), 9)\nimport time\ntime.sleep(5)",
        "import hermes_tools as h, os\nos.write(h._calls, b'no json\\n')\nimport time\ntime.sleep(5)",
        "import hermes_tools as h, os\nos.write(h._calls, b'[1]\\n')\nimport time\ntime.sleep(5)",
        "import hermes_tools as h, os\nos.write(h._calls, b'{\"tool\": 7}\\n')\nprint(h._reader.readline())",
    ],
)
async def test_a_script_that_breaks_its_pipe_harms_only_its_own_call(play: Player, code: str) -> None:
    outcome = await play.outcome("execute_code", json.dumps({"code": code}), 8)
    assert "error" in outcome.content
    assert (await run(play, "print(1)"))["output"] == "1"


async def test_threads_take_turns(play: Player) -> None:
    answer = await run(
        play,
        "from concurrent.futures import ThreadPoolExecutor\nfrom hermes_tools import shout\n"
        "print(sorted(ThreadPoolExecutor(8).map(shout, 'abcdefgh')))",
    )
    assert answer["output"] == str(sorted("ABCDEFGH"))


async def test_helpers(play: Player) -> None:
    answer = await run(
        play,
        "from hermes_tools import json_parse, shell_quote, retry\ntries = []\n"
        "def fn():\n    tries.append(1)\n    if len(tries) < 3: raise ValueError\n    return 'done'\n"
        "print(json_parse('[\"a\\tb\"]'), shell_quote('a b'), retry(fn, delay=0.01), len(tries))",
    )
    assert answer["output"] == "['a\\tb'] 'a b' done 3"
