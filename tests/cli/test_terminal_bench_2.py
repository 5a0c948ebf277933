"""The shipped spec of Terminal-Bench 2: rows with images and archives of tests, which come when the agent has ended."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.runs.evaluate import Evaluation, run_evaluate
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.overrides import parse_extra_args
from tests.env.test_hermes_agent_environments import packed
from tests.env.upstream.model import Messages, Model, call, says
from tests.runs.playing import lines

SCRIPT = """\
if [ "$(cat /app/answer)" = "$(cat /tests/expected)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def row(name: str, image: Path | None = None, script: str = SCRIPT, category: str = "easy") -> dict[str, Any]:
    return {
        "task_name": name, "category": category, "instruction": name, "docker_image": str(image) if image else None,
        "environment_tar": "", "tests_tar": packed(expected=f"image {name}"), "test_sh": script,
    }  # fmt: skip


async def evaluated(
    folder: Path, rows: list[dict[str, Any]], command: str, *sets: str
) -> tuple[Evaluation, dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Play the rows with a model that runs one command; what was found, the rollouts by task, and what was said."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))

    def answer(messages: Messages) -> dict[str, Any]:
        return says("Done.") if messages[-1]["role"] == "tool" else call("terminal", command=command)

    model = Model(answer)
    await model.start()
    policy = json.dumps({"type": "openai", "base_url": model.url, "model": "m"})
    data = json.dumps({"path": "json", "data_files": str(folder / "rows.jsonl"), "split": "train", "eval": "only"})
    given = [f"servers.policy={policy}", f"dataset={data}", "sandbox.network=false"]
    given += [f"sandbox.image={{{{ '{folder}/' ~ docker_image.split('/')[-1] if docker_image else none }}}}", *sets]
    spec = load_spec("terminal-bench-2", overrides=parse_extra_args((), given))
    found, directory = await run_evaluate(
        spec, RunOptions("evaluate", out=folder / "run", progress=Progress(io.StringIO()))
    )
    await model.stop()
    played = lines(directory.path / "rollouts.jsonl")
    by_task = {next(m["content"] for m in one["messages"] if m["role"] == "user"): one for one in played}
    return found, by_task, model.bodies


@pytest.mark.slow
async def test_each_row_has_its_image_and_its_tests_come_after_the_agent(tmp_path: Path, rootfs: Path) -> None:
    rows = []
    for name in ("one", "two"):
        image = tmp_path / name
        shutil.copytree(rootfs, image, symlinks=True, copy_function=os.link)
        (image / "etc" / "issue").unlink()
        (image / "etc" / "issue").write_text(f"image {name}\n")
        rows.append(row(name, image))
    rows.append(row("three", tmp_path / "two", category="hard"))
    command = "ls /tests /logs; mkdir -p /app; cp /etc/issue /app/answer"
    found, by_task, bodies = await evaluated(tmp_path, rows, command)
    assert {name: one["score"] for name, one in by_task.items()} == {"one": 1.0, "two": 1.0, "three": 0.0}
    told = [m["content"] for body in bodies for m in body["messages"] if m["role"] == "tool"]
    assert told and all("/tests" in one and "expected" not in one for one in told), "the agent finds no tests"
    assert found.metrics["eval/by/category/easy/mean_reward"] == 1.0
    assert found.metrics["eval/by/category/hard/mean_reward"] == 0.0


async def test_a_reward_that_the_agent_writes_itself_is_none(tmp_path: Path) -> None:
    command = "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/test.sh"
    _, by_task, _ = await evaluated(tmp_path, [row("forged")], command)
    assert by_task["forged"]["score"] == 0.0


@pytest.mark.parametrize("number", ["1", "2", "1e99"])
async def test_a_reward_that_the_agent_protects_from_the_grader_is_none(tmp_path: Path, number: str) -> None:
    command = (
        f"mkdir -p /tests /logs/verifier; echo {number} > /logs/verifier/reward.txt; "
        "chmod 444 /logs/verifier/reward.txt; chmod 555 /logs/verifier /logs /tests"
    )
    _, by_task, _ = await evaluated(tmp_path, [row("protected")], command)
    assert by_task["protected"]["score"] == 0.0


@pytest.mark.parametrize(
    "left", ["rm $F", ": > $F", "rm $F; mkdir $F", "rm $F; mkfifo $F", "chmod 0 $F; rm -r ${F%/*}"]
)
async def test_script_that_ends_well_without_its_reward_scores_0(tmp_path: Path, left: str) -> None:
    """Code of the agent that the tests run removes the reward, or a full disk loses it."""
    script = f"echo 0 > /logs/verifier/reward.txt; F=/logs/verifier/reward.txt; {left}; exit 0\n"
    _, by_task, _ = await evaluated(tmp_path, [row("lost", script=script)], "true")
    assert by_task["lost"]["score"] == 0.0


@pytest.mark.parametrize("number", ["2", "-1", "1e99", "nan", "inf", "one"])
async def test_reward_outside_0_to_1_is_scored_as_zero(tmp_path: Path, number: str) -> None:
    """Code of the agent that the tests run may write the file."""
    script = f"echo {number} > /logs/verifier/reward.txt; exit 0\n"
    _, by_task, _ = await evaluated(tmp_path, [row("large", script=script)], "true")
    assert by_task["large"]["score"] == 0.0


@pytest.mark.slow  # that of a task in the format of Harbor is fast
async def test_tests_that_cannot_run_are_a_failure_and_no_score(tmp_path: Path) -> None:
    missing = "no-such-runner && echo 1 > /logs/verifier/reward.txt"
    lacking = "uvx pytest /tests; if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    rows = [row("missing", script=missing), row("lacking", script=f"PATH=/nothing\n{lacking}")]
    found, by_task, _ = await evaluated(tmp_path, [row("fine"), *rows], "true")
    assert found.ungraded == 2
    assert by_task.pop("fine")["score"] == 0.0
    for one in by_task.values():
        assert one["score"] is None and one["stop_reason"] == "reward_failure"
        assert "the tests cannot run in this sandbox" in one["error"]


async def test_tests_that_the_agent_keeps_from_running_score_0(tmp_path: Path) -> None:
    script = f"test ! -e /app/broken || exit 127\n{SCRIPT}"
    _, by_task, _ = await evaluated(tmp_path, [row("broken", script=script)], "mkdir /app; touch /app/broken")
    assert by_task["broken"]["score"] == 0.0
    assert "did not run to their end" in by_task["broken"]["rewards"]["verified"]["reason"]


@pytest.mark.parametrize(("work", "script"), [("true", "sleep 60"), ("sleep 60", "sleep 5")])
async def test_agent_and_tests_share_one_bound_of_time(tmp_path: Path, work: str, script: str) -> None:
    began = time.monotonic()
    _, by_task, _ = await evaluated(tmp_path, [row("slow", script=script)], work, "agent.task_timeout=2")
    assert time.monotonic() - began < 30
    slow = by_task["slow"]
    assert slow["score"] == 0.0 and slow["error"] is None
    assert "the tests had no end in time" in slow["rewards"]["verified"]["reason"]


async def test_the_first_benchmark_reads_task_folders_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 34: tasks outside of the spec's folder were refused while playing, and validate said valid."""
    task = tmp_path / "tasks" / "copy"
    (task / "tests" / "deep").mkdir(parents=True)
    (task / "task.yaml").write_text("instruction: Copy the bytes.\n")
    (task / "solution.sh").write_text("printf '\\377\\000' > copy\n")
    (task / "run-tests.sh").write_text('"$TEST_DIR/deep/check" copy && test ! -e /tmp/task/solution.sh\n')
    (task / "tests" / "deep" / "check").write_text('#!/bin/sh\ncmp "$1" "$TEST_DIR/bytes"\n')
    (task / "tests" / "deep" / "check").chmod(0o755)
    (task / "tests" / "bytes").write_bytes(b"\xff\x00")
    shutil.copytree(task, tmp_path / "tasks" / "other")
    monkeypatch.setenv("TERMINAL_BENCH_TASKS", str(tmp_path / "tasks"))
    spec = load_spec("terminal-bench", demo=True)
    found, _ = await run_evaluate(spec, RunOptions("evaluate", tmp_path / "run", progress=Progress(quiet=True)))
    assert [line["score"] for line in lines(tmp_path / "run" / "rollouts.jsonl")] == [1.0], found
