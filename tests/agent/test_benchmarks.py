"""The programs in `benchmarks/` run; how fast is none of a test's business."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl.sandbox.cgroup import find_layout

ROOT = Path(__file__).parents[2]


def run(*command: str, **more: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_benchmark_of_the_loop_measures_every_contender() -> None:
    sizes = ["--turns", "2", "--conversations", "2", "--concurrency", "1", "--latency", "1", "--repetitions", "1"]
    printed = run("benchmarks/loop.py", *sizes)
    for contender in ("raw aiohttp", "openai client", "hermes-rl", "hermes-rl, sync tool"):
        assert f"| {contender} | " in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_of_the_endpoint_measures_every_dialect() -> None:
    printed = run("benchmarks/agents.py", "--turns", "2", "--conversations", "2", "--repetitions", "1")
    names = ("chat/completions", "responses", "messages", "generateContent")
    streamed = ("streamGenerateContent, streamed", *(f"{dialect}, streamed" for dialect in names[:3]))
    for dialect in (*names, *streamed):
        assert printed.count(f"| {dialect} | ") == 2  # beside a proxy, and of tokens


@pytest.mark.slow
@pytest.mark.by_turns(2)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["bubblewrap", "none"])
def test_hundreds_of_rollouts_leave_nothing(backend: str, tmp_path: Path) -> None:
    """Background jobs, orphans, cancellations, sandboxes that are killed; the program fails where something is left."""
    printed = run(
        "benchmarks/leaks.py", "--rollouts", "150", "--concurrency", "16", "--backend", backend, TMPDIR=str(tmp_path)
    )
    assert "| control groups | 0 | 0 |" in printed


@pytest.mark.slow
@pytest.mark.by_turns(2, 1)
@pytest.mark.timeout(400)
def test_hundreds_of_rollouts_of_agent_programs_leave_nothing(tmp_path: Path) -> None:
    sizes = ("--rollouts", "300", "--concurrency", "64", "--program")
    assert "| control groups | 0 | 0 |" in run("benchmarks/leaks.py", *sizes, TMPDIR=str(tmp_path))


@pytest.mark.slow
@pytest.mark.by_turns(2)
@pytest.mark.timeout(240)
@pytest.mark.skipif(find_layout() is None, reason="this user may make no control groups here")
def test_run_survives_sandboxes_that_use_all_memory() -> None:
    """In 2 GiB; the program fails where the run ends, or an innocent rollout has not the score that it deserves."""
    printed = run("benchmarks/crowd.py", "--sandboxes", "64", "--seconds", "30")
    assert "innocent and 1  8" in printed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_benchmark_of_the_sandbox_measures_every_step() -> None:
    printed = run("benchmarks/sandbox.py", "--concurrency", "2", "--calls", "2")
    for step in ("cold start and release, ms", "terminal calls/s", "write 4 kB, calls/s", "PSS of an idle sandbox, MB"):
        assert f"| {step} | " in printed


@pytest.mark.slow
def test_the_benchmark_of_tokens_prints_both_tables() -> None:
    sizes = ["--turns", "4", "--tokens", "2048", "--groups", "1", "--repetitions", "1"]
    printed = run("benchmarks/tokens.py", *sizes)
    for row in ("render", "merge", "request", "record", "nothing else", "sending"):
        assert f"| {row} | " in printed


@pytest.mark.slow
def test_the_benchmark_of_runs_measures_every_contender() -> None:
    printed = run("benchmarks/runs.py", "--groups", "4", "--concurrency", "8", "--latency", "1", "--repetitions", "1")
    for contender in ("raw aiohttp", "one group at a time", "hermes-rl process", "hermes-rl process, sandboxed"):
        assert f"| {contender} | " in printed


@pytest.mark.slow
def test_the_benchmark_of_runs_has_latencies_that_are_spread() -> None:
    sizes = ["--groups", "4", "--concurrency", "8", "--latency", "5", "--repetitions", "1"]
    printed = run("benchmarks/runs.py", *sizes, "--shape", "lognormal", "--only", "hermes-rl process")
    assert "5 ms latency (median, lognormal)" in printed


@pytest.mark.slow
def test_runs_benchmark_measures_each_concurrency_with_one_reference() -> None:
    sizes = ["--groups", "3", "--concurrency", "4", "8", "--latency", "1", "--repetitions", "1"]
    printed = run("benchmarks/runs.py", *sizes, "--only", "raw aiohttp", "one group at a time")
    assert "| raw aiohttp | 4 (3) | " in printed
    assert "| raw aiohttp | 8 (1.5) | " in printed
    assert printed.count("| one group at a time | ") == 1


@pytest.mark.slow
def test_adaptive_benchmark_measures_adaptive_and_fixed_concurrency() -> None:
    printed = run("benchmarks/adaptive.py", "--capacity", "8", "--seconds", "1", "--latency", "50")
    assert printed.count("\n| 8 | ") == 2
    assert printed.count("\n| 4 | ") == 1


@pytest.mark.slow
def test_rollouts_in_flight_are_measured() -> None:
    assert "| 8 | " in run("benchmarks/in_flight.py", "--rollouts", "8", "--latency", "0.5")


@pytest.mark.slow
def test_token_level_turns_are_measured_beside_a_bare_client() -> None:
    printed = run("benchmarks/token_turns.py", "--rollouts", "64", "--repetitions", "1")
    assert "| bare client | " in printed and "| hermes-rl, isolate: default | " in printed


@pytest.mark.slow
def test_a_run_of_hundreds_of_sandboxed_rollouts_does_not_grow() -> None:
    """Processes, descriptors, control groups, threads, memory; the program fails where they grow."""
    assert "Nothing has grown" in run("benchmarks/soak.py", "--rollouts", "600", "--every", "150")
