"""Answers of tools that reach outside, kept and given again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.python_tools import python_tool
from hermes_rl.tools.recording import Recorder, Replay
from tests.tools.calling import Player

asked: list[str] = []


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word.
    """
    asked.append(word)
    if word == "bad":
        raise ValueError("no such word")
    return f"{word} {len(asked)}"


async def answers(tool: Any, *words: str) -> list[str]:
    async with ToolRuntime(toolkit=Toolkit([tool])) as runtime:
        play = Player(runtime)
        return [(await play.outcome("look_up", json.dumps({"word": word}))).content for word in words]


async def test_recorded_tool_results_repeat_per_rollout(tmp_path: Path) -> None:
    asked.clear()
    tool = python_tool(look_up)
    recorded = await answers(Recorder(tmp_path).wrap(tool, "words"), "a", "b", "a")
    assert recorded == ["a 1", "b 2", "a 3"]
    (replayed,) = Replay(tmp_path).tools("words")
    assert replayed.schema == tool.schema
    for _ in range(2):  # each rollout from the start
        assert await answers(replayed, "a", "a", "b", "a") == ["a 1", "a 3", "b 2", "a 3"]
    assert len(asked) == 3, "the tool itself was not called again"


async def test_a_recording_is_continued(tmp_path: Path) -> None:
    asked.clear()
    await answers(Recorder(tmp_path).wrap(python_tool(look_up), "words"), "a")
    await answers(Recorder(tmp_path).wrap(python_tool(look_up), "words"), "b")
    assert len((tmp_path / "tools.jsonl").read_text().splitlines()) == 1
    assert await answers(Replay(tmp_path).tools("words")[0], "b", "a") == ["b 2", "a 1"]


async def test_whatever_text_an_answer_holds_is_recorded_and_read_again(tmp_path: Path) -> None:
    words = ["a\u2028b", "a\x85b", "a\x0cb", "half \ud83d", "a\r\nb"]
    recorded = await answers(Recorder(tmp_path).wrap(python_tool(look_up), "words"), *words)
    assert await answers(Replay(tmp_path).tools("words")[0], *words) == recorded
    path = tmp_path / "answers.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n") if line]
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines if "half" not in one["answer"]))
    assert await answers(Replay(tmp_path).tools("words")[0], words[0]) == recorded[:1]


async def test_unrecorded_call_returns_an_error_to_the_model(tmp_path: Path) -> None:
    await answers(Recorder(tmp_path).wrap(python_tool(look_up), "words"), "a")
    (answer,) = await answers(Replay(tmp_path).tools("words")[0], "z")
    assert "this call has no recorded answer" in answer
    with pytest.raises(UserError, match="has words, not web"):
        Replay(tmp_path).tools("web")


def test_no_recording(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has nothing, not web"):
        Replay(tmp_path).tools("web")
    (tmp_path / "tools.jsonl").write_text("{no json\n")
    with pytest.raises(UserError, match="holds no recording"):
        Replay(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be used"):
        Recorder(tmp_path / "file")
