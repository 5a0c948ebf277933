"""A rollout's own process: its state, its tools and the rewards that name its state, apart from all others."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.api.environment import open_env
from hermes_rl.errors import UserError
from hermes_rl.tools.rollout_process import read_descriptions
from hermes_rl.user_code.wire import WireError

CODE = '''
import os, time
shared = []

class World:
    def __init__(self, item):
        if item["n"] == 13:
            raise ValueError("no such world")
        self.n, self.heard = item["n"], []
    def tell(self, words: str) -> dict:
        """Tell the world."""
        self.heard.append(words)
        shared.append(words)
        return {"heard": len(self.heard), "shared": len(shared), "pid": os.getpid()}
    def refuse(self, words: str) -> str:
        """Refuse."""
        raise KeyError(words)
    def die(self) -> str:
        """End the process."""
        os._exit(3)
    def sleep(self) -> str:
        """Take long."""
        time.sleep(60)

def shout(text: str) -> str:
    """Shout."""
    shared.append(text)
    return f"{text.upper()} {len(shared)}"

def heard(state, result, ctx=None) -> float:
    return len(state.heard) + len(shared) / 100
'''
SPEC = """
version: 1
name: world
dataset: {items: [{n: 1}, {n: 2}, {n: 13}]}
prompt: {user: "Tell world {{ n }}."}
state: {python: code.py:World, isolate: process}
tools: [{state: tell}, {state: refuse}, {state: die}, {state: sleep}, {python: "code.py:shout", isolate: process}]
rewards: {heard: {fn: "code.py:heard", range: [0, 10]}}
agent: {tool_timeout: 1}
solution: {turns: [{tools: TOOLS}, {say: done}]}
servers: {policy: {type: scripted}}
"""


def spec(folder: Path, tools: str) -> Path:
    (folder / "code.py").write_text(CODE)
    (folder / "spec.yaml").write_text(SPEC.replace("TOOLS", tools))
    return folder / "spec.yaml"


async def played(folder: Path, tools: str, rows: int = 2) -> list[Any]:
    async with open_env(spec(folder, tools)) as env:
        return [await env.run(row) for row in itertools.islice(env.rows(), rows)]


def answers(rollout: Any) -> list[str]:
    return [str(message["content"]) for message in rollout.messages if message["role"] == "tool"]


async def test_state_tools_and_rewards_share_one_process_with_its_modules(tmp_path: Path) -> None:
    tools = "[{name: tell, args: {words: a}}, {name: shout, args: {text: b}}, {name: tell, args: {words: c}}]"
    for rollout in await played(tmp_path, tools):
        first, second, third = answers(rollout)
        assert '"heard": 1, "shared": 1' in first
        assert second == "B 2"
        assert '"heard": 2, "shared": 3' in third
        assert str(os.getpid()) not in first
        assert rollout.score == pytest.approx(2.03), "the reward sees the state itself, and its modules"


async def test_a_process_that_is_reused_keeps_its_modules_and_gets_a_new_state(tmp_path: Path) -> None:
    path = spec(tmp_path, "[{name: tell, args: {words: a}}]")
    path.write_text(path.read_text().replace("isolate: process}\ntools", "isolate: reuse}\ntools"))
    async with open_env(path) as env:
        first, second = [await env.run(row) for row in itertools.islice(env.rows(), 2)]
        assert '"heard": 1, "shared": 1' in answers(first)[0]
        assert '"heard": 1, "shared": 2' in answers(second)[0]
        assert first.score == pytest.approx(1.01)
        assert second.score == pytest.approx(1.02)
        assert len({text.rpartition('pid": ')[2] for text in answers(first) + answers(second)}) == 1
        both = await asyncio.gather(*(env.run(row) for row in itertools.islice(env.rows(), 2)))
        pids = [answers(rollout)[0].rpartition('pid": ')[2] for rollout in both]
        assert len(set(pids)) == 2, "two rollouts at a time never share one"


async def test_a_reused_process_that_a_call_has_ended_is_nobodys_any_more(tmp_path: Path) -> None:
    path = spec(tmp_path, "[{name: die, args: {}}]")
    path.write_text(path.read_text().replace("isolate: process}\ntools", "isolate: reuse}\ntools"))
    async with open_env(path) as env:
        for row in itertools.islice(env.rows(), 2):
            (said,) = answers(await env.run(row))
            assert "status 3" in said
            assert "earlier" not in said


async def test_exception_in_a_tool_is_returned_to_the_model(tmp_path: Path) -> None:
    (rollout,) = await played(tmp_path, "[{name: refuse, args: {words: x}}, {name: tell, args: {n: 1}}]", rows=1)
    first, second = answers(rollout)
    assert "tool 'refuse' failed: KeyError: 'x'" in first
    assert "words" in second


@pytest.mark.parametrize(("tool", "said"), [("die", "status 3"), ("sleep", "did not answer within 1 s")])
async def test_call_that_ends_the_process_loses_the_state_and_is_graded(tmp_path: Path, tool: str, said: str) -> None:
    (rollout,) = await played(tmp_path, f"[{{name: {tool}, args: {{}}}}, {{name: tell, args: {{words: a}}}}]", rows=1)
    first, second = answers(rollout)
    assert said in first
    assert "in an earlier call" in second
    assert rollout.score == 0, rollout.error


async def test_state_that_cannot_be_created_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such world"):
        await played(tmp_path, "[{name: tell, args: {words: a}}]", rows=3)


async def test_state_processes_end_with_their_rollouts(tmp_path: Path) -> None:
    rollouts = await played(tmp_path, "[{name: tell, args: {words: a}}]")
    pids = {int(answers(rollout)[0].rpartition('pid": ')[2].rstrip("}")) for rollout in rollouts}
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


PREPARED = '''
import os
ready, made_by = [], os.getpid()

class World:
    @classmethod
    def prepare(cls):
        ready.append(os.getpid())
        if os.environ.get("PREPARING") == "fails":
            raise ValueError("not today")
    def __init__(self, item):
        self.ready = ready
    def look(self) -> str:
        """Look."""
        return f"{len(ready)} {ready[0] != os.getpid()}"

def prepared(state) -> float:
    return len(state.ready)
'''


@pytest.mark.parametrize("fails", ["", "fails"])
async def test_what_a_class_prepares_is_made_once_and_there_in_each_fork(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREPARING", fails)
    text = SPEC.replace("[{state: tell}, {state: refuse}, {state: die}, {state: sleep}, ", "[{state: look}, ")
    text = text.replace(', {python: "code.py:shout", isolate: process}', "").replace("{heard: {", "{prepared: {")
    text = text.replace("code.py:heard", "code.py:prepared").replace("TOOLS", "[{name: look}]")
    text = text.replace('{python: "code.py:shout", isolate: process}', "").replace("look}, ]", "look}]")
    (tmp_path / "code.py").write_text(PREPARED + f"# {fails}\n")
    (tmp_path / "spec.yaml").write_text(text)
    async with open_env(tmp_path / "spec.yaml") as env:
        rollouts = [await env.run(row) for row in itertools.islice(env.rows(), 2)]
    for rollout in rollouts:
        assert (rollout.score, answers(rollout)) == (1, ["1 True"])


BETWEEN = """
import os, signal
made = 0

