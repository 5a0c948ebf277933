"""Faults of rewards that no schema can see: each is named, and a sound spec has none."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from hermes_rl.data.load import load_rows
from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.runs.deep_answers import BLIND, KINDS, Probe, play
from hermes_rl.runs.reward_check import DeepReport, check_rewards
from hermes_rl.spec.deep_checks import table
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
def called(result): return bool(result.messages[-2].get("role") == "tool")
class Counter:
    def __init__(self, item): self.count = 0
def counting(result, state, *, target):
    state.count += 1
    return (target in result.final_response) / state.count
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
    return await check_rewards(load_spec(folder / "spec.yaml", demo=True))


def test_documentation_has_the_table_of_the_checks() -> None:
    page = Path(__file__).parents[2] / "docs" / "rewards.md"
    assert table() in page.read_text(encoding="utf-8"), f"docs/rewards.md needs:\n{table()}"


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
        "the prompt contains the answer",
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
async def test_reward_for_an_answer_that_solves_nothing_is_named(tmp_path: Path, case: str) -> None:
    row, changed, before, after, *said = BLINDLY[case]
    text = SOUND.replace(before, after, 1).replace(row, changed, 1)
    report = await examined(tmp_path, text + "toolsets: [terminal]\n")
    warnings = [warning for warning in report.warnings if "pays for an answer that solves nothing" in warning]
    if said[0] == "none":
        assert warnings == []
    else:
        assert len(warnings) == 1 and all(part in warnings[0] for part in said), warnings


PASSING = {
    "an answer that passes everywhere": ({}, 'right: {fn: code.py:tries, args: {target: "{{ capital }}"}}', "error"),
    "an answer that passes on a third": ({"capital: Rome": 'capital: "nan"'}, RIGHT, None),
    "an answer that passes on two thirds": (
        {"capital: Rome": 'capital: "nan"', "capital: Paris": 'capital: "nan"'},
        RIGHT,
        "error",
    ),
    "a word of the prompt": (
        {"capital: Rome": 'capital: "Italy"', "capital: Paris": "capital: France"},
        RIGHT,
        "error",
    ),
    "calls that were refused": ({}, "right: {fn: code.py:called}", "error"),
}


@pytest.mark.parametrize("case", PASSING)
async def test_blind_answer_that_passes_on_half_of_the_rows_is_an_error(tmp_path: Path, case: str) -> None:
    changes, reward, severity = PASSING[case]
    text = SOUND.replace(RIGHT, reward).replace("{{ country }}?", "{{ country }}")
    for before, after in changes.items():
        text = text.replace(before, after)
    if "called" in reward:
        solution = "turns: [{tools: [{name: ask, args: {}}]}, {say: Done}]}\ntools: [{python: code.py:ask}]"
        text = re.sub(r"turns: .*", solution, text)
    report = await examined(tmp_path, text)
    assert severities(report).get("blind_answers_pass") == severity, report.findings


def severities(report: DeepReport) -> dict[str, str]:
    return {finding.check: finding.severity for finding in report.findings}


GENERIC = """
name: lines
dataset: {items: [{text: "a\\nb\\n", n: "2"}, {text: "a\\n", n: "1"}, {text: "a\\nb\\nc\\n", n: "3"}]}
prompt: {user: "Count the lines of in.txt into out.txt."}
toolsets: [terminal]
sandbox: {files: [{to: in.txt, content: "{{ text }}"}]}
rewards: {file: {fn: file_matches, args: {path: out.txt, content: "{{ n }}"}}}
solution: {turns: [{tools: [{name: terminal, args: {command: "wc -l < in.txt > out.txt"}}]}, {say: "{{ n }}"}]}
"""


async def test_rows_with_the_same_solution_are_not_near_misses(tmp_path: Path) -> None:
    report = await examined(tmp_path, GENERIC)
    assert report.problems == [] and "near miss" not in report.scores
    assert "another row's solution" not in report.blind


async def test_solution_below_the_pass_mark_on_every_row_is_an_error(tmp_path: Path) -> None:
    half = f"{RIGHT}\n  file: {{fn: file_matches, args: {{path: out.txt, content: a}}}}\nscore: {{combine: minimum}}"
    text = SOUND.replace(RIGHT, half) + "toolsets: [terminal]\n"
    assert severities(await examined(tmp_path, text))["gold_fails"] == "error"
    one = SOUND.replace('say: "{{ capital }}"', "say: \"{{ 'x' if capital == 'Rome' else capital }}\"")
    report = await examined(tmp_path, one)
    assert severities(report) == {"gold_fails_on_some_rows": "warning"}
    assert len(report.failing) == 1 and report.failing[0] in report.warnings[0]


async def test_answers_that_run_out_of_time_are_reported_as_that(tmp_path: Path) -> None:
    slow = "outcome: {fn: command_output, args: {command: sleep 5, expected: a, timeout: 0.1}}"
    report = await examined(tmp_path, SOUND.replace(RIGHT, slow) + "toolsets: [terminal]\n")
    assert severities(report) == {"timeouts": "error"}
    assert "reward outcome: no end within 0.1 s" in report.problems[0]
    assert "18 of 18 rollouts" in report.problems[0]


async def test_agents_that_run_out_of_time_are_reported_as_that(tmp_path: Path) -> None:
    calls = "{tools: [{name: terminal, args: {command: sleep 0.2}}]}, " * 9
    text = SOUND.replace("turns: [", f"turns: [{calls}") + "toolsets: [terminal]\nagent: {timeout: 0.6}\n"
    report = await examined(tmp_path, text)
    assert severities(report)["timeouts"] == "error" and "constant_score" not in severities(report)
    assert (
        "9 of 18 rollouts (gold, gold again, near miss; rows" in report.problems[0]
        and "agent.timeout" in report.problems[0]
    )


SKIPPED = """
import pytest

