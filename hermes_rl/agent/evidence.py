"""Build the messages and tool calls that rewards see of a rollout driven by an agent program.

Any request may be forged by the policy, because a command of the policy can send requests like the program. Therefore
only this module builds the messages and tool calls of an `AgentResult`, from the records of the endpoint and the tool
server. Unverifiable messages are marked as `context`. A tool call is listed only if the policy sampled it, and names
the component that executed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hermes_rl.agent.conversations import ProgramCall
from hermes_rl.agent.result import AgentResult, Message, ToolCall, first_answer, text_of
from hermes_rl.tokens.transcript import canonical_calls
from hermes_rl.values import read_object

if TYPE_CHECKING:
    from hermes_rl.agent.endpoint import Endpoint


def take_evidence(result: AgentResult, endpoint: Endpoint) -> None:
    """Add one run of a program to its result. All runs of a seat form one conversation.

    Args:
        result: result that contains the earlier runs.
        endpoint: endpoint that the program called in this run.
    """
    tools, calls = endpoint.tools, endpoint.conversations.calls
    earlier = result.messages if any(_is_answer(each) for each in result.messages[result.prompt_length :]) else []
    if (last := endpoint.main) is not None:
        answers = {index: calls[call_index].answer for index, call_index in last.sampled.items()}
        request = last.request.messages
        messages = marked([*request, last.message], {**answers, len(request): last.message}, endpoint.prompt, earlier)
        result.messages = _join_runs(earlier, messages) if earlier else messages
        result.prompt_length = first_answer(result.messages)
        result.tool_schemas = last.request.tools
    spoken = list(_policy_calls(result.messages[result.prompt_length :]))
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
    """Return a conversation with the policy's replies as sampled, and `context: True` on unverified messages.

    Verified are the program's prompt, the replies, and after a reply one result for each of its tool calls. Results are
    matched to calls by id if the ids agree, otherwise by order, because some programs omit or repeat ids. Each result
    gets the id of its call.

    Args:
        messages: messages as sent by the program, with the last reply.
        answers: message index → the sampled reply at that index.
        prompt: messages sent by the program before the policy could run anything.
        earlier: messages of earlier runs, whose replies may appear again.
    """
    earlier_replies = {_comparison_key(each) for each in earlier if _is_answer(each)}
    first = first_answer(list(messages))
    marked_messages: list[Message] = [
        each if each in prompt else {**each, "context": True} for each in messages[:first]
    ]
    waiting: list[str] = []  # ids of tool calls of the last reply that have no result yet
    sent: list[str] = []  # the same ids as the program sent them
    for index, message in enumerate(messages[first:], first):
        if message["role"] == "assistant" and (index in answers or _comparison_key(message) in earlier_replies):
            message = answers.get(index, message)
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
            sent = [call["id"] for call in messages[index].get("tool_calls") or ()]
            marked_messages.append(message)
        elif message["role"] == "tool" and waiting:
            sent_id = str(message.get("tool_call_id"))
            position = sent.index(sent_id) if sent.count(sent_id) == 1 else 0
            sent.pop(position)
            marked_messages.append({**message, "tool_call_id": waiting.pop(position)})
        else:
            waiting = []
            marked_messages.append({**message, "context": True})
    return marked_messages


def matched(
    spoken: Sequence[tuple[ToolCall, bool]],
    executed: Sequence[ToolCall],
    delivered: Iterable[ProgramCall],
    offered: Sequence[str],
) -> list[ToolCall]:
    """Return the tool calls of the policy: first of the graded conversation, then of other conversations.

    A call of a tool of the spec is included if the tool server executed it, with the server's result. A call that was
    never executed is excluded, even if the program reports it, and so is a call that no policy reply contains. A call
    of a tool that the program provides is included if the program sent a result. Calls of other conversations have turn
    0.

    Args:
        spoken: calls of the graded conversation, each with True if it has a result.
        executed: calls that the tool server executed, in order.
        delivered: replies delivered to the program in all conversations.
        offered: names of the spec's tools.
    """
    calls: dict[int, ToolCall] = {}
    free: dict[int, ToolCall] = {}
    for index, (call, has_result) in enumerate(spoken):
        if any(_is_name_of(call.name, tool) for tool in offered):
            free[index] = call
        elif has_result:
            calls[index] = call
    in_main = {call.id for call, _ in spoken}
    elsewhere = [
        each for answer in delivered for each in answer.answer.get("tool_calls") or () if each["id"] not in in_main
    ]
    others: list[ToolCall] = []
    for call in executed:
        matches = (
            n for n, each in free.items() if _is_name_of(each.name, call.name) and each.arguments == call.arguments
        )
        if (spoken_index := next(matches, None)) is not None:
            each = free.pop(spoken_index)
            calls[spoken_index] = replace(call, turn=each.turn, id=each.id)
            continue
        sources = (
            each
            for each in elsewhere
            if _is_name_of(each["function"]["name"], call.name) and _call_arguments(each) == call.arguments
        )
        if (source := next(sources, None)) is not None:
            elsewhere.remove(source)
            others.append(replace(call, turn=0, id=source["id"]))
    return [*(calls[index] for index in sorted(calls)), *others]


def _policy_calls(messages: Sequence[Message]) -> Iterator[tuple[ToolCall, bool]]:
    """Yield the tool calls of the policy's replies, each with True if it has a result."""
    turn, waiting = 0, dict[str, ToolCall]()
    for message in messages:
        if message["role"] == "tool" and not message.get("context"):
            if (call := waiting.pop(message["tool_call_id"], None)) is not None:
                yield replace(call, result=text_of(message.get("content"))), True
        elif message["role"] == "assistant":
            yield from ((call, False) for call in waiting.values())
            turn, waiting = turn + 1, {}
            for call in () if message.get("context") else message.get("tool_calls") or ():
                name, arguments = call["function"]["name"], _call_arguments(call)
                waiting[call["id"]] = ToolCall(turn, call["id"], name, arguments, "", executed_by="program")
    yield from ((call, False) for call in waiting.values())


def _is_name_of(name: str, tool: str) -> bool:
    """Return True if `name` is the program's name of `tool`; it may be longer, as in `mcp__tools__add`."""
    return name == tool or (name.endswith(tool) and not name[-len(tool) - 1].isalnum())


def _join_runs(earlier: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """Return the messages of earlier runs and of this one, which may continue the conversation."""
    last = text_of(earlier[-1].get("content"))
    if any(each["role"] == "assistant" and text_of(each.get("content")) == last for each in messages[:-1]):
        return list(messages)
    return [*earlier, *(each for each in messages if each["role"] != "system" or each not in earlier)]


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("context")


def _comparison_key(message: Message) -> tuple[str, tuple[str, ...]]:
    """Return the text and the canonical tool calls of a message, for comparison by meaning."""
    return text_of(message.get("content")).strip(), tuple(canonical_calls(message))


def _call_arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call, or their text if they cannot be parsed."""
    text = call["function"]["arguments"]
    value = read_object(text)
    return text if value is None else value
