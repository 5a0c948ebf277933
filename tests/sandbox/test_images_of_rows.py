"""A run of rows with images of their own: what each was played in is on record, what cannot be had is set aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from tests.sandbox.test_docker import plan  # noqa: F401

SPEC = """
version: 1
name: images
dataset: {items: [{image: one}, {image: gone}, {image: two}], key: image, shuffle: 0, eval: only}
prompt: {user: "Say where you are."}
toolsets: {enabled: [terminal]}
sandbox: {backend: docker, image: "{{ image }}"}
rewards: {right: {fn: exact_match, args: {target: "{{ image }}"}}}
solution:
  turns: [{tools: [{name: terminal, args: {command: "true"}}]}, {say: "{{ image }}"}]
servers: {policy: {type: scripted, error_rate: 0}}
"""
TRAIN = SPEC.replace(", eval: only", "") + "process: {group_size: 2, groups: 12, drop_uniform: false}\n"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
async def engine(plan: Any) -> None:  # noqa: F811
    """It has two of the three images."""
    await plan(images={"one": {}, "two": {}}, nowhere=["gone"])


@pytest.mark.usefixtures("engine")
async def test_row_with_an_unavailable_image_is_quarantined(tmp_path: Path) -> None:
    (tmp_path / "images.yaml").write_text(TRAIN)
    summary, directory = await run_process(load_spec(tmp_path / "images.yaml"), RunOptions("process", tmp_path / "out"))
    assert (summary.written, summary.stopped) == (12, None)
    (aside,) = directory.read_run_info()["quarantined"]
    assert (aside["row_key"], aside["cause"]) == ("gone", "sandbox_failure")
    assert "the image gone cannot be pulled" in aside["detail"]
    assert {group["row_key"] for group in lines(directory.path / "groups.jsonl")} == {"one", "two"}


@pytest.mark.usefixtures("engine")
async def test_digests_are_on_record(tmp_path: Path) -> None:
    (tmp_path / "images.yaml").write_text(SPEC.replace("{image: gone}, ", ""))
    _, directory = await run_evaluate(load_spec(tmp_path / "images.yaml"), RunOptions("evaluate", tmp_path / "out"))
    digests = {name: [f"{name}@sha256:{'ab' * 32}"] for name in ("one", "two")}
    assert directory.read_run_info()["images"] == digests
    played = {line["row_key"]: line["image"] for line in lines(directory.path / "rollouts.jsonl")}
    assert played == {name: digest for name, (digest,) in digests.items()}