@pytest.mark.skip
def test_one():
    assert False
"""


@pytest.mark.slow
async def test_tests_that_are_all_skipped_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SKIPPED)
    tests = (
        "tests: {fn: tests_pass, args: {command: python -m pytest -q test_it.py, "
        "files: [{to: test_it.py, from: test_it.py}]}}\nsandbox: {python: [pytest]}"
    )
    report = await examined(tmp_path, SOUND.replace(RIGHT, tests) + "toolsets: [terminal]\n")
    assert severities(report)["tests_skipped"] == "error" and len(report.problems) == 1


async def test_reward_that_differs_on_the_same_end_state_is_named(tmp_path: Path) -> None:
    counting = 'right: {fn: "code.py:counting", args: {target: "{{ capital }}"}, isolate: none}'
    report = await examined(
        tmp_path, SOUND.replace(RIGHT, counting) + "state: {python: code.py:Counter, isolate: none}\n"
    )
    assert severities(report)["not_repeatable"] == "error"
    assert "reward right is not repeatable" in report.problems[0]


async def test_row_that_passes_untouched_is_a_warning_that_names_it(tmp_path: Path) -> None:
    text = SOUND.replace("dataset:", "dataset:\n  key: country").replace("capital: Rome", 'capital: ""')
    report = await examined(tmp_path, text)
    assert severities(report)["untouched_passes"] == "warning"
    assert any("1 of 3 rows pass although nothing was done; row Italy" in one for one in report.warnings)


async def test_reward_that_never_varies_is_a_warning(tmp_path: Path) -> None:
    report = await examined(tmp_path, SOUND.replace(RIGHT, f"{RIGHT}\n  idle: {{fn: code.py:constant, weight: 0.1}}"))
    assert severities(report) == {"constant_reward": "warning"}
    assert "reward idle is 0.5 for each of" in report.warnings[0]


@pytest.mark.parametrize("severity", ["off", "warning", "error"])
async def test_check_severity_follows_the_spec(tmp_path: Path, severity: str) -> None:
    text = SOUND.replace(RIGHT, f"{RIGHT}\n  idle: {{fn: code.py:constant, weight: 0.1}}")
    report = await examined(tmp_path, f"{text}checks: {{constant_reward: {severity}}}\n")
    assert severities(report) == ({} if severity == "off" else {"constant_reward": severity})


LEAKS = {
    "said": ("of {{ country }}?", "of {{ country }}? (It is {{ capital }}.)", "error"),
    "one of several": ("of {{ country }}?", "of {{ country }}: Paris, Rome, or Madrid?", "warning"),
    "an option": ("of {{ country }}?", "of {{ country }}?\\nA) {{ capital }}\\nB) Oslo", "warning"),
    "a part of a text": (
        "of {{ country }}?",
        "of {{ country }}? {{ 'A long text. ' * 50 }} {{ capital }} is.",
        "warning",
    ),
}


@pytest.mark.parametrize("case", LEAKS)
async def test_answer_in_the_prompt_is_only_a_warning_for_choices(tmp_path: Path, case: str) -> None:
    before, after, severity = LEAKS[case]
    assert severities(await examined(tmp_path, SOUND.replace(before, after)))["leaked_answer"] == severity


async def test_all_rows_are_checked_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.runs.reward_check.LOOKED_AT", 4)
    monkeypatch.setattr("hermes_rl.runs.reward_check.ROWS_IN_MEMORY", 4)
    rows = ", ".join(f"{{country: c{n}, capital: {n}x}}" for n in range(8))
    (tmp_path / "spec.yaml").write_text(SOUND.replace(SOUND.split("items: ")[1].split("\n")[0], f"[{rows}]"))
    spec = load_spec(tmp_path / "spec.yaml", demo=True)
    report = await check_rewards(spec, rows="all")
    assert report.rows == 8 and report.scores["gold"] == 1
    assert report.blind["the prompt"] == {"rows": 8, "mean": 0, "passing": 0}
    assert (await check_rewards(spec, rows=3)).rows == 3


async def test_endless_generator_is_refused_by_name_where_all_rows_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.data.load.ENDLESS", 2000)
    (tmp_path / "rows.py").write_text(
        "import itertools\ndef rows(**_):\n"
        "    return ({'country': str(n), 'capital': f'{n}x'} for n in itertools.count())\n"
    )
    generated = "\n".join(line for line in SOUND.splitlines() if "items:" not in line)
    (tmp_path / "spec.yaml").write_text(generated.replace("dataset:", "dataset: {generator: rows.py:rows}"))
    spec = load_spec(tmp_path / "spec.yaml", demo=True)
    with pytest.raises(UserError, match=r"dataset\.generator: .*rows\.py:rows has given 2001 rows .*--rows N"):
        await check_rewards(spec, rows="all")
    assert (await check_rewards(spec, rows=2)).problems == []
    monkeypatch.setattr("hermes_rl.data.load.ENDLESS_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"has given 1 rows in 0 s and not ended"):
        await check_rewards(spec, rows="all")


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
    monkeypatch.setattr("hermes_rl.runs.deep_checks.SLOW_SECONDS", 0.2)
    slow = SOUND.replace(RIGHT, 'right: {fn: code.py:slow, args: {target: "{{ capital }}"}}')
    assert any(warning.startswith("reward right took") for warning in (await examined(tmp_path, slow)).warnings)


async def test_spec_without_a_solution_is_checked_with_wrong_answers_only(tmp_path: Path) -> None:
    report = await examined(tmp_path, SOUND.replace('solution: {turns: [{say: "{{ capital }}"}]}\n', ""))
    assert list(report.scores) == ["empty", "garbage"]
    assert any("there is no solution" in warning for warning in report.warnings)


async def test_a_group_reward_compares_the_kinds(tmp_path: Path) -> None:
    pairs = 'right: {fn: llm_pairwise, args: {rubric: longer, reference: "no"}}'
    report = await examined(
        tmp_path, SOUND.replace(RIGHT, pairs).replace("policy: {", "judge: {type: scripted}, policy: {")
    )
    assert report.scores["empty"] is not None
    assert not any(each.check.startswith("gold_fails") for each in report.findings), "its own copies are as good"
    assert report.failing == []


@pytest.mark.parametrize("place", ["rollout", "fresh"])
async def test_tests_that_the_image_cannot_run_are_named_before_a_model_is_asked(tmp_path: Path, place: str) -> None:
    tests = f"tests: {{fn: tests_pass, sandbox: {place}, args: {{command: phpunit tests}}}}"
    report = await examined(tmp_path, SOUND.replace(RIGHT, tests))
    assert any("tests_pass: the command cannot run, as the image lacks 'phpunit'" in one for one in report.problems)


async def test_failing_solution_is_explained_and_its_rollouts_are_saved(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "old").touch()
    (tmp_path / "code.py").write_text(REASON)
    turns = "turns: [{tools: [{name: terminal, args: {command: 'touch it; echo no way; exit 3'}}]}, {say: 'I cannot'}]"
    text = SOUND.replace(RIGHT, 'right: {fn: "code.py:reason"}').replace('turns: [{say: "{{ capital }}"}]', turns)
    (tmp_path / "spec.yaml").write_text(text + "toolsets: [terminal]\nartifacts: {it: {path: it}}\n")
    report = await check_rewards(load_spec(tmp_path / "spec.yaml", demo=True), tmp_path / "kept")
    whys = [one for one in report.problems if one.startswith("the solution of row ")]
    assert len(whys) == 3
    for said in ("scores 0 ", "right 0: it does not say where", "no way", "the last answer: 'I cannot'"):
        assert said in whys[0], whys[0]
    assert report.rollouts_directory == tmp_path / "kept"
    assert sorted(path.name for path in report.rollouts_directory.iterdir()) == ["artifacts", "rollouts.jsonl"]
    kept = [json.loads(line) for line in (report.rollouts_directory / "rollouts.jsonl").read_text().splitlines()]
    assert Counter(line["kind"] for line in kept) == dict.fromkeys(KINDS, 3)
    assert (report.rollouts_directory / kept[0]["artifacts"]["it"]["path"]).is_file()


async def test_what_a_program_says_that_never_asks_is_named(tmp_path: Path) -> None:
    program = 'agent: {program: {command: [sh, -c, "echo there is no such option; exit 3"]}}\n'
    report = await examined(tmp_path, SOUND + program)
    assert "made 0 requests (0 refused) and ended with status 3: there is no such option" in report.problems[0]


async def test_valid_spec_saves_no_rollouts(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SOUND)
    report = await check_rewards(load_spec(tmp_path / "spec.yaml", demo=True), tmp_path / "kept")
    assert report.rollouts_directory is None and not (tmp_path / "kept").exists()


async def test_the_same_prompt_for_every_row_is_right_for_a_game(tmp_path: Path) -> None:
    text = SOUND.replace("of {{ country }}?", "of the country that ask() tells?")
    report = await examined(tmp_path, text + "tools: [{python: code.py:ask}]\n")
    assert report.problems == []
    assert [one for one in report.warnings if "the prompt is the same for every row" in one]


async def test_constant_prompt_is_only_a_warning_for_programs(tmp_path: Path) -> None:
    program = 'agent: {program: {command: [cat, country], env: {URL: "{{ endpoint }}"}}}\n'
    files = 'sandbox: {files: [{to: country, content: "{{ country }}"}]}\n'
    report = await examined(tmp_path, SOUND.replace("of {{ country }}?", "of the country?") + program + files)
    assert not [problem for problem in report.problems if "the prompt is the same for every row" in problem]
    assert [warning for warning in report.warnings if "the prompt is the same for every row" in warning]


async def test_evaluation_rows_are_checked_if_all_rows_are_for_evaluation(tmp_path: Path) -> None:
    report = await examined(tmp_path, SOUND.replace("dataset:\n", "dataset:\n  eval: only\n"))
    assert report.problems == [] and report.scores["gold"] == 1


@pytest.mark.parametrize("reward", ["asks", "reads"])
async def test_scripted_judge_verdict_is_a_warning_not_a_problem(tmp_path: Path, reward: str) -> None:
    """Fault 36: a right spec was blamed, with status 2, since no script judges as a model does."""
    text = SOUND.replace(RIGHT, f"right: {{fn: code.py:{reward}}}").replace(
        "servers: {", "servers: {judge: {type: openai, base_url: 'http://localhost:1', model: j}, "
    )
    report = await examined(tmp_path, text)
    assert report.problems == []
    said = "`judge`, which reward right calls, is replaced by a script here, which does not judge like a model"
    assert any(said in warning for warning in report.warnings), report.warnings
    broken = text.replace("rewards:\n", "rewards:\n  mine: {fn: code.py:broken, args: {target: a}}\n")
    assert any("mine" in problem for problem in (await examined(tmp_path, broken)).problems)


async def test_omitted_scripted_user_message_is_a_warning_not_a_problem(tmp_path: Path) -> None:
    """Fault 36: a solution that does not say what the user says was blamed for it."""
    text = SOUND.replace(RIGHT, "right: {fn: code.py:heard}").replace(
        "servers: {",
        "user: {stop: [Bye], max_turns: 3}\nservers: {user: {type: openai, base_url: 'http://localhost:1', model: u}, ",
    )
    report = await examined(tmp_path, text)
    assert report.problems == []
    assert any("the simulated user is replaced by a script" in one and "`user:`" in one for one in report.warnings)
    told = text.replace('[{say: "{{ capital }}"}]', '[{say: "{{ capital }}"}, {user: I am Bob.}]')
    assert any("every answer scores 0" in problem for problem in (await examined(tmp_path, told)).problems)


async def test_machine_without_namespaces_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise UserError("bwrap cannot make a sandbox here: as root, sysctl -w user.max_user_namespaces=15000")

    monkeypatch.setattr("hermes_rl.runs.setup.require_bubblewrap", refuse)
    assert (await examined(tmp_path, SOUND)).problems == []
    with pytest.raises(UserError, match="max_user_namespaces=15000"):
        await examined(tmp_path, SOUND + "toolsets: [terminal]\n")


async def test_refused_calls_leave_the_tools_that_a_user_names(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    solution = "[{tools: [{name: ask, args: {}}]}, {say: One moment.}, {say: '{{ capital }}'}]"
    text = SOUND.replace('[{say: "{{ capital }}"}]', solution)
    more = "user: {turns: [{say: 'Which is it?', tools: [ask]}]}\ntools: [{python: code.py:ask}]\n"
    report = await examined(tmp_path, text + more)
    assert report.blind["the solution's calls, each refused"]["mean"] == 0


async def test_row_without_a_solution_is_a_warning_and_no_failure(tmp_path: Path) -> None:
    turns = SOUND.replace('[{say: "{{ capital }}"}]', '\'{{ [{"say": capital}] if country != "Italy" else [] }}\'')
    report = await examined(tmp_path, turns.replace("items:", "key: country\n  items:"))
    assert report.problems == [] and report.failing == []
    assert any("1 row of 3 have no solution" in warning and "row Italy" in warning for warning in report.warnings)


async def test_guess_that_is_right_by_chance_does_not_pay(tmp_path: Path) -> None:
    rows = ", ".join(f"{{country: Land{chr(97 + number)}, capital: '{number % 5}'}}" for number in range(10))
    text = SOUND.replace(SOUND[SOUND.index("[{country") : SOUND.index("prompt:")], f"[{rows}]\n")
    report = await examined(tmp_path, text)
    assert not any("pays for an answer" in warning for warning in report.warnings), report.warnings


async def test_rows_without_a_key_are_named_with_their_prompt(tmp_path: Path) -> None:
    wrong = SOUND.replace('[{say: "{{ capital }}"}]', "[{say: '{{ country }}'}]")
    report = await examined(tmp_path, wrong)
    assert any("(What is the capital of Italy?)" in problem for problem in report.problems)
    report = await examined(tmp_path, wrong.replace("items:", "key: country\n  items:"))
    assert any("the solution of row Italy scores 0" in problem for problem in report.problems)
