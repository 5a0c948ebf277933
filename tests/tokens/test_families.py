"""Turns as the renderers of the package renderers read them: short ones here, long ones in a process of their own."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.tokens import families
from hermes_rl.tokens.families import FEW_TOKENS
from hermes_rl.tokens.tokenizer import TemplateRefused
from tests.tokens.families import MARKS_OF, adder, renderer_of, write_coder, write_hermes, write_kimi

WRITERS = {"qwen3": write_hermes, "qwen3.5": write_coder, "kimi-k2": write_kimi}
CALLS = [("add", {"a": 1, "text": "ß 😀"}), ("add", {"a": 2})]


@pytest.mark.parametrize("name", WRITERS)
async def test_a_long_turn_is_read_as_a_short_one(name: str) -> None:
    renderer = renderer_of(name)
    short = renderer.tokenizer.encode(WRITERS[name]("Soon 😀.", None, CALLS))
    words = renderer.tokenizer.encode("Words ß 😀 é. " * FEW_TOKENS)
    assert len(short) < FEW_TOKENS < len(words)
    here, apart = [await renderer.parse(said, [], adder()) for said in (short, words + short)]
    assert [(call.name, call.arguments) for call in here.calls] == CALLS
    assert apart.calls == here.calls
    assert apart.content == "Words ß 😀 é. " * FEW_TOKENS + here.content


@pytest.mark.parametrize(
    ("name", "text"),
    [("qwen3.5", "<tool_call><function=f>" + "<parameter=a>" * 40_000 + "</function></tool_call>"),
     ("deepseek-v4", '<｜DSML｜invoke name="f">\n' * 4_000)],
)  # fmt: skip
async def test_a_turn_that_takes_too_long_is_text(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "PARSE_SECONDS", 0.2)
    renderer = renderer_of(name)
    began = time.thread_time()
    parsed = await renderer.parse(renderer.tokenizer.encode(text), [], None)
    assert (parsed.content, parsed.calls) == (text, [])
    assert time.thread_time() - began < 1


async def test_arguments_nested_too_deeply_are_not_a_call() -> None:
    renderer = renderer_of("qwen3")
    for depth, called in ((150, True), (300, False)):
        nested = '{"a": ' * depth + "1" + "}" * depth
        written = f'<tool_call>\n{{"name": "f", "arguments": {nested}}}\n</tool_call>'
        (call,) = (await renderer.parse(renderer.tokenizer.encode(written), [], None)).calls
        assert (call.problem is None) == called


def test_families_of_these_tests_are_made() -> None:
    assert [renderer_of(name).name for name in MARKS_OF] == list(MARKS_OF)


def test_renderer_gets_no_picture_and_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from renderers import Qwen3Renderer

    renderer = renderer_of("qwen3")
    given: list[Any] = []
    monkeypatch.setattr(Qwen3Renderer, "render_ids", lambda _, messages, **__: given.append(messages) or [1])
    os.mkfifo(tmp_path / "pipe.png")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"
    for url in (address, str(tmp_path / "pipe.png"), f"file://{tmp_path}/pipe.png", "data:image/png;base64,AA=="):
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "image": url},
            {"type": "text", "text": "look", "image": url},
            {"type": "text", "text": {"image": url}},
            {"image_url": url},
            url,
        ):
            for content in ([{"type": "text", "text": "look"}, part], *([part] if isinstance(part, dict) else [])):
                with pytest.raises(TemplateRefused, match="only text can be sent"):
                    renderer.first([{"role": "user", "content": content}], None)
    assert given == []
    with listener, pytest.raises(BlockingIOError):
        listener.accept()
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]
    with pytest.raises(TemplateRefused, match="changes texts"):  # nothing is written here
        renderer.first([{"role": "user", "content": parts}], None)
    assert given[0] == [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
