"""Which variables of the runner user code sees, and how an exception names the key that lets it see another one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.data.load import load_rows
from hermes_rl.errors import UserError
from hermes_rl.plugins import Code
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.spec.load import SpecError, parse_spec
from hermes_rl.user_code import environment
from hermes_rl.user_code.environment import admit, user_code_variables
from hermes_rl.user_code.failures import ForeignError
from hermes_rl.user_code.pool import ProcessPool

SECRET = "sk-a-secret-of-the-runner"
LISTED = "of-the-spec"
CODE = """
import os
from pathlib import Path

def variables(): return dict(os.environ)
def of_processes(): return [Path(f"/proc/{pid}/environ").read_text() for pid in ("self", os.getppid())]
def pid(): return os.getpid()
def wants(variable): return os.environ[variable]
def looks_up(variable): return {}[variable]
def wraps(variable):
    try:
        return os.environ[variable]
    except KeyError as error:
        raise ValueError("no settings") from error
"""


@pytest.fixture(autouse=True)
def runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_listed_variables", {})
    monkeypatch.setattr(environment, "_runner_names", frozenset())
    monkeypatch.setenv("RUNNER_SECRET", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("GAME_DIR", LISTED)


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


def call(pool: ProcessPool, directory: Path, name: str, source: str = CODE, **arguments: Any) -> Any:
    path = directory / "code.py"
    path.write_text(source)
    return asyncio.run(pool.call(Code.from_ref(f"{path}:{name}"), arguments, "hermes_rl.plugins:identity", 60))


def test_user_code_sees_general_and_listed_variables_alone(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    general = {"PATH", "https_proxy", "SSL_CERT_FILE", "LC_TIME", "HF_HOME", "XDG_CACHE_HOME", "PYTHONHASHSEED"}
    for name in general - {"PATH"}:
        monkeypatch.setenv(name, "7")
    admit(["GAME_DIR", "NOT_SET"], os.environ)
    seen = call(pool, tmp_path, "variables")
    assert seen == user_code_variables()
    assert general < seen.keys() and seen["GAME_DIR"] == LISTED
    assert not {"RUNNER_SECRET", "HF_TOKEN", "PYTEST_CURRENT_TEST", "NOT_SET"} & seen.keys()


def test_no_process_of_user_code_has_a_secret_in_its_environment(pool: ProcessPool, tmp_path: Path) -> None:
    admit(["GAME_DIR"], os.environ)
    assert SECRET not in "".join(call(pool, tmp_path, "of_processes"))


def test_without_a_fork_server_they_see_the_same(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.user_code.fork_server.sys.platform", "other")
    admit(["GAME_DIR"], os.environ)
    assert SECRET not in "".join(call(pool, tmp_path, "of_processes"))
    assert call(pool, tmp_path, "variables") == user_code_variables()


def test_a_listed_variable_has_the_value_that_the_spec_was_given(pool: ProcessPool, tmp_path: Path) -> None:
    admit(["GAME_DIR", "RUNNER_SECRET"], {"GAME_DIR": "of a file of variables"})
    seen = call(pool, tmp_path, "variables")
    assert seen["GAME_DIR"] == "of a file of variables"
    assert "RUNNER_SECRET" not in seen, "who may not read the runner's variables cannot list them either"


def test_newly_listed_variable_replaces_the_process(pool: ProcessPool, tmp_path: Path) -> None:
    before = call(pool, tmp_path, "pid")
    assert call(pool, tmp_path, "pid") == before
    admit(["GAME_DIR"], os.environ)
    assert call(pool, tmp_path, "variables")["GAME_DIR"] == LISTED
    assert call(pool, tmp_path, "pid") != before


@pytest.mark.parametrize("how", ["wants", "wraps"])
def test_an_exception_about_a_missing_variable_names_the_key(pool: ProcessPool, tmp_path: Path, how: str) -> None:
    admit([], os.environ)
    with pytest.raises(ForeignError, match=r"GAME_DIR is not set.*write `user_code: \{env: \[GAME_DIR\]\}`"):
        call(pool, tmp_path, how, variable="GAME_DIR")
    with pytest.raises(ForeignError) as caught:
        call(pool, tmp_path, how, variable="NOWHERE")
    assert "user_code" not in str(caught.value), "the runner does not have it either"


def test_a_module_that_lacks_a_variable_when_it_is_loaded_names_the_key(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit([], os.environ)
    with pytest.raises(UserError, match=r"write `user_code: \{env: \[GAME_DIR\]\}`"):
        call(pool, tmp_path, "given", 'import os\nHERE = os.environ["GAME_DIR"]\ndef given(): return HERE\n')


def test_missing_dictionary_key_is_not_reported_as_a_missing_variable(pool: ProcessPool, tmp_path: Path) -> None:
    admit([], os.environ)
    with pytest.raises(ForeignError) as caught:
        call(pool, tmp_path, "looks_up", variable="GAME_DIR")
    assert "user_code" not in str(caught.value)


OF_A_SPEC = """
import json, os
from pathlib import Path

from hermes_rl import Score

def seen() -> str:
    environs = [Path(f"/proc/{pid}/environ").read_text() for pid in ("self", os.getppid())]
    return json.dumps([dict(os.environ), *environs])

def tool() -> str:
    "Look."
    return seen()

class World:
    def __init__(self, item):
        self.first = seen()
    def look(self) -> str:
        "Look."
        return self.first + seen()

def reward() -> float:
    return Score(0.0, reason=seen())

def asks(state) -> float:
    return Score(0.0, reason=seen())
"""
SPEC = """
dataset: {items: [{x: 1}]}
prompt: {user: Look.}
state: {python: "code.py:World", isolate: STATE}
tools: [{state: look}, {python: "code.py:tool", isolate: TOOL}]
user_code: {env: [GAME_DIR]}
rewards:
  reward: {fn: "code.py:reward", weight: 0}
  asks: {fn: "code.py:asks", weight: 0}
solution: {turns: [{tools: [{name: look}, {name: tool}]}, {say: Done.}]}
servers: {policy: {type: scripted}}
"""


@pytest.mark.parametrize(("state", "tool", "environ"), [("process", "reuse", None), ("reuse", "process", {})])
async def test_rewards_states_and_tools_see_listed_variables_and_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: str, tool: str, environ: dict[str, str] | None
) -> None:
    """`validate --deep` gives no variables, so that no server has a key."""
    (tmp_path / "code.py").write_text(OF_A_SPEC)
    spec = parse_spec(SPEC.replace("STATE", state).replace("TOOL", tool), folder=tmp_path)
    async with CompiledSpec(spec, environ) as world:
        group = await RolloutRunner(world).start(load_rows(spec, "train", notify=print)[0], "g", 1)
    [rollout] = group.rollouts
    assert rollout.result is not None
    answers = [str(message["content"]) for message in rollout.result.messages if message["role"] == "tool"]
    reasons = [str(value.reason) for value in rollout.rewards.values()]
    assert len(answers) == 2 and len(reasons) == 2
    for text in (*answers, *reasons):
        assert LISTED in text and "PATH" in text and SECRET not in text, text[:500]


@pytest.mark.parametrize("name", ["A B", "1X", "A=B", ""])
def test_a_listed_name_is_the_name_of_a_variable(name: str) -> None:
    with pytest.raises(SpecError, match="name of an environment variable"):
        parse_spec(f"dataset: {{items: [{{x: 1}}]}}\nuser_code: {{env: ['{name}']}}\n", folder=Path())
