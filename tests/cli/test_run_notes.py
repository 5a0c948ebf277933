"""A run reports what it repeats, how an evaluation samples, and whether its tokens are recorded."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.overrides import parse_extra_args
from tests.commands import hermes
from tests.http_servers import Handler, serving

REWARD = '''
from pathlib import Path
from hermes_rl import Score
from hermes_rl.errors import JudgeFailure

def long(result, item):
    """Cannot tell the first time."""
    if item["fails"]:
        try:
            (Path(__file__).parent / f"tried-{item['q']}").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            raise JudgeFailure("the grader is down")
    return Score(1.0, metrics={"half": 0.5} if item["fails"] else {})
'''
SPEC = """
dataset: {items: [{q: a, fails: true}, {q: b, fails: false}], eval: EVAL}
prompt: {user: "{{ q }}"}
rewards: {long: {fn: "reward.py:long", isolate: none}}
servers: {policy: {type: openai, base_url: "URL", model: acme/no-such-model}}
process: {groups: 2, group_size: 1, concurrency: 1}
"""


class Model(ThreadingHTTPServer):
    """A chat server that refuses its first `refusals` calls."""

    def __init__(self, refusals: int) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.refusals = refusals
        self.bodies: list[dict[str, Any]] = []
        self.told: Callable[[], str] = str
        self.heard: list[str] = []
        """What the user had been told when each call came."""


class Answer(Handler):
    server: Model

    def do_GET(self) -> None:  # noqa: N802 - the name is that of http.server
        self.answer({"data": []})

    def do_POST(self) -> None:  # noqa: N802 - the name is that of http.server
        self.server.bodies.append(json.loads(self.body()))
        self.server.heard.append(self.server.told())
        if self.server.refusals:
            self.server.refusals -= 1
            self.answer({"error": {"message": "busy"}}, 503)
            return
        message = {"role": "assistant", "content": "a long answer"}
        usage = {"prompt_tokens": 3, "completion_tokens": 4}
        self.answer({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})


@pytest.fixture
def model() -> Iterator[Model]:
    server = Model(refusals=1)
    with serving(server):
        yield server


def write(folder: Path, model: Model, rows: str) -> None:
    (folder / "reward.py").write_text(REWARD)
    url = f"http://127.0.0.1:{model.server_address[1]}/v1"
    (folder / "spec.yaml").write_text(SPEC.replace("URL", url).replace("EVAL", rows))


def play(folder: Path, model: Model, *words: str, rows: str = "null") -> subprocess.CompletedProcess[str]:
    write(folder, model, rows)
    command = ("run", "spec.yaml", *words, "--out", "run")
    return hermes(*command, cwd=folder, env={"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1"})


def test_run_reports_retried_rollouts_and_calls(tmp_path: Path, model: Model) -> None:
    done = play(tmp_path, model, "process", "--verbose")
    assert done.returncode == 0, done.stderr
    told = "rollouts retried: 1; calls sent again: policy 1"
    assert told in done.stdout and told in done.stderr
    retried = json.loads((tmp_path / "run" / "run.json").read_text())["retried"]
    assert retried == {"rollouts": 1, "calls": {"policy": 1}}
    logged = [line for line in done.stderr.splitlines() if " INFO hermes_rl." in line]
    assert any("attempt 1 failed" in line and "busy" in line for line in logged), done.stderr
    assert any("retrying rollout" in line and "the grader is down" in line for line in logged), done.stderr


def test_what_was_not_done_again_is_not_told(tmp_path: Path, model: Model) -> None:
    model.refusals = 0
    done = play(tmp_path, model, "process", "--set", "dataset.filter=not fails")
    assert "again" not in done.stdout + done.stderr and "INFO" not in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["retried"] == {"rollouts": 0, "calls": {}}


async def test_chat_server_without_a_tokenizer_is_warned_about_before_any_call(tmp_path: Path, model: Model) -> None:
    stream = io.StringIO()
    model.told = stream.getvalue
    write(tmp_path, model, "null")
    spec = load_spec(
        tmp_path / "spec.yaml", overrides=parse_extra_args([], ["servers.policy.tokenizer=/no/such/folder"])
    )
    await run_process(spec, RunOptions("process", tmp_path / "run", progress=Progress(stream)))
    said = model.heard[0]
    assert "WARNING: the groups will have messages and no tokens" in said and "/no/such/folder" in said
    assert "under `tokenizer` of the server" in said
    assert "no tokens: " not in stream.getvalue(), "the user is told once, not again at the end"


@pytest.mark.parametrize(
    ("sets", "temperature", "why"),
    [
        ((), 0.0, "one rollout per row"),
        (("evaluate.rollouts=2",), 1.0, "2 rollouts per row"),
        (("evaluate.agent.temperature=0.3",), 0.3, "set by evaluate.agent.temperature"),
    ],
)
def test_evaluate_reports_its_sampling_temperature(
    tmp_path: Path, model: Model, sets: tuple[str, ...], temperature: float, why: str
) -> None:
    model.refusals = 0
    done = play(tmp_path, model, "evaluate", *(word for one in sets for word in ("--set", one)), rows="only")
    assert f"evaluation at temperature {temperature:g}: " in done.stderr and why in done.stderr
    assert {body.get("temperature") for body in model.bodies} == {temperature}
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["config_general"]["generation_parameters"]["temperature"] == temperature
    size = len(model.bodies) - 1  # the grader was down once
    assert f"reward/long/half 0.5000 (n = {size // 2} of {size})" in done.stdout.splitlines()
    assert metrics["results"]["all"]["eval/reward_count/long/half"] == size // 2
    assert "eval/reward_count/long" not in metrics["results"]["all"]


@pytest.mark.slow
def test_the_library_of_tokenizers_gives_no_advice(tmp_path: Path) -> None:
    served = hermes("run", "terminal-files", "serve", "--set", "serve.api_url=http://127.0.0.1:1", cwd=tmp_path)
    assert served.returncode != 0 and "PyTorch" not in served.stderr, served.stderr
    code = "from hermes_rl.tokens.load import load_tokenizer, small_tokenizer_path as p; load_tokenizer(str(p()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "PyTorch" not in done.stderr
    code = "from hermes_rl.tokens.families import family_names; family_names()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "PyTorch" not in done.stderr


def test_a_warning_is_printed_once(tmp_path: Path) -> None:
    """The rows of a generator run with --deep, and without isolation the user is warned before the first sandbox."""
    (tmp_path / "rows.py").write_text("def made(*, seed, split):\n    for n in range(4):\n        yield {'n': n}\n")
    (tmp_path / "words.yaml").write_text(
        "dataset: {generator: 'rows.py:made'}\nprompt: {user: '{{ n }}'}\ntoolsets: [terminal]\n"
        "sandbox: {backend: none}\nservers: {policy: {type: scripted}}\nprocess: {groups: 1, group_size: 1}\n"
        "rewards: {exact_match: {args: {target: '{{ n }}'}}}\n"
        "solution: {turns: [{tools: [{name: terminal, args: {command: ls}}]}, {say: '{{ n }}'}]}\n"
    )
    shallow, deep = (hermes("validate", "words.yaml", *more, cwd=tmp_path) for more in ((), ("--deep",)))
    assert "the rows of a generator were not checked" in shallow.stderr
    assert "gold         1.000" in deep.stdout and "were not checked" not in deep.stderr, deep.stderr
    done = hermes("run", "words.yaml", "process", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("with your rights") == 1
