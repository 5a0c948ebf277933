"""First request to the policy for a row: messages and tools, and the text and tokens made from them.

The first request is made by the loop that runs rollouts, and intercepted before the call of a model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.data.load import Rows, Split, load_rows
from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import RolloutKey
from hermes_rl.rollouts.variables import key_names
from hermes_rl.runs.renderer_check import renderer_of, tokenizer_of
from hermes_rl.runs.setup import plan_of
from hermes_rl.servers.base import ChatReply, ChatRequest, ServerConfig, chat_body
from hermes_rl.spec.model import Spec
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.rendering import history_named, next_prompt
from hermes_rl.tokens.tokenizer import TemplateRefused
from hermes_rl.tokens.transcript import Transcript

SEARCHED = 100_000
"""Rows that are searched for a key."""


@dataclass(frozen=True)
class Rendered:
    """First request for a row, in the form that a chat server gets, and `config` of the policy's first server.

    Attributes:
        exact: True if the server gets the text, as token ids; False if it gets messages and tools.
        text: rendering by the chat template of the policy's tokenizer, or None if it is unknown.
        ids: the tokens of the text, and `pieces` the text of each.
        missing: why there is no text.
    """

    row: Row
    request: ChatRequest
    config: ServerConfig
    exact: bool
    text: str | None = None
    ids: tuple[int, ...] = ()
    token_texts: tuple[str, ...] = ()
    tokenizer: str | None = None
    missing: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """JSON body that a chat server receives."""
        body: dict[str, Any] = json.loads(json.dumps(chat_body(self.request, self.config), default=dict))
        return body

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        rest = {name: value for name, value in self.body.items() if name not in ("messages", "tools")}
        return {
            "row_key": self.row.key,
            "messages": self.body["messages"],
            "tools": self.body.get("tools", []),
            "request": rest,
            "sent_as": "tokens" if self.exact else "messages",
            "text": self.text,
            "tokens": list(self.ids) if self.ids else None,
            "tokenizer": self.tokenizer,
            "missing": self.missing,
        }


class _AskedError(Exception):
    """The model was about to be asked."""

    def __init__(self, request: ChatRequest) -> None:
        super().__init__("the model was about to be asked")
        self.request = request


class _Catching:
    """Replaces the policy, and calls no model."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        raise _AskedError(request)


def find_row(rows: Rows, query: str, split: Split) -> Row:
    """Return a row by its key, a prefix of its key, or its position in the run from 0.

    Raises `UserError` unless exactly one row matches.
    """
    begins = []
    for row in islice(rows, SEARCHED):
        if row.key == query:
            return row
        if row.key.startswith(query):
            begins.append(row)
    if query.isdecimal():
        with suppress(IndexError):
            return rows[int(query)]
    if len(begins) == 1:
        return begins[0]
    if begins:
        raise UserError(
            f"--row: {len(begins)} rows start with {query!r}: {', '.join(candidate.key for candidate in begins[:5])}"
        )
    count = rows.length if rows.length is not None else "endless"
    other = "; --split eval looks among the rows for evaluation" if split == "train" else ""
    raise UserError(f"--row: there is no row {query!r}: give a key, or a place from 0 (rows: {count}){other}")


async def chosen_row(spec: Spec, query: str, split: Split | None, notify: Callable[[str], None]) -> tuple[Row, Split]:
    """Return the requested row and its split: train, if there are such rows. Raises as `find_row`."""
    only = spec.dataset.eval is not None and spec.dataset.eval.only
    among: Split = split or ("eval" if only else "train")
    rows = await asyncio.to_thread(load_rows, spec, among, notify=notify, lazily=True)
    # Without `dataset.key` keys are hashes, so a small number is a position; no row after it is needed.
    is_place = spec.dataset.key is None and query.isdecimal() and int(query) < SEARCHED
    if is_place and (row := await asyncio.to_thread(lambda: next(islice(rows, int(query), None), None))) is not None:
        return row, among
    try:
        return await asyncio.to_thread(find_row, rows, query, among), among
    except UserError:
        rows = await asyncio.to_thread(load_rows, spec, among, notify=notify)  # which knows how many there are
        return await asyncio.to_thread(find_row, rows, query, among), among


async def render_row(compiled: CompiledSpec, row: Row, split: Split, *, with_text: bool) -> Rendered:
    """Return the first request for a row; no model is called, and no sandbox starts unless a tool's server needs one.

    With `with_text`, requests that only the server renders are rendered too, if its tokenizer is available.

    Raises:
        UserError: a template or a tool does not work; RunError: a server of tools cannot be started.
    """
    spec = compiled.spec
    size = plan_of(spec, "evaluate" if split == "eval" else "process").size
    key = RolloutKey(row, row.key if split == "eval" else f"{row.key}:0", 0, size)
    options, policy = compiled.options(split), spec.servers["policy"][0]
    if policy.kind.token_level:
        options = replace(options, logprobs=False)  # it always returns them; a chat server must be asked
    async with compiled.runtime(key) as runtime:
        seed = key.seed(spec.seed) if options.seeded else None
        loop = HermesAgentLoop(
            _Catching(), runtime.toolkit.schemas, task_id=runtime.task_id, options=replace(options, seed=seed)
        )
        try:
            await loop.run(compiled.prompt(row))
            raise AssertionError("a rollout starts with a model call")
        except _AskedError as capture:
            request = capture.request
    rendered = Rendered(row, request, compiled.policy.configs[0], exact=policy.kind.exact)
    if not (rendered.exact or with_text):
        return rendered
    return await asyncio.to_thread(_with_text, spec, rendered)


def _with_text(spec: Spec, rendered: Rendered) -> Rendered:
    messages, tools = list(rendered.request.messages), rendered.request.tools
    try:
        if rendered.exact:
            renderer = renderer_of(spec)
            tokenizer, ids = renderer.tokenizer, next_prompt(renderer, Transcript(), messages, tools).ids.tolist()
            text = tokenizer.decode(ids)
        else:
            name = tokenizer_of(spec)
            if name is None:
                return replace(rendered, missing="the policy names neither a model nor a tokenizer")
            tokenizer = load_tokenizer(name)
            text = tokenizer.render(history_named(messages), tools, add_generation_prompt=True)
            ids = tokenizer.encode(text)
    except (UserError, TemplateRefused) as error:
        return replace(rendered, missing=str(error))
    token_texts = tuple(tokenizer.decode([token]) for token in ids)
    return replace(rendered, text=text, ids=tuple(ids), token_texts=token_texts, tokenizer=tokenizer.name)


def with_placeholder_keys(spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, with a placeholder for each server key that is not set, as no server is called."""
    return {
        **dict.fromkeys(key_names(spec), "not-needed"),
        **{name: value for name, value in environ.items() if value.strip()},
    }
