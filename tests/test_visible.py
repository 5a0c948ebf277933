"""What agents write is only text, wherever a person sees it."""

# ruff: noqa: E501

from __future__ import annotations

import io
import json
import tracemalloc
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.runs.progress import Progress
from hermes_rl.terminal_text import end_of, escape_controls, start_of
from tests.commands import hermes

HOSTILE = {
    "clear the screen": "\x1b[2J", "title": "\x1b]0;pwned\x07", "C1 sequence": "\x9b31m", "one line over another": "\rok",
    "backspace": "bad\b\b\bgood", "bell": "\x07", "null": "\0", "delete": "\x7f", "next line": "\x85", "form feed": "\f",
    "right to left": "\u202egnp.exe", "isolate": "\u2066x\u2069", "mark": "\u200f", "Arabic mark": "\u061c",
    "line separator": "\u2028", "paragraph separator": "\u2029", "surrogate": "\udc80", "zero width": "\u200b",
    "tag": "\U000e0041", "byte order mark": "\ufeff", "soft hyphen": "\u00ad", "clipboard": "\x1b]52;c;eA==\x07",
    "answer back": "\x05", "device": "\x1bP+q\x1b\\", "vertical tab": "\v",
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_terminal_would_obey_is_shown_escaped(what: str) -> None:
    text = HOSTILE[what]
    shown = escape_controls(f"a {text} b")
    assert shown.isprintable()
    assert shown.startswith("a ") and shown.endswith(" b") and "\\u" in shown


@pytest.mark.parametrize("text", ["", "plain", "ä ö 中文 ✓ ·", "👩‍💻", "two\nlines\tand a tab", "mi\u200cx"])
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert escape_controls(text) == text


@given(st.text())
def test_all_that_is_shown_can_be_printed_and_json_stays_json(text: str) -> None:
    shown = escape_controls(text)
    shown.encode()
    assert not {unicodedata.category(each) for each in shown} & {"Cs", "Zl", "Zp"}
    assert set("".join(each for each in shown if unicodedata.category(each) == "Cc")) <= {"\n", "\t"}
    assert json.loads(escape_controls(json.dumps({"a": text}, ensure_ascii=False))) == {"a": text}


def test_notes_and_lines_of_progress_are_text() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for text in HOSTILE.values():
        progress.note(f"row x failed: {text}")
        progress.show(text, [1.0], last=True)
    assert all(line.isprintable() for line in stream.getvalue().split("\n"))


SPEC = """
name: esc
dataset: {items: [{q: hi}]}
prompt: {user: "{{ q }}"}
toolsets: [terminal]
rewards:
  own: {fn: "look.py:own"}
solution: {turns: [{tools: [{name: terminal, args: {command: "true"}}]}]}
servers: {policy: {type: scripted, error_rate: 0}}
process: {group_size: 1, groups: 1}
"""
LOOK = """
def own(ctx):
    raise ValueError(ctx.terminal("printf '\\\\033[2J\\\\033]0;pwned\\\\007 \\\\342\\\\200\\\\256 x\\\\rdone'")["output"])
"""


@pytest.mark.parametrize("command", [["run", "{spec}", "process", "--out", "{out}"], ["validate", "{spec}", "--deep"]])
def test_a_whole_run_prints_no_control_character_of_an_agent(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "esc.yaml").write_text(SPEC)
    (tmp_path / "look.py").write_text(LOOK)
    words = [word.format(spec=tmp_path / "esc.yaml", out=tmp_path / "run") for word in command]
    done = hermes(*words, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert "pwned" in said
    assert all(line.isprintable() for line in said.replace("\t", " ").split("\n")), said


@pytest.mark.slow
def test_a_long_text_takes_memory_by_its_length_alone() -> None:
    text = "\u2212" * 900_000
    tracemalloc.start()
    try:
        assert escape_controls(text) == text
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12_000_000


@given(st.text(alphabet="ab \n", max_size=60), st.integers(8, 40))
def test_cut_texts_start_and_end_with_whole_words(text: str, most: int) -> None:
    start, end = start_of(text, most), end_of(text, most)
    if len(text) <= most:
        assert start == end == text
        return
    assert len(start) <= most and len(end) <= most
    assert start[-1] == end[0] == "…"
    assert text.startswith(start[:-1]) and text.endswith(end[1:])
    words = text[: most - 1].split()
    if len(words) > 1 and 2 * len(text[: most - 1].rstrip().rpartition(words[-1])[0].rstrip()) > most:
        assert text[len(start) - 1].isspace(), "it is cut within a word"


def test_reasons_start_with_a_whole_word() -> None:
    output = "E   assert parsed(level) == ([level:], package, level)\n" * 3
    assert end_of(output, 60) == "…E   assert parsed(level) == ([level:], package, level)\n"
    assert start_of("The answer names no source for the second claim", 30) == "The answer names no source…"
    assert end_of("x" * 50, 20) == "…" + "x" * 19
