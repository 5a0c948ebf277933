"""What people write by habit is answered with the form that is right here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.cli.validate import validate_one
from hermes_rl.data.load import load_rows
from hermes_rl.errors import SpecError
from hermes_rl.spec.check import check_spec
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.spec.overrides import parse_extra_args

BASE = "dataset: {items: [{q: a, answer: b}, {q: c, answer: d}], eval: only}\nprompt: {user: '{{ q }}'}\n"


def said(text: str) -> str:
    with pytest.raises(SpecError) as failed:
        parse_spec(text)
    return str(failed.value)


@pytest.mark.parametrize(
    ("written", "line", "message"),
    [
        ("max_turns: 3", "3:1", "unknown key `max_turns`; it is `agent.max_turns`"),
        ("temperature: 0.5", "3:1", "it is `agent.temperature`"),
        ("model: m", "3:1", "it is `servers.policy.model`"),
        ("model_name: m", "3:1", "it is `servers.policy.model`"),
        ("limit: 4", "3:1", "it is `dataset.limit` or `evaluate.limit`"),
        ("system: be kind", "3:1", "it is `prompt.system`"),
        ("group_size: 4", "3:1", "it is `process.group_size` or `serve.group_size`"),
        ("agent: {image: x}", "3:9", "it is `sandbox.image`"),
        ("agent: {max_turn: 3}", "3:9", "did you mean `max_turns`?"),
        ("tool: []", "3:1", "did you mean `tools`?"),
        ("tools: [lib.py:f]", "3:9", "write {python: lib.py:f}"),
        ("tools: lib.py:f", "3:8", "write tools: [{python: lib.py:f}]"),
        ("tools: [terminal]", "3:9", "a toolset is written toolsets: [terminal]"),
        ("toolsets: terminal", "3:11", "write toolsets: [terminal]"),
        ("rewards: [exact_match]", "3:10", "write rewards: {exact_match: {args: {…}}}"),
        ("rewards: {r: r.py:f}", "3:14", "write {fn: r.py:f}"),
        ("servers: {policy: gpt}", "3:19", "write {base_url: URL, model: gpt}"),
        ("sandbox: docker", "3:10", "write sandbox: {backend: docker}"),
        ("sandbox: debian", "3:10", "write sandbox: {image: debian}"),
        ("artifacts: {a: x.txt}", "3:16", "write {path: x.txt}"),
        ("solution: [{say: x}]", "3:11", "write solution: {turns: [{say: …}]}"),
        ("budget: 10", "3:9", "write budget: {max_tokens: 10}"),
        ("process: 10", "3:10", "write process: {groups: 10}"),
    ],
)
def test_misplaced_key_or_value_error_names_the_correct_form(written: str, line: str, message: str) -> None:
    (problem,) = said(f"{BASE}{written}\n").splitlines()
    assert problem.startswith(f"<text>:{line}: ") and message in problem


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("datset: {items: [{}]}\nprompt: {user: x}\n", ["1:1: unknown key `datset`; did you mean `dataset`?"]),
        ("dataset: {itms: [{}]}\nprompt: {user: x}\n", ["1:11: unknown key `itms`; did you mean `items`? Choices: "]),
        (
            "dataset: {items: [{x: 1}]}\npromt: {user: '{{ x }}'}\n",
            ["2:1: unknown key `promt`; did you mean `prompt`?"],
        ),
        ("dataset: {items: [{x: 1}]}\nprompt: {usr: '{{ x }}'}\n", ["2:10: unknown key `usr`; did you mean `user`?"]),
        (f"{BASE}rewards: {{exact_match: {{arg: {{target: '{{{{ q }}}}'}}}}}}\n", ["3:25: unknown key `arg`; did you"]),
        (f"{BASE}rewards: {{exact_match: {{args: {{taget: x}}}}}}\n", ["3:32: `exact_match` has no argument `taget`"]),
        (
            f"{BASE}rewards: {{exact_match: {{args: {{answer: x}}}}}}\n",
            ["3:32: `exact_match` has no argument `answer` and needs `target`; choices: target, ignore_case, strip"],
        ),
        (
            f"{BASE}rewards: {{command_output: {{args: {{run: x, timeout: 3}}}}}}\n",
            ["3:35: `command_output` has no argument `run` and needs `command`, `expected`; choices: command, "],
        ),
        (f"{BASE}servers: {{judge: {{type: scripted, templat: '{{{{ q }}}}'}}}}\n", ["3:35: unknown key `templat`"]),
        (f"{BASE}my_notes: {{text: '{{{{ q }}}}'}}\n", ["3:1: unknown key `my_notes`"]),
    ],
)
def test_a_misspelt_key_is_the_only_news(tmp_path: Path, text: str, problems: list[str]) -> None:
    (tmp_path / "s.yaml").write_text(text)
    told = [str(problem).partition("s.yaml:")[2] for problem in validate_one(str(tmp_path / "s.yaml")).problems]
    assert len(told) == len(problems) and all(map(str.startswith, told, problems)), told


def test_what_a_misspelt_section_means_is_checked_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("datset: {items: [{q: a}]}\nprompt: {user: '{{ p }}'}\n")
    told = [str(problem).partition("s.yaml:")[2] for problem in validate_one(str(tmp_path / "s.yaml")).problems]
    assert told[0] == "1:1: unknown key `datset`; did you mean `dataset`?"
    assert len(told) == 2 and told[1].startswith("2:"), told


def test_a_dataset_and_a_prompt_may_be_meant_in_short() -> None:
    assert "write dataset: {path: q.jsonl}" in said("dataset: q.jsonl\nprompt: {user: x}\n")
    for value, form in (
        ("0.5", "{fraction: 0.5}"),
        ("test", "{split: test}"),
        ("true", "only"),
        ("8", "{limit: 8, fraction: SHARE}"),
    ):
        assert f"write eval: {form}" in said(f"dataset: {{items: [{{}}], eval: {value}}}\nprompt: {{user: x}}\n")
    assert 'write prompt: {user: "…"}' in said("dataset: {items: [{}]}\nprompt: x\n")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--limit", "write --set dataset.limit=VALUE or --set evaluate.limit=VALUE"),
        ("--model", "write --openai.model_name VALUE"),
        ("--max-turns", "write --set agent.max_turns=VALUE"),
        ("--output-dir", "write --out DIRECTORY"),
        ("--openai.modell_name", "did you mean `--openai.model_name`?"),
    ],
)
def test_option_of_other_tools_error_names_the_equivalent(option: str, message: str) -> None:
    with pytest.raises(SpecError) as failed:
        parse_extra_args([option, "3"], [])
    assert str(failed.value) == f"{option}: there is no such option; {message}"


def test_unknown_reward_parameters_error_lists_the_available_ones(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def r(completion, answer, result): return 1.0\ndef s(judg): return 1.0\n")
    path = tmp_path / "s.yaml"
    path.write_text(
        f"{BASE}rewards:\n  r: {{fn: 'r.py:r'}}\n  s: {{fn: 'r.py:s'}}\nservers: {{judge: {{type: scripted}}}}\n"
    )
    problems = [problem.message for problem in check_spec(load_spec(path))[0]]
    assert "`r` needs `completion`, `answer`" in problems[0]
    assert "`completion` is `result.final_response` here" in problems[0]
    assert '`args: {answer: "{{ answer }}"}`' in problems[0]
    assert "a run gives ctx, group, item, paid, result, roles, seats, state" in problems[0]
    assert problems[1].endswith("; did you mean `judge`?")


def test_the_limit_of_a_dataset_for_evaluation_alone_is_about_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    for text, count in ((BASE, 1), (BASE.replace("only", "{fraction: 0.5}").replace("}]", "}, {q: e}, {q: f}]"), 2)):
        path.write_text(text)
        spec = load_spec(path, overrides=parse_extra_args([], ["dataset.limit=1"]))
        assert len(load_rows(spec, "eval", notify=print)) == count
