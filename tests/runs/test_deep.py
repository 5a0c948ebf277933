"""Faults of rewards that no schema can see: each is named, and a sound spec has none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hermes_rl.data.load import load_rows
from hermes_rl.errors import HermesRLError
from hermes_rl.runs.deep import BLIND, KINDS, DeepReport, Probe, examine, play
from hermes_rl.spec.load import load_spec

CODE = """
import random, time

def constant(result): return 0.5
def attempt(result): return len(result.messages) > 1
def tries(result, *, target):
    return result.final_response == target or len(result.messages) > 3
def long(result, *, target):
    said = result.final_response
    return said == target or (len(said) > 25 and "capital" in said)
def divides(result): return 1.0 / int(result.final_response) > 0 if result.final_response.isdigit() else 0.0
def words(result): return bool(result.final_response.strip())
def broken(result, *, target): return float("nan") if target in result.final_response else 0.0
def dice(result, *, target): return random.random() * (target in result.final_response)
def slow(result, *, target):
    time.sleep(0.3)
    return target in result.final_response
def numeric(result): return any(letter.isdigit() for letter in result.final_response)
def backwards(result, *, target): return target not in result.final_response
async def asks(result, judge): return "yes" in await judge.chat([{"role": "user", "content": result.final_response}])
async def reads(result, judge): return float(await judge.chat([{"role": "user", "content": result.final_response}]))
def heard(result): return any(m["content"] == "My name is Ann." for m in result.messages)
def ask() -> str:
    "Ask for the country."
    return "France"
"""
REASON = """
from hermes_rl import Score

def reason(result): return Score(0.0, reason="it does not say where")
"""
SOUND = """
version: 1
name: capitals
dataset:
  items: [{country: France, capital: Paris}, {country: Italy, capital: Rome}, {country: Spain, capital: Madrid}]
prompt: {user: "What is the capital of {{ country }}?"}
rewards:
  right: {fn: exact_match, args: {target: "{{ capital }}"}}
