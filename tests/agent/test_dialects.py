"""Each dialect: what is read, what is written, and that an answer which comes back is the one that was given."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from hermes_rl.agent.dialects import CHAT, DIALECTS, dialect_at, written_models
from hermes_rl.agent.dialects.base import ProgramAnswer, ProgramDialect, ProgramRequest, RefusedRequestError
from hermes_rl.agent.dialects.google import Google
from hermes_rl.agent.dialects.messages import Messages
from hermes_rl.agent.dialects.responses import Responses
from hermes_rl.agent.result import Message
from hermes_rl.tokens.transcript import snapshot
from tests.thorough import examples

RESPONSES, MESSAGES, GOOGLE = Responses(), Messages(), DIALECTS[-1]
EACH = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: type(dialect).__name__)
EMPTY = ProgramRequest([], [], stream=False, sampling={})
BODIES: dict[str, dict[str, Any]] = {
    "Chat": {"messages": [{"role": "user", "content": "hi"}]},
    "Responses": {"input": "hi"},
    "Messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "Google": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}


def answer(message: Message, finish: str = "stop") -> ProgramAnswer:
    return ProgramAnswer("r-1", 1_700_000_000, "policy", {"role": "assistant", **message}, finish, 7, 3)


@EACH
def test_usage_is_what_the_engine_has_counted(dialect: ProgramDialect) -> None:
    said = replace(answer({"content": "So."}), reasoning_tokens=2)
    whole = json.loads(dialect.written(said, EMPTY))
    if isinstance(dialect, Google):
        counts = {"promptTokenCount": 7, "candidatesTokenCount": 1, "thoughtsTokenCount": 2, "totalTokenCount": 10}
        assert whole["usageMetadata"] == counts
        return
    whole = whole["usage"]
    counts = {"input_tokens": 7, "output_tokens": 3}
    if dialect is CHAT:
        details = {"reasoning_tokens": 2}
        counts = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "completion_tokens_details": details}
    assert counts.items() <= whole.items()
    if isinstance(dialect, Responses):
        assert whole["output_tokens_details"] == {"reasoning_tokens": 2}
    assert "completion_tokens_details" not in json.loads(dialect.written(answer({"content": "So."}), EMPTY))["usage"]


def called(*arguments: str, name: str = "f") -> list[dict[str, Any]]:
    return [
        {"id": f"c0001000{place}", "type": "function", "function": {"name": name, "arguments": each}}
        for place, each in enumerate(arguments)
    ]


def streamed(dialect: ProgramDialect, said: ProgramAnswer, request: ProgramRequest = EMPTY) -> list[dict[str, Any]]:
    """The data of each event; its name, where it has one, is its type."""
    events = []
    for each in dialect.events(said, request):
        *named, data = each.decode().strip().splitlines()
        if data != "data: [DONE]":
            events.append(json.loads(data.removeprefix("data: ")))
            assert [name.removeprefix("event: ") for name in named] in ([], [events[-1].get("type")])
    return events


def sent_back(dialect: ProgramDialect, whole: dict[str, Any]) -> list[Any]:
    """What a client of the dialect adds to its conversation for an answer."""
    if isinstance(dialect, Responses):
        return list(whole["output"])
    if isinstance(dialect, Messages):
        return [{"role": "assistant", "content": whole["content"]}]
    if isinstance(dialect, Google):
        return [whole["candidates"][0]["content"]]
    return [whole["choices"][0]["message"]]


def collected(dialect: ProgramDialect, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer as a client puts it together from a stream."""
    if isinstance(dialect, Responses):
        return of_responses(events)
    if isinstance(dialect, Google):
        return of_google(events)
    return of_messages(events) if isinstance(dialect, Messages) else of_chat(events)


def of_responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    for item in done:
        whole = item.get("arguments", item.get("input")) if "call" in item["type"] else item["content"][0]["text"]
        assert deltas[item["id"]] == whole
    assert events[-1]["response"]["output"] == done
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return dict(events[-1]["response"])


