"""A real vLLM on this machine's processors plays, and every trained token is what its model says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.real.conftest import Vllm, hermes, policy, recomputed

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


def test_ten_thousand_tokens_are_exact_and_turns_are_independent(vllm: Vllm, model: Path, sums: Path) -> None:
    hermes(
        "run", sums, "process", *policy(vllm, model), "--set", "process.groups=45", "--out", "run", folder=sums.parent
    )
    found = recomputed(model, sums.parent / "run" / "groups.jsonl")
    assert found["problems"] == {}
    assert found["tokens"] >= 10_000
    assert found["sum"] / found["tokens"] <= 1e-6
    assert found["max"] < 1e-3
    # Whether a turn begins with a thought is drawn anew in each turn: equal decisions are as frequent as by chance.
    assert found["turns"] > 50
    assert abs(found["agree"] - found["expected"]) <= 4 * found["variance"] ** 0.5


def test_the_sampling_of_the_model_folder_changes_nothing(
    model: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hostile = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(model, hostile)
    file = hostile / "generation_config.json"
    settings = json.loads(file.read_text("utf-8"))
    settings |= {
        "do_sample": True,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.2,
        "repetition_penalty": 1.3,
        "temperature": 0.3,
    }
    file.write_text(json.dumps(settings), "utf-8")
    server = Vllm(hostile, hostile.parent / "log")
    server.start()
    try:
        # The same question over and over: the first token of each answer is a draw from one distribution.
        one = ["--set", "dataset={items: [{a: 3, b: 4, c: 5, want: 23}]}", "--set", "agent.max_turns=1"]
        many = ["--set", "process.group_size=8", "--set", "process.groups=64", "--set", "dataset.repeat=true"]
        out = hermes(
            "run", sums, "process", *policy(server, model), *one, *many, "--set", "serve.drop_uniform=false",
            "--out", "run", folder=sums.parent,
        )  # fmt: skip
        found = recomputed(model, sums.parent / "run" / "groups.jsonl")
    finally:
        server.kill()
    assert found["problems"] == {}, out
    assert found["sum"] / found["tokens"] <= 1e-6


def test_a_teacher_that_is_the_policy_itself_finds_each_token_as_probable_as_it_was_sampled(
    vllm: Vllm, model: Path, sums: Path
) -> None:
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