solution: {turns: [{say: "{{ capital }}"}]}
servers: {policy: {type: scripted}}
"""
RIGHT = 'right: {fn: exact_match, args: {target: "{{ capital }}"}}'


async def examined(folder: Path, text: str) -> DeepReport:
    (folder / "code.py").write_text(CODE)
    (folder / "spec.yaml").write_text(text)
    return await examine(load_spec(folder / "spec.yaml", demo=True))


async def test_a_sound_spec(tmp_path: Path) -> None:
    report = await examined(tmp_path, SOUND)
    assert report.problems == [] and report.warnings == []
    assert report.scores == dict(zip(KINDS, (1, 1, 0, 0, 0, 1), strict=True))


FAULTS = {
    "constant": (RIGHT, "right: {fn: code.py:constant}", "every answer scores 0.5, right or wrong"),
    "satisfied by nothing": (RIGHT, "right: {fn: code.py:attempt}", "every answer scores 1, right or wrong"),
    "satisfied by garbage": (RIGHT, "right: {fn: code.py:words}", "garbage scores like the solution"),
    "another row's answer": (
        RIGHT,
        "right: {fn: contains_all, args: {values: []}, weight: 0}\n  known: {fn: regex_match, "
        "args: {pattern: '^(Paris|Rome|Madrid)$'}}",
        "the solution of another row scores like a row's own (1 of 1)",
    ),
    "leaked answer": (
        "of {{ country }}?",
        "of {{ country }}? (It is {{ capital }}.)",
        "the prompt holds the answer",
    ),
    "the question is left out": ("of {{ country }}?", "of the country?", "the prompt is the same for every row"),
    "a filter that empties the data": ("prompt:", "  filter: country == 'Atlantis'\nprompt:", "no rows are left"),
    "not finite": (
        RIGHT,
        'right: {fn: code.py:broken, args: {target: "{{ capital }}"}}',
        "gold (row ",
    ),
    "not deterministic": (
        RIGHT,
        'right: {fn: code.py:dice, args: {target: "{{ capital }}"}}',
        "reward right is not deterministic",
    ),
    "wrong answers are better": (
        RIGHT,
        'right: {fn: code.py:backwards, args: {target: "{{ capital }}"}}',
        "scores like the solution (1 of 0)",
    ),
    "the solution is wrong": ('say: "{{ capital }}"', 'say: "It is {{ capital }}."', "every answer scores 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_is_named(tmp_path: Path, fault: str) -> None:
    before, after, expected = FAULTS[fault]
    assert before in SOUND
    try:
        found = (await examined(tmp_path, SOUND.replace(before, after, 1))).problems
    except HermesRLError as error:  # a finding too
        found = [str(error)]
    assert any(expected in problem for problem in found), found


BLINDLY = {
    "a frequent answer": (
        "capital: Rome}",
        'capital: "yes"}',
        RIGHT,
        RIGHT,
        "reward right",
        "'yes'",
        "1 (33%)",
        "row ",
    ),
    "an attempt": (
        "",
        "",
        RIGHT,
        RIGHT.replace("exact_match", "code.py:tries"),
        "reward right",
        "call without",
        "3 (100%)",
        "row ",
    ),
    "a penalty": ("", "", RIGHT, f"{RIGHT}\n  none: {{fn: code.py:words, weight: -0.5}}", "none", "", "", ""),
    "the prompt": (
        "",
        "",
        RIGHT,
        RIGHT.replace("exact_match", "code.py:long"),
        "reward right",
        "'the prompt'",
        "3 (100%)",
        "(1 instead of 0)",
    ),
    "a metric": (
        "",
        "",
        RIGHT,
        f"{RIGHT}\n  none: {{fn: code.py:long, args: {{target: a}}, weight: 0}}",
        "none",
        "",
        "",
        "",
    ),
}


@pytest.mark.parametrize("case", BLINDLY)
async def test_a_reward_that_pays_for_what_solves_nothing_is_named(tmp_path: Path, case: str) -> None:
    row, changed, before, after, *said = BLINDLY[case]
    text = SOUND.replace(before, after, 1).replace(row, changed, 1)
    report = await examined(tmp_path, text + "toolsets: [terminal]\n")
    assert report.problems == []
    warnings = [warning for warning in report.warnings if "pays for an answer that solves nothing" in warning]
    if said[0] == "none":
        assert warnings == []
    else:
        assert len(warnings) == 1 and all(part in warnings[0] for part in said), warnings


async def test_a_reward_that_fails_on_a_blind_answer_is_a_problem(tmp_path: Path) -> None:
    report = await examined(tmp_path, SOUND.replace(RIGHT, f"{RIGHT}\n  also: {{fn: code.py:divides, weight: 0.1}}"))
    (problem,) = report.problems
    assert problem.startswith("the answer '0' (row ") and "ZeroDivisionError" in problem


async def test_blind_answers_are_bounded_in_time(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SOUND)
    spec = load_spec(tmp_path / "spec.yaml", demo=True)
    rows = list(load_rows(spec, "train", notify=print))
    async with Probe(spec, rows) as probe:
        groups = [group async for group in play(probe, rows, "train", BLIND, seconds=0)]
    assert len(groups) == 1 and len(groups[0].rollouts) == len(BLIND)


async def test_a_slow_reward_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.runs.deep.SLOW_SECONDS", 0.2)
    slow = SOUND.replace(RIGHT, 'right: {fn: code.py:slow, args: {target: "{{ capital }}"}}')
    assert any(warning.startswith("reward right took") for warning in (await examined(tmp_path, slow)).warnings)


async def test_without_a_solution_only_the_wrong_is_played(tmp_path: Path) -> None:
    report = await examined(tmp_path, SOUND.replace('solution: {turns: [{say: "{{ capital }}"}]}\n', ""))
    assert list(report.scores) == ["empty", "garbage"]
    assert any("there is no solution" in warning for warning in report.warnings)


async def test_a_group_reward_compares_the_kinds(tmp_path: Path) -> None:
    pairs = 'right: {fn: llm_pairwise, args: {rubric: longer, reference: "no"}}'
    report = await examined(
        tmp_path, SOUND.replace(RIGHT, pairs).replace("policy: {", "judge: {type: scripted}, policy: {")
    )
    assert report.scores["empty"] is not None


@pytest.mark.parametrize("place", ["rollout", "fresh"])
async def test_tests_that_the_image_cannot_run_are_named_before_a_model_is_asked(tmp_path: Path, place: str) -> None:
    tests = f"tests: {{fn: tests_pass, sandbox: {place}, args: {{command: phpunit tests}}}}"
    report = await examined(tmp_path, SOUND.replace(RIGHT, tests))
    assert any("tests_pass: the command cannot run, as the image lacks 'phpunit'" in one for one in report.problems)


async def test_why_the_solution_fails_is_said_and_what_was_played_is_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "old").touch()
    (tmp_path / "code.py").write_text(REASON)
    turns = "turns: [{tools: [{name: terminal, args: {command: 'touch it; echo no way; exit 3'}}]}, {say: 'I cannot'}]"
    text = SOUND.replace(RIGHT, 'right: {fn: "code.py:reason"}').replace('turns: [{say: "{{ capital }}"}]', turns)
    (tmp_path / "spec.yaml").write_text(text + "toolsets: [terminal]\nartifacts: {it: {path: it}}\n")
    report = await examine(load_spec(tmp_path / "spec.yaml", demo=True), tmp_path / "kept")
    whys = [one for one in report.warnings if one.startswith("the solution of row ")]
    assert len(whys) == 3
    for said in ("scores 0 ", "right 0: it does not say where", "no way", "the last answer: 'I cannot'"):
        assert said in whys[0], whys[0]
    assert report.kept == tmp_path / "kept"
    assert sorted(path.name for path in report.kept.iterdir()) == ["artifacts", "rollouts.jsonl"]
    kept = [json.loads(line) for line in (report.kept / "rollouts.jsonl").read_text().splitlines()]
    assert Counter(line["kind"] for line in kept) == dict.fromkeys(KINDS, 3)
    assert (report.kept / kept[0]["artifacts"]["it"]["path"]).is_file()


async def test_what_a_program_says_that_never_asks_is_named(tmp_path: Path) -> None:
    program = 'agent: {program: {command: [sh, -c, "echo there is no such option; exit 3"]}}\n'
    report = await examined(tmp_path, SOUND + program)
    assert "made 0 requests (0 refused) and ended with status 3: there is no such option" in report.warnings[0]


async def test_of_a_sound_spec_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SOUND)
    report = await examine(load_spec(tmp_path / "spec.yaml", demo=True), tmp_path / "kept")
    assert report.kept is None and not (tmp_path / "kept").exists()


async def test_the_same_prompt_for_every_row_is_right_for_a_game(tmp_path: Path) -> None:
    text = SOUND.replace("of {{ country }}?", "of the country that ask() tells?")
    report = await examined(tmp_path, text + "tools: [{python: code.py:ask}]\n")
    assert report.problems == []
    assert [one for one in report.warnings if "the prompt is the same for every row" in one]


async def test_the_same_prompt_for_every_row_is_right_for_a_program_that_looks_into_its_sandbox(tmp_path: Path) -> None:
    program = 'agent: {program: {command: [cat, country], env: {URL: "{{ endpoint }}"}}}\n'
    files = 'sandbox: {files: [{to: country, content: "{{ country }}"}]}\n'
    report = await examined(tmp_path, SOUND.replace("of {{ country }}?", "of the country?") + program + files)
    assert not [problem for problem in report.problems if "the prompt is the same for every row" in problem]
    assert [warning for warning in report.warnings if "the prompt is the same for every row" in warning]


async def test_rows_that_are_all_for_evaluation_are_played(tmp_path: Path) -> None:
    report = await examined(tmp_path, SOUND.replace("dataset:\n", "dataset:\n  eval: only\n"))
    assert report.problems == [] and report.scores["gold"] == 1


@pytest.mark.parametrize("reward", ["asks", "reads"])
async def test_what_a_scripted_judge_says_is_no_fault_of_the_spec(tmp_path: Path, reward: str) -> None:
    """Fault 36: a right spec was blamed, with status 2, since no script judges as a model does."""
    text = SOUND.replace(RIGHT, f"right: {{fn: code.py:{reward}}}").replace(
        "servers: {", "servers: {judge: {type: openai, base_url: 'http://localhost:1', model: j}, "
    )
    report = await examined(tmp_path, text)
    assert report.problems == []
    said = "`judge`, which reward right asks, is played by a script here, and a script does not judge as a model does"
    assert any(said in warning for warning in report.warnings), report.warnings
    broken = text.replace("rewards:\n", "rewards:\n  mine: {fn: code.py:broken, args: {target: a}}\n")
    assert any("mine" in problem for problem in (await examined(tmp_path, broken)).problems)


async def test_what_a_scripted_user_leaves_out_is_no_fault_of_the_spec(tmp_path: Path) -> None:
    """Fault 36: a solution that does not say what the user says was blamed for it."""
    text = SOUND.replace(RIGHT, "right: {fn: code.py:heard}").replace(
        "servers: {",
        "user: {stop: [Bye], max_turns: 3}\nservers: {user: {type: openai, base_url: 'http://localhost:1', model: u}, ",
    )
    report = await examined(tmp_path, text)
    assert report.problems == []
    assert any("the simulated user is played by a script" in one and "`user:`" in one for one in report.warnings)
    told = text.replace('[{say: "{{ capital }}"}]', '[{say: "{{ capital }}"}, {user: I am Bob.}]')
    assert any("every answer scores 0" in problem for problem in (await examined(tmp_path, told)).problems)
