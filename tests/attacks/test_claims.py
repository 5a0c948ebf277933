"""Code of the policy that runs inside of user code, and claims there that somebody else has failed.

A tool that interprets Python, a reward that executes an answer, and a state that evaluates an expression run the text
of the policy in a process of ours. An exception of ours that it raises there is a claim: it never ends a run, nor keeps
the rollout from being graded.
"""

# ruff: noqa: E501 - an attack is one line

from __future__ import annotations

from pathlib import Path

import pytest

import hermes_rl
from hermes_rl.endings import OURS
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import ALONE
from hermes_rl.servers.scripted import Script
from hermes_rl.spec import parse_spec

OURSELVES = "import hermes_rl.errors as e\nimport hermes_rl.endings as n\n"
KINDS = (
    *("UserError", "NotYetAvailable", "RunError", "Failure", "ServerFailure", "SandboxFailure", "ToolServerFailure"),
    *("RewardFailure", "JudgeFailure", "RowFailure", "HermesRLError", "AgentFault"),
)
CLAIMS = {
    **{kind: f"raise e.{kind}('x')" for kind in KINDS},
    **{f"a failure of ours that ends as {ending}": f"raise e.Failure('x', ending=n.Ending({ending.value!r}))" for ending in OURS},
    # What describes the exception raises another one, which nobody expects there.
    **{
        f"{kind} out of the text of an exception": f"class A(Exception):\n def __str__(self): raise e.{kind}('x')\nraise A"
        for kind in ("UserError", "SandboxFailure", "ToolServerFailure", "RunError")
    },
    **{
        f"{kind} out of a text that is asked for twice": f"class A(e.{kind}):\n def __str__(self): raise A\nraise A('x')"
        for kind in ("UserError", "SandboxFailure")
    },
    "problems of a spec": "raise e.SpecError([e.Problem('a', 1, 1, 'x')])",
    "a class derived from one": "class A(e.UserError): pass\nraise A('x')",
    "a class of the same name": "class UserError(e.HermesRLError): pass\nraise UserError('x')",
    "a class of two kinds": "class A(e.SandboxFailure, e.JudgeFailure): pass\nraise A('x')",
    "an ending that there is not": "f = e.Failure('x'); f.ending = 'nope'; raise f",
    "more classes than are carried": "k = e.UserError\nfor i in range(150): k = type('A', (k,), {})\nraise k('x')",
    "a name that is not carried": "raise type('A' * 5000, (e.SandboxFailure,), {})('x')",
    "a group of them": "raise ExceptionGroup('x', [e.SandboxFailure('x'), e.UserError('x')])",
    "one that is no Exception": "class A(e.UserError, KeyboardInterrupt): pass\nraise A('x')",
    "the interrupt of a user": "raise KeyboardInterrupt",
    "the end of a generator": "raise GeneratorExit",
}  # fmt: skip

CODE = """
def python(code: str) -> str:
    "Run Python."
    names = {}
    exec(code, names)
    return str(names.get("answer"))

class World:
    def __init__(self, item): self.answer = None
    def python(self, code: str) -> str:
        "Run Python."
        return python(code)

def graded(result):
    names = {"answer": 1.0}
    exec(result.final_response, names)
    return names["answer"]

def compared(group): return [graded(result) for result in group]
"""
TOOLS = {
    **{f"tool, {each}": f'tools: [{{python: "code.py:python", isolate: {each}}}]' for each in ("process", "reuse", "sandbox")},
    **{
        f"state, {each}": f'tools: [{{state: python}}]\nstate: {{python: "code.py:World", isolate: {each}}}'
        for each in ("process", "reuse", "sandbox")
    },
}  # fmt: skip
REWARDS = {
    "reward, process": '{fn: "code.py:graded"}',
    "reward, sandbox": '{fn: "code.py:graded", isolate: sandbox}',
    "reward that compares": '{fn: "code.py:compared"}',
}
SPEC = """
dataset: {items: [{n: 1}]}
prompt: {user: "Go."}
servers: {policy: {type: scripted}}
agent: {max_turns: 100}
"""


@pytest.mark.parametrize("place", [*TOOLS, *REWARDS])
async def test_claim_neither_ends_a_run_nor_leaves_a_rollout_ungraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "code.py").write_text(CODE)
    claims = [OURSELVES + code for code in CLAIMS.values()]
    claims = claims[::3] if place == "reward, sandbox" else claims  # a process costs more there
    right = "answer = 1.0"
    if place in TOOLS:
        rest = f"{TOOLS[place]}\nrewards: {{right: {{fn: exact_match, args: {{target: done}}}}}}"
        calls = [{"tools": [{"name": "python", "args": {"code": code}}]} for code in (*claims, right)]
        played, scores = [[*calls, {"say": "done"}]], [1.0]
    else:
        rest = f"rewards: {{right: {REWARDS[place]}}}"
        played, scores = [[{"say": code}] for code in (*claims, right)], [0.0] * len(claims) + [1.0]
    for turns, score in zip(played, scores, strict=True):
        monkeypatch.setattr(CompiledSpec, "script", lambda self, key, prior, seat=ALONE, t=turns: Script.of(t, prior))
        async with hermes_rl.open_env(parse_spec(SPEC + rest, folder=tmp_path)) as env:
            rollout = await env.play(next(iter(env.rows())), replays=0)
        assert (rollout.error, rollout.score) == (None, score), turns
        if place in TOOLS:
            answers = [call.result for call in rollout.result.tool_calls]
            assert len(answers) == len(claims) + 1
            assert answers[-1] == "1.0"
