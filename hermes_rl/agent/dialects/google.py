"""Parse and write Google's generateContent for agent programs.

Sources: Google's API reference, and requests recorded from programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hermes_rl.agent.dialects.base import (
    ProgramAnswer,
    ProgramRequest,
    RefusedRequestError,
    add_text,
    arguments_of,
    event,
    function_call,
    function_tool,
    join_texts,
    noted,
    object_of,
    require_list,
    require_object,
    require_text,
)
from hermes_rl.agent.result import Message, text_of
from hermes_rl.values import write_message

SAMPLING = (
    "temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed", "presencePenalty", "frequencyPenalty",
    "thinkingConfig",
)  # fmt: skip
SCHEMAS = ("responseSchema", "responseJsonSchema", "_responseJsonSchema")
TYPES = {"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"}
"""Types in Google's schemas; JSON Schema uses the same names in lower case."""
TOLD = ("output", "result", "error")
"""Keys that hold the text of a tool result if there is no other key."""
STOPS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
ERRORS = {"not_found": (404, "NOT_FOUND"), "server_error": (500, "INTERNAL")}


class Google:
    """Google's generateContent; see `base.ProgramDialect`. The path decides if a reply is streamed."""

    def __init__(self, method: str, *, stream: bool) -> None:
        self.path = f":{method}"
        self._stream = stream

    def read(self, body: Any) -> ProgramRequest:
        body = require_object(body, "the body")
        settings = require_object(body.get("generationConfig") or {}, "`generationConfig`")
        if settings.get("candidateCount") not in (None, 1):
            raise RefusedRequestError("`candidateCount` must be 1: a conversation has one answer")
        if settings.get("responseMimeType") not in (None, "text/plain") or any(map(settings.get, SCHEMAS)):
            raise RefusedRequestError("`responseMimeType` must be text/plain: the policy is sampled freely")
        if settings.get("responseLogprobs"):
            raise RefusedRequestError("log-probabilities are not given to programs")
        configured = require_object(body.get("toolConfig") or {}, "`toolConfig`").get("functionCallingConfig") or {}
        mode = require_object(configured, "`functionCallingConfig`").get("mode")
        if mode not in (None, "AUTO", "NONE"):
            raise RefusedRequestError("the `mode` of calls must be AUTO or NONE: the policy is sampled freely")
        messages: list[Message] = []
        if instruction := body.get("systemInstruction"):
            parts = require_list(require_object(instruction, "`systemInstruction`").get("parts"), "`parts`")
            messages.append({"role": "system", "content": "\n".join(_part_text(part) for part in parts)})
        for content in require_list(body.get("contents"), "`contents`"):
            _add_content(messages, content)
        if not messages:
            raise RefusedRequestError("`contents` must not be empty")
        tools = [] if mode == "NONE" else require_list(body.get("tools") or [], "`tools`")
        functions = [function for tool in tools for function in _read_functions(tool)]
        return ProgramRequest(join_texts(messages), functions, self._stream, noted(settings, SAMPLING))

    def written(self, answer: ProgramAnswer, request: ProgramRequest) -> bytes:
        return write_message(_response_object(answer, _message_parts(answer.message), last=True))

    def events(self, answer: ProgramAnswer, request: ProgramRequest) -> Iterator[bytes]:
        """Yield a separate response for each part, the last one with the finish reason."""
        parts = _message_parts(answer.message)
        for part_number, part in enumerate(parts, 1):
            yield event(_response_object(answer, [part], last=part_number == len(parts)))

    def error(self, message: str, code: str) -> bytes:
        status_code, status = ERRORS.get(code, (400, "INVALID_ARGUMENT"))
        return write_message({"error": {"code": status_code, "message": message, "status": status}})


def _add_content(messages: list[Message], content: dict[str, Any]) -> None:
    """Add the parts of one content; adjacent contents of the model form one message."""
    role = content.get("role") or "user"
    if role not in ("user", "model", "function"):
        raise RefusedRequestError("each content must have a role, one of model, user")
    if role == "model" and not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": []})
    for part in require_list(content.get("parts") or [], "`parts`"):
        if role == "model":
            _add_said(messages[-1], part)
        elif "functionResponse" in part:
            result = require_object(part["functionResponse"], "`functionResponse`")
            answer = {"tool_call_id": str(result.get("id") or ""), "content": _result_text(result.get("response"))}
            messages.append({"role": "tool", **answer})
        elif messages and messages[-1]["role"] == "user":
            add_text(messages[-1], "\n" + _part_text(part))
        else:
            messages.append({"role": "user", "content": [_part_text(part)]})


def _add_said(turn: Message, part: dict[str, Any]) -> None:
    if "functionCall" in part:
        call = require_object(part["functionCall"], "`functionCall`")
        function = function_call(call.get("id"), call.get("name"), arguments_of(call.get("args")))
        turn.setdefault("tool_calls", []).append(function)
    elif part.get("thought"):
        add_text(turn, _part_text(part), "reasoning_content")
    else:
        add_text(turn, _part_text(part))


def _part_text(part: dict[str, Any]) -> str:
    if "text" not in part:
        kind = next(iter(part), "nothing")
        raise RefusedRequestError(f"a part with {kind!r:.100} cannot be read: texts, calls and their results can")
    return require_text(part["text"], "`text`")


def _result_text(response: Any) -> str:
    """Return the text of a tool result; JSON if it holds more than a text."""
    response = require_object(response if response is not None else {}, "`response` of a tool")
    (name, value), *others = response.items() or [("", None)]
    return value if name in TOLD and isinstance(value, str) and not others else json.dumps(response, ensure_ascii=False)


def _read_functions(tool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in tool:
        if kind != "functionDeclarations":
            raise RefusedRequestError(f"{kind!r:.100} cannot be offered: switch it off in the program; functions can")
    for function in require_list(tool.get("functionDeclarations") or [], "`functionDeclarations`"):
        parameters = function.get("parametersJsonSchema") or _json_schema(function.get("parameters"))
        yield function_tool(function.get("name"), function.get("description"), parameters)


def _json_schema(written: Any) -> Any:
    """Return a Google schema with the type names of JSON Schema."""
    if isinstance(written, list):
        return [_json_schema(each) for each in written]
    if not isinstance(written, dict):
        return written
    schema = {name: _json_schema(value) for name, value in written.items()}
    if isinstance(kind := written.get("type"), str) and kind in TYPES:
        schema["type"] = kind.lower()
    return schema


def _message_parts(message: Message) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        parts.append({"text": reasoning, "thought": True})
    if text := text_of(message.get("content")):
        parts.append({"text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        called = {"id": call["id"], "name": function["name"], "args": object_of(function["arguments"])}
        parts.append({"functionCall": called})
    return parts or [{"text": ""}]


def _response_object(answer: ProgramAnswer, parts: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": parts}}
    if last:
        candidate["finishReason"] = STOPS.get(answer.finish, "STOP")
    thoughts, prompt, completion = answer.reasoning_tokens or 0, answer.prompt_tokens, answer.completion_tokens
    counts = {"promptTokenCount": prompt, "candidatesTokenCount": completion - thoughts, "thoughtsTokenCount": thoughts}
    usage = {**counts, "totalTokenCount": prompt + completion}
    return {"responseId": answer.id, "modelVersion": answer.model, "candidates": [candidate], "usageMetadata": usage}
