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
from hermes_rl.agent.result import AgentResult
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import ONLY_SEAT
from hermes_rl.scoring.grader import GradedReward, Grader
from hermes_rl.scoring.reward_function import find_reward
from hermes_rl.scoring.reward_value import RewardValue, Weighting
from hermes_rl.servers.scripted.play import Script
from hermes_rl.spec.load import parse_spec
from hermes_rl.stop_reasons import INFRASTRUCTURE_FAILURES, StopReason
from tests.thorough import THOROUGH

OURSELVES = "import hermes_rl.errors as e\nimport hermes_rl.stop_reasons as n\n"
KINDS = (
    *("UserError", "NotYetAvailable", "RunError", "Failure", "ServerFailure", "SandboxFailure", "ToolServerFailure"),
    *("RewardFailure", "JudgeFailure", "RowFailure", "HermesRLError", "AgentFault"),
)
CLAIMS = {
    **{kind: f"raise e.{kind}('x')" for kind in KINDS},
    **{
        f"an infrastructure failure that stops as {reason}": f"raise e.Failure('x', stop_reason=n.StopReason({reason.value!r}))"
        for reason in INFRASTRUCTURE_FAILURES
    },
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
    "an unknown stop reason": "f = e.Failure('x'); f.stop_reason = 'nope'; raise f",
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


PLACES = [*TOOLS, *REWARDS]


@pytest.mark.generated
@pytest.mark.parametrize("place", PLACES)
async def test_claim_neither_ends_a_run_nor_leaves_a_rollout_ungraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "code.py").write_text(CODE)
    claims = [OURSELVES + code for code in CLAIMS.values()]
    if not THOROUGH or place == "reward, sandbox":  # a process costs more there
        claims = claims[PLACES.index(place) % 3 :: 3]
    right = "answer = 1.0"
    if place in TOOLS:
        rest = f"{TOOLS[place]}\nrewards: {{right: {{fn: exact_match, args: {{target: done}}}}}}"
        calls = [{"tools": [{"name": "python", "args": {"code": code}}]} for code in (*claims, right)]
        played, scores = [[*calls, {"say": "done"}]], [1.0]
    else:
        rest = f"rewards: {{right: {REWARDS[place]}}}"
        played, scores = [[{"say": code}] for code in (*claims, right)], [0.0] * len(claims) + [1.0]
    for turns, score in zip(played, scores, strict=True):
        monkeypatch.setattr(
            CompiledSpec, "script", lambda self, key, prior, seat=ONLY_SEAT, t=turns: Script.from_turns(t, prior)
        )
        async with hermes_rl.open_env(parse_spec(SPEC + rest, folder=tmp_path)) as env:
            rollout = await env.run(next(iter(env.rows())), retries=0)
        assert (rollout.error, rollout.score) == (None, score), turns
        if place in TOOLS:
            answers = [call.result for call in rollout.result.tool_calls]
            assert len(answers) == len(claims) + 1
            assert answers[-1] == "1.0"


