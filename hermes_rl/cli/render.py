"""`hermes-rl render`: print the model's exact first input for a row of a spec; no model is called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from rich.console import RenderableType

from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import Options, policy_of
from hermes_rl.cli.run import run_interruptible
from hermes_rl.cli.screen import DIM, GOOD, heading, safe, show, show_exactly, table
from hermes_rl.cli.show import message_parts
from hermes_rl.data.load import Split
from hermes_rl.errors import UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.runs.prompt_preview import Rendered, chosen_row, render_row, with_placeholder_keys
from hermes_rl.spec.model import Spec

ANY_SERVER = 'servers.policy={"type": "openai", "base_url": "http://localhost/v1", "model": "MODEL"}'
"""Placeholder for the policy if the spec names none: every chat server gets the same messages and tools."""


@dataclass(frozen=True)
class RenderRequest:
    """Arguments of `hermes-rl render`."""

    spec: str
    options: Options
    row: str = "0"
    split: Split | None = None
    tokens: bool = False
    demo: bool = False
    as_json: bool = False
    pager: bool = True


def render_spec(request: RenderRequest) -> int:
    """Print the first request for a row; return the exit status."""
    load = partial(request.options.load, request.spec, demo=request.demo)
    spec = load()
    if "policy" not in spec.servers:
        policy_override = policy_of(request.options.environ())
        if policy_override is None and request.tokens:
            raise UserError(
                "the spec names no policy, and so no tokenizer: name one, as in --openai.server_type vllm "
                "--openai.base_url http://localhost:8000/v1 --openai.model_name MODEL; or give --demo"
            )
        if policy_override is None:
            echo("the spec names no policy: this is what a chat server is sent, whatever its model (MODEL)", err=True)
        spec = load(policy_override or ANY_SERVER)
    rendered = run_interruptible(_render_row(spec, request))
    if request.as_json:
        echo(json.dumps(rendered.record(), indent=2, ensure_ascii=False))
        return 0
    if rendered.exact and rendered.text is None:
        raise UserError(f"the text cannot be rendered: {rendered.missing}\n--json shows messages and tools")
    if request.tokens:
        show(_token_parts(rendered), pager=request.pager)
    elif rendered.text is not None:
        show_exactly(rendered.text, pager=request.pager)
    else:
        show(_request_parts(rendered), pager=request.pager)
    return 0


async def _render_row(spec: Spec, request: RenderRequest) -> Rendered:
    row, split = await chosen_row(spec, request.row, request.split, partial(echo, err=True))
    async with CompiledSpec(spec, with_placeholder_keys(spec, request.options.environ())) as compiled:
        if spec.user is not None and spec.user.speaks_first:
            echo("the simulated user speaks first: its message follows these messages", err=True)
        return await render_row(compiled, row, split, with_text=request.tokens)


def _request_parts(rendered: Rendered) -> Iterator[RenderableType]:
    body = rendered.body
    yield heading(f"POST {(rendered.config.base_url or '').rstrip('/')}/chat/completions, row {rendered.row.key}")
    rest = {name: value for name, value in body.items() if name not in ("messages", "tools")}
    yield safe(json.dumps(rest, indent=2, ensure_ascii=False))
    yield from message_parts(body["messages"], body.get("tools"))


def _token_parts(rendered: Rendered) -> Iterator[RenderableType]:
    if rendered.text is None:
        raise UserError(f"there are no tokens: {rendered.missing}")
    sent = "what the server is sent" if rendered.exact else "the server gets messages and may have another template"
    yield safe(f"{len(rendered.ids)} tokens of {rendered.tokenizer}: {sent}", DIM)
    tokens = table("place", "id", "token", right=("place", "id"))
    for position, (token, token_text) in enumerate(zip(rendered.ids, rendered.token_texts, strict=True)):
        tokens.add_row(str(position), str(token), safe(repr(token_text), GOOD))
    yield tokens
