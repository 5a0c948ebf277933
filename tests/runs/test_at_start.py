"""Plain `validate` refuses what a run refuses before its first rollout, in the same words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.cli.validate import validate_one
from hermes_rl.errors import UserError
from hermes_rl.runs.at_start import unset_variables
from hermes_rl.runs.setup import RunOptions, open_run
from hermes_rl.spec.load import load_spec, parse_spec

CODE = """
def both(result, group, ctx): return [0.0]
def compares(group): return [1.0 for _ in group]
def changed(result, state): return 1.0
def x(a: str) -> str:
    "Do x."
    return a
class World:
    def __init__(self, item): self.n = 0
"""
JUDGE = ", judge: {type: scripted}"
FAR = "{type: openai, base_url: 'http://localhost:1/v1', model: m"
SEATS = "agents: {a: {}, b: {}}\nschedule: {order: alternate, rounds: 2}"
REFUSED = {
    "a judge that no server plays": {"rewards": "{r: {fn: llm_judge, args: {rubric: a}}}"},
    "a judge of pairs that no server plays": {"rewards": "{r: {fn: llm_pairwise, args: {rubric: a}}}"},
    "one of several judges": {
        "rewards": "{r: {fn: llm_judge, args: {rubric: a, server: [judge, two]}}}",
        "servers": JUDGE,
    },
    "a group and a sandbox": {"rewards": "{r: {fn: code.py:both}}"},
    "shares of a comparison": {"rewards": "{r: {fn: code.py:compares, seats: {a: 1, b: -1}}}", "more": SEATS},
    "a state elsewhere": {"rewards": "{r: {fn: code.py:changed, isolate: none}}", "more": "state: code.py:World"},
    "a state outside of the sandbox": {
        "rewards": "{r: {fn: code.py:changed, isolate: sandbox}}",
        "more": "state: code.py:World",
    },
    "a judge in a sandbox": {
        "rewards": "{r: {fn: llm_judge, isolate: sandbox, args: {rubric: a}}}",
        "servers": JUDGE,
    },
    "workers without a call each": {
        "servers": f", judge: {FAR}, max_concurrency: 2}}",
        "more": "process: {workers: 4}",
    },
    "a tool of a seat": {
        "more": "tools: [{python: code.py:x}]\nagents: {a: {tools: [zz]}, b: {}}\n"
        "schedule: {order: alternate, rounds: 2}"
    },
    "an order by no column": {"dataset": ", order: nothere"},
    "a recording that was not made": {"more": "toolsets: {enabled: [web], replay: ./nothing}"},
    "a registry without the reward": {"rewards": "{r: {fn: 'atropos:nothing'}}"},
}


def written(folder: Path, case: dict[str, str]) -> Path:
    rewards = case.get("rewards", "{r: {fn: exact_match, args: {target: a}}}")
    (folder / "code.py").write_text(CODE)
    path = folder / "s.yaml"
    path.write_text(
        f"dataset: {{items: [{{q: a}}, {{q: b}}]{case.get('dataset', '')}}}\nprompt: {{user: '{{{{ q }}}}'}}\n"
        f"rewards: {rewards}\nservers: {{policy: {{type: scripted}}{case.get('servers', '')}}}\n"
        f"{case.get('more', '')}\n"
    )
    return path


@pytest.mark.parametrize("case", REFUSED)
async def test_validate_refuses_what_a_run_refuses_at_its_start(tmp_path: Path, case: str) -> None:
    path = written(tmp_path, REFUSED[case])
    (problem,) = validate_one(str(path)).problems
    assert problem.line is not None
    with pytest.raises(UserError) as refused:
        async with open_run(load_spec(path), RunOptions("process", out=tmp_path / "out")) as opened:
            await anext(opened.run.groups())
    assert str(refused.value).endswith(problem.message)


def test_judge_with_an_unusable_calibration_or_fallback_is_refused(tmp_path: Path) -> None:
    args = "{rubric: a, fallback: nothing, calibrate: cases.jsonl}"
    path = written(tmp_path, {"rewards": f"{{r: {{fn: llm_judge, args: {args}}}}}", "servers": JUDGE})
    problems = [problem.message for problem in validate_one(str(path)).problems]
    assert any("there is no reward `nothing`" in problem for problem in problems)
    assert any(problem.startswith(f"calibrate: {tmp_path}/cases.jsonl cannot be used") for problem in problems)


def test_key_that_is_not_set_is_a_warning(tmp_path: Path) -> None:
    keys = "api_key_env: KEY, headers_env: {X-Team: TEAM}"
    path = written(tmp_path, {"servers": f", judge: {FAR}, {keys}}}"})
    verdict = validate_one(str(path), environ={})
    assert verdict.problems == []
    assert [warning.message for warning in verdict.warnings] == [
        "the environment variable KEY, named by api_key_env of a server, is not set",
        "the environment variable TEAM, named by headers_env.X-Team of a server, is not set",
    ]
    assert validate_one(str(path), environ={"KEY": "a", "TEAM": "b"}).warnings == []
    (problem,) = validate_one(str(path), environ={"KEY": "a\nb", "TEAM": "b"}).problems
    assert "KEY has a line break" in problem.message


def test_header_of_a_tool_server_that_is_not_set_is_a_warning() -> None:
    tools = "tools: [{mcp: {name: far, url: 'http://localhost:1', headers_env: {Authorization: TOOL_KEY}}}]\n"
    spec = parse_spec(f"dataset: {{items: [{{q: a}}]}}\nprompt: {{user: a}}\n{tools}", environ={})
    wrong, unset = unset_variables(spec, {})
    assert not wrong and "TOOL_KEY, named by headers_env.Authorization" in unset[0].message
