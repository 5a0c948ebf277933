"""The real tinker-cookbook collects datums from a spec; a completer replaces Tinker's service."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.api.summing import CODE, MASKED, TEXT
from tests.real.doors_played import require_as_everywhere, write_doors
from tests.real.environments import HERE, ROOT, tinker_python
from tests.service.test_batches import BROKEN

COMPONENT = "tinker-cookbook"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(300)]


def seen(folder: Path, program: str, text: str = TEXT) -> Any:
    """Run one of `tinker_programs.py` on the spec, and return its result."""
    (folder / "code.py").write_text(CODE)
    (folder / "sums.yaml").write_text(text)
    return seen_of("sums.yaml", folder, program)


def seen_of(spec: str, folder: Path, program: str) -> Any:
    command = [str(tinker_python()), str(HERE / "tinker_programs.py"), program]
    done = subprocess.run(
        [*command, spec, str(small_tokenizer_path())],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_sampled_token_is_in_a_datum_in_its_context(tmp_path: Path) -> None:
    found = seen(tmp_path, "trained")
    assert {reward for rewards in found["rewards"] for reward in rewards} == {0.0, 1.0}
    assert found["stops"] == ["completed"]
    assert len(found["datums"]) == 24
    sampled = [(prompt, ids, pytest.approx(logprobs, abs=1e-6)) for prompt, ids, logprobs in found["log"]]
    trained = 0
    for datum in found["datums"]:
        ids, mask, logprobs = datum["ids"], [0.0, *datum["mask"]], [0.0, *datum["logprobs"]]
        place = 0
        while place < len(ids):
            end = place
            while end < len(ids) and mask[end]:
                end += 1
            if end > place:
                assert (ids[:place], ids[place:end], logprobs[place:end]) in sampled
                trained += 1
            place = max(end, place + 1)
    assert trained == len(found["log"]) == 48


def test_a_failure_is_an_error_and_no_reward(tmp_path: Path) -> None:
    (tmp_path / "grading.py").write_text(BROKEN)
    (tmp_path / "broken").touch()
    text = TEXT.replace("rewards: {", 'rewards: {steady: {fn: "grading.py:steady", weight: 1}, ')
    first, repeated = seen(tmp_path, "failing", text)
    assert first.startswith("RolloutFailed: reward_failure: ")
    assert "reward_failure" in repeated


def test_a_rollout_that_the_cookbook_stops_has_no_reward(tmp_path: Path) -> None:
    said, reason = seen(tmp_path, "limited")
    assert reason == "max_turns"
    assert "ended a rollout (max_turns) before it was scored" in said


def test_what_the_spec_masks_counts_and_is_not_trained_on(tmp_path: Path) -> None:
    assert seen(tmp_path, "masked", MASKED) == [[0.0, 0.0], 0.0]


def test_the_script_of_the_documents_makes_a_configuration(tmp_path: Path) -> None:
    assert seen(tmp_path, "script") == [8, "True"]


def test_common_spec_gives_the_same_scores_and_tokens_in_every_integration(tmp_path: Path) -> None:
    write_doors(tmp_path)
    require_as_everywhere(seen_of("alone.yaml", tmp_path, "doors"), compared=False)
    refused = seen_of("doors.yaml", tmp_path, "comparing")
    assert (
        "rewards.judged.args.fallback, rewards.longest compares the members of a group, and tinker-cookbook" in refused
    )