SCORE = "from hermes_rl import Score\n"
PLAIN = "import hermes_rl.user_code.process as p, hermes_rl.user_code.wire as w, time\nr = p.current_runner()\n"
VALUES = {
    "text": ("answer = '1.0'", 0),
    "bytes": ("answer = b'1'", 0),
    "number beyond all floats": ("answer = 10**5000", 0),
    "number beyond the bound": ("answer = 1e300", 0),
    "not a number": ("answer = float('nan')", 0),
    "infinity": ("answer = float('inf')", 0),
    "above the range": ("answer = 7", 1),
    "below the range": ("answer = -7", 0),
    "truth": ("answer = True", 1),
    "nothing": ("answer = None", 0),
    "values for turns that were not": ("answer = [0.5] * 9", 0),
    "a list in a list": ("answer = [[1.0]]", 0),
    "nested lists": ("answer = []\nfor _ in range(100_000): answer = [answer]", 0),
    "a list that holds itself": ("answer = []\nanswer.append(answer)", 0),
    "many values": ("answer = [0] * 800_000", 0),
    "many lists": ("answer = [[]] * 1_000_000", 0),
    "a sequence that lies about its length": (
        "from collections.abc import Sequence\nclass A(Sequence):\n def __len__(s): return 10**9\n"
        " def __getitem__(s, i):\n  if i > 3: raise IndexError\n  return 0.0\nanswer = A()", 0),
    "a number that raises": ("class A:\n def __float__(s): raise KeyboardInterrupt\nanswer = A()", 0),
    "a float with another text": ("class A(float):\n def __repr__(s): return '1e999'\nanswer = A(0.5)", 0.5),
    "an integer with another text": ("class A(int):\n def __repr__(s): return '{}'\nanswer = A(1)", 1),
    "a score in a score": (SCORE + "answer = Score(Score(1.0))", 0),
    "a score with a long reason": (SCORE + "answer = Score(1.0, reason='x' * 3_000_000)", 1),
    "a reason that raises": (SCORE + "class A:\n def __str__(s): raise ValueError\nanswer = Score(1.0, reason=A())", 0),
    "metrics that are no mapping": (SCORE + "answer = Score(1.0, metrics=[1])", 0),
    "many metrics": (SCORE + "answer = Score(1.0, metrics={str(i): 0.0 for i in range(50_000)})", 1),
    "more metrics than are carried": (SCORE + "answer = Score(1.0, metrics={str(i): 0.0 for i in range(500_000)})", 0),
    "metrics of one name": (SCORE + "answer = Score(1.0, metrics={'1': 1, 1: 2})", 1),
    "a metric that is not finite": (SCORE + "answer = Score(1.0, metrics={'a': float('nan')})", 0),
    "a metric of a long name": (SCORE + "answer = Score(1.0, metrics={'a' * 1_000_000: 1})", 1),
    "overrides that are long": (SCORE + "answer = Score(1.0, overrides={'a': 'x' * 1_000_000})", 0),
    "overrides that nest": (SCORE + "a = {}\nfor _ in range(980): a = {'a': a}\nanswer = Score(1.0, overrides=a)", None),
    "overrides that are no JSON": (SCORE + "answer = Score(1.0, overrides={'a': {1, 2}})", 0),
    "overrides that are not finite": (SCORE + "answer = Score(1.0, overrides={'a': float('inf')})", 0),
    "a function": ("answer = lambda: 1.0", 0),
    "an awaitable that raises": ("async def a(): raise SystemExit\nanswer = a()", 0),
    "a return in two processes": ("import os\nos.fork()\nanswer = 1.0", 1),
    "the end of the process": ("import os\nos._exit(0)", 0),
    "a signal": ("import os\nos.kill(os.getpid(), 9)", 0),
    "threads that stay": ("import threading, time\nfor _ in range(50): threading.Thread(target=time.sleep, args=(1,)).start()\nanswer = 1.0", 1),
    "more memory than there is": ("bytearray(3 << 30)", 0),
    "more recursion than there is": ("def f(): f()\nf()", 0),
    "more files than there are": ("k = [open('/dev/null') for _ in range(100_000)]", 0),
    # What looks like a failure of the machine, and is the answer's own choice.
    "an address at which nobody listens": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1', timeout=5)", 0),
    "an address of nobody": ("import urllib.request\nurllib.request.urlopen('http://nowhere.invalid', timeout=5)", 0),
    "a connection that is reset": ("raise ConnectionResetError(104, 'x')", 0),
    "a file that is gone": ("open('/nowhere')", 0),
    "a disk that is full": ("raise OSError(28, 'No space left on device')", 0),
    "a time that is over": ("raise TimeoutError('timed out')", 0),
    "a module that is not installed": ("import no_such_module", 0),
    "a state that is broken": ("import sys, types\nsys.modules['math'] = types.ModuleType('math')\nfrom math import floor", 0),
    "many lines of the log": ("import logging\nfor i in range(300): logging.getLogger('a' * i).error('x' * 5000)\nanswer = 1.0", 1),
    "a level that there is not": ("import logging\nlogging.getLogger().log(70_000, 'x')\nanswer = 1.0", 0),
    "a question of many values": (PLAIN + "r.ask(r._first, 'x', [0] * 800_000).result()", 0),
    "a message of nested values": (PLAIN + "w.send(r._connection, b'[' * 3_000_000); time.sleep(9)", 0),
    "a message of many keys": (PLAIN + "w.send(r._connection, w.to_json(dict.fromkeys(map(str, range(300_000))))); time.sleep(9)", 0),
    "a message of many digits": (PLAIN + "w.send(r._connection, b'[' + b'1' * 60_000 + b']'); time.sleep(9)", 0),
    "a message of bytes that are none": (PLAIN + "w.send(r._connection, b'{\"\\\\u0000bytes\": \"%\"}'); time.sleep(9)", 0),
}  # fmt: skip
"""What code of an answer makes a reward return, and the value; None: either end of the range."""


@pytest.mark.slow
async def test_odd_values_of_an_executed_answer_are_graded(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    grader = Grader(
        (GradedReward(find_reward("graded", f"{tmp_path}/code.py:graded"), Weighting("graded")),),
        lambda args, item: args,
    )
    wrong = {}
    for name, (code, expected) in VALUES.items():
        values: dict[str, RewardValue] = {}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": code}]
        result = AgentResult(messages=messages, turns_used=1, prompt_length=1, stop_reason=StopReason.FINISHED)
        await grader.grade_rollout({"n": 1}, result, None, None, values)
        value = values["graded"]
        small = len(value.metrics) < 200 and len(str(value.record())) < 30_000
        if value.value not in ((0, 1) if expected is None else (expected,)) or not small:
            wrong[name] = value
    assert wrong == {}
