"""The real TRL trains a small model on rollouts of a spec: its three integrations, and vLLM in its process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.api.summing import CODE, TEXT
from tests.integrations.doors import SCORES, tokens_of
from tests.learning import nim
from tests.real.doors_played import MEMBERS, require_as_everywhere
from tests.real.environments import HERE, ROOT, small_learner, tiny_model, trl_python, vllm_python

COMPONENT = "TRL"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]
CALCULATOR = """
import json, os, sys, urllib.request

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "multiply")]


def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS}).encode()
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(address, body)) as answer:
        return json.load(answer)["choices"][0]["message"]


messages = [{"role": "user", "content": sys.argv[1]}]
while (message := ask(messages)).get("tool_calls"):
    messages.append(message)
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
            a, b = arguments["a"], arguments["b"]
            result = a + b if function["name"] == "add" else a * b
            function["arguments"] = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
        except (ValueError, KeyError, TypeError) as error:
            result = f"{type(error).__name__}: {error}"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
print(message["content"])
"""
"""An agent program for the task of the learning example; it sends calls back in other JSON than was sampled."""
CALCULATING = """
dataset: {generator: "tools.py:rows"}
prompt: {user: "{{ a }}{{ op }}{{ b }}"}
sandbox: {files: [{to: agent.py, from: agent.py}]}
agent:
  program:
    command: [python3, agent.py, "{{ prompt }}"]
    env: {OPENAI_BASE_URL: "{{ endpoint }}/v1"}
  max_turns: 2
  max_tokens: 24
  timeout: 120
