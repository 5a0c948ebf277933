"""`hermes-rl play`: one rollout, seen as it goes, by the policy or by a person."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.commands import hermes

SPEC = """
dataset: {items: [{word: blue}, {word: red}]}
prompt: {user: "Write {{ word }} into a file."}
toolsets: [file, terminal]
rewards: {right: {fn: file_matches, args: {path: a.txt, content: "{{ word }}"}}}
solution:
  turns:
    - tools: [{name: write_file, args: {path: a.txt, content: "{{ word }}"}}]
    - say: "\\x1b[2JIt is written."
"""
SCRIPTED = "servers: {policy: {type: scripted}}"


def play(folder: Path, *more: str, typed: str = "", spec: str = SPEC) -> subprocess.CompletedProcess[str]:
    (folder / "words.yaml").write_text(spec)
    return hermes("play", "words.yaml", *more, cwd=folder, typed=typed)


def test_a_rollout_is_seen_as_it_goes_and_nothing_is_recorded(tmp_path: Path) -> None:
    done = play(tmp_path, "--row", "1", spec=SPEC + SCRIPTED)
    assert done.returncode == 0, done.stderr
    seen = done.stdout
    order = [
        "Write red into a file.",
        "turn 1",
        "→ write_file",
        '"bytes_written": 3',
        "turn 2",
        "It is written.",
        "score        1",
    ]
    places = [seen.index(one) for one in order]
    assert places == sorted(places)
    assert "\x1b" not in seen
    assert [path.name for path in tmp_path.iterdir()] == ["words.yaml"]


def test_person_acts_as_the_model_when_the_spec_has_no_policy(tmp_path: Path) -> None:
    typed = (
        "/tools\n/nothing {}\n/write_file {bad\n/write_file [1]\n"
        '/write_file {"path": "a.txt", "content": "blue"}\n/terminal {"command": "cat a.txt"}\n\nIt is done.\n'
    )
    done = play(tmp_path, "--person", typed=typed)
    assert done.returncode == 0, done.stderr
    assert "You are the model." in done.stderr
    assert "/write_file  {path: string, content: string" in done.stdout
    assert "there is no tool 'nothing'; there are: " in done.stderr
    assert "the arguments are not valid JSON" in done.stderr and "the arguments are an object" in done.stderr
    results = [line.lstrip("> ") for line in done.stdout.splitlines() if "← " in line]
    assert results == ["← write_file", "← terminal"] and "── tool ──" not in done.stdout
    assert "score        1\nstop reason  finished: it replied without calling a tool\n" in done.stdout


def test_a_persons_wrong_answer_is_graded_as_a_models(tmp_path: Path) -> None:
    done = play(tmp_path, "--person", typed="I do not know.\n")
    assert done.returncode == 0
    assert "a.txt: No such file or directory" in done.stdout
    assert "score        0\nstop reason  finished: it replied without calling a tool\n" in done.stdout


def test_the_end_of_the_input_ends_the_rollout(tmp_path: Path) -> None:
    assert play(tmp_path, "--person", typed="").returncode == 130


def test_a_person_looks_into_the_sandbox_before_it_is_graded(tmp_path: Path) -> None:
    done = play(tmp_path, "--shell", typed="cat a.txt\nfalse\necho -n green > a.txt\nexit\n", spec=SPEC + SCRIPTED)
    assert done.returncode == 0, done.stderr
    assert "sandbox$ blue" in done.stdout
    assert "status 1" in done.stdout
    assert "score        0\n" in done.stdout  # what was changed, the rewards have seen


@pytest.mark.parametrize(
    ("more", "words"),
    [(("--row", "9"), "there is no row '9'"), ((), "no policy"), (("--openai.nothing", "1"), "nothing")],
)
def test_person_mode_reports_invalid_rows_policies_and_flags(more: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = play(tmp_path, *(("--person",) if "--row" in more else ()), *more)
    assert done.returncode == 2
    assert words in done.stderr


def test_unreachable_policy_is_reported_immediately(tmp_path: Path) -> None:
    away = 'servers: {policy: {type: openai, base_url: "http://127.0.0.1:9/v1", model: m}}'
    done = play(tmp_path, spec=SPEC + away)
    assert done.returncode != 0
    assert "127.0.0.1:9" in done.stderr


def test_play_and_show_print_calls_alike(tmp_path: Path) -> None:
    played = play(tmp_path, "--row", "1", spec=SPEC + SCRIPTED).stdout
    run = hermes("run", "words.yaml", "process", "--out", "run", "--set", "process.groups=2", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for number in map(str, range(1, 9)):
        shown = hermes("show", "run", number, "--no-pager", cwd=tmp_path).stdout
        if "Write red" in shown:
            break
    calls = [text[text.index("→ write_file") : text.index("── assistant, turn 2 ──")] for text in (played, shown)]
    assert calls[0] == re.sub(r"(?m)^(← .*) [0-9.]+ s$", r"\1", calls[1])
    ends = [re.search(r"^stop reason  .*$", text, re.MULTILINE) for text in (played, shown)]
    assert ends[0] is not None and ends[1] is not None and ends[0][0] == ends[1][0]
    assert "program" not in ends[0][0]
