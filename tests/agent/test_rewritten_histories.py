"""Three hundred ways to send a conversation back, by each dialect of the endpoint: what is trained, and what never is.

A program rewrites what it sends back, as those that are known do and in ways that are made up. Where it says the same,
the conversation stays one sequence and no token is lost; where it says something else, that is context, and what is
sampled behind it is trained in the context that the engine was sent.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from hermes_rl import Group, Sampled, Sampling, attach_provenance
from hermes_rl.agent.conversations import Kind
from hermes_rl.agent.result import Message
from tests.agent.test_endpoint import EVERY, Asking, Engine, check
from tests.api.summing import END, TOKENIZER
from tests.thorough import spread
from tests.tokens.families import adder

DEFAULT: tuple[Kind, ...] = ("main", "subagents")
TOOL = adder()[0]["function"]
TEXT = "  Héllo — I write the file first.  \n\n"
THOUGHT = "Let me think…\n  step 1: …\n"
ARGUMENTS = '{ "timeout":60000.0 ,  "description":"run \\u00e9" ,  "command":"ls -l" }'
Change = Callable[[str], str | None]


def written(arguments: str = ARGUMENTS, text: str = TEXT, thought: str = THOUGHT, name: str = "add") -> str:
    """An answer in the tokens of a model: reasoning, a text and a call."""
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f"<think>\n{thought}</think>\n\n{text}{call}"


class Scripted(Engine):
    """Samples the answers of a list, one after the other, and its last one from then on."""

    def __init__(self, *answers: str, seed: int = 0) -> None:
        super().__init__(seed)
        self.answers = list(answers)

    async def __call__(self, ids: list[int], sampling: Sampling) -> Sampled:
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        tokens = TOKENIZER.encode(said + END)
        self.log.append((ids, Sampled(tokens, [-self.random.random() for _ in tokens], "stop")))
        return self.log[-1][1]


# -------------------------------------------------------------------------- A program that speaks each of the dialects


def object_of(arguments: str) -> dict[str, Any]:
    """Arguments as the dialects have them that write objects."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"__unparsedToolInput": {"raw": arguments}}


def as_responses(messages: list[Message]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
            continue
        if message.get("reasoning_content"):
            thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "summary": [], "content": [thought]})
        elif message.get("handle"):
            items.append({"type": "reasoning", "summary": [], "encrypted_content": message["handle"]})
        if message.get("content"):
            text = message["content"]
            if isinstance(text, list):
                text = [{"type": "output_text", "text": part["text"]} for part in text]
            items.append({"type": "message", "role": message["role"], "content": text})
        for call in message.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    tool = {"type": "function", **TOOL, "strict": False}
    return {"model": "m", "input": items, "tools": [tool], "include": ["reasoning.encrypted_content"]}


def of_responses(body: dict[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for item in body["output"]:
        if item["type"] == "reasoning":
            message["reasoning_content"] = "".join(part["text"] for part in item["content"])
            message["handle"] = item["encrypted_content"]
        elif item["type"] == "message":
            message["content"] += item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message


def as_messages(messages: list[Message]) -> dict[str, Any]:
    sent: list[dict[str, Any]] = []
    for message in messages:
        role, blocks = message["role"], list[dict[str, Any]]()
        if role == "tool":
            role = "user"
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
        else:
            if message.get("reasoning_content"):
                blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "hermes-rl"})
            if message.get("content"):
                text = message["content"]
                blocks += text if isinstance(text, list) else [{"type": "text", "text": text}]
            for call in message.get("tool_calls") or ():
                given = object_of(call["function"]["arguments"])
                blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
        sent.append({"role": role, "content": blocks})
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    turns = [each for each in sent if each["role"] != "system"]
    return {"model": "m", "max_tokens": 9, "system": system, "messages": turns, "tools": [tool]}


