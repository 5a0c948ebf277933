"""`hermes-rl grade SPEC --atif FILES` scores trajectories of other agents with a spec's rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.analysis.external_trajectories import read_atif
from hermes_rl.cli.main import status

SPEC = """
dataset: {items: [{q: "One and one?", a: "2"}, {q: "Two and two?", a: "4"}], key: q}
prompt: {system: Answer., user: "{{ q }}"}
toolsets: [todo]
rewards:
  exact_match: {args: {target: "{{ a }}"}}
  tool_usage: {weight: 0.5, args: {any_of: [todo]}}
solution: {turns: [{tools: [{name: todo, args: {}}]}, {say: "{{ a }}"}]}
process: {group_size: 1, groups: 2}
servers: {policy: {type: scripted}}
"""


def trajectory(question: str = "Two and two?", answer: str = "4", **changes: Any) -> dict[str, Any]:
    """A trajectory as another agent may have written it."""
    call = {"tool_call_id": "x", "function_name": "todo", "arguments": {"merge": True}}
    seen = {"results": [{"source_call_id": "x", "content": "nothing"}, {"content": [{"type": "text", "text": "more"}]}]}
    steps: list[dict[str, Any]] = [
        {"step_id": 1, "source": "system", "message": "Be somebody else."},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": f"{question} "}]},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "reasoning_content": "Hm.",
            "tool_calls": [call],
            "observation": seen,
        },
        {
            "step_id": 4,
            "source": "agent",
            "message": answer,
            "metrics": {"prompt_tokens": 5},
            "timestamp": "2026-01-01",
        },
    ]
    return {
        **{"schema_version": "ATIF-v1.6", "session_id": "s", "agent": {"name": "other", "version": "1"}},
        **{"steps": steps, "final_metrics": {"total_prompt_tokens": 5, "total_completion_tokens": 2}},
        **changes,
    }


def write(folder: Path, **files: dict[str, Any]) -> list[str]:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return [str(folder / f"{name}.json") for name in files]


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return str(tmp_path / "spec.yaml")


def test_each_is_graded_as_its_row_asks(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, right=trajectory(), wrong=trajectory(answer="5"), other=trajectory("One and one?", "2"))
    assert status(["grade", spec, "--json", "--atif", *files]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["row_key"], each["score"]) for each in said] == [
        ("Two and two?", 1.5),
        ("Two and two?", 0.5),
        ("One and one?", 1.5),
    ]
    assert status(["grade", spec, "--atif", files[0], "--row", "One and one?"]) == 0
    assert "0.5  " in (said_by := capsys.readouterr().out) and "exact_match 0, tool_usage 1" in said_by


def test_a_run_that_was_exported_scores_as_it_did(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["run", spec, "process", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert status(["export", str(tmp_path / "run"), "--out", str(tmp_path / "atif")]) == 0
    capsys.readouterr()
    files = [str(path) for path in sorted((tmp_path / "atif").iterdir())]
    assert status(["grade", spec, "--json", "--atif", files[0], "--atif", *files[1:]]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    recorded = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(said) == 2
    graded, before = (
        {
            line["row_key"]: {name: (each["value"], each.get("metrics")) for name, each in line["rewards"].items()}
            for line in lines
        }
        for lines in (said, recorded)
    )
    assert graded == before


def test_what_rewards_see_is_what_was_said(tmp_path: Path) -> None:
    (file,) = write(tmp_path, one=trajectory())
    result, _ = read_atif(Path(file))
    assert [message["role"] for message in result.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert (result.prompt_length, result.turns_used, result.final_response) == (2, 2, "4")
    assert (result.tool_calls[0].name, result.tool_calls[0].arguments) == ("todo", {"merge": True})
    assert (result.tool_calls[0].result, result.reasoning_per_turn) == ("nothing", ["Hm.", None])
    assert result.usage.completion_tokens == 2


STEPS: list[Any] = trajectory()["steps"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"steps": []}, "steps: "),
    "another version": ({"schema_version": "ATIF-v2.0"}, "schema_version: "),
    "no agent": ({"agent": {"version": "1"}}, "agent.name: "),
    "numbers that are not in order": ({"steps": [{**STEPS[0], "step_id": 2}]}, "counts the steps from 1"),
    "nobody": ({"steps": [{**STEPS[0], "source": "tool"}]}, "steps.0.source: "),
    "a call of the user's": ({"steps": [{**STEPS[2], "step_id": 1, "source": "user"}]}, "only an agent calls tools"),
    "an answer to nothing": (
        {"steps": [{**STEPS[0], "observation": {"results": [{"source_call_id": "y"}]}}]},
        "answers the call 'y'",
    ),
    "arguments as a text": (
        {"steps": [{**STEPS[2], "step_id": 1, "tool_calls": [{**STEPS[2]["tool_calls"][0], "arguments": "{}"}]}]},
        "steps.0.tool_calls.0.arguments: ",
    ),
    "a picture without a source": ({"steps": [{**STEPS[0], "message": [{"type": "image"}]}]}, "steps.0.message"),
    "a message that is none": ({"steps": [{**STEPS[0], "message": None}]}, "steps.0.message"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_grade_refuses_an_invalid_trajectory_with_its_location(
    name: str, spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, why = REFUSED[name]
    files = write(tmp_path, odd=trajectory(**changes))
    assert status(["grade", spec, "--atif", *files]) == 2
    error = capsys.readouterr().err
    assert "odd.json: this is not a trajectory in ATIF: " in error and why in error and "Traceback" not in error


def test_grade_refuses_unknown_rows_and_unsupported_rewards(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write(tmp_path, stray=trajectory("Three and three?"), right=trajectory())
    for arguments, why in (
        (files[:1], "there is no row whose prompt is its first user message; pass the row's key with --row KEY"),
        ([files[1], "--row", "Nine?"], "there is no row with the key 'Nine?'"),
        ([str(tmp_path / "none.json")], "none.json cannot be read"),
        (
            [files[1], "--set", "rewards.file_matches={args: {path: a, content: b}}"],
            "a trajectory has none; leave it out",
        ),
        (
            [
                files[1],
                "--set",
                "rewards.llm_pairwise={args: {rubric: good}}",
                "--set",
                "servers.judge={type: scripted}",
            ],
            "group",
        ),
    ):
        assert status(["grade", spec, "--atif", *arguments]) == 2
        assert why in capsys.readouterr().err