rewards: {right: {fn: "tools.py:right"}}
"""


def play(program: str, folder: Path, spec: Path | None = None, launch: Sequence[str] = ()) -> dict[str, Any]:
    """Run one of `trl_programs.py` in `folder`, and return its result."""
    learner = small_learner()
    # Threads that wait for each other by spinning make a small model slow where programs need the cores too.
    command = ["env", "OMP_NUM_THREADS=1", str(trl_python()), *launch, str(HERE / "trl_programs.py"), program]
    return seen([*command, str(learner), str(spec or learner / "learning.yaml")], folder)


def seen(command: list[str], folder: Path) -> dict[str, Any]:
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **own, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"'))
    found: dict[str, Any] = json.JSONDecoder().raw_decode(line)[0]  # two processes may print on one line
    return found


def test_a_model_learns_with_the_script_of_the_documents(tmp_path: Path) -> None:
    require_learnt(play("grpo", tmp_path))


def test_a_model_learns_as_the_policy_of_an_agent_program(tmp_path: Path) -> None:
    shutil.copy(small_learner() / "tools.py", tmp_path)
    (tmp_path / "agent.py").write_text(CALCULATOR)
    (tmp_path / "calculator.yaml").write_text(CALCULATING)
    # Programs ask when they are ready, so that batches, and with them what is sampled, differ from run to run.
    require_learnt(play("grpo", tmp_path, tmp_path / "calculator.yaml"), first=3)
    (record,) = tmp_path.glob("outputs/grpo/*/rollouts.jsonl")
    programs = [json.loads(line)["program"] for line in record.read_text("utf-8").splitlines()]
    calls = [call for program in programs for call in program["calls"]]
    # What a program makes of broken JSON is the policy's doing; all that says the same is trained on.
    assert sum(call["tokens"] for call in calls if call["trained"]) >= 0.99 * sum(call["tokens"] for call in calls)


def test_a_model_learns_a_game_against_itself(tmp_path: Path) -> None:
    shutil.copy(nim.__file__, tmp_path)
    (tmp_path / "rival.yaml").write_text(nim.RIVAL)
    (tmp_path / "self_play.yaml").write_text(nim.SELF_PLAY)
    found = play("self_play", tmp_path, tmp_path / "self_play.yaml")
    print("wins against chance:", *found["wins"])  # noqa: T201
    assert found["wins"][0] < 0.6
    assert found["wins"][-1] >= 0.9
    assert max(found["worst"]) <= 1e-4
    assert min(found["trained"]) > 200
    (record,) = tmp_path.glob("outputs/self_play/*/rollouts.jsonl")
    seats = Counter(json.loads(line)["seat"]["name"] for line in record.read_text("utf-8").splitlines())
    assert seats["first"] == seats["second"] > 1_000


def require_learnt(found: dict[str, Any], first: int = 1) -> None:
    """Require that a run of the documented script has learned the task on exactly the sampled tokens; `first` is its
    number of initial steps.
    """
    assert found["parameters"] < 1_000_000
    assert len(found["means"]) == 12
    assert min(found["means"][:first]) < 0.5  # of 64 rollouts: a standard error of 0.06
    assert max(found["means"][6:]) > 0.7
    assert max(found["worst"]) <= 1e-4
    assert min(found["trained"]) > 500  # tokens of 64 rollouts, so that the comparison is of something
    assert found["recorded"] == [12 * 64]
    assert found["log"]["hermes_rl/turns"] > 1.8
    assert found["log"]["hermes_rl/rewards/right"] == found["log"]["reward"]


def test_failed_rollouts_are_excluded_from_baselines(tmp_path: Path) -> None:
    found = play("failing", tmp_path)
    assert sum(found["unscored"]) > 0
    assert found["logged"] == [unscored / 64 for unscored in found["unscored"]]
    assert found["off"] < 1e-5  # every advantage is that of a baseline of the scored ones alone
    assert max(found["worst"]) <= 1e-4


def test_two_processes_run_disjoint_members_of_a_split_group(tmp_path: Path) -> None:
    found = play("ranks", tmp_path, launch=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    assert found["processes"] == 2
    assert max(found["worst"]) <= 1e-4
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert len(first) == len(second) == 2 * 12
    whole: dict[str, list[int]] = {}
    for group, index, size in first + second:
        assert size == 8
        whole.setdefault(group, []).append(index)
    assert len(whole) == 2 * 3
    assert all(sorted(indices) == list(range(8)) for indices in whole.values())
    assert len({group for group, _, _ in first} & {group for group, _, _ in second}) == 2


def test_async_training_uses_all_sequences_of_concurrent_groups(tmp_path: Path) -> None:
    found = play("asynchronous", tmp_path)
    assert found["steps"] == 6
    assert all(found["exact"])
    assert found["sequences"] == 2
    rollouts, samples = found["rows"]
    assert samples > 1.5 * rollouts
    assert found["staleness"][0] == 0
    assert set(found["staleness"][1:]) <= {1, 2, 3}
    assert found["log"]["ratio"][0] == pytest.approx(1.0, abs=1e-5)
    assert found["log"]["kl"][0] < 1e-6
    # TRL folds what sequences share, and no sampled token is lost or trained on twice.
    assert found["loss terms"] == found["sampled"]
    assert found["forwarded"] < found["tokens"]
    assert found["log"]["hermes_rl/zero_variance_frac"][0] is not None
    assert found["log"]["hermes_rl/versions_spread_max"][0] is not None
    assert found["log"]["hermes_rl/dropped_frac"][0] == 0


def test_trl_loop_runs_in_the_environments_of_a_spec(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "sums.yaml").write_text(TEXT)
    found = play("environments", tmp_path, tmp_path / "sums.yaml")
    assert found["steps"] == 2
    assert found["called"] == [1.0, 1.0]
    assert {score for scores in found["scores"] for score in scores} == {0.0, 1.0}


def test_advantages_are_those_of_the_estimators(tmp_path: Path) -> None:
    found = play("estimators", tmp_path)
    assert found.keys() == {"mean", "std", "rloo"}
    assert max(found.values()) < 1e-4  # TRL computes in single precision


def test_common_spec_gives_the_same_scores_and_tokens_in_every_integration(tmp_path: Path) -> None:
    found = play("doors", tmp_path, tmp_path / "doors.yaml")
    require_as_everywhere(found["rows"], compared=True)
    require_as_everywhere(found["samples"], compared=True)
    require_as_everywhere(found["stepped"], compared=False)
    assert (
        "rewards.judged.args.fallback, rewards.longest compares the members of a group, and TRL's own"
        in found["refused"]
    )
    every = MEMBERS * sum(map(tokens_of, SCORES))
    assert found["in the loss"] == [every]
    # TRL folds what members share, which here is all, and each token stays a term of the loss for each of them.
    assert found["loss terms"] == every


def test_colocated_vllm_applies_the_requested_sampling(tmp_path: Path) -> None:
    found = seen([str(vllm_python()), str(HERE / "colocated.py"), str(tiny_model())], tmp_path)
    assert found["worst"] < 1e-4
    assert found["ended"][0] == ["length", False, 3]
    assert all((finish == "stop") == stopped for finish, stopped, _ in found["ended"])
    assert any(stopped for _, stopped, _ in found["ended"])