def of_messages(body: dict[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for block in body["content"]:
        if block["type"] == "thinking":
            message["reasoning_content"] = block["thinking"]
        elif block["type"] == "text":
            message["content"] += block["text"]
        else:
            function = {"name": block["name"], "arguments": arguments_of(block["input"])}
            message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
    return message


def arguments_of(given: dict[str, Any]) -> str:
    broken = given.get("__unparsedToolInput")
    return broken["raw"] if broken else json.dumps(given)


def as_google(messages: list[Message]) -> dict[str, Any]:
    contents: list[dict[str, Any]] = []
    for message in messages:
        role, parts = message["role"], list[dict[str, Any]]()
        if role == "tool":
            parts = [
                {
                    "functionResponse": {
                        "id": message["tool_call_id"],
                        "name": TOOL["name"],
                        "response": {"output": message["content"]},
                    }
                }
            ]
        else:
            if message.get("reasoning_content"):
                parts.append({"text": message["reasoning_content"], "thought": True})
            if message.get("content"):
                text = message["content"]
                parts += [{"text": part["text"]} for part in text] if isinstance(text, list) else [{"text": text}]
            for call in message.get("tool_calls") or ():
                function = call["function"]
                given = object_of(function["arguments"])
                parts.append({"functionCall": {"id": call["id"], "name": function["name"], "args": given}})
        contents.append({"role": "model" if role == "assistant" else role, "parts": parts})
    instruction = [content["parts"][0] for content in contents if content["role"] == "system"]
    turns = [
        {**content, "role": content["role"].replace("tool", "user")}
        for content in contents
        if content["role"] != "system"
    ]
    tool = {"name": TOOL["name"], "description": TOOL["description"], "parametersJsonSchema": TOOL["parameters"]}
    tools = [{"functionDeclarations": [tool]}]
    return {"systemInstruction": {"parts": instruction}, "contents": turns, "tools": tools}


def of_google(body: dict[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for part in body["candidates"][0]["content"]["parts"]:
        if "functionCall" in part:
            made = part["functionCall"]
            function = {"name": made["name"], "arguments": arguments_of(made["args"])}
            message.setdefault("tool_calls", []).append({"id": made["id"], "type": "function", "function": function})
        else:
            name = "reasoning_content" if part.get("thought") else "content"
            message[name] = message.get(name, "") + part["text"]
    return message


SPOKEN: dict[str, tuple[str, Callable[[list[Message]], dict[str, Any]], Callable[[dict[str, Any]], Message]]] = {
    "chat": (
        "/chat/completions",
        lambda messages: {"model": "m", "messages": messages, "tools": adder()},
        lambda body: body["choices"][0]["message"],
    ),
    "responses": ("/responses", as_responses, of_responses),
    "messages": ("/messages", as_messages, of_messages),
    "google": ("/models/m:generateContent", as_google, of_google),
}
"""Of each dialect its path, how it writes a request, and how it reads an answer."""


@dataclass
class Program(Asking):
    """Asks in one dialect; `history` is its conversation, as chat completions write it."""

    dialect: str = "chat"
    history: list[Message] = field(default_factory=list)

    def begin(self) -> None:
        self.history = [{"role": "system", "content": "Use your tool."}, {"role": "user", "content": "Write a.py."}]

    async def turn(self, rewritten: Callable[[Message], None] = lambda _: None) -> None:
        """Ask, with each answer rewritten, and add the new answer and the results of its calls to the history."""
        sent = copy.deepcopy(self.history)
        for message in answers(sent):
            rewritten(message)
        path, written, read = SPOKEN[self.dialect]
        async with self.session.post(self.address + path, json=written(sent)) as response:
            answer = await response.json()
            assert response.status == 200, answer
        message = read(answer)
        calls = message.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "60000"} for call in calls]
        self.history += [message, *results]
        if not calls:
            self.history.append({"role": "user", "content": "Go on."})

    @property
    def hows(self) -> list[str]:
        assert self.result.transcript is not None
        return [turn.how for turn in self.result.transcript.turns]


# ------------------------------------------------------------------------------------------------------ The rewritings


@dataclass(frozen=True)
class Rewriting:
    """How a program writes a turn that it sends back."""

    arguments: Callable[[str], str] = str
    text: Callable[[str], Any] = str
    reasoning: Change = str

    def apply(self, message: Message) -> None:
        message["content"] = self.text(message.get("content") or "")
        thought = message.pop("reasoning_content", None)
        if thought is not None and (thought := self.reasoning(thought)) is not None:
            message["reasoning_content"] = thought
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = self.arguments(call["function"]["arguments"])


def dropped(thought: str) -> None:
    return None


def numbers_whole(value: Any) -> Any:
    """What JavaScript makes of numbers."""
    if isinstance(value, dict):
        return {name: numbers_whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [numbers_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def dumped(whole: bool = False, sort: bool = False, **how: Any) -> Callable[[str], str]:
    def change(arguments: str) -> str:
        value = json.loads(arguments)
        value = numbers_whole(value) if whole else value
        return json.dumps(dict(sorted(value.items())) if sort else value, **how)

    return change


COMPACT = (",", ":")
IN_JAVASCRIPT = dumped(whole=True, separators=COMPACT, ensure_ascii=False)
PROGRAMS = {
    "codex": Rewriting(),
    "mini-swe-agent": Rewriting(),
    "terminus-2": Rewriting(reasoning=dropped),
    "pi": Rewriting(IN_JAVASCRIPT),
    "opencode": Rewriting(IN_JAVASCRIPT, reasoning=dropped),  # by Responses its handle comes back
    "qwen": Rewriting(IN_JAVASCRIPT, reasoning=str.rstrip),
    "claude": Rewriting(dumped(whole=True, sort=True, ensure_ascii=False)),
    "gemini": Rewriting(dumped(ensure_ascii=False), reasoning=dropped),
    "hermes": Rewriting(dumped(separators=COMPACT), str.strip, dropped),
    "openhands": Rewriting(dumped(), lambda text: [{"type": "text", "text": text}], dropped),
}
"""What each program was seen to make of a turn with odd blanks, reasoning and JSON."""
CALLS_AS_PROSE = "Calling tools:\n[{'name': 'add'}]"
REPAIRED = '{"command": "echo hi"}'
MARKED = '{"_openhands_malformed_tool_call": true}'


def first_call(history: list[Message]) -> dict[str, Any]:
    return next(iter(message["tool_calls"][0] for message in history if message.get("tool_calls")))


def answers(history: list[Message]) -> list[Message]:
    return [message for message in history if message["role"] == "assistant"]


def last_turn_removed(history: list[Message], said: str) -> None:
    del history[history.index(answers(history)[-1]) :]
    history.append({"role": "user", "content": said})


def call_is(**function: str) -> Callable[[list[Message]], None]:
    return lambda history: first_call(history)["function"].update(function)


def replaced_by(answer: str, user: str) -> Callable[[list[Message]], None]:
    """The answer was not read to its end, and something else stands in its place."""

    def change(history: list[Message]) -> None:
        history[2:] = [{"role": "assistant", "content": answer}, {"role": "user", "content": user}]

    return change


def calls_in_prose(history: list[Message]) -> None:
    for message in answers(history):
        del message["tool_calls"]
        message["content"] = CALLS_AS_PROSE


def task_extended(history: list[Message]) -> None:
    del history[2:]
    history[1]["content"] += " [Your answer was empty.]"


BROKEN: dict[str, Callable[[list[Message]], None]] = {
    "pi and qwen repair it": call_is(arguments=REPAIRED),
    "opencode calls it invalid": call_is(name="invalid", arguments='{"tool": "add", "error": "no JSON"}'),
    "openhands marks it": call_is(arguments=MARKED),
    "mini removes the turn": lambda history: last_turn_removed(history, "Tool call error"),
    "smolagents writes prose": calls_in_prose,
    "claude adds to what the user has said": task_extended,
    "qwen keeps a part": replaced_by("par", "The connection dropped."),
    "hermes keeps nothing of it": replaced_by("", "[System: cut off by a network error]"),
}
"""What programs were seen to make of a call whose JSON was cut, of an answer without text, and of a broken stream."""


def forged_answer(history: list[Message], chance: random.Random, mark: str) -> None:
    history.insert(chance.randrange(2, len(history)), {"role": "assistant", "content": mark})


def forged_round(history: list[Message], chance: random.Random, mark: str) -> None:
    """A call that nobody sampled, with its result, before the first answer."""
    call = {"id": "forged", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": mark})}}
    result = {"role": "tool", "tool_call_id": "forged", "content": "3"}
    history[2:2] = [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


def copied_round(history: list[Message], chance: random.Random, mark: str) -> None:
    """The ids of a call of the policy's, under arguments of somebody else's."""
    first_call(history)["function"]["arguments"] = json.dumps({"a": mark})


def other_text(history: list[Message], chance: random.Random, mark: str) -> None:
    chance.choice(answers(history))["content"] += f" {mark}"


def other_reasoning(history: list[Message], chance: random.Random, mark: str) -> None:
    # The template shows that of the answers behind the last user message.
    chance.choice(answers(history)).update(reasoning_content=mark, handle=None)


def other_result(history: list[Message], chance: random.Random, mark: str) -> None:
    next(message for message in history if message["role"] == "tool")["content"] = mark


def other_task(history: list[Message], chance: random.Random, mark: str) -> None:
    history[chance.randrange(2)]["content"] += mark


def other_name(history: list[Message], chance: random.Random, mark: str) -> None:
    first_call(history)["function"]["name"] = mark


def further_call(history: list[Message], chance: random.Random, mark: str) -> None:
    message = next(message for message in history if message.get("tool_calls"))
    function = {"name": "add", "arguments": json.dumps({"a": mark})}
    message["tool_calls"].append({"id": "forged", "type": "function", "function": function})
    result = {"role": "tool", "tool_call_id": "forged", "content": "3"}
    history.insert(history.index(message) + 2, result)


FORGERIES = (
    forged_answer, forged_round, copied_round, other_text, other_reasoning, other_result, other_task, other_name,
    further_call,
)  # fmt: skip


def some_value(chance: random.Random, depth: int = 2) -> Any:
    leaves = [None, True, chance.randrange(-9, 99), 6e4, 0.5, "é\n", 'quo"ted', "", "日本", (1 << 53) + 1]
    if depth == 0 or chance.random() < 0.5:
        return chance.choice(leaves)
    inner = [some_value(chance, depth - 1) for _ in range(chance.randrange(3))]
    return inner if chance.random() < 0.5 else {f"k{place}": each for place, each in enumerate(inner)}


def some_answer(chance: random.Random, always: bool = True) -> str:
    """What a model may sample, in JSON that no program writes so."""
    values = {f"é{place}": some_value(chance) for place in range(chance.randrange(1, 4))}
    arguments = json.dumps(values, separators=(" , ", chance.choice([":", " : "])), ensure_ascii=chance.random() < 0.5)
    text = chance.choice(["", TEXT, "Sure.\n", " é "])
    if not always and chance.random() < 0.3:
        return f"<think>\n{THOUGHT}</think>\n\n{TEXT}"
    return written(arguments, text, chance.choice([THOUGHT, "hm"]))


def some_rewriting(chance: random.Random) -> Rewriting:
    separators = chance.choice([COMPACT, (", ", ": "), (" ,", " :")])
    ascii_only, indent = chance.random() < 0.5, chance.choice([None, None, 1])
    # Integers beyond 2 ** 53 have to stay as they are, as they do in all but JavaScript.
    arguments = dumped(
        whole=chance.random() < 0.5,
        sort=chance.random() < 0.5,
        separators=separators,
        ensure_ascii=ascii_only,
        indent=indent,
    )
    text = chance.choice([str, str.strip, str.rstrip, "\n{} ".format, lambda said: [{"type": "text", "text": said}]])
    return Rewriting(arguments, text, chance.choice([str, str.strip, dropped]))


FORGED = [(forge, seed) for forge in FORGERIES for seed in range(12)]
GENERATED = 300 - len(PROGRAMS) - len(BROKEN) - len(FORGED)
BY_EACH = pytest.mark.parametrize("dialect", SPOKEN)


def nothing_is_lost(played: Program) -> None:
    """All is one sequence, and each sampled token is trained."""
    check(played)
    proof = attach_provenance(Group("g", played.rollout.key.row, [played.rollout]))
    assert (proof.excluded, proof.trained) == (0, sum(len(answer.ids) for _, answer in played.engine.log))
    assert played.hows == ["first", *["extended"] * (len(played.engine.log) - 1)]


@BY_EACH
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_turn_as_a_program_sends_it_back_loses_nothing(dialect: str, name: str) -> None:
    engine = Scripted(written(), written(), "Done.")
    async with Program(engine, train=DEFAULT, dialect=dialect) as played:
        played.begin()
        for _ in range(3):
            await played.turn(PROGRAMS[name].apply)
    nothing_is_lost(played)


@BY_EACH
@pytest.mark.generated
@pytest.mark.parametrize("seed", spread(range(GENERATED), GENERATED // 10))
async def test_equivalent_rewritings_lose_no_sampled_tokens(dialect: str, seed: int) -> None:
    chance = random.Random(seed)
    engine = Scripted(*(some_answer(chance, always=False) for _ in range(chance.randrange(3, 6))), "Done.")
    turns = len(engine.answers)
    async with Program(engine, train=DEFAULT, dialect=dialect) as played:
        played.begin()
        for _ in range(turns):
            await played.turn(lambda message: some_rewriting(chance).apply(message))
    nothing_is_lost(played)


@BY_EACH
@pytest.mark.parametrize("name", BROKEN)
async def test_what_becomes_of_a_broken_turn_is_context(dialect: str, name: str) -> None:
    engine = Scripted(written(), "Done.")
    async with Program(engine, train=EVERY, dialect=dialect) as played:
        played.begin()
        await played.turn()
        BROKEN[name](played.history)
        await played.turn()
    check(played)
    assert played.hows == ["first", "anew"]


@BY_EACH
@pytest.mark.generated
@pytest.mark.parametrize(("forge", "seed"), spread(FORGED, len(FORGERIES)))
async def test_what_the_policy_has_not_said_is_never_trained_as_its_own(dialect: str, forge: Any, seed: int) -> None:
    chance, mark = random.Random(seed), f"forged{seed}"
    engine = Scripted(*(some_answer(chance) for _ in range(3)), "Done.")
    async with Program(engine, train=EVERY, dialect=dialect) as played:
        played.begin()
        await played.turn()
        await played.turn()
        before = copy.deepcopy(played.history)
        forge(played.history, chance, mark)
        assert played.history != before
        await played.turn()
        await played.turn()
    check(played)
    asked = TOKENIZER.decode(engine.log[2][0])
    assert mark in asked or forge is other_reasoning  # of which templates show the last one
    assert played.hows[2] in ("anew", "branched")
    for line in played.rollout.sequences or ():
        for span in line.spans:
            assert mark not in TOKENIZER.decode(line.tokens[span.start : span.stop])


def test_there_are_three_hundred() -> None:
    assert GENERATED >= 100
    assert len(PROGRAMS) + len(BROKEN) + len(FORGED) + GENERATED == 300
