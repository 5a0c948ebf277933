"""`hermes-rl show`: a newcomer finds out why a rollout failed, whatever the agent has written."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.cli.main import status
from tests.analysis.recorded import programmed, recorded, write_run
from tests.commands import Command, environment, hermes

GRADING = {"rewards": {"right": "a"}, "scoring": {"weightings": [{"name": "right", "weight": 1.0, "gate": False}]}}


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Eight rollouts of four rows: six pass, one is wrong, one has no score."""
    lines = [recorded(row, index, size=2) for row in "abc" for index in range(2)]
    lines.append(recorded("d", 0, 0.25, size=2, text="It is 7 \x1b[2J\u202e [red]no markup[/red]"))
    lines.append(recorded("d", 1, None, size=2))
    lines[6]["tool_errors"] = [
        {"turn": 1, "tool_name": "terminal", "arguments": "{}", "error": "no such command", "tool_result": ""}
    ]
    lines[6]["tool_calls"][0]["error"] = "no such command"
    lines[6]["messages"][1]["reasoning_content"] = "I had better guess."
    lines[6]["rewards"]["right"]["metrics"] = {"distance": 3.5}
    lines[6]["artifacts"] = {"report": {"path": "artifacts/d/report", "size": 12, "sha256": "f" * 64}}
    return str(write_run(tmp_path / "run", lines, grading=GRADING))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert status(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_a_run_is_summed_up(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, run)
    assert "asking evaluate" in out
    assert "8 rollouts of 4 rows in 4 groups; 1 could not be graded" in out
    assert "mean score 0.893, 95 % interval" in out
    assert "6 of 7 pass" in out
    assert "without a score: 1 × sandbox_failure" in out
    assert "there was no room" in out
    worst = out.split("worst rows")[1].splitlines()[1]
    assert worst.split() == ["d", "0.25", "0/1", "(1", "ungraded)", "1.5", "#8"]
    assert f"next: hermes-rl show {run} --failed" in out


def test_the_failed_ones_are_listed_the_worst_first(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, run, "--failed")
    table = out[out.index(" score  stop reason") :].splitlines()
    assert [line.split()[:3] for line in table[1:3]] == [["8", "-", "sandbox_failure"], ["7", "0.25", "finished"]]
    assert f"next: hermes-rl show {run} 8" in out


def test_show_starts_with_the_reason_for_a_failure(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, run, "7")
    first = out.splitlines()
    assert first[0].startswith("d:0-0  #7 of 8  score 0.25  finished")
    assert first[1] == "why: right gave 0.25: it is another"
    assert first[2] == "     1 of 1 tool calls failed, the last: terminal: no such command"
    assert first[3] == "others of its group: #8 -"
    for part in (
        "answer    d", "I had better guess.", "→ terminal", "command: ls", "← terminal 0.25 s (failed)", "distance 3.5",
        "finished: it replied without calling a tool", "artifacts/d/report", "prompt 120, completion 12", "total 1.50",
    ):  # fmt: skip
        assert part in out
    out = shown(capsys, run, "d:0-1")
    assert "why: it has no score: a sandbox could not start" in out
    assert "not caused by the policy, so it does not count as 0" in out
    assert "there was no room" in out
    assert "why:" not in shown(capsys, run, "1")


def test_what_an_agent_wrote_is_only_text(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, run, "d:0-0")
    assert "It is 7 \\u001b[2J\\u202e [red]no markup[/red]" in out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\x1b" not in shown(capsys, run, "d:0-0", "--json")


def test_rollout_is_found_by_a_prefix_of_its_id(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "#3 of 8" in shown(capsys, run, "#3")
    assert "#7 of 8" in shown(capsys, run, "d:0-0")
    out = shown(capsys, run, "d")
    assert "2 rollouts start with 'd'" in out
    assert status(["show", run, "nothing"]) == 2
    assert "a number from 1 to 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--stop-reason", "sandbox_failure"], ["d:0-1"]),
        (["--tool", "terminal"], ["a:0-0", "a:0-1", "b:0-0", "b:0-1", "c:0-0", "c:0-1", "d:0-0", "d:0-1"]),
        (["--tool", "write_file"], []),
        (["--failed"], ["d:0-1", "d:0-0"]),
        (["--failed", "--sort", "errors"], ["d:0-0", "d:0-1"]),
    ],
)
def test_rollouts_are_chosen(run: str, capsys: pytest.CaptureFixture[str], options: list[str], ids: list[str]) -> None:
    found = json.loads(shown(capsys, run, *options, "--json"))
    assert [one["id"] for one in found["rollouts"]] == ids
    assert found["summary"]["graded"] == 7


