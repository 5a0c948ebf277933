"""`hermes-rl play`: run one rollout and show it live; a person may replace the model. Nothing is recorded.

The same runner as in a run runs the rollout. A wrapper around the policy shows each message before it passes on the
request, so that a person sees exactly the model's input.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import RenderableType

from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import Options, with_policy
from hermes_rl.cli.run import run_interruptible
from hermes_rl.cli.screen import (
    BAD,
    DIM,
    GOOD,
    arguments_text,
    call_parts,
    heading,
    indented,
    pairs_table,
    reasoning_parts,
    result_parts,
    safe,
    show,
    table,
)  # fmt: skip
from hermes_rl.data.load import Split
from hermes_rl.errors import Failure
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.runs.prompt_preview import chosen_row, with_placeholder_keys
from hermes_rl.runs.setup import require_machine
from hermes_rl.servers.base import CALLABLE, ChatReply, ChatRequest, ChatServer, Message, Timing
from hermes_rl.servers.exactness import require_address, require_reachable
from hermes_rl.spec.model import Spec
from hermes_rl.terminal_text import start_of
from hermes_rl.threads import run_in_thread
from hermes_rl.tools.base import ToolRuntime
from hermes_rl.values import read_json

PLAY_HELP = """You are the model. A line is your reply, which ends the rollout unless a simulated user continues.
  /NAME {"argument": …}   call a tool; several of these lines, then an empty one, call several at once
  /tools                  see the tools        Ctrl-D  end"""
MESSAGE_CHARACTERS = 4_000
"""Maximum number of characters shown of a message."""
NOBODY = 'servers.policy={"type": "openai", "base_url": "http://localhost/v1", "model": "you"}'
"""Placeholder for the policy if the spec names none and a person replies."""


@dataclass(frozen=True)
class PlayRequest:
    """Arguments of `hermes-rl play`."""

    spec: str
    options: Options
    row: str = "0"
    split: Split | None = None
    person: bool = False
    shell: bool = False
    demo: bool = False


def play_spec(request: PlayRequest) -> int:
    """Run one rollout; return the exit status, which is 1 if it could not be graded."""
    if request.person:
        spec = request.options.load(request.spec, demo=request.demo)
        if "policy" not in spec.servers:
            spec = request.options.load(request.spec, NOBODY, demo=request.demo)
    else:
        load = partial(request.options.load, request.spec, demo=request.demo)
        spec = with_policy(load, request.options.environ())
    rollout = run_interruptible(_run_rollout(spec, request))
    show(_result_parts(rollout))
    return 0 if rollout.error is None else 1


async def _run_rollout(spec: Spec, request: PlayRequest) -> Rollout:
    say = partial(echo, err=True)
    row, split = await chosen_row(spec, request.row, request.split, say)
    environ = request.options.environ()
    async with CompiledSpec(spec, with_placeholder_keys(spec, environ) if request.person else environ) as compiled:
        require_machine(compiled, say, None)
        for role in compiled.roles.values():
            role.tell(say)
        if not request.person:
            await require_reachable("policy", compiled.policy.configs)
        for name, role in compiled.roles.items():
            await require_address(name, role.configs if name != "policy" else ())
        await compiled.open(row)
        policy: ChatServer = Person() if request.person else compiled.policy
        runner = _OneRollout(compiled, policy, split, shell=request.shell)
        show([heading(f"row {row.key}")])
        key = RolloutKey(row, row.key if split == "eval" else f"{row.key}:0", 0, 1)
        return await runner.alone(key)


class _OneRollout(RolloutRunner):
    """Runner of a single attempt that shows its messages.

    With `shell`, a person may run commands in the sandbox before the rewards grade it.
    """

    def __init__(self, compiled: CompiledSpec, policy: ChatServer, split: Split, *, shell: bool) -> None:
        super().__init__(compiled, split=split, policy=_Shown(policy), retries=0)
        self._shell = shell

    async def _grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        assert rollout.result is not None and isinstance(self.policy, _Shown)
        self.policy.show_new(rollout.result.messages)
        if self._shell:
            await _run_shell(runtime)
        await super()._grade(rollout, runtime)


class _Shown:
    """Wrapper of the policy that shows new messages of the conversation before each call and the reply after it."""

    def __init__(self, policy: ChatServer) -> None:
        self._policy, self._shown_count, self._turn = policy, 0, 0
        self._called: dict[str, str] = {}

    async def chat(self, request: ChatRequest) -> ChatReply:
        self.show_new(request.messages)
        reply = await self._policy.chat(request)
        self._turn += 1
        self._shown_count += 1
        for call in reply.message.get("tool_calls") or ():
            self._called[str(call.get("id"))] = call["function"]["name"]
        if not isinstance(self._policy, Person):
            show(_message_parts(reply.message, self._turn, self._called))
        return reply

    async def close(self) -> None:
        await self._policy.close()

    def show_new(self, messages: Sequence[Message]) -> None:
        """Show the messages that were not shown yet."""
        for message in messages[self._shown_count :]:
            show(_message_parts(message, self._turn, self._called))
        self._shown_count = max(self._shown_count, len(messages))


class Person:
    """A person at the keyboard, who replies like a model."""

    def __init__(self) -> None:
        self._has_shown_help, self._calls = False, itertools.count()

    async def chat(self, request: ChatRequest) -> ChatReply:
        if not self._has_shown_help:
            echo(PLAY_HELP, err=True)
        self._has_shown_help = True
        message = await self._message({tool["function"]["name"]: tool for tool in request.tools or ()})
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        # Report no duration: a person's thinking time does not count as the agent's working time.
        return ChatReply(message, finish, {}, "you", CALLABLE, timing=Timing())

    async def close(self) -> None:
        """Do nothing: no resource is held."""

    async def _message(self, tools: dict[str, Any]) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        while True:
            line = await run_in_thread(lambda: _read_line("> "))
            if line is None:
                raise asyncio.CancelledError  # it ends the rollout, as Ctrl-C does
            if line == "/tools":
                show([part for tool in tools.values() for part in _tool_parts(tool["function"])])
            elif line.startswith("/"):
                name, _, arguments = line[1:].partition(" ")
                if (wrong := _call_error(name, arguments, tools)) is None:
                    function = {"name": name, "arguments": arguments or "{}"}
                    calls.append({"id": f"you-{next(self._calls)}", "type": "function", "function": function})
                else:
                    echo(wrong, err=True)
            elif calls and not line:
                return {"role": "assistant", "content": "", "tool_calls": calls}
            elif calls:
                return {"role": "assistant", "content": line, "tool_calls": calls}
            elif line:
                return {"role": "assistant", "content": line}


def _tool_parts(function: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield a tool for a person to read: its arguments, optional ones with ?."""
    schema = function.get("parameters") or {}
    required = schema.get("required") or ()
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}: {schema_of.get('type', 'any')}"
        for name, schema_of in (schema.get("properties") or {}).items()
    )
    yield safe(f"/{function['name']}  {{{arguments}}}", GOOD)
    yield indented(safe(_shorten(function.get("description") or "")))


