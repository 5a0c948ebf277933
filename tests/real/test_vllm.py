"""A real vLLM on this machine's CPUs samples, and every trained token matches the model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hermes_rl.servers.base import ChatRequest, ContextLengthExceeded, ServerConfig
from hermes_rl.servers.exactness import Finding
from hermes_rl.servers.factory import create_client, token_server
from hermes_rl.servers.sampling_check import measure
from tests.real.conftest import Vllm, hermes, policy, recomputed
from tests.real.environments import HERE

COMPONENT = "vLLM on processors"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


def groups_of(folder: Path) -> list[dict[str, Any]]:
    """Return the complete records of the groups; one more may be incomplete."""
    lines = (folder / "groups.jsonl").read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def require_exact(found: dict[str, Any]) -> None:
    assert found["problems"] == {}
    assert found["tokens"] > 500
    assert found["sum"] / found["tokens"] <= 1e-6
    assert found["unexplained"] == 0


def test_ten_thousand_tokens_are_exact_and_turns_are_independent(
    vllm: Vllm, model: Path, sums: Path, record_property: Callable[[str, object], None]
) -> None:
    more = ["--set", "process.groups=64", "--out", "run"]
    hermes("run", sums, "process", *policy(vllm, model), *more, folder=sums.parent)
    found = recomputed(model, sums.parent / "run" / "groups.jsonl")
    require_exact(found)
    assert found["tokens"] >= 10_000
    # Whether a turn begins with a thought is drawn anew in each turn: equal decisions are as frequent as by chance.
    assert found["turns"] > 100
    deviations = (found["agree"] - found["expected"]) / found["variance"] ** 0.5
    record_property("figure", f"{found['tokens']} tokens, mean difference {found['sum'] / found['tokens']:.1e}")
    record_property(
        "figure", f"{found['turns']} pairs of turns, {deviations:+.1f} standard deviations from independence"
    )
    assert abs(found["agree"] - found["expected"]) <= 4 * found["variance"] ** 0.5


ASKING = """
agent:
  program:
    command: [python3, agent.py, WAY, "{{ a }}", "{{ b }}", "{{ c }}"]
    env: {OPENAI_BASE_URL: "{{ endpoint }}/v1"}
  max_turns: 16
  max_tokens: 96
  timeout: 120