def test_a_long_list_is_cut(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "… and 6 more (--limit 0 lists all)" in shown(capsys, run, "--limit", "2")
    assert "more (--limit" not in shown(capsys, run, "--limit", "0")


def test_long_texts_are_cut_unless_all_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [recorded("a", text="begin " + "x" * 9_000 + " end")], grading=GRADING)
    out = shown(capsys, str(folder), "1")
    assert "7012 characters are omitted (--full shows them)" in out
    assert " end" in out
    assert "x" * 9_000 in shown(capsys, str(folder), "1", "--full")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}/nothing"], "there is no run at"),
        (["{run}", "--prompt"], "about one rollout"),
        (["{run}", "--stop-reason", "finishd"], "did you mean `finished`"),
        (["{run}", "--sort", "size"], "is none of number, score"),
        (["{run}", "7", "--tokens"], "this rollout has no tokens"),
    ],
)
def test_show_reports_invalid_arguments(
    run: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert status(["show", *(one.format(run=run) for one in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_show_lists_retried_attempts_separately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [recorded("a", score=None), recorded("a", attempt=1)]
    folder = str(write_run(tmp_path / "run", lines, grading=GRADING))
    out = shown(capsys, folder)
    assert "1 rollout of 1 row in 1 group; 1 retried" in out
    assert "could not be graded" not in out
    assert "attempt 0: #1 sandbox_failure" in shown(capsys, folder, "2")


def test_show_reports_an_empty_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no rollout has ended yet" in shown(capsys, str(write_run(tmp_path / "run", [])))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("played")
    done = hermes("run", "terminal-files", "process", "--set", "process.groups=2", "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("next: hermes-rl show run")
    return folder / "run"


def test_show_prompt_prints_the_text_of_the_recorded_tokens(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text of the recorded tokens, which hold what the template made of messages and tools."""
    out = shown(capsys, str(played), "1", "--prompt")
    assert out.startswith("<|im_start|>system\nYou are a careful engineer with a terminal.")
    assert '"name": "write_file"' in out
    assert out.endswith("<|im_start|>assistant\n\n")
    found = json.loads(shown(capsys, str(played), "1", "--prompt", "--json"))
    assert found["text"] == out[:-1]
    assert found["messages"][0]["role"] == "system"
    assert [tool["function"]["name"] for tool in found["tools"]][:2] == ["terminal", "process"]


def test_show_tokens_marks_the_trained_tokens(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = json.loads((played / "rollouts.jsonl").read_text().splitlines()[0])
    (sequence,) = json.loads(shown(capsys, str(played), "1", "--tokens", "--json"))["tokens"]
    trained = [place for place, mask in enumerate(sequence["masks"]) if mask != -100]
    assert len(trained) == line["usage"]["completion_tokens"]
    assert "".join(sequence["texts"][place] for place in trained).startswith("<tool_call>\n")
    out = shown(capsys, str(played), "1", "--tokens")
    assert f"{len(sequence['tokens'])} tokens, {len(trained)} trained" in out
    listed = [one.split()[0] for one in out.splitlines() if one.rstrip().endswith("'") and one.split()[0].isdecimal()]
    assert listed == list(map(str, trained))


def on_a_terminal(*arguments: str, cwd: Path, **more: str) -> str:
    """Run the program on a terminal of 24 lines and 80 columns, and return what it wrote there."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environ = {name: value for name, value in environment({"TERM": "xterm", **more}).items() if name != "COLUMNS"}
    with os.fdopen(its, "r+b", 0) as terminal:
        process = Command(*arguments, cwd=cwd, env=environ, streams=(terminal, terminal, terminal))
    written, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([ours], [], [], 1.0)[0]:
            continue
        try:
            written += os.read(ours, 65536)
        except OSError:  # the program has ended
            break
    assert process.wait(timeout=10) == 0
    os.close(ours)
    return written.decode()


def test_a_terminal_has_colours_and_a_pager(played: Path) -> None:
    marked = "sed s/^/PAGED:/"
    out = on_a_terminal("show", "run", cwd=played.parent, PAGER=marked)
    assert "PAGED:\x1b[1mterminal-files process" in out
    plain = on_a_terminal("show", "run", cwd=played.parent, PAGER=marked, NO_COLOR="1")
    assert "\x1b[3" not in plain
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in plain.split("\r\n")) <= len("PAGED:") + 80
    assert "PAGED:" not in on_a_terminal("show", "run", "--no-pager", cwd=played.parent, PAGER=marked)
    assert "PAGED:" not in on_a_terminal("show", "run", "--failed", "--limit", "3", cwd=played.parent, PAGER=marked)
    assert "terminal-files process" in on_a_terminal("show", "run", cwd=played.parent, PAGER="/no/such/pager")


def test_a_pipe_may_be_closed_early(played: Path) -> None:
    command = f"{sys.executable} -m hermes_rl.cli.main show run 1 --tokens --full | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=played.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "sequence 1 of 1" in done.stdout


def test_show_failed_reports_a_run_without_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_run(tmp_path / "run", [recorded("a")], grading=GRADING))
    assert "every rollout passes" in shown(capsys, folder, "--failed")
    assert "no such rollout" in shown(capsys, folder, "--failed", "--tool", "other")


def test_the_calls_of_an_agent_program_are_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    helper = [("subagents", 1 + number if number else None, 3, True) for number in range(6)]
    line = programmed("a", [("side_calls", None, 9, False), ("main", None, 5, True), *helper, ("main", 1, 7, True)])
    folder = str(write_run(tmp_path / "run", [line]))
    out = shown(capsys, folder, "1")
    assert "program: 10 requests, 1 refused, status 0" in out and "refused, at last: `n` must be 1" in out
    rows = [each.split() for each in out.splitlines()]
    assert ["main", "2,", "9", "12", "12", "9:", "answer", "9"] in rows
    assert ["side_calls", "1", "9", "0", "1:", "answer", "1"] in rows
    assert ["subagents", "3–8", "18", "18", "3:", "answer", "3"] in rows
    assert "…" in out
    assert "6: answer 6" not in out
    assert "6: answer 6" in shown(capsys, folder, "1", "--full")
    assert "working <b>\\u001b[31m" in out
    assert "it has asked for temperature 0.2" in out


@pytest.mark.parametrize(
    ("calls", "stop_reason", "first"),
    [
        (
            [],
            "program_aborted",
            "the policy was never asked, so nothing was sampled: its program made 1 request (1 refused, the",
        ),
        ([], "timeout", "the policy was never asked, so nothing was sampled"),
        (
            [("main", None, 5, True)],
            "program_aborted",
            "its agent program aborted with status 0; the last request that was",
        ),
        ([("main", None, 5, True)], "timeout", "it ended before it was done: `agent.timeout`"),
    ],
)
def test_why_a_program_did_not_get_further(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: list[Any], stop_reason: str, first: str
) -> None:
    line = {**programmed("a", calls), "score": 0.5, "rewards": {}, "stop_reason": stop_reason}
    out = shown(capsys, str(write_run(tmp_path / "run", [line], grading=GRADING)), "1")
    assert f"why: {first}" in " ".join(out.split()), out
    assert ("`agent.timeout`" in out) == (stop_reason == "timeout")


def test_groups_graded_by_a_fallback_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [recorded(row, index, size=2) for row in "ab" for index in range(2)]
    for line in lines[:2]:
        line["rewards"]["right"]["metrics"] = {"fallback": 1.0}
    out = shown(capsys, str(write_run(tmp_path / "run", lines, grading=GRADING)))
    assert "the judge of right was unavailable: its fallback graded 1 group\n" in out
    lines[0]["rewards"]["right"]["metrics"] = lines[1]["rewards"]["right"]["metrics"] = {}
    assert "fallback" not in shown(capsys, str(write_run(tmp_path / "other", lines, grading=GRADING)))
