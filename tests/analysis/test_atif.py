"""`hermes-rl export --format atif`: rollouts as trajectories that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.cli.main import status
from tests.analysis.recorded import recorded, write_run

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def odd() -> dict[str, Any]:
    """Return a rollout's line with all that a conversation may hold."""
    line = recorded("odd/one")
    bad = {"id": "c2", "type": "function", "function": {"name": "terminal", "arguments": '{"command": '}}
    line["messages"] = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]},
        {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [bad]},
        {"role": "tool", "tool_call_id": "c2", "content": '{"error": "malformed"}'},
        {"role": "tool", "tool_call_id": "c9", "content": "nobody asked"},
        {"role": "assistant", "content": "A picture."},
    ]
    line["prompt_length"] = 3
    return line


def exported(tmp_path: Path) -> dict[str, Any]:
    """Export a run of a plain and an odd rollout; the trajectories by the name of their file."""
    run = write_run(tmp_path / "run", [recorded("plain"), odd()])
    assert status(["export", str(run), "--format", "atif", "--out", str(tmp_path / "atif")]) == 0
    return {path.name: json.loads(path.read_text("utf-8")) for path in (tmp_path / "atif").iterdir()}


def test_each_rollout_is_a_file_with_its_steps(tmp_path: Path) -> None:
    plain = exported(tmp_path)["plain:0-0.json"]
    assert [step["source"] for step in plain["steps"]] == ["user", "agent", "agent"]
    assert [step["step_id"] for step in plain["steps"]] == [1, 2, 3]
    call = {"tool_call_id": "c1", "function_name": "terminal", "arguments": {"command": "ls"}}
    assert plain["steps"][1]["tool_calls"] == [call]
    assert plain["steps"][1]["observation"]["results"][0]["source_call_id"] == "c1"
    assert plain["extra"]["score"] == 1.0
    assert plain["agent"]["name"] == "hermes-rl"


def test_atif_export_keeps_context_images_and_unparsed_arguments(tmp_path: Path) -> None:
    steps = exported(tmp_path)["odd%2Fone:0-0.json"]["steps"]
    assert [step["source"] for step in steps] == ["system", "agent", "user", "agent", "agent"]
    assert [step.get("is_copied_context", False) for step in steps] == [False, True, False, False, False]
    assert steps[2]["message"][1]["source"] == {"media_type": "image/png", "path": IMAGE["image_url"]["url"]}  # type: ignore[index]
    assert steps[3]["tool_calls"][0]["arguments"] == {}
    assert steps[3]["tool_calls"][0]["extra"] == {"arguments": '{"command": '}
    assert steps[3]["reasoning_content"] == "Look."
    assert [result.get("source_call_id") for result in steps[3]["observation"]["results"]] == ["c2", None]


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    run = write_run(tmp_path / "run", [recorded("plain")])
    assert status(["export", str(run), "--out", str(tmp_path / "mine")]) == 2
    error = capsys.readouterr().err
    assert "no --format: writing atif" in error and "contains other files" in error
    assert status(["export", str(write_run(tmp_path / "none", [])), "--out", str(tmp_path / "new")]) == 2
    assert "no rollout with a conversation" in capsys.readouterr().err
