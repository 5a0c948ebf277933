"""A function as an agent: called in a process of its own, with the endpoint and the sandbox's commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hermes_rl import Group, Rollout, StopReason, attach_provenance, open_env
from hermes_rl.errors import SpecError, UserError
from hermes_rl.spec.load import parse_spec
from tests.api.summing import Sampler, sampled, trained
from tests.commands import hermes

AGENT = """
import asyncio, json, os, time, urllib.request, urllib.error

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

def post(endpoint, messages):
    body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL]}).encode()
    request = urllib.request.Request(endpoint + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

def work(endpoint, prompt, ctx):
    messages = [{"role": "user", "content": prompt}]
    while True:
        message = post(endpoint, messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            a, b = json.loads(call["function"]["arguments"]).values()
            total = ctx.terminal(f"expr {a} + {b}")["output"].strip()
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": total})

def solve(row, endpoint, token, prompt, ctx):
    assert (row["a"], endpoint.endswith(token), os.path.exists("answer")) == (1, True, False)
    ctx.write_file("answer", work(endpoint, prompt, ctx))
    return {"done": True}

async def slowly(endpoint, prompt, ctx, system="", further=3):
    answers = await asyncio.gather(*(asyncio.to_thread(work, endpoint, prompt, ctx) for _ in range(2)))
    await asyncio.to_thread(ctx.write_file, "answer", answers[0])

def raises(endpoint, prompt):
    post(endpoint, [{"role": "user", "content": prompt}])
    raise ValueError("what now?")

def claims(endpoint, prompt):
    from hermes_rl.errors import SandboxFailure
    post(endpoint, [{"role": "user", "content": prompt}])
    raise SandboxFailure("so it says")

def misuses(endpoint, prompt, ctx):
    post(endpoint, [{"role": "user", "content": prompt}])
    ctx.artifact("nothing")

def breaks(row):
    return row["nothing"]

def hangs(endpoint, prompt):
    post(endpoint, [{"role": "user", "content": prompt}])
    while True: pass

def ends(endpoint, prompt):
    post(endpoint, [{"role": "user", "content": prompt}])
    os._exit(0)

def hungry(endpoint, prompt):
    post(endpoint, [{"role": "user", "content": prompt}])
    return len(bytearray(8 << 30))

def elsewhere(endpoint, prompt, token):
    for path in (endpoint.replace(token, "guessed"), endpoint.partition("/r/")[0]):
        try:
            post(path, [{"role": "user", "content": prompt}])
        except urllib.error.HTTPError as error:
            assert error.code == 404
        else:
            raise AssertionError(path)
    return post(endpoint, [{"role": "user", "content": prompt}])

def wants(endpoint, model): ...
"""
TEXT = """
name: sums
dataset: {{items: [{{a: 1, b: 2}}]}}
prompt: {{system: Be brief., user: "What is {{{{ a }}}} plus {{{{ b }}}}?"}}
agent: {{program: {{python: "agent.py:{name}"}}, max_turns: 8, max_tokens: 200, timeout: {timeout}}}
rewards: {{file_matches: {{args: {{path: answer, content: "The sum is 3."}}}}}}
"""


async def played(folder: Path, name: str, sampler: Sampler | None = None, timeout: float = 60.0) -> Rollout:
    (folder / "agent.py").write_text(AGENT)
    async with open_env(parse_spec(TEXT.format(name=name, timeout=timeout), folder=folder)) as env:
        return await env.run(env.rows()[0], (sampler or Sampler()).policy())


@pytest.mark.parametrize(("name", "turns"), [("solve", 2), ("slowly", 4)])
async def test_function_program_runs_and_trains_on_the_sampled_tokens(tmp_path: Path, name: str, turns: int) -> None:
    sampler = Sampler()
    rollout = await played(tmp_path, name, sampler)
    assert rollout.result is not None
    assert (rollout.stop_reason, rollout.score, rollout.turns) == (StopReason.FINISHED, 1.0, turns), (
        rollout.result.program
    )
    assert trained([rollout]) == sampled(sampler.answers)
    assert attach_provenance(Group("g", rollout.key.row, [rollout])).exact
    assert rollout.result.program is not None
    assert rollout.result.program.output == ("{'done': True}" if name == "solve" else "")


@pytest.mark.parametrize(
    ("name", "stop_reason", "output"),
    [
        ("raises", StopReason.PROGRAM_ABORTED, "what now?"),
        ("claims", StopReason.PROGRAM_ABORTED, "so it says"),
        ("misuses", StopReason.PROGRAM_ABORTED, "no artifact"),
        ("hangs", StopReason.TIMEOUT, ""),
        ("ends", StopReason.PROGRAM_ABORTED, "its process ended"),
        ("hungry", StopReason.PROGRAM_ABORTED, "MemoryError"),
        ("elsewhere", StopReason.FINISHED, "tool_calls"),
    ],
)
async def test_what_a_function_does_is_graded(tmp_path: Path, name: str, stop_reason: StopReason, output: str) -> None:
    rollout = await played(tmp_path, name, timeout=2.0 if name == "hangs" else 60.0)
    assert rollout.result is not None
    assert rollout.result.program is not None
    assert (rollout.stop_reason, rollout.score, rollout.error) == (stop_reason, 0.0, None), rollout.result.program
    assert output in rollout.result.program.output
    assert (rollout.turns, rollout.examples(exact=True) != []) == (1, True)


@pytest.mark.parametrize(("name", "problem"), [("breaks", "before it asked the model"), ("wants", "wants `model`")])
async def test_function_program_that_fails_to_start_is_a_user_error(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        await played(tmp_path, name)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("{}", "command"),
        ('{command: [agent], python: "agent.py:solve"}', "command"),
        ('{python: "agent.py:solve", env: {A: b}}', "`env` goes with `command`"),
    ],
)
def test_a_program_is_a_command_or_a_function(tmp_path: Path, program: str, problem: str) -> None:
    text = "dataset: {items: [{a: 1}]}\nprompt: {user: Go.}\nrewards: {right: {fn: exact_match, args: {target: x}}}\n"
    with pytest.raises(SpecError, match=problem):
        parse_spec(f"{text}agent: {{program: {program}}}\n", folder=tmp_path)


def test_function_program_from_the_docs_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "agents.md").read_text().partition("## A function")[2]
    for name, language in (("agent.py", "python"), ("spec.yaml", "yaml")):
        (tmp_path / name).write_text(text.partition(f"```{language}\n")[2].partition("```")[0])
    done = hermes("run", "spec.yaml", "process", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["stop_reason"], line["score"]) for line in lines] == [("finished", 1.0)] * 4
