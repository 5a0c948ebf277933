"""What the models of each role cost is in the record of a run, whoever told the prices."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.cli.main import status
from hermes_rl.errors import UserError
from hermes_rl.servers.base import ChatRequest, ServerConfig
from hermes_rl.servers.factory import create_client
from hermes_rl.spec.load import parse_spec
from tests.servers.loopback_server import Answer, Loopback

PRICES = {"policy": (1.0, 10.0), "judge": (100.0, 1000.0), "user": (7.0, 0.0)}
REWARDS = """
async def liked(result, judge):
    return bool(await judge.chat([{"role": "user", "content": "Is it good?"}]) is not None)
"""
COMPARED = """
async def best(group, judge):
    await judge.chat([{"role": "user", "content": "Which is best?"}])
    return [0.0, 1.0]
"""
SPEC = """
version: 1
name: priced
dataset: {items: [{n: 1}, {n: 2}, {n: 3}], eval: only}
prompt: {system: "You sell pears."}
user: {system: "You want {{ n }} pears.", server: user, speaks_first: true, max_turns: 3}
rewards:
  liked: {fn: "rewards.py:liked"}
  clear: {fn: llm_judge, args: {rubric: "It is polite.", question: "{{ n }}"}}
solution: {turns: [{user: "Some pears."}, {say: "Here you are.", user: "Thank you."}, {say: "Bye."}]}
servers:
  policy: {type: scripted, prices: {prompt: 1, completion: 10}}
  judge: {type: scripted, prices: {prompt: 100, completion: 1000}}
  user: {type: scripted, prices: {prompt: 7, completion: 0}}
