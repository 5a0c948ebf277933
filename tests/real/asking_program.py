"""Agent program that asks three questions in one conversation: ``python asking_program.py WAY A B C``.

There are three ways. `chat` and `responses` send back what came, to the byte. `rewriting` speaks Anthropic's messages,
asks for a title, asks again for an answer that it throws away, changes what a call says, and puts a summary in the
place of what was said. The file stands alone, as it runs in a sandbox.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
SCHEMA = {"additionalProperties": False, "properties": NUMBERS, "required": ["a", "b"], "type": "object"}
TOOLS = {"add": "Add two numbers.", "multiply": "Multiply two numbers."}
SYSTEM = "Use the tools."
Item = dict[str, Any]


def post(path: str, **body: Any) -> Any:
    address, data = os.environ["OPENAI_BASE_URL"] + path, json.dumps({"model": "policy", **body}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if b"the rollout is over" not in error.read():
            raise
        sys.exit(0)  # there are no turns left


def called(name: str, arguments: Any) -> str:
    try:
        a, b = arguments["a"], arguments["b"]
        return str(a + b if name == "add" else a * b)
    except (KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def chat(questions: list[str]) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "description": does, "parameters": SCHEMA}}
        for name, does in TOOLS.items()
    ]
    history: list[Item] = [{"role": "system", "content": SYSTEM}]
    for question in questions:
        history.append({"role": "user", "content": question})
        calls: Any = True
        while calls:
            message = post("/chat/completions", messages=history, tools=tools)["choices"][0]["message"]
            history.append(message)
            calls = message.get("tool_calls")
            for call in calls or ():
                result = called(call["function"]["name"], read(call["function"]["arguments"]))
                history.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def responses(questions: list[str]) -> None:
    tools = [
        {"type": "function", "name": name, "description": does, "parameters": SCHEMA, "strict": False}
        for name, does in TOOLS.items()
    ]
    items: list[Item] = []
    for question in questions:
        items.append({"role": "user", "content": question})
        calls: Any = True
        while calls:
            output = post("/responses", instructions=SYSTEM, input=items, tools=tools, store=False)["output"]
            items += output
            calls = [item for item in output if item["type"] == "function_call"]
            for call in calls:
                result = called(call["name"], read(call["arguments"]))
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})


def rewriting(questions: list[str]) -> None:
    tools = [{"name": name, "description": does, "input_schema": SCHEMA} for name, does in TOOLS.items()]
    body: Item = {"max_tokens": 32_000, "system": SYSTEM}
    post("/messages", **body, messages=[{"role": "user", "content": f"A title for: {questions[0]}"}])
    history: list[Item] = []
    for number, question in enumerate(questions):
        history.append({"role": "user", "content": question})
        calls: Any = True
        while calls:
            blocks = post("/messages", **body, messages=history, tools=tools)["content"]
            if number == 1 and history[-1]["content"] == question:
                blocks = post("/messages", **body, messages=history, tools=tools)["content"]  # and throws one away
            calls = [block for block in blocks if block["type"] == "tool_use"]
            if number == 2 and calls:
                calls[0]["input"] = {"b": 1, "a": 2}
            history.append({"role": "assistant", "content": blocks})
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": called(call["name"], call["input"])}
                for call in calls
            ]
            if results:
                history.append({"role": "user", "content": results})
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        if number == 0:
            history = [{"role": "user", "content": f"What was said before: {text}"}]


if __name__ == "__main__":
    way, (a, b, c) = sys.argv[1], sys.argv[2:]
    # The answer to the last question is what is graded; others differ, so that no two ways are sampled alike.
    others = ((b, a, c), (c, b, a)) if way == "chat" else ((c, a, b), (b, c, a))
    globals()[way]([f"What is {x} + {y} * {z}?" for x, y, z in (*others, (a, b, c))])
