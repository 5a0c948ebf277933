"""What rewards see of a rollout that an agent program has driven: what happened, and not what the program says.

Whatever a program sends may be the policy's invention, as any command of the policy can send it too. So this module,
and no other, makes the messages and tool calls of an `AgentResult` from the records of the endpoint and the tool
server: of the messages, those that nobody can vouch for are marked as `context`, and a tool call is one that the policy
has sampled, with who executed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hermes_rl.agent.conversations import ProgramCall
from hermes_rl.agent.result import AgentResult, Message, ToolCall, first_answer, text_of
from hermes_rl.tokens.transcript import canonical_calls
from hermes_rl.values import read_bounded

if TYPE_CHECKING:
    from hermes_rl.agent.endpoint import Endpoint


def take_evidence(result: AgentResult, endpoint: Endpoint) -> None:
    """Add what a run of a program has done to its result; all runs of a seat are one conversation.

    Args:
        result: with what earlier runs have added.
        endpoint: which the program has asked in this run.
    """
    tools, calls = endpoint.tools, endpoint.conversations.calls
    earlier = result.messages if any(_is_answer(each) for each in result.messages[result.prompt_length :]) else []
    if (last := endpoint.main) is not None:
        answers = {place: calls[number].answer for place, number in last.sampled.items()}
        request = last.request.messages
        messages = marked([*request, last.message], {**answers, len(request): last.message}, endpoint.prompt, earlier)
        result.messages = _joined(earlier, messages) if earlier else messages
        result.prompt_length = first_answer(result.messages)
        result.tool_schemas = last.request.tools
    spoken = list(_spoken(result.messages[result.prompt_length :]))
    executed = [] if tools is None else tools.calls
    offered = [] if tools is None else tools.names
    others = [call for call in result.tool_calls if call.turn == 0]
    delivered = (call for call in calls if call.delivered < math.inf)
    result.tool_calls = [*matched(spoken, executed, delivered, offered), *others]
    if tools is not None:
        result.tool_errors = list(tools.errors)


def marked(
    messages: Sequence[Message],
    answers: Mapping[int, Message],
    prompt: Sequence[Message],
    earlier: Sequence[Message] = (),
) -> list[Message]:
    """Return a conversation with the policy's answers as they were sampled, and `context: True` in what is no evidence.

    Evidence are the program's prompt, the answers, and behind an answer one result for each of its tool calls. Results
    belong to calls by their ids where these are those of the calls, else by their order, as there are programs that
    send no ids or repeat them; they get the ids of the calls.

    Args:
        messages: as the program has sent them, with the last answer.
        answers: place of a message → the answer that stands there.
        prompt: what the program had sent before the policy could run anything.
        earlier: messages of earlier runs, whose answers may stand there too.
    """
    known = {_words(each) for each in earlier if _is_answer(each)}
    first = first_answer(list(messages))
    kept: list[Message] = [each if each in prompt else {**each, "context": True} for each in messages[:first]]
    waiting: list[str] = []  # ids of calls of the last answer that have no result yet
    sent: list[str] = []  # as the program has them
    for place, message in enumerate(messages[first:], first):
        if message["role"] == "assistant" and (place in answers or _words(message) in known):
            message = answers.get(place, message)
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
            sent = [call["id"] for call in messages[place].get("tool_calls") or ()]
            kept.append(message)
        elif message["role"] == "tool" and waiting:
            named = str(message.get("tool_call_id"))
            number = sent.index(named) if sent.count(named) == 1 else 0
            sent.pop(number)
            kept.append({**message, "tool_call_id": waiting.pop(number)})
        else:
            waiting = []
            kept.append({**message, "context": True})
    return kept


def matched(
    spoken: Sequence[tuple[ToolCall, bool]],
    executed: Sequence[ToolCall],
    delivered: Iterable[ProgramCall],
    offered: Sequence[str],
) -> list[ToolCall]:
    """Return the tool calls that the policy has made: those of the graded conversation, then those of others.

    A call of one of the spec's tools is there if the tool server has executed it, with the server's result: what was
    never executed is no call, whatever the program says, and neither is what no answer of the policy has asked for. A
    call of a tool of the program's own is there if the program has sent a result. Calls of other conversations have
    turn 0.

    Args:
        spoken: calls of the graded conversation, with whether there is a result.
        executed: by the tool server, in their order.
        delivered: the answers that the program was given, in all conversations.
        offered: names of the spec's tools.
    """
    calls: dict[int, ToolCall] = {}
    free: dict[int, ToolCall] = {}
    for number, (call, has_result) in enumerate(spoken):
        if any(_names(call.name, tool) for tool in offered):
            free[number] = call
        elif has_result:
            calls[number] = call
    in_main = {call.id for call, _ in spoken}
    elsewhere = [
        each for answer in delivered for each in answer.answer.get("tool_calls") or () if each["id"] not in in_main
    ]
    others: list[ToolCall] = []
    for call in executed:
        same = (n for n, each in free.items() if _names(each.name, call.name) and each.arguments == call.arguments)
        if (place := next(same, None)) is not None:
            each = free.pop(place)
            calls[place] = replace(call, turn=each.turn, id=each.id)
            continue
        asked = (
            each
            for each in elsewhere
            if _names(each["function"]["name"], call.name) and _arguments(each) == call.arguments
        )
        if (source := next(asked, None)) is not None:
            elsewhere.remove(source)
            others.append(replace(call, turn=0, id=source["id"]))
    return [*(calls[number] for number in sorted(calls)), *others]


def _spoken(messages: Sequence[Message]) -> Iterator[tuple[ToolCall, bool]]:
    """Yield the tool calls of the policy's answers, each with whether it has a result."""
    turn, waiting = 0, dict[str, ToolCall]()
    for message in messages:
        if message["role"] == "tool" and not message.get("context"):
            if (call := waiting.pop(message["tool_call_id"], None)) is not None:
                yield replace(call, result=text_of(message.get("content"))), True
        elif message["role"] == "assistant":
            yield from ((call, False) for call in waiting.values())
            turn, waiting = turn + 1, {}
            for call in () if message.get("context") else message.get("tool_calls") or ():
                name, arguments = call["function"]["name"], _arguments(call)
                waiting[call["id"]] = ToolCall(turn, call["id"], name, arguments, "", executed_by="program")
    yield from ((call, False) for call in waiting.values())


def _names(name: str, tool: str) -> bool:
    """Return whether a program calls a tool by this name, which may be longer, as in `mcp__tools__add`."""
    return name == tool or (name.endswith(tool) and not name[-len(tool) - 1].isalnum())


def _joined(earlier: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """Return what a program has said in earlier runs and in this one, which may have gone on with the conversation."""
    last = text_of(earlier[-1].get("content"))
    if any(each["role"] == "assistant" and text_of(each.get("content")) == last for each in messages[:-1]):
        return list(messages)
    return [*earlier, *(each for each in messages if each["role"] != "system" or each not in earlier)]


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("context")


def _words(message: Message) -> tuple[str, tuple[str, ...]]:
    """Return what a message says, in the one form that messages of the same meaning have."""
    return text_of(message.get("content")).strip(), tuple(canonical_calls(message))


def _arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call; the text where they cannot be read."""
    text = call["function"]["arguments"]
    try:
        value = read_bounded(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