def _read_line(prompt: str) -> str | None:
    """Return the line that a person types, or None at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _call_error(name: str, arguments: str, tools: dict[str, Any]) -> str | None:
    """Return the error in a typed call, or None if it can be sent."""
    if name not in tools:
        return f"there is no tool {name!r}; there are: {', '.join(tools) or 'none'}"
    try:
        read = read_json(arguments or "{}")
    except ValueError as error:
        return f"the arguments are not valid JSON: {error}"
    return None if isinstance(read, dict) else 'the arguments are an object, as in {"path": "a.txt"}'


async def _run_shell(runtime: ToolRuntime) -> None:
    """Let a person look around in the sandbox; each line is a separate command."""
    try:
        sandbox = await runtime.sandbox()
    except Failure as failure:
        echo(f"there is no sandbox to look into: {failure}", err=True)
        return
    echo(
        "the agent's sandbox; each line runs as a separate command, and the rewards see your changes. "
        "Ctrl-D or exit ends",
        err=True,
    )
    while (line := await run_in_thread(lambda: _read_line("sandbox$ "))) not in (None, "exit"):
        done = await sandbox.run(line or ":", cwd=runtime.shell.cwd)
        show([safe(done.output.rstrip("\n"))] if done.stdout else [])
        if done.exit_code:
            show([safe(f"status {done.exit_code}{', out of time' if done.timed_out else ''}", DIM)])


def _message_parts(message: Message, turn: int, called: Mapping[str, str]) -> Iterator[RenderableType]:
    """Yield a message for a person to read, as `show` does; `called` has the name of each call by its id."""
    role, content = str(message.get("role")), message.get("content")
    text = _shorten(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)) if content else ""
    if role == "tool" and message.get("tool_call_id") in called:
        yield from result_parts(called[message["tool_call_id"]], text)
        return
    yield heading(f"assistant, turn {turn}" if role == "assistant" else role)
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        yield from reasoning_parts(_shorten(thought))
    if text:
        yield safe(text)
    for call in message.get("tool_calls") or ():
        yield from call_parts(call["function"]["name"], _shorten(arguments_text(call["function"]["arguments"])))


def _shorten(text: object) -> str:
    full_text = str(text)
    return (
        full_text
        if len(full_text) <= MESSAGE_CHARACTERS
        else f"{start_of(full_text, MESSAGE_CHARACTERS)} ({len(full_text)} characters)"
    )


def _result_parts(rollout: Rollout) -> Iterator[RenderableType]:
    yield heading("rewards")
    reward_table = table("reward", "value", "reason", right=("value",))
    for name, value in rollout.rewards.items():
        reward_table.add_row(
            safe(name), "-" if value.value is None else f"{value.value:.4g}", safe(_shorten(value.reason or ""))
        )
    yield reward_table
    yield heading("end")
    program = rollout.result is not None and rollout.result.program is not None
    facts = pairs_table()
    score = "none" if rollout.score is None else f"{rollout.score:.4g}"
    facts.add_row("score", safe(score, GOOD if rollout.score else BAD))
    facts.add_row("stop reason", safe(f"{rollout.stop_reason}: {rollout.stop_reason.rule.event(program=program)}"))
    if rollout.error:
        facts.add_row("error", safe(rollout.error, BAD))
    yield facts