def of_messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        if event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for key in ("text", "thinking", "signature"):
                if key in delta:
                    block[key] += delta[key]
            block["json"] += delta.get("partial_json", "")
    for block in blocks:
        raw = block.pop("json")
        if block["type"] == "tool_use":
            try:
                value = json.loads(raw or "{}")
            except ValueError:
                value = None
            block["input"] = value if isinstance(value, dict) else {"__unparsedToolInput": {"raw": raw}}
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return {**events[0]["message"], "content": blocks, **events[-2]["delta"]}


def of_google(events: list[dict[str, Any]]) -> dict[str, Any]:
    candidates = [event["candidates"][0] for event in events]
    assert [index for index, each in enumerate(candidates) if "finishReason" in each] == [len(candidates) - 1]
    parts = [part for each in candidates for part in each["content"]["parts"]]
    return {"candidates": [{"content": {"role": "model", "parts": parts}}]}


def of_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        for name in ("content", "reasoning_content"):
            message[name] = message.get(name, "") + delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append({**call, "function": dict(call["function"])})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"choices": [{"message": message}]}


def body_with(dialect: ProgramDialect, conversation: list[Any]) -> dict[str, Any]:
    if isinstance(dialect, Google):
        return {"contents": [each if "parts" in each else BODIES["Google"]["contents"][0] for each in conversation]}
    return {"input" if isinstance(dialect, Responses) else "messages": conversation}


ANSWERS: dict[str, tuple[Message, str]] = {
    "a text": ({"content": "  Héllo\n"}, "stop"),
    "reasoning": ({"content": "So.", "reasoning_content": "Let me\n think…\n"}, "stop"),
    "two calls": ({"content": "I add.", "tool_calls": called('{ "a":1.0 ,"b": "é"}', "{}")}, "tool_calls"),
    "a call alone": ({"content": "", "tool_calls": called('{"a": 1}')}, "tool_calls"),
    "broken arguments": ({"content": "", "tool_calls": called('{"a": ')}, "tool_calls"),
    "arguments that are a list": ({"content": "", "tool_calls": called("[1]")}, "tool_calls"),
    "a turn that was cut": ({"content": "I was c"}, "length"),
    "nothing": ({"content": ""}, "stop"),
}


@EACH
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ANSWERS)
def test_reply_round_trips_through_each_dialect_as_sampled(dialect: ProgramDialect, stream: bool, name: str) -> None:
    message, finish = ANSWERS[name]
    said = answer(message, finish)
    whole = collected(dialect, streamed(dialect, said)) if stream else json.loads(dialect.written(said, EMPTY))
    read = dialect.read(body_with(dialect, [{"role": "user", "content": "hi"}, *sent_back(dialect, whole)]))
    assert [each["role"] for each in read.messages] == ["user", "assistant"]
    assert snapshot(said.message).has_same_meaning(read.messages[-1])
    assert read.messages[-1].get("reasoning_content", "") == message.get("reasoning_content", "")
    ids = [call["id"] for call in message.get("tool_calls", ())]
    assert [call["id"] for call in read.messages[-1].get("tool_calls", ())] == ids


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_written_is_what_the_makers_types_say(name: str) -> None:
    said = answer(*ANSWERS[name])
    ChatCompletion.model_validate_json(CHAT.written(said, EMPTY), strict=False)
    for event in streamed(CHAT, said):
        ChatCompletionChunk.model_validate(event)
    response = Response.model_validate_json(RESPONSES.written(said, EMPTY))
    assert response.status == ("incomplete" if said.finish == "length" else "completed")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, 3)
    every = TypeAdapter[Any](ResponseStreamEvent)
    for event in streamed(RESPONSES, said):
        read = every.validate_python(event)
        assert read.type == event["type"]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("stop", "end_turn"), ("tool_calls", "tool_use"), ("length", "max_tokens"), ("content_filter", "refusal")],
)
def test_messages_dialect_reports_the_stop_reason_and_usage(finish: str, reason: str) -> None:
    said = answer({"content": "So."}, finish)
    whole = json.loads(MESSAGES.written(said, EMPTY))
    assert (whole["stop_reason"], whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (reason, 7, 3)
    events = streamed(MESSAGES, said)
    assert events[-2]["delta"]["stop_reason"] == reason
    assert events[-2]["usage"]["output_tokens"] == 3


def test_responses_dialect_joins_items_of_one_turn_only() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Add."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    read = RESPONSES.read({"instructions": "Work.", "input": items, "reasoning": {"effort": "low"}, "store": False})
    assert [each["role"] for each in read.messages] == ["system", "system", "user", "assistant", "tool", "tool"]
    turn = read.messages[3]
    assert (turn["reasoning_content"], turn["content"], len(turn["tool_calls"])) == ("hm", "I add.", 2)
    assert [(each["tool_call_id"], each["content"]) for each in read.messages[4:]] == [("c1", "1"), ("c2", "2")]
    assert read.sampling == {"reasoning": '{"effort": "low"}', "store": False}


def test_reasoning_comes_back_by_its_handle() -> None:
    said = answer({"content": "So.", "reasoning_content": "hm …"})
    items = json.loads(RESPONSES.written(said, EMPTY))["output"]
    del items[0]["content"]
    assert RESPONSES.read({"input": items}).messages[0]["reasoning_content"] == "hm …"
    items[0]["encrypted_content"] = "hermes-rl:???"
    assert "reasoning_content" not in RESPONSES.read({"input": items}).messages[0]


def test_a_custom_tool_takes_a_text() -> None:
    tool = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "grammar"}}
    request = RESPONSES.read({"input": "hi", "tools": [tool]})
    assert request.tools[0]["function"]["parameters"]["required"] == ["input"]
    for arguments, kind in (('{"input": "*** Begin\\n"}', "custom_tool_call"), ('{"a": 1}', "function_call")):
        said = answer({"content": "", "tool_calls": called(arguments, name="apply_patch")}, "tool_calls")
        whole = json.loads(RESPONSES.written(said, request))
        assert whole["output"][0]["type"] == kind
        Response.model_validate(whole)
        assert collected(RESPONSES, streamed(RESPONSES, said, request)) == whole
        read = RESPONSES.read({"input": whole["output"], "tools": [tool]})
        assert snapshot(said.message).has_same_meaning(read.messages[0])


