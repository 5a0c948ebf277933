"""What the endpoint of an agent program costs per call, beside a proxy that only forwards.

    python benchmarks/agents.py [--conversations N] [--turns N] [--concurrency C] [--repetitions N] [--verifiers PYTHON]

A model server with canned answers in a process of its own; each contender in one too, which is sent the same bytes: the
conversations of a program, by each dialect, streamed and not. Its processor time is measured from the first request to
the last, behind a round that warms up. Prints two Markdown tables: beside a proxy, and what becomes of it where the
policy is one of tokens, which somebody has to render, tokenize and parse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from report import machine, say, spread, table

from hermes_rl import Policy, Sampled, Sampling
from hermes_rl.agent.dialects import DIALECTS
from hermes_rl.agent.dialects.base import ProgramAnswer, ProgramDialect, ProgramRequest
from hermes_rl.agent.endpoint import Endpoint
from hermes_rl.agent.recorder import LoopOptions, PolicyRecorder
from hermes_rl.agent.result import AgentResult
from hermes_rl.servers.base import ChatRequest
from hermes_rl.threads import reduce_gc_pauses
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.parsers.table import load_parser
from hermes_rl.tokens.rendering import for_template
from hermes_rl.tokens.transcript import Transcript

TEXT = "The listing shows what was asked for; I go on with the next step of the work. " * 2
ARGUMENTS = '{"command": "ls -l /workspace && cat /workspace/notes.txt"}'
CALL = {"id": "c1", "type": "function", "function": {"name": "tool0", "arguments": ARGUMENTS}}
ANSWER = ProgramAnswer("r", 0, "m", {"role": "assistant", "content": TEXT, "tool_calls": [CALL]}, "tool_calls", 900, 60)
RESULT, SYSTEM = "total 8 notes.txt " * 45, "You work in a shell, step by step, and say what you do. " * 70
TOOLS = 8
SAMPLED = f'{TEXT}<tool_call>\n{{"name": "tool0", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'
BASELINE, CHAT, TOKENS = "aiohttp proxy", "hermes-rl, chat server", "hermes-rl, tokens"
RENDERING, ALONE, VERIFIERS = "aiohttp that renders", "the policy alone", "verifiers"
STREAMED = ":streamGenerateContent"
"""Google's path says whether an answer is streamed; in the other dialects the body does."""


@dataclass(frozen=True)
class Case:
    """What is asked: by a dialect, streamed or not."""

    dialect: ProgramDialect
    stream: bool

    @property
    def name(self) -> str:
        return f"{self.dialect.path[1:]}{', streamed' if self.stream else ''}"

    @property
    def google(self) -> bool:
        return self.dialect.path.startswith(":")

    @property
    def path(self) -> str:
        return f"/v1beta/models/m{self.dialect.path}" if self.google else f"/v1{self.dialect.path}"

    def bodies(self, turns: int) -> list[bytes]:
        """Return the requests of one conversation, one for each turn."""
        return [body(self.dialect, turn, stream=self.stream) for turn in range(turns)]


CASES = [
    Case(dialect, stream)
    for dialect in DIALECTS
    for stream in (False, True)
    if not dialect.path.startswith(":") or stream == (dialect.path == STREAMED)
]


# -------------------------------------------------------------------------------- What is asked, and what is answered


