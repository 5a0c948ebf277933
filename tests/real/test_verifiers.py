"""The real verifiers runs a spec: `vf-eval`, and the environment server with the client that prime-rl uses."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.api.summing import CODE, END, TEXT, TOKENIZER, write
from tests.integrations.chat_model import ChatModel
from tests.integrations.doors import answer
from tests.real.doors_played import require_as_everywhere, write_doors
from tests.real.environments import HERE, ROOT, verifiers_python
from tests.servers.token_policy import TokenPolicy

COMPONENT = "verifiers"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(600)]
EVAL = "from verifiers.v1.cli.eval.main import main; main()"
MASKED = TEXT + "on_stop: {max_turns: mask}\n"


async def run(folder: Path, *words: str) -> str:
    """Run a program in the environment with verifiers, and return its output."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), "KEY": "x", "HF_HUB_OFFLINE": "1"}
    pipe = asyncio.subprocess.PIPE
    python = await asyncio.to_thread(verifiers_python)
    done = await asyncio.create_subprocess_exec(str(python), *words, cwd=folder, env=own, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(done.communicate(), 300)
    assert done.returncode == 0, err.decode()[-3000:]
    return out.decode()


async def evaluated(folder: Path, url: str, *options: str, text: str = TEXT) -> list[dict[str, Any]]:
    """Return the traces of `vf-eval` on the spec, three for each of its four rows."""
    (folder / "code.py").write_text(CODE)
    (folder / "sums.yaml").write_text(text)
    words = ["hermes-rl-verifiers", "--env.taskset.spec", "sums.yaml", "--env.agent.runtime.type", "subprocess"]
    words += ["-m", "tiny", "--client.base-url", url, "--client.api-key-var", "KEY", "-r", "3"]
    words += ["--output-dir", "out", "--run.name", "a", "--no-push", *options]
    await run(folder, "-c", EVAL, *words)
    lines = (folder / "out" / "a" / "traces.jsonl").read_text("utf-8").splitlines()
    traces = [trace for line in lines for trace in json.loads(line)["traces"]]
    assert len(traces) == 12
    return traces


async def test_vf_eval_scores_as_the_spec_does(tmp_path: Path) -> None:
    model = ChatModel(wrong=3)
    async with model.running() as url:
        traces = await evaluated(tmp_path, url)
    scores = [trace["rewards"]["score"]["score"] for trace in traces]
    assert sorted(scores) == [0.0] * 4 + [1.0] * 8
    assert [trace["metrics"]["right"] for trace in traces] == scores
    assert {trace["ok"] for trace in traces} == {True}
    assert len({trace["task"]["key"] for trace in traces}) == 4


async def test_no_rollout_has_a_reward_where_the_model_is_down(tmp_path: Path) -> None:
    async with ChatModel(down=True).running() as url:
        traces = await evaluated(tmp_path, url)
    assert [trace["rewards"] for trace in traces] == [{}] * 12
    assert {trace["ok"] for trace in traces} == {False}
    assert {trace["errors"][-1]["type"] for trace in traces} == {"ProviderError"}


async def test_a_rollout_that_verifiers_stops_has_no_reward(tmp_path: Path) -> None:
    async with ChatModel().running() as url:
        traces = await evaluated(tmp_path, url, "--env.agent.max-turns", "1")
    assert [trace["rewards"] for trace in traces] == [{}] * 12
    assert {trace["ok"] for trace in traces} == {False}
    assert all("before it was scored" in trace["errors"][-1]["message"] for trace in traces)


async def test_trained_tokens_are_the_sampled_tokens(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "sums.yaml").write_text(TEXT)
    policy = TokenPolicy(
        TOKENIZER,
        lambda text, chance: f"<think>\nI add.\n</think>\n\n{write(text, chance.random() < 0.7)}{END}",
        ("inference",),
    )
    async with policy.running() as url:
        words = [str(HERE / "verifiers_train.py"), url, "sums.yaml", str(small_tokenizer_path())]
        traces = json.loads((await run(tmp_path, *words)).splitlines()[-1])
    assert len(traces) == 12
    assert {trace["rewards"]["score"] for trace in traces} == {0.0, 1.0}
    sampled = {(tuple(one.prompt), tuple(one.ids), tuple(one.logprobs)) for one in policy.log}
    found = [stretch for trace in traces for branch in trace["branches"] for stretch in stretches(branch)]
    assert len(found) == len(policy.log) == 24
    assert set(found) == sampled


async def test_what_the_spec_masks_is_not_trained_on(tmp_path: Path) -> None:
    text = MASKED.replace("max_turns: 4", "max_turns: 1")
    async with ChatModel().running() as url:
        traces = await evaluated(tmp_path, url, text=text)
    assert [trace["rewards"]["score"]["score"] for trace in traces] == [0.0] * 12
    assert {trace["agent"]["trainable"] for trace in traces} == {False}


async def test_rewards_that_compare_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "sums.yaml").write_text(TEXT.replace("{right:", '{longest: {fn: "code.py:longest"}, right:'))
    words = [str(HERE / "verifiers_train.py"), "http://127.0.0.1:9/v1", "sums.yaml", str(small_tokenizer_path())]
    with pytest.raises(AssertionError, match=r"rewards.longest compares the members of a group, and verifiers"):
        await run(tmp_path, *words)


async def test_common_spec_gives_the_same_scores_and_tokens_in_every_integration(tmp_path: Path) -> None:
    write_doors(tmp_path)
    policy = TokenPolicy(TOKENIZER, lambda text, _: answer(text) + END, ("inference",))
    async with policy.running() as url:
        words = [str(HERE / "verifiers_train.py"), url, "alone.yaml", str(small_tokenizer_path())]
        traces = json.loads((await run(tmp_path, *words)).splitlines()[-1])
        with pytest.raises(AssertionError, match=r"rewards.judged.args.fallback, rewards.longest compares the members"):
            await run(tmp_path, words[0], url, "doors.yaml", words[-1])
    trained = [sum(sum(branch["mask"]) for branch in trace["branches"]) for trace in traces]
    rows = [(trace["key"], trace["rewards"]["score"], count) for trace, count in zip(traces, trained, strict=True)]
    require_as_everywhere(rows, compared=False, members=4)


def stretches(branch: dict[str, Any]) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """Return each span of sampled tokens with its context and log-probabilities."""
    ids, mask, found, place = branch["ids"], branch["mask"], [], 0
    while place < len(ids):
        end = place
        while end < len(ids) and mask[end]:
            end += 1
        if end > place:
            found.append((tuple(ids[:place]), tuple(ids[place:end]), tuple(branch["logprobs"][place:end])))
        place = max(end, place + 1)
    return found


def test_benchmark_beside_verifiers_plays_all_rollouts() -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "runs.py"), "--peer", "verifiers", str(verifiers_python())]
    program += ["--groups", "2", "--concurrency", "4", "--repetitions", "1", "--only", "raw aiohttp"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("| verifiers 0.4.0 | 4 (2) | ")