sandbox: {files: [{to: agent.py, from: agent.py}]}
"""
EXCLUDED = {"side_calls", "rejected", "changed"}
"""Kinds of calls that the program which rewrites makes, and nothing is trained of."""


def test_ten_thousand_tokens_of_three_agent_programs_are_exact(
    vllm: Vllm, model: Path, sums: Path, record_property: Callable[[str, object], None]
) -> None:
    folder, groups, excluded = sums.parent, list[str](), Counter[str]()
    shutil.copy(HERE / "asking_program.py", folder / "agent.py")
    text = re.sub(r"(?m)^tools: .*\n", "", sums.read_text("utf-8"))
    for way in ("chat", "responses", "rewriting"):
        spec = folder / f"{way}.yaml"
        spec.write_text(re.sub(r"(?m)^agent: .*\n", "", text) + ASKING.replace("WAY", way))
        hermes("run", spec, "process", *policy(vllm, model), "--set", "process.groups=8", "--out", way, folder=folder)
        # A group has as many lines as its longest rollout has sequences.
        proofs = list({line["group"]: line["provenance"] for line in groups_of(folder / way)}.values())
        assert [proof["problems"] for proof in proofs if not proof["exact"]] == []
        figures = {
            name: sum(proof[name] for proof in proofs) for name in ("sampled", "trained", "excluded", "sequences")
        }
        assert figures["trained"] + figures["excluded"] == figures["sampled"]
        share = figures["trained"] / figures["sampled"]
        record_property("figure", f"{way}: {figures}, {share:.1%} trained")
        for line in (folder / way / "rollouts.jsonl").read_text("utf-8").splitlines():
            program = json.loads(line)["program"]
            assert program["exit_code"] == 0, program["output"]
            excluded.update(program["excluded"])
        groups += (folder / way / "groups.jsonl").read_text("utf-8").splitlines()
        if way == "rewriting":
            assert excluded.keys() >= EXCLUDED
            assert sum(excluded.values()) == figures["excluded"]
        else:
            assert share >= 0.95
            assert not excluded
    (folder / "groups.jsonl").write_text("\n".join(groups))
    found = recomputed(model, folder / "groups.jsonl")
    record_property("figure", f"{found['tokens']} tokens, mean difference {found['sum'] / found['tokens']:.1e}")
    record_property("figure", f"left out: {dict(excluded)}")
    require_exact(found)
    assert found["tokens"] >= 10_000


async def measured(url: str, model: Path, draws: int) -> list[Finding]:
    server = token_server(ServerConfig("vllm", f"{url}/v1", "tiny", tokenizer=str(model)))
    try:
        return await measure(server, 1.0, None, draws)
    finally:
        await server.close()


async def test_what_is_sampled_is_what_was_asked_for(vllm: Vllm, model: Path) -> None:
    findings = await measured(vllm.url, model, 8000)
    assert [finding for finding in findings if not finding.ok] == []
    assert "longest conversation: 1024 tokens" in findings[-1].detail


@pytest.fixture
def hostile(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """Yield a server whose model directory requests sampling parameters that change the distribution."""
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copytree(model, folder / "model")
    file = folder / "model" / "generation_config.json"
    settings = json.loads(file.read_text("utf-8"))
    settings |= {"do_sample": True, "top_k": 2, "top_p": 0.5, "repetition_penalty": 1.3, "temperature": 0.3}
    file.write_text(json.dumps(settings), "utf-8")
    server = Vllm(folder / "model", folder / "log")
    server.start()
    yield server
    server.kill()


async def test_the_sampling_settings_of_a_model_folder_change_nothing(
    hostile: Vllm, model: Path, record_property: Callable[[str, object], None]
) -> None:
    findings = await measured(hostile.url, model, 8000)
    assert [finding for finding in findings if not finding.ok] == []
    variation = float(findings[0].detail.split("total variation ")[1].split()[0])
    record_property("figure", f"total variation {variation}")
    assert variation <= 0.02


def doctor_on_sampling(server: Vllm, model: Path, sums: Path) -> list[str]:
    """Return the report of `doctor --sampling` about draws at temperature 0.7, and at 1."""
    command = [sys.executable, "-m", "hermes_rl.cli.main", "doctor", str(sums), "--sampling"]
    given = [*policy(server, model), "--set", "agent.temperature=0.7"]
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False, timeout=300)
    return [line for line in done.stdout.splitlines() if "draws of one token" in line]


def test_doctor_finds_raw_logprobs_at_another_temperature_than_1(vllm: Vllm, model: Path, sums: Path) -> None:
    own, neutral = doctor_on_sampling(vllm, model, sums)
    assert own.startswith("FAIL  sampling (vllm): 2000 draws of one token with temperature 0.7: total variation ")
    assert neutral.startswith("ok    sampling (vllm): 2000 draws of one token with temperature 1: total variation 0.0")


async def test_cached_tokens_of_a_prompt_are_counted(vllm: Vllm, model: Path) -> None:
    config = ServerConfig("vllm", f"{vllm.url}/v1", "tiny", tokenizer=str(model))
    request = ChatRequest([{"role": "user", "content": "What is 2 + 3? " * 60}], max_tokens=2)
    async with create_client("policy", [config]) as role:
        first, second = [(await role.chat(request)).usage for _ in range(2)]
    assert first["prompt_tokens"] == second["prompt_tokens"]
    assert second["prompt_tokens"] > second["prompt_tokens_details"]["cached_tokens"] > 0


def test_doctor_has_nothing_against_processed_logprobs(
    model: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = Vllm(model, tmp_path_factory.mktemp("processed") / "log", "--logprobs-mode", "processed_logprobs")
    server.start()
    try:
        lines = doctor_on_sampling(server, model, sums)
    finally:
        server.kill()
    assert [line.split()[0] for line in lines] == ["ok", "ok"]


async def test_a_reward_model_is_asked_on_each_of_its_paths(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rating")
    server = Vllm(
        *(with_one_output(model, folder / "model"), folder / "log", "--runner", "pooling", "--convert", "classify"),
        *("--hf-overrides", '{"num_labels": 1}'),
    )
    server.start()
    asked = [{"role": "user", "content": "Where is it?"}]
    try:
        for kind in ("vllm-score", "vllm-classify", "vllm-pooling"):
            config = ServerConfig(kind, f"{server.url}/v1", "tiny")
            async with create_client("rater", [config]) as rater:
                (number,) = await rater.rated([*asked, {"role": "assistant", "content": "In Paris."}])
                assert 0 <= number <= 1
                with pytest.raises(ContextLengthExceeded):
                    await rater.rated([*asked, {"role": "assistant", "content": "word " * 20_000}])
    finally:
        server.kill()


def with_one_output(model: Path, folder: Path) -> Path:
    """Return a copy of the model that also has a weight for its one output.

    vLLM takes a weight that no file holds from unset memory, where numbers can be NaN.
    """
    shutil.copytree(model, folder)
    width = json.loads((model / "config.json").read_text("utf-8"))["hidden_size"]
    save_file({"score.weight": np.full((1, width), 0.1, np.float32)}, folder / "score.safetensors")
    return folder


def test_a_server_that_is_killed_and_comes_back_costs_nothing(vllm: Vllm, model: Path, sums: Path) -> None:
    more = ["--set", "process.groups=24", "--set", "process.concurrency=8", "--out", "run"]
    running = hermes("run", sums, "process", *policy(vllm, model), *more, folder=sums.parent, background=True)
    wait_for_groups(sums.parent / "run", 2, running)
    vllm.kill()
    time.sleep(3)
    vllm.start()
    said, _ = running.communicate(timeout=300)
    assert running.returncode == 0, said
    assert len(groups_of(sums.parent / "run")) == 24
    require_exact(recomputed(model, sums.parent / "run" / "groups.jsonl"))


def wait_for_groups(folder: Path, count: int, running: Any) -> None:
    deadline = time.monotonic() + 200
    while not (folder / "groups.jsonl").exists() or len(groups_of(folder)) < count:
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_costs_nothing(mode: str, vllm: Vllm, model: Path, sums: Path) -> None:
    more = ["--set", "process.groups=16", "--set", "process.concurrency=8", "--set", "agent.timeout=60", "--out", "run"]
    running = hermes("run", sums, "process", *policy(vllm, model), *more, folder=sums.parent, background=True)
    wait_for_groups(sums.parent / "run", 1, running)
    vllm.post(f"/pause?mode={mode}")
    time.sleep(3)
    vllm.post("/resume")
    said, _ = running.communicate(timeout=300)
    assert running.returncode == 0, said
    assert len(groups_of(sums.parent / "run")) == 16
    rollouts = (sums.parent / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()
    assert [line for line in rollouts if json.loads(line).get("error") is not None] == []
    require_exact(recomputed(model, sums.parent / "run" / "groups.jsonl"))


def test_every_token_is_explained_by_weights_within_its_versions(
    model: Path, sums: Path, vllm: Vllm, record_property: Callable[[str, object], None]
) -> None:
    versions = [model, model.with_name("trained-2"), model.with_name("trained-3")]
    vllm.post("/update_weight_version", {"new_version": "1"})
    more = ["--set", "process.groups=48", "--set", "process.concurrency=8", "--out", "run"]
    told = policy(vllm, model, weights_path="/weight_info")
    running = hermes("run", sums, "process", *told, *more, folder=sums.parent, background=True)
    try:
        for version, count in ((2, 6), (3, 20)):
            wait_for_groups(sums.parent / "run", count, running)
            take(vllm, versions[version - 1], version)
        said, _ = running.communicate(timeout=300)
    finally:
        take(vllm, model, 4)
    assert running.returncode == 0, said
    require_exact(recomputed(versions, sums.parent / "run" / "groups.jsonl"))
    spans = {(one["provenance"]["oldest"], one["provenance"]["newest"]) for one in groups_of(sums.parent / "run")}
    record_property("figure", f"versions of groups, oldest and newest: {sorted(spans)}")
    assert {(1, 1), (3, 3)} <= spans
    assert len(spans) > 2


def take(server: Vllm, weights: Path, version: int) -> None:
    """Give a running server new weights, as a trainer would."""
    server.post("/pause?mode=keep")
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
    server.post("/update_weight_version", {"new_version": str(version)})
    server.post("/resume")


def test_two_hundred_and_fifty_six_at_a_time(vllm: Vllm, model: Path, sums: Path) -> None:
    more = ["--set", "process.groups=96", "--set", "process.concurrency=256", "--out", "run"]
    hermes("run", sums, "process", *policy(vllm, model), *more, folder=sums.parent)
    assert len(groups_of(sums.parent / "run")) == 96
    require_exact(recomputed(model, sums.parent / "run" / "groups.jsonl"))


def test_chat_and_token_level_servers_say_the_same_and_score_alike(
    vllm: Vllm, model: Path, sums: Path, record_property: Callable[[str, object], None]
) -> None:
    """The temperature is low, because the two sides parse invalid calls differently."""
    found, first = [], []
    for kind in ("vllm", "openai"):
        settings = ["--set", "agent.temperature=0.3", "--out", kind]
        hermes("run", sums, "evaluate", *policy(vllm, model, type=kind), *settings, folder=sums.parent)
        found.append(json.loads((sums.parent / kind / "metrics.json").read_text("utf-8"))["results"]["all"])
        first.append(first_turns(sums.parent / kind))
    means = [float(one["eval/mean_reward"]) for one in found]
    errors = [float(one["eval/mean_reward_stderr"]) for one in found]
    both = first[0].keys() & first[1].keys()
    same = [name for name in both if first[0][name] == first[1][name]]
    record_property("figure", f"mean rewards {means}, standard errors {errors}; {len(same)} of {len(both)} turns equal")
    assert abs(means[0] - means[1]) <= 3 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5, found
    assert len(both) >= 0.9 * found[0]["eval/rollouts"]
    assert len(same) >= 0.99 * len(both), "one seed, one prompt, one model"


def first_turns(run: Path) -> dict[str, Any]:
    """Return the first reply of each rollout by id, with thoughts, text and calls, except for replies with invalid
    calls.
    """
    said = {}
    for line in map(json.loads, (run / "rollouts.jsonl").read_text("utf-8").splitlines()):
        message = next(message for message in line["messages"] if message["role"] == "assistant")
        thought, _, text = (message["content"] or "").rpartition("</think>")
        thought = message.get("reasoning_content") or thought.removeprefix("<think>")
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or ()]
        if "<think>" not in text and not any(error["turn"] == 1 for error in line["tool_errors"]):
            said[line["id"]] = thought.strip(), text.strip(), calls
    return said


def test_teacher_equal_to_the_policy_reproduces_the_sampled_logprobs(vllm: Vllm, model: Path, sums: Path) -> None:
    teacher = [word.replace("servers.policy.", "servers.teacher.") for word in policy(vllm, model)]
    few = ["--set", "process.groups=2", "--set", "process.group_size=2", "--set", "distill={top_k: 5}"]
    hermes("run", sums, "process", *policy(vllm, model), *teacher, *few, "--out", "run", folder=sums.parent)
    compared = among = 0
    for text in (sums.parent / "run" / "groups.jsonl").read_text("utf-8").splitlines():
        line = json.loads(text)
        names = ("tokens", "inference_logprobs", "ref_logprobs", "distill_token_ids", "distill_logprobs")
        for tokens, sampled, reference, ids, best in zip(*(line[name] for name in names), strict=True):
            assert len(tokens) == len(reference) == len(ids) == len(best)
            assert {len(row) for row in ids[1:]} == {len(row) for row in best[1:]} == {5}
            for at in range(1, len(tokens)):
                assert best[at] == sorted(best[at], reverse=True)
                if tokens[at] in ids[at]:
                    assert best[at][ids[at].index(tokens[at])] == reference[at]
                    among += 1
                else:
                    assert reference[at] <= best[at][-1]
                if sampled[at] != 1.0:
                    assert abs(sampled[at] - reference[at]) < 1e-3
                    compared += 1
    assert compared > 50
    assert among > compared / 2