def test_messages_are_read_block_by_block() -> None:
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
            {"type": "text", "text": "Work.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Add."}, {"type": "text", "text": "Now."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "Go on."},
                ],
            },
            {"role": "system", "content": "Be brief."},
        ],
        "tools": [{"name": "f", "description": "F.", "input_schema": {"type": "object"}}],
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "stream": True,
    }
    read = MESSAGES.read(body)
    assert [each["role"] for each in read.messages] == ["system", "user", "assistant", "tool", "user", "system"]
    assert [each["content"] for each in read.messages] == ["Work.", "Add.\nNow.", "", "2", "Go on.", "Be brief."]
    assert read.tools[0] == {
        "type": "function",
        "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}},
    }
    assert read.sampling == {"max_tokens": 32000, "thinking": '{"type": "adaptive"}'}
    assert read.stream


def test_google_is_read_part_by_part() -> None:
    body = {
        "systemInstruction": {"parts": [{"text": "Work."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Add."}, {"text": "Now."}]},
            {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "I add."}]},
            {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "f", "args": {"a": 1}}}]},
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "c1", "name": "f", "response": {"output": "2"}}},
                    {"functionResponse": {"id": "c2", "name": "f", "response": {"sum": 2, "of": "é"}}},
                    {"text": "Go on."},
                ],
            },
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "f", "parameters": {"type": "OBJECT", "properties": {"type": {"type": "STRING"}}}},
                    {"name": "g", "description": "G.", "parametersJsonSchema": {"type": "object"}},
                ]
            }
        ],
        "generationConfig": {"temperature": 1, "topP": 0.95, "thinkingConfig": {"thinkingBudget": 8192}},
    }
    read = GOOGLE.read(body)
    assert [each["role"] for each in read.messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    said = ["Work.", "Add.\nNow.", "I add.", "2", '{"sum": 2, "of": "é"}', "Go on."]
    assert [each["content"] for each in read.messages] == said
    turn = read.messages[2]
    assert (turn["reasoning_content"], turn["tool_calls"][0]["function"]["arguments"]) == ("hm", '{"a": 1}')
    assert [each["function"]["parameters"] for each in read.tools] == [
        {"type": "object", "properties": {"type": {"type": "string"}}},
        {"type": "object"},
    ]
    assert read.sampling == {"temperature": 1, "topP": 0.95, "thinkingConfig": '{"thinkingBudget": 8192}'}
    assert (read.stream, DIALECTS[-2].read(body).stream) == (True, False)


@pytest.mark.parametrize(
    ("dialect", "more", "reason"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "web_search"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "log-probabilities"),
        (RESPONSES, {"input": [{"type": "image_generation_call"}]}, "image_generation_call"),
        (RESPONSES, {"input": []}, "input"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        (MESSAGES, {"mcp_servers": [{}]}, "mcp_servers"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_format"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        (MESSAGES, {"messages": []}, "messages"),
        (CHAT, {"tools": [{"type": "custom"}]}, "custom"),
        (CHAT, {"n": 2}, "`n`"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "parameters of a tool"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": [1]}]}, "parameters of a tool"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text alone"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": [1]}]}, "parameters of a tool"),
        (GOOGLE, {"contents": []}, "contents"),
        (GOOGLE, {"contents": [{"parts": [{"inlineData": {}}]}]}, "inlineData"),
        (GOOGLE, {"generationConfig": {"candidateCount": 2}}, "candidateCount"),
        (GOOGLE, {"generationConfig": {"responseMimeType": "application/json"}}, "responseMimeType"),
        (GOOGLE, {"generationConfig": {"responseLogprobs": True}}, "log-probabilities"),
        (GOOGLE, {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "AUTO or NONE"),
        (GOOGLE, {"tools": [{"googleSearch": {}}]}, "googleSearch"),
    ],
)
def test_what_no_answer_could_honour_is_refused_by_name(
    dialect: ProgramDialect, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RefusedRequestError, match=reason):
        dialect.read({**BODIES[type(dialect).__name__], **more})


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
WORDS = (
    *("user", "assistant", "tool", "system", "text", "message", "reasoning", "function_call", "function_call_output"),
    *("custom_tool_call", "tool_use", "tool_result", "thinking", "input_text", "function", "custom", "auto", "model"),
)
KEYS = (
    *(
        "role",
        "content",
        "type",
        "text",
        "thinking",
        "id",
        "name",
        "input",
        "arguments",
        "call_id",
        "output",
        "summary",
    ),
    *("tool_calls", "function", "tool_use_id", "parameters", "input_schema", "encrypted_content", "format"),
    *("parts", "functionCall", "functionResponse", "functionDeclarations", "response", "args", "thought", "mode"),
)
HOSTILE = st.recursive(
    st.one_of(JSON, st.sampled_from(WORDS)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)),
    max_leaves=12,
)
FIELDS = (
    *("messages", "input", "system", "instructions", "tools", "tool_choice", "stream", "text", "include", "thinking"),
    *("output_config", "response_format", "stream_options", "max_tokens", "stop", "n", "logprobs", "metadata"),
    *("contents", "systemInstruction", "generationConfig", "toolConfig"),
)


@EACH
@settings(max_examples=examples(300), deadline=None)
@given(st.one_of(JSON, st.dictionaries(st.sampled_from(FIELDS), HOSTILE, max_size=6)))
def test_any_body_is_read_or_refused(dialect: ProgramDialect, body: Any) -> None:
    try:
        request = dialect.read(body)
    except RefusedRequestError as error:
        assert json.loads(dialect.error(str(error), "invalid_request"))["error"]["message"]
    else:
        assert all(each["role"] in ("system", "user", "assistant", "tool") for each in request.messages)
        json.dumps(dict(request.sampling))


def test_each_dialect_is_found_at_its_path_and_models_in_any() -> None:
    assert [dialect_at(f"/r/x/v1{dialect.path}") for dialect in DIALECTS] == list(DIALECTS)
    assert dialect_at("/v1/messages/count_tokens") is None
    assert json.loads(written_models("policy"))["data"][0]["id"] == "policy"
    assert json.loads(MESSAGES.error("x", "rollout_over"))["error"]["type"] == "invalid_request_error"
    assert json.loads(MESSAGES.error("x", "server_error"))["error"]["type"] == "api_error"