def body(dialect: ProgramDialect, turn: int, *, stream: bool) -> bytes:
    """The request of a program in its nth turn, as that dialect has it."""
    schema = {"type": "object", "properties": {"command": {"type": "string", "description": "What is run. " * 30}}}
    names = [f"tool{index}" for index in range(TOOLS)]
    tool_fields: dict[str, Any] = {"description": "Runs a command and says what it has printed. " * 6}
    more: dict[str, Any] = {"model": "m", "stream": stream}
    reply = json.loads(dialect.written(ANSWER, ProgramRequest([], [], stream=False, sampling={})))
    if dialect.path == "/responses":
        tools = [{"type": "function", "name": name, **tool_fields, "parameters": schema} for name in names]
        result: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": RESULT}
        items = [{"role": "user", "content": "Begin."}, *turn * [*reply["output"], result]]
        return json.dumps({**more, "instructions": SYSTEM, "input": items, "tools": tools}).encode()
    if dialect.path == "/messages":
        tools = [{"name": name, **tool_fields, "input_schema": schema} for name in names]
        assistant_message = {"role": "assistant", "content": reply["content"]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": RESULT}]}
        messages = [{"role": "user", "content": "Begin."}, *turn * [assistant_message, result]]
        return json.dumps({**more, "max_tokens": 999, "system": SYSTEM, "messages": messages, "tools": tools}).encode()
    if dialect.path.startswith(":"):
        functions = [{"name": name, **tool_fields, "parametersJsonSchema": schema} for name in names]
        answered = {"functionResponse": {"id": "c1", "name": "tool0", "response": {"output": RESULT}}}
        contents = [{"role": "user", "parts": [{"text": "Begin."}]}]
        contents += turn * [reply["candidates"][0]["content"], {"role": "user", "parts": [answered]}]
        google = {"contents": contents, "systemInstruction": {"parts": [{"text": SYSTEM}]}}
        return json.dumps({**google, "tools": [{"functionDeclarations": functions}]}).encode()
    tools = [{"type": "function", "function": {"name": name, **tool_fields, "parameters": schema}} for name in names]
    result = {"role": "tool", "tool_call_id": "c1", "content": RESULT}
    opening_messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Begin."}]
    messages = [*opening_messages, *turn * [reply["choices"][0]["message"], result]]
    return json.dumps({**more, "messages": messages, "tools": tools}).encode()


async def canned(request: web.BaseRequest) -> web.StreamResponse:
    """The model: it answers in the dialect of the path."""
    request_body = await request.read()
    dialect = next(each for each in DIALECTS if request.path.endswith(each.path))
    streamed = b'"stream": true' in request_body or b'"stream":true' in request_body or dialect.path == STREAMED
    return await answered(request, dialect, ProgramRequest([], [], stream=streamed, sampling={}))


async def answered(
    request: web.BaseRequest, dialect: ProgramDialect, program_request: ProgramRequest
) -> web.StreamResponse:
    if not program_request.stream:
        return web.Response(body=dialect.written(ANSWER, program_request), content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in dialect.events(ANSWER, program_request):
        await response.write(event)
    await response.write_eof()
    return response


# ------------------------------------------------------------------------- Who is measured, in a process of its own


async def proxied(stack: AsyncExitStack, model: str, ports: int) -> list[int]:
    session = await stack.enter_async_context(aiohttp.ClientSession())

    async def forward(request: web.BaseRequest) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"}
        async with session.post(model + request.path, data=await request.read(), headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    return [await served(forward) for _ in range(ports)]


async def recorded(stack: AsyncExitStack, policy: Policy, ports: int) -> list[int]:
    numbers = []
    for index in range(ports):
        recorder = PolicyRecorder(AgentResult(transcript=Transcript()), policy.role, LoopOptions(max_turns=10_000))
        endpoint = await stack.enter_async_context(Endpoint(recorder, f"r{index}"))
        listener = listening()
        numbers.append(listener.getsockname()[1])
        endpoint.serve(listener)
    return numbers


async def chatted(stack: AsyncExitStack, model: str, ports: int) -> list[int]:
    return await recorded(stack, Policy.server("openai", f"{model}/v1", "m"), ports)


def token_policy() -> Policy:
    tokens = load_tokenizer().encode(SAMPLED)

    async def sample(ids: list[int], sampling: Sampling) -> Sampled:
        return Sampled(tokens, [-0.1] * len(tokens), "stop")

    return Policy.sampling(sample, None)


async def tokenized(stack: AsyncExitStack, model: str, ports: int) -> list[int]:
    return await recorded(stack, token_policy(), ports)


async def rendering(stack: AsyncExitStack, model: str, ports: int) -> list[int]:
    """What a chat server does in front of its engine: it renders and tokenizes each request, and parses the answer."""
    tokenizer, parser = load_tokenizer(), load_parser("hermes")
    sampled = tokenizer.encode(SAMPLED)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        dialect = next(each for each in DIALECTS if request.path.endswith(each.path))
        program_request = dialect.read(json.loads(await request.read()))
        messages = [for_template(message) for message in program_request.messages]
        tokenizer.encode(tokenizer.render(messages, program_request.tools, add_generation_prompt=True))
        parser.calls(tokenizer.decode(sampled[:-1]), program_request.tools)
        return await answered(request, dialect, program_request)

    return [await served(answer) for _ in range(ports)]


def policy_alone(case: Case, options: argparse.Namespace) -> float:
    """Return the milliseconds per call of the policy of `TOKENS`, asked for the same without an endpoint."""
    requests = [
        (case.dialect.read(json.loads(request_body)), len(request_body)) for request_body in case.bodies(options.turns)
    ]
    role = token_policy().role

    async def converse() -> None:
        transcript = Transcript()
        for program_request, size in requests:
            await role.chat(
                ChatRequest(program_request.messages, program_request.tools, resent=size, transcript=transcript)
            )

    async def all_of_them() -> float:
        await converse()
        before = time.process_time()
        for _ in range(options.conversations):
            await converse()
        return 1000 * (time.process_time() - before) / (options.conversations * options.turns)

    with reduce_gc_pauses():
        return asyncio.run(all_of_them())


CONTENDERS: dict[str, Callable[[AsyncExitStack, str, int], Awaitable[list[int]]]] = {
    BASELINE: proxied,
    CHAT: chatted,
    TOKENS: tokenized,
    RENDERING: rendering,
}


def listening() -> Any:
    import socket

    return socket.create_server(("127.0.0.1", 0), backlog=1024)


async def served(handler: Any) -> int:
    listener = listening()
    await asyncio.get_running_loop().create_server(web.Server(handler, access_log=None), sock=listener)
    return int(listener.getsockname()[1])


async def serve(name: str, model: str, ports: int) -> None:
    """Be a contender: print the ports, then the processor time at each line that is read."""
    async with AsyncExitStack() as stack:
        stack.enter_context(reduce_gc_pauses())  # as in every run
        numbers = [await served(canned)] if name == "model" else await CONTENDERS[name](stack, model, ports)
        say(json.dumps([[port, "local"] for port in numbers]))
        while await asyncio.to_thread(sys.stdin.readline):
            say(str(time.process_time()))


# ------------------------------------------------------------------------------------------------------ The program


@contextmanager
def process(command: list[str]) -> Iterator[tuple[list[tuple[int, str]], Callable[[], float]]]:
    """Start a contender; yields a port and a key for each conversation, and how to ask for its processor time."""
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdin is not None
        assert running.stdout is not None

        def used() -> float:
            running.stdin.write("\n")
            running.stdin.flush()
            return float(running.stdout.readline())

        yield json.loads(running.stdout.readline()), used
    finally:
        running.kill()
        running.wait()


def contender(name: str, model: str, ports: int, options: argparse.Namespace) -> list[str]:
    if name == VERIFIERS:
        return [options.verifiers, str(Path(__file__).with_name("agents_verifiers.py")), model, str(ports)]
    return [sys.executable, __file__, "--serve", name, "--model", model, "--ports", str(ports)]


async def play(endpoints: list[tuple[int, str]], path: str, bodies: list[bytes], concurrency: int) -> None:
    """Ask each port for one conversation, turn by turn."""
    free = asyncio.Semaphore(concurrency)

    async def converse(session: aiohttp.ClientSession, port: int, key: str) -> None:
        async with free:
            for request_body in bodies:
                headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "x-api-key": key}
                async with session.post(f"http://127.0.0.1:{port}{path}", data=request_body, headers=headers) as answer:
                    response_body = await answer.read()
                    assert answer.status == 200 and b"ls -l /workspace" in response_body, response_body[:500]

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(converse(session, *endpoint) for endpoint in endpoints))


def measure(name: str, model: str, case: Case, options: argparse.Namespace) -> float:
    """Return the milliseconds of processor time per call."""
    if name == ALONE:
        return policy_alone(case, options)
    bodies = case.bodies(options.turns)
    with process(contender(name, model, options.conversations + 4, options)) as (endpoints, used):
        asyncio.run(play(endpoints[:4], case.path, bodies, 4))
        before = used()
        asyncio.run(play(endpoints[4:], case.path, bodies, options.concurrency))
        return 1000 * (used() - before) / (options.conversations * options.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=32, help="of a program, each a rollout (default: 32)")
    parser.add_argument("--turns", type=int, default=10, help="calls per conversation (default: 10)")
    parser.add_argument("--concurrency", type=int, default=8, help="conversations at a time (default: 8)")
    parser.add_argument("--repetitions", type=int, default=5, help="of everything (default: 5)")
    parser.add_argument("--verifiers", help="an interpreter that has verifiers 0.4, measured too; default: none")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options.model, options.ports))
        return
    contenders = [*CONTENDERS, ALONE, *([VERIFIERS] if options.verifiers else [])]
    beside_proxy, of_tokens = list[list[str]](), list[list[str]]()
    with process(contender("model", "", 1, options)) as (endpoints, _):
        model = f"http://127.0.0.1:{endpoints[0][0]}"
        for case in CASES:
            measured: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(options.repetitions):
                for name in contenders:
                    if name != VERIFIERS or not case.google:  # which it does not speak
                        measured[name].append(measure(name, model, case, options))
            overheads = [total - part for total, part in zip(measured[TOKENS], measured[ALONE], strict=True)]
            proxy, others = measured[BASELINE], [CHAT, *([VERIFIERS] if options.verifiers else [])]
            figures = [proxy, *(measured[name] for name in others), *(ratios(measured[name], proxy) for name in others)]
            beside_proxy.append([case.name, *(spread(each) if each else "–" for each in figures)])
            figures = [measured[RENDERING], measured[TOKENS], measured[ALONE]]
            figures += [
                ratios(measured[TOKENS], measured[RENDERING]),
                ratios(measured[TOKENS], proxy),
                ratios(overheads, proxy),
            ]
            of_tokens.append([case.name, *map(spread, figures)])
    sizes = [len(body(DIALECTS[0], turn, stream=False)) for turn in (0, options.turns - 1)]
    say(f"{options.conversations} conversations of {options.turns} calls of {sizes[0]} to {sizes[1]} bytes,")
    say(f"{options.concurrency} at a time, {options.repetitions} repetitions; median (smallest to largest).")
    say(f"{machine()}. CPU in ms per call.\n")
    say(table(["dialect", BASELINE, *others, *(f"{name} / proxy" for name in others)], beside_proxy))
    say("")
    compared = [f"{TOKENS} / {RENDERING}", f"{TOKENS} / proxy", f"{TOKENS} without {ALONE} / proxy"]
    say(table(["dialect", RENDERING, TOKENS, ALONE, *compared], of_tokens))


def ratios(mine: list[float], others: list[float]) -> list[float]:
    """Return the ratios within each repetition; none where one of them was not measured."""
    return [a / b for a, b in zip(mine, others, strict=False)]


if __name__ == "__main__":
    main()
