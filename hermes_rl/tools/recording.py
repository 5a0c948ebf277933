"""Record the results of tools that reach outside, and return them later, so that an evaluation can be repeated.

A recording has ``tools.jsonl``, one tool a line as the model saw it, with the toolset or server it came from as
``source``, and ``answers.jsonl``, one call with its result a line: ``{"tool", "arguments", "answer", "error"}``. In a
rollout, the n-th call of a tool with the same arguments gets the n-th result that was recorded for it, or the last one
if there are fewer.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from hermes_rl.errors import UserError
from hermes_rl.others_files import LARGEST_DIRECTORY, append_to, read_regular
from hermes_rl.terminal_text import escape_controls
from hermes_rl.threads import run_in_thread
from hermes_rl.tools.base import DescribedTool, Tool, ToolInputError, ToolRuntime
from hermes_rl.values import read_own_json, write_json

log = logging.getLogger(__name__)

TOOLS, ANSWERS = "tools.jsonl", "answers.jsonl"
Answering = Callable[[dict[str, Any], ToolRuntime], Awaitable[str]]
"""Handler of a tool's calls, with the signature of `Tool.call`."""


class Recorder:
    """Stores the results of tools in a directory; existing results remain. UserError: the directory cannot be
    written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._recorded_tools = {(line["source"], line["function"]["name"]) for line in _read_lines(folder / TOOLS)}
        except OSError as error:
            raise UserError(f"toolsets.record: {folder} cannot be used: {error.strerror}") from error

    def wrap(self, tool: Tool, source: str) -> Tool:
        """Return the tool of a toolset or server, wrapped to store its results."""
        if (source, tool.name) not in self._recorded_tools:
            self._recorded_tools.add((source, tool.name))
            self._append(TOOLS, {"source": source, **tool.schema})
        recorded = _Outside(tool.name, tool.description, tool.parameters, partial(self._answer, tool))
        recorded.parallel, recorded.timeout, recorded.on_sandbox = tool.parallel, tool.timeout, tool.on_sandbox
        return recorded

    async def _answer(self, tool: Tool, args: dict[str, Any], runtime: ToolRuntime) -> str:
        try:
            answer = await tool.call(args, runtime)
        except ToolInputError as error:
            await self.keep(tool.name, args, str(error), error=True)
            raise
        await self.keep(tool.name, args, answer, error=False)
        return answer

    async def keep(self, tool: str, arguments: Mapping[str, Any], answer: str, *, error: bool) -> None:
        """Write one result; the call returns only after that."""
        line = {"tool": tool, "arguments": arguments, "answer": answer, "error": error}
        await run_in_thread(lambda: self._append(ANSWERS, line))

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with self._writing, append_to(self._folder / name) as file:
            file.write(write_json(line) + b"\n")


class Replay:
    """Tools of a recording, which return its results. UserError: there is no recording."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._counts: WeakKeyDictionary[ToolRuntime, Counter[str]] = WeakKeyDictionary()
        """Number of times that each rollout has made each call."""
        try:
            self._tools: dict[str, dict[str, Tool]] = defaultdict(dict)
            for line in _read_lines(folder / TOOLS):
                name, description = line["function"]["name"], str(line["function"]["description"])
                tool = _Outside(name, description, line["function"]["parameters"], partial(self.answer, name))
                self._tools[line["source"]][name] = tool
            self._answers: dict[str, list[tuple[str, bool]]] = defaultdict(list)
            for line in _read_lines(folder / ANSWERS):
                self._answers[_call_key(line["tool"], line["arguments"])].append((line["answer"], line["error"]))
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"toolsets.replay: {folder} holds no recording: {error}") from error

    def tools(self, source: str) -> tuple[Tool, ...]:
        """Return the recorded tools of a toolset or server; raises `UserError` if it was not recorded."""
        if source not in self._tools:
            recorded = ", ".join(self._tools) or "nothing"
            raise UserError(f"toolsets.replay: {self.folder} has {recorded}, not {source}; record it first")
        return tuple(self._tools[source].values())

    async def answer(self, tool: str, arguments: Mapping[str, Any], runtime: ToolRuntime) -> str:
        """Return the recorded result; raises `ToolInputError` if there is none, as the model chose the arguments."""
        key = _call_key(tool, arguments)
        if key not in self._answers:
            log.warning(
                "%s has no answer to %s; record it with toolsets.record", self.folder, escape_controls(key[:500])
            )
            raise ToolInputError("this call has no recorded answer, and external services are not called now")
        counts = self._counts.setdefault(runtime, Counter())
        call_index = counts[key]
        counts[key] += 1
        answer, error = self._answers[key][min(call_index, len(self._answers[key]) - 1)]
        if error:
            raise ToolInputError(answer)
        return answer


class _Outside(DescribedTool):
    """A tool that reaches outside; its results come from a handler, or pass through it."""

    outside = True

    def __init__(self, name: str, description: str, parameters: dict[str, Any], answer: Answering) -> None:
        super().__init__(name, description, parameters)
        self._answer = answer

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        return await self._answer(args, runtime)


def _read_lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return []
    # Not `splitlines`: a result may contain other line separators unescaped, such as U+2028.
    return [read_own_json(line) for line in read_regular(path, LARGEST_DIRECTORY).split(b"\n") if line]


def _call_key(tool: str, arguments: Mapping[str, Any]) -> str:
    return f"{tool}({json.dumps(arguments, sort_keys=True, ensure_ascii=False)})"


# --------------------------------------- Tools that reach outside, for a demo: one fixed result each, from the spec

_TEXT = {"type": "string"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "web_search": {"query": _TEXT, "limit": {"type": "integer"}},
    "web_extract": {"urls": {"type": "array", "items": _TEXT}},
}
"""Parameters of the tools that models know best; any other accepts all arguments."""


def canned_tools(toolset: str, answers: Mapping[str, str]) -> tuple[Tool, ...]:
    """Return the tools with fixed results; raises `UserError` if the spec contains none."""
    if not answers:
        raise UserError(
            f"toolset {toolset} reaches outside, which --demo does not: give its tools answers in "
            'toolsets.demo_answers, such as {web_search: \'{"data": {"web": []}}\'}'
        )
    return tuple(_canned_tool(name, answer) for name, answer in answers.items())


def _canned_tool(name: str, text: str) -> Tool:
    async def answer(args: dict[str, Any], runtime: ToolRuntime) -> str:
        return text

    accepted = {"type": "object", "properties": PARAMETERS.get(name, {}), "additionalProperties": True}
    return _Outside(name, f"A stand-in for {name}: it always gives the same answer.", accepted, answer)
