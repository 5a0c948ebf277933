"""Seats that agent programs play: real processes in the sandbox, one run for each turn, honest and hostile."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl import Group, Policy, StopReason, UserError, attach_provenance, open_env
from hermes_rl.agent.recorder import PolicyRecorder
from hermes_rl.analysis.record import RunRecord
from hermes_rl.analysis.rollout_view import Screen, shown_rollout
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import parse_spec
from tests.api.summing import TOKENIZER, Sampler, sampled, trained
from tests.commands import hermes

AGENT = '''
"""Asks the model until it calls no tool; what it has heard and said is in the file that its first word names."""
import json, os, socket, subprocess, sys, time, urllib.error, urllib.request

MODE, FILE, TASK = sys.argv[1:4]
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}

def post(path, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["KEY"]}
    request = urllib.request.Request(os.environ["URL"] + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        print(error.read().decode())
        sys.exit(3)

def ask(messages):
    return post("/v1/chat/completions", {"model": "m", "messages": messages, "tools": [BASH]})["choices"][0]["message"]

def tool(method, **params):
    return post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})["result"]

messages = [{"role": "system", "content": "You are a program."}]
if MODE == "remembers" and os.path.exists(FILE):
    messages = json.load(open(FILE))
messages.append({"role": "user", "content": TASK})
if MODE == "sleeps":
    ask(messages)
    time.sleep(1000)
if MODE == "leaves a squatter":
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 8182)); time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while socket.socket().connect_ex(("127.0.0.1", 8182)): time.sleep(0.01)
while True:
    message = ask(messages)
    messages.append(message)
    if MODE == "crashes": sys.exit(1)
    if not message.get("tool_calls"): break
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        if MODE == "calls":
            said = tool("tools/call", name=call["function"]["name"], arguments=arguments)["content"][0]["text"]
        else:
            said = subprocess.run(["sh", "-c", arguments["command"]], capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
json.dump(messages, open(FILE, "w"))
'''
CODE = '''
"""Rewards and a function as an agent."""
import json
import urllib.request


def texts(result):
    return len(result.texts)


def solve(endpoint, messages):
    heard = [message["content"] for message in messages if message["role"] == "user"]
    if heard[-1] == "fail": raise ValueError("it will not")
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(endpoint + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        json.load(answer)


async def twice(seats):
    return [await seats["white"].say("one"), await seats["black"].say("two"), await seats["black"].say("three")]
'''


def program(mode: str = "plain", seat: str = "black", **more: Any) -> dict[str, Any]:
    """Return what plays a seat by the program above."""
    command = ["python3", "/agent.py", mode, f"/tmp/{seat}.json", "{{ prompt }}"]
    env = {"URL": "{{ endpoint }}", "KEY": "{{ token }}"}
    return {"command": command, "env": env, "files": [{"to": "/agent.py", "content": AGENT.strip()}], **more}


def spec_of(folder: Path, mode: str = "plain", **parts: Any) -> str:
    """Write a spec in which the loop plays one seat and the program the other; returns its path."""
    (folder / "code.py").write_text(CODE)
    spec = {
        "name": "seats",
        "dataset": {"items": [{"secret": 3}]},
        "prompt": {"system": "You play.", "user": "Say a number."},
        "agents": {
            "white": {},
            "black": {"prompt": {"user": "You answer."}, "message_template": "{{ seat }}: {{ text }}",
                      "agent": {"program": program(mode)}},
        },
        "schedule": {"order": "alternate", "rounds": 2},
        "rewards": {"texts": {"fn": "code.py:texts", "range": [0, 9]}},
        "solution": {"turns": [
            {"say": "1"}, {"say": "3"},
            {"seat": "black", "tools": [{"name": "bash", "args": {"command": "echo {{ secret }}"}}]},
            {"seat": "black", "say": "2"}, {"seat": "black", "say": "4"},
        ]},
        "servers": {"policy": {"type": "scripted"}},
        **parts,
    }  # fmt: skip
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return str(path)


async def played(folder: Path, mode: str = "plain", *, policy: Policy | None = None, **parts: Any) -> Group:
    async with open_env(spec_of(folder, mode, **parts)) as env:
        return await env.run_group(next(iter(env.rows())), 1, policy)


def seat_of(group: Group, name: str) -> Any:
    return next(seat for seat in group.rollouts[0].seats if seat.seat.name == name)


def conversation(group: Group, name: str) -> list[tuple[str, str]]:
    return [(message["role"], message["content"] or "") for message in seat_of(group, name).messages]


async def test_a_program_is_run_for_each_turn_of_its_seat(tmp_path: Path) -> None:
    group = await played(tmp_path)
    assert [content for role, content in conversation(group, "white") if role != "system"] == [
        "Say a number.", "1", "2", "3",
    ]  # fmt: skip
    assert conversation(group, "black") == [
        ("system", "You are a program."), ("user", "You answer.\n\nwhite: 1"), ("assistant", ""), ("tool", "3\n"),
        ("assistant", "2"), ("user", "white: 3"), ("assistant", "4"),
    ]  # fmt: skip
    black = seat_of(group, "black")
    assert (black.stop_reason, black.turns, black.score) == (StopReason.ENVIRONMENT_DONE, 3, 3.0)
    assert [(call.name, call.result, call.turn) for call in black.result.tool_calls] == [("bash", "3\n", 1)]
    run = black.result.program
    assert (run.requests, run.exit_code) == (3, 0)
    assert [(call["kind"], call["continues"]) for call in run.calls] == [("main", None), ("main", 0), ("main", None)]
    assert attach_provenance(group).exact and all(attach_provenance(part).exact for part in group.compared())


@pytest.mark.parametrize(("mode", "sequences"), [("plain", 2), ("remembers", 1)])
async def test_what_is_trained_is_what_was_sampled_over_all_runs(tmp_path: Path, mode: str, sequences: int) -> None:
    """A program that goes on with the conversation of its run before has one sequence."""
    answers: dict[str, list[Any]] = {"white": [], "black": []}
    sampler = Sampler()

    async def sample(ids: list[int], sampling: Any) -> Any:
        text = TOKENIZER.decode(ids)
        seat = "black" if "You are a program" in text else "white"
        sampler_answer = await sampler(
            TOKENIZER.encode("<|im_start|>user\nWhat is 1 plus 2<tool_response>\n3"), sampling
        )
        answers[seat].append(sampler_answer)
        return sampler_answer

    group = await played(tmp_path, mode, policy=Policy.sampling(sample, TOKENIZER))
    for seat in group.rollouts[0].seats:
        assert trained([seat]) == sampled(answers[seat.seat.name])
        assert len(answers[seat.seat.name]) == 2
    black = seat_of(group, "black")
    assert len(black.sequences) == sequences
    said = [content for role, content in conversation(group, "black") if role == "assistant"]
    assert said == ["The sum is 3."] * 2
    assert all(attach_provenance(part).exact for part in group.compared())


async def test_a_manager_calls_programs_in_parallel_which_share_its_sandbox(tmp_path: Path) -> None:
    look = {"name": "terminal", "args": {"command": "cat note-ann note-bob"}}
    both = [{"name": name, "args": {"task": f"do it, {name}"}} for name in ("ann", "bob")]
    write = {name: {"name": "bash", "args": {"command": f"echo {name} > note-{name}"}} for name in ("ann", "bob")}
    workers = {
        name: {"prompt": {"system": "You work."}, "tools": [],
               "agent": {"program": program(seat=name, tools="mcp")}} for name in ("ann", "bob")
    }  # fmt: skip
    turns = [
        {"tools": both}, {"tools": [{"name": "ann", "args": {"task": "more"}}, look]}, {"say": "done"},
        *({"seat": name, **turn} for name in workers
          for turn in ({"tools": [write[name]]}, {"say": f"{name} 1"}, {"say": f"{name} 2"})),
    ]  # fmt: skip
    agents = {"boss": {}, **workers}
    group = await played(tmp_path, agents=agents, toolsets=["terminal"], solution={"turns": turns}, schedule="call")
    answers = [content for role, content in conversation(group, "boss") if role == "tool"]
    assert answers[:3] == ["ann 1", "bob 1", "ann 2"] and "ann\\nbob" in answers[3]
    assert [content for role, content in conversation(group, "ann") if role == "user"] == ["do it, ann", "more"]
    assert [(seat.turns, seat.stop_reason) for seat in group.rollouts[0].seats] == [
        (3, StopReason.ENVIRONMENT_DONE), (3, StopReason.ENVIRONMENT_DONE), (2, StopReason.ENVIRONMENT_DONE),
    ]  # fmt: skip
    assert all(attach_provenance(part).exact for part in group.compared())


async def test_a_program_may_be_the_manager_by_its_tool_server(tmp_path: Path) -> None:
    agents = {
        "boss": {"tools": [], "agent": {"program": program("calls", "boss", tools="mcp")}},
        "ann": {"prompt": {"system": "You work."}},
    }  # fmt: skip
    turns = [{"tools": [{"name": "ann", "args": {"task": "do it"}}]}, {"say": "done"}, {"seat": "ann", "say": "did it"}]
    group = await played(tmp_path, agents=agents, solution={"turns": turns}, schedule="call")
    boss = seat_of(group, "boss")
    assert [(call.name, call.arguments, call.result) for call in boss.result.tool_calls] == [
        ("ann", {"task": "do it"}, "did it"),
    ]  # fmt: skip
    assert [content for role, content in conversation(group, "ann") if role == "user"] == ["do it"]
    assert all(attach_provenance(part).exact for part in group.compared())


async def test_function_program_receives_the_conversation_of_its_seat(tmp_path: Path) -> None:
    black = {"prompt": {"system": "You answer."}, "agent": {"program": {"python": "code.py:solve"}}}
    turns = [{"say": "1"}, {"seat": "black", "say": "2"}, {"seat": "black", "say": "4"}]
    parts = {"agents": {"white": {}, "black": black}, "solution": {"turns": turns}}
    group = await played(tmp_path, schedule={"fn": "code.py:twice"}, **parts)
    assert [content for role, content in conversation(group, "black")] == ["You answer.", "two", "2", "three", "4"]
    assert group.rollouts[0].result is not None and group.rollouts[0].result.outcome == ["1", "2", "4"]
    assert all(attach_provenance(part).exact for part in group.compared())


# ------------------------------------------------------------------------------------ whose doing an end is


@pytest.mark.parametrize(
    ("mode", "agent", "stop_reason", "turns"),
    [
        ("crashes", {}, StopReason.PROGRAM_ABORTED, 1),
        ("plain", {"max_turns": 2}, StopReason.MAX_TURNS, 2),
        ("sleeps", {"timeout": 60}, StopReason.TIMEOUT, 1),
    ],
)
async def test_early_program_exit_stops_its_seat_as_caused_by_the_policy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    agent: dict[str, Any],
    stop_reason: StopReason,
    turns: int,
) -> None:
    if "timeout" in agent:
        # Its time is over once its first call, and the one of the other seat before, have been answered.
        ask, answered = PolicyRecorder.ask, []

        async def noted(*args: Any, **more: Any) -> Any:
            answered.append(await ask(*args, **more))
            return answered[-1]

        monkeypatch.setattr(PolicyRecorder, "ask", noted)
        monkeypatch.setattr("hermes_rl.agent.program.clock", lambda: time.monotonic() + 1000 * (len(answered) >= 2))
    black = {"prompt": {"user": "You answer."}, "agent": {"program": program(mode), **agent}}
    group = await played(tmp_path, agents={"white": {}, "black": black})
    ended = {seat.seat.name: (seat.stop_reason, seat.turns) for seat in group.rollouts[0].seats}
    assert ended == {
        "white": (StopReason.ENVIRONMENT_DONE, 2 if stop_reason is StopReason.MAX_TURNS else 1),
        "black": (stop_reason, turns),
    }
    assert group.dropped is None and group.rollouts[0].key.attempt == 0


async def test_missing_program_is_a_user_error_in_an_untouched_sandbox(
    tmp_path: Path,
) -> None:
    agents = {"white": {}, "black": {"agent": {"program": {"command": ["no-such-program"]}}}}
    with pytest.raises(UserError, match=r"agents\.black\.agent\.program: `.*` cannot be started \(status 127\)"):
        await played(tmp_path, agents=agents)


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("rm /usr/local/bin/worker 2>/dev/null; true", []),
        ("mkdir -p /tmp/there", [{"to": "/tmp/there", "content": "x"}]),
    ],
)
async def test_missing_program_after_another_seat_acted_aborts_the_seat(
    tmp_path: Path, command: str, files: list[Any]
) -> None:
    black = {"agent": {"program": {"command": ["worker"], "files": files}}}
    turns = [{"tools": [{"name": "terminal", "args": {"command": command}}]}, {"say": "1"}]
    parts = {"agents": {"white": {}, "black": black}, "toolsets": ["terminal"], "solution": {"turns": turns}}
    group = await played(tmp_path, **parts)
    black_seat = seat_of(group, "black")
    assert (black_seat.stop_reason, black_seat.turns, black_seat.score) == (StopReason.PROGRAM_ABORTED, 0, 0.0)
    assert any("agents.black.agent.program" in error.error for error in black_seat.result.tool_errors)


@pytest.mark.parametrize("keep", [False, True])
async def test_process_of_another_seat_ends_with_its_turn_unless_kept(keep: bool, tmp_path: Path) -> None:
    agents = {
        "white": {"prompt": {"user": "Go."}, "agent": {"program": program("leaves a squatter", "white")}},
        "black": {"prompt": {"user": "You answer."}, "agent": {"program": program()}},
    }  # fmt: skip
    turns = [{"say": "1"}, {"seat": "black", "say": "2"}]
    parts: dict[str, Any] = {"sandbox": {"keep_processes": True}} if keep else {}
    group = await played(tmp_path, agents=agents, solution={"turns": turns}, **parts)
    black = seat_of(group, "black")
    assert black.stop_reason is (StopReason.PROGRAM_ABORTED if keep else StopReason.ENVIRONMENT_DONE)
    assert [("port 8182 of the sandbox" in error.error) for error in black.result.tool_errors] == [True] * keep


async def test_function_program_that_fails_on_a_message_stops_with_aborted(tmp_path: Path) -> None:
    agents = {
        "white": {}, "black": {"prompt": {"system": "You."}, "agent": {"program": {"python": "code.py:solve"}}},
    }  # fmt: skip
    group = await played(tmp_path, agents=agents, solution={"turns": [{"say": "fail"}]})
    black = seat_of(group, "black")
    assert black.stop_reason is StopReason.PROGRAM_ABORTED and "it will not" in black.result.program.output


@pytest.mark.parametrize("words", ["nul \0 byte", "half \ud83d of one", "x" * 200_000])
async def test_message_unfit_for_a_command_line_stops_only_the_program(tmp_path: Path, words: str) -> None:
    async def chat(messages: Any, tools: Any) -> str:
        return "fine" if any(message["content"] == "You are a program." for message in messages) else words

    policy = Policy.chat(chat, tokenizer=TOKENIZER)
    group = await played(tmp_path, policy=policy)
    black = seat_of(group, "black")
    assert group.dropped is None and group.rollouts[0].key.attempt == 0
    assert black.stop_reason in (StopReason.PROGRAM_ABORTED, StopReason.ENVIRONMENT_DONE)


async def test_a_template_that_what_it_hears_does_not_fit_ends_the_seat(tmp_path: Path) -> None:
    command = ["echo", "{{ [0][prompt | int] }}"]
    agents = {"white": {}, "black": {"prompt": {"system": "You."}, "agent": {"program": {"command": command}}}}
    group = await played(tmp_path, agents=agents)
    assert seat_of(group, "black").stop_reason is StopReason.ENVIRONMENT_ERROR and group.rollouts[0].score is not None


async def test_a_server_that_fails_a_programs_seat_fails_the_episode(tmp_path: Path) -> None:
    first: list[Any] = []
    gone = False

    async def chat(messages: Any, tools: Any) -> str:
        nonlocal gone
        if not first:
            first.append(messages)
        elif messages == first[0]:  # another episode begins
            first.append(messages)
            gone = False
        gone = gone or (len(first) == 1 and any(message["content"] == "You are a program." for message in messages))
        if gone:
            raise RuntimeError("the engine is gone")
        return "fine"

    group = await played(tmp_path, policy=Policy.chat(chat, tokenizer=TOKENIZER))
    assert group.rollouts[0].key.attempt >= 1 and group.dropped is None
    assert [seat.turns for seat in group.rollouts[0].seats] == [2, 2]


# ------------------------------------------------------------------------------------------------- in a record


async def test_program_episodes_are_recorded_resumed_and_shown(tmp_path: Path) -> None:
    rows = [{"secret": number} for number in range(2)]
    path = Path(spec_of(tmp_path, process={"groups": 2, "group_size": 1}, dataset={"items": rows}))
    spec, run = parse_spec(path.read_text(), folder=tmp_path), tmp_path / "run"
    launch = RunOptions("process", out=run, progress=Progress(quiet=True))
    await run_process(spec, launch)
    text = (run / "rollouts.jsonl").read_text().splitlines(keepends=True)
    written = [json.loads(line) for line in text]
    assert [(line["seat"]["name"], "program" in line) for line in written] == [("black", True), ("white", False)] * 2
    groups = [json.loads(line) for line in (run / "groups.jsonl").read_text().splitlines()]
    assert len(groups) == 6, "of each of the two groups one for white, and one for each of black's sequences"
    assert all(line["provenance"]["exact"] for line in groups)
    (run / "rollouts.jsonl").write_text("".join(text[:-1]))
    (run / "groups.jsonl").write_text("")
    summary, _ = await run_process(spec, launch)
    assert summary.attempts == 1
    assert len((run / "groups.jsonl").read_text().splitlines()) == 6
    record = RunRecord(run)
    record.refresh()
    black = next(rollout for rollout in record.rollouts if rollout.seat == "black")
    shown = shown_rollout(record, black.id, Screen())
    assert shown["program"]["requests"] == 3 and [seat["seat"] for seat in shown["seats"]] == ["white", "black"]


@pytest.mark.slow
def test_manager_and_program_examples_of_the_docs_run(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    (tmp_path / "agent.py").write_text((docs / "agents.md").read_text().partition("```python\n")[2].partition("```")[0])
    text = (docs / "seats.md").read_text().partition("## A seat may be a program")[2]
    (tmp_path / "spec.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    for command in (["validate", "--deep", "spec.yaml"], ["run", "spec.yaml", "process", "--out", "run"]):
        done = hermes(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["seat"]["name"], line["score"]) for line in lines] == [("coder", 1.0), ("manager", 1.0)] * 4
    groups = [json.loads(line) for line in (tmp_path / "run" / "groups.jsonl").read_text().splitlines()]
    assert groups and all(line["provenance"]["exact"] for line in groups)


async def test_seat_cannot_cause_an_infrastructure_failure_of_another_seat(
    tmp_path: Path,
) -> None:
    changed = """import json, urllib.request
messages = [{"role": "user", "content": "many words " * 2000}]
data = json.dumps({"model": "m", "messages": messages}).encode()
address = "http://127.0.0.1:8182/v1/chat/completions"
urllib.request.urlopen(urllib.request.Request(address, data, {"Content-Type": "application/json"}))
"""
    change = {"name": "write_file", "args": {"path": "agent.py", "content": changed}}
    black: dict[str, Any] = {
        "prompt": {"user": "You answer."},
        "agent": {"program": {"command": ["python3", "agent.py"]}, "max_trajectory_tokens": 400},
    }
    (tmp_path / "agent.py").write_text("print('nothing')")
    parts = {
        "agents": {"white": {}, "black": black},
        "toolsets": ["terminal", "file"],
        "sandbox": {"files": [{"to": "agent.py", "from": "agent.py"}]},
        "solution": {"turns": [{"tools": [change]}, {"say": "1"}, {"seat": "black", "say": "2"}]},
    }
    group = await played(tmp_path, **parts)
    assert (group.dropped, seat_of(group, "black").stop_reason) == (None, StopReason.TOKEN_BUDGET), group.detail