class Fragile:
    def __init__(self, item):
        if not os.path.exists(item["flag"]):
            open(item["flag"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        self.pid = os.getpid()
    def look(self) -> int:
        \"\"\"Look.\"\"\"
        return self.pid
"""


async def test_a_state_process_that_is_killed_while_it_starts_is_retried(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(BETWEEN)
    text = SPEC.replace("{n: 1}, {n: 2}, {n: 13}", f"{{n: 1, flag: {tmp_path}/flag}}")
    text = text.replace("code.py:World", "world.py:Fragile").replace("code.py:heard", "rewards.py:same")
    text = text[: text.index("tools: [")] + "tools: [{state: look}]\n" + text[text.index("rewards:") :]
    (tmp_path / "rewards.py").write_text("import os\ndef same(state): return state.pid == os.getpid()\n")
    (tmp_path / "spec.yaml").write_text(text.replace("TOOLS", "[{name: look}]"))
    async with open_env(tmp_path / "spec.yaml") as env:
        rollout = await env.run(next(iter(env.rows())))
    assert (rollout.error, rollout.score) == (None, 1), "a reward of another file runs where the state is"


SPREAD = """
version: 1
name: spread
dataset: {items: [{n: 1}, {n: 2}]}
prompt: {user: "Count {{ n }}."}
state: {python: world.py:World, isolate: ISOLATE}
tools: [{state: inc}, {python: "tools.py:where"}]
rewards: {counted: {fn: "rewards.py:counted"ELSE}}
solution: {turns: [{tools: [{name: inc}, {name: where}]}, {say: done}]}
servers: {policy: {type: scripted}}
"""


@pytest.mark.parametrize(
    ("isolate", "otherwise", "apart"),
    [("process", "", True), ("reuse", "", True), ("none", ", isolate: process", True), ("none", "", False)],
)
async def test_code_of_several_files_runs_where_the_spec_says(
    tmp_path: Path, isolate: str, otherwise: str, apart: bool
) -> None:
    counting = "class World:\n    def __init__(self, item): self.n = 0\n    def inc(self) -> int:\n"
    (tmp_path / "world.py").write_text(counting + '        "Count."\n        self.n += 1\n        return self.n\n')
    (tmp_path / "tools.py").write_text('import os\ndef where() -> int:\n    "Say it."\n    return os.getpid()\n')
    metrics = "Score(state.n, metrics={'pid': os.getpid()})"
    counted = f"import os\nfrom hermes_rl import Score\ndef counted(state): return {metrics}\n"
    (tmp_path / "rewards.py").write_text(counted)
    (tmp_path / "spec.yaml").write_text(SPREAD.replace("ISOLATE", isolate).replace("ELSE", otherwise))
    async with open_env(tmp_path / "spec.yaml") as env:
        rollouts = [await env.run(row) for row in env.rows()]
    for rollout in rollouts:
        assert rollout.score == 1, rollout.error
        assert (rollout.rewards["counted"].metrics["pid"] != os.getpid()) is apart
        assert answers(rollout)[1] != str(os.getpid())


COUNTED = '''
import os
from pathlib import Path

class World:
    def __init__(self, item):
        with open(item["log"], "a") as log:
            log.write(f"{os.getpid()}\\n")
        if item.get("fails"):
            raise ValueError("no such world")
    @property
    def odd(self):
        raise OSError("not today")
    schemas = [{"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}]
    def play(self, name, args):
        return name
    def look(self) -> str:
        """Look."""
        return "seen"
'''
MADE = """
dataset: {items: [{log: LOG}, {log: LOG}]}
prompt: {user: Look.}
state: {python: "code.py:World"}
tools: [TOOLS]
user: {server: user, system: You look too., tools: [{state: look}]}
solution: {turns: [{tools: [{name: look}], user: Well?}, {say: Done.}]}
servers: {policy: {type: scripted}, user: {type: scripted}}
"""


async def rollouts_of(directory: Path, tools: str) -> tuple[list[Any], list[dict[str, Any]], list[int]]:
    """Return the rollouts, the schemas that the API shows, and the processes in which states were made."""
    log = directory / "log"
    (directory / "code.py").write_text(COUNTED)
    (directory / "spec.yaml").write_text(MADE.replace("LOG", str(log)).replace("TOOLS", tools))
    async with open_env(directory / "spec.yaml") as env:
        rows = list(env.rows())
        rollouts = [await env.run(row) for row in rows]
        shown = env.tools(rows[0])
    return rollouts, shown, [int(line) for line in log.read_text().split()]


@pytest.mark.parametrize("tools", ["{state: look}", "{state: play, schemas: schemas}"])
async def test_no_state_is_made_in_the_runner_to_describe_its_tools(tmp_path: Path, tools: str) -> None:
    rollouts, shown, made_by = await rollouts_of(tmp_path, tools)
    assert os.getpid() not in made_by
    assert len(made_by) == 3, "one for each rollout, and one for what the API shows"
    [look] = [tool["function"] for tool in shown]
    assert (look["name"], look["description"], look["parameters"]["properties"]) == ("look", "Look.", {})
    assert [answers(rollout) for rollout in rollouts] == [["look" if "schemas" in tools else "seen"]] * 2


async def test_a_state_that_raises_when_its_tools_are_described_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tools: odd of the state raised OSError: not today at .*code\.py"):
        await rollouts_of(tmp_path, "{state: odd}")
    with pytest.raises(UserError, match="has no 'lok'; did you mean `look`"):
        await rollouts_of(tmp_path, "{state: lok}")


DESCRIBED = {"name": "look", "description": "Look.", "parameters": {}, "parallel": False}


@pytest.mark.parametrize(
    "message",
    [
        None,
        {},
        [None],
        [{**DESCRIBED, "name": "a b"}],
        [{**DESCRIBED, "name": 1}],
        [{**DESCRIBED, "description": None}],
        [{**DESCRIBED, "parameters": []}],
        [{**DESCRIBED, "parallel": 1}],
        [{**DESCRIBED, "more": 1}],
    ],
)
def test_descriptions_of_tools_in_another_form_are_refused(message: Any) -> None:
    assert read_descriptions([DESCRIBED]) == [DESCRIBED]
    with pytest.raises(WireError):
        read_descriptions(message)


OWN_TOOLS = """
class World:
    def __init__(self, item):
        self.documents = [{"name": f"tool_{item['n']}", "description": "Count.", "parameters": {"type": "object"}}]
    def call(self, name, arguments):
        return name

def named(result, item) -> bool:
    return [call.name for call in result.tool_calls if call.error is None] == [f"tool_{item['n']}"]
"""


async def test_each_row_has_the_tools_that_its_own_state_describes(tmp_path: Path) -> None:
    """All rows had those of the first one, whose process had been asked."""
    (tmp_path / "world.py").write_text(OWN_TOOLS)
    (tmp_path / "spec.yaml").write_text("""
version: 1
dataset: {items: [{n: 1}, {n: 2}, {n: 3}]}
prompt: {user: "Count {{ n }}."}
state: world.py:World
tools: [{state: call, schemas: documents}]
rewards: {named: {fn: "world.py:named"}}
solution: {turns: [{tools: [{name: "tool_{{ n }}"}]}, {say: done}]}
servers: {policy: {type: scripted}}
""")
    async with open_env(tmp_path / "spec.yaml") as env:
        assert [(await env.run(row)).score for row in itertools.islice(env.rows(), 3)] == [1, 1, 1]


@pytest.mark.parametrize("isolate", ["process", "none"])
async def test_a_schema_that_refers_to_itself_is_a_mistake_of_the_spec(isolate: str, tmp_path: Path) -> None:
    """It ended the run with a KeyError."""
    endless = OWN_TOOLS.replace('"type": "object"', '"$ref": "#"')
    assert endless != OWN_TOOLS
    (tmp_path / "world.py").write_text(endless)
    (tmp_path / "spec.yaml").write_text(f"""
dataset: {{items: [{{n: 1}}]}}
prompt: {{user: "Count {{{{ n }}}}."}}
state: {{python: "world.py:World", isolate: {isolate}}}
tools: [{{state: call, schemas: documents}}]
rewards: {{named: {{fn: "world.py:named"}}}}
servers: {{policy: {{type: scripted}}}}
""")
    async with open_env(tmp_path / "spec.yaml") as env:
        with pytest.raises(UserError, match=r"the tool `tool_1` are not a usable JSON Schema: it refers to itself"):
            await env.run(next(iter(env.rows())))