evaluate: {rollouts: 2}
process: {groups: 1, group_size: 1}
"""


@pytest.fixture(autouse=True)
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "priced.yaml").write_text(SPEC)
    return tmp_path / "priced.yaml"


def run(*more: str, mode: str = "evaluate") -> dict[str, Any]:
    assert status(["run", "priced.yaml", mode, "--quiet", "--out", "out", *more]) == 0
    described: dict[str, Any] = json.loads(Path("out/run.json").read_text())
    return described


def require_priced(usage: dict[str, dict[str, float]]) -> None:
    assert set(usage) == set(PRICES)
    for role, (prompt, completion) in PRICES.items():
        one = usage[role]
        assert one["calls"] > 0
        cost = (one["prompt_tokens"] * prompt + one["completion_tokens"] * completion) / 1e6
        assert one["cost"] == pytest.approx(cost)


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_each_role_is_in_run_json_and_all_of_them_in_each_rollout(workers: str) -> None:
    usage = run("--set", f"evaluate.workers={workers}")["usage"]
    require_priced(usage)
    assert usage["policy"]["calls"] == 6 * 2
    assert usage["judge"]["calls"] == 6
    lines = [json.loads(line) for line in Path("out/rollouts.jsonl").read_text().splitlines()]
    costs = [line["usage"]["cost"] + sum(counts.get("cost", 0) for counts in line["roles"].values()) for line in lines]
    total = sum(one["cost"] for one in usage.values())
    assert math.fsum(costs) == pytest.approx(total)
    metrics = json.loads(Path("out/metrics.json").read_text())
    assert metrics["results"]["all"]["eval/cost"] == pytest.approx(total / 6)


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_judge_that_compares_a_group_is_counted_once(workers: str, spec: Path) -> None:
    (spec.parent / "rewards.py").write_text(COMPARED)
    changes = ["--set", "rewards={liked: {fn: rewards.py:best}}", "--set", f"evaluate.workers={workers}"]
    usage = run(*changes)["usage"]
    require_priced(usage)
    assert usage["judge"]["calls"] == 3
    lines = [json.loads(line) for line in Path("out/rollouts.jsonl").read_text().splitlines()]
    assert sum(line["roles"].get("judge", {}).get("calls", 0) for line in lines) == 3
    again = run(*changes)["usage"]
    assert {role: pytest.approx(counts) for role, counts in usage.items()} == again


def test_resumed_run_adds_to_its_usage() -> None:
    first = run("--set", "evaluate.limit=1")["usage"]
    second = run()["usage"]
    require_priced(second)
    assert second["policy"]["calls"] == 3 * first["policy"]["calls"]
    assert run()["usage"] == second


def test_what_costs_is_shown_and_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    capsys.readouterr()
    assert status(["show", "out", "--no-pager"]) == 0
    assert "cost in $" in capsys.readouterr().out
    bound = ["--set", "budget.max_cost=0.000001", "--set", "evaluate.concurrency=1"]
    assert status(["run", "priced.yaml", "evaluate", "--out", "b", *bound]) == 1
    assert (
        "a row had ended: budget.max_cost (1e-06 $) is used up. Complete results are saved" in capsys.readouterr().err
    )


def test_final_output_reports_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    usage = run()["usage"]
    said = capsys.readouterr().out
    assert f"cost: {sum(one['cost'] for one in usage.values()):.2g} $ (" in said
    assert f"judge {usage['judge']['cost']:.2g} $" in said
    assert status(["run", "priced.yaml", "evaluate", "--out", "out", "--dry-run", "--set", "evaluate.rollouts=9"]) == 0
    assert "cost: about 0.00 $" not in capsys.readouterr().out


def test_user_calls_to_the_policy_server_are_counted_separately() -> None:
    usage = run("--set", "user.server=policy")["usage"]
    line = json.loads(Path("out/rollouts.jsonl").read_text().splitlines()[0])
    assert line["turns"] == 2
    assert line["roles"]["policy"]["calls"] == 3
    assert usage["policy"]["calls"] == 6 * 5
    assert usage["policy"]["cost"] == pytest.approx(
        (usage["policy"]["prompt_tokens"] + 10 * usage["policy"]["completion_tokens"]) / 1e6
    )


def test_a_dry_run_tells_the_cost_of_each_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["run", "priced.yaml", "evaluate", "--out", "out", "--dry-run", "--sample", "3"]) == 0
    said = capsys.readouterr().out
    total = sum(one["cost"] for one in run()["usage"].values())
    foretold = float(said.split("cost: about ")[1].split()[0])
    assert foretold == pytest.approx(total, rel=0.2, abs=0.01)
    assert "judge" in said.split("cost: about ")[1]
    Path("prices.json").write_text('{"scripted": {"prompt": 0, "completion": 0}}')
    again = ["run", "priced.yaml", "evaluate", "--out", "out", "--set", "evaluate.rollouts=4"]
    assert status([*again, "--dry-run", "--prices", "prices.json"]) == 0
    assert "cost: about 0.00 $" in capsys.readouterr().out


async def test_what_the_server_tells_wins() -> None:
    request = ChatRequest([{"role": "user", "content": "hi"}])
    body = {"choices": [{"message": {"role": "assistant", "content": "ho"}, "finish_reason": "stop"}]}
    counts = {"prompt_tokens": 1_000_000, "completion_tokens": 2_000_000}
    for usage, cost in (
        (counts, 5.0),
        ({**counts, "cost": 0.5}, 0.5),
        ({"prompt_tokens": 1}, None),
        ({**counts, "cost": "much"}, 5.0),
        ({"prompt_tokens": "many", "completion_tokens": True}, None),
    ):
        server = await Loopback().start()
        server.otherwise = Answer(body=json.dumps({**body, "usage": usage}).encode())
        config = ServerConfig("openai", server.url, "m", prices={"prompt": 1.0, "completion": 2.0})
        async with create_client("policy", [config]) as client:
            reply = await client.chat(request)
        await server.stop()
        assert reply.usage.get("cost") == (cost if cost is not None else usage.get("cost"))


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ("{prompt: 1}", "missing key `completion`"),
        ("{prompt: -1, completion: 1}", "must be at least 0"),
        ("{prompt: .inf, completion: 1}", "finite"),
        ("1", "expected a mapping"),
    ],
)
def test_prices_that_are_none_are_refused(prices: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^<text>:12:\d+: .*{said}"):
        parse_spec(SPEC.replace("{prompt: 1, completion: 10}", prices))
