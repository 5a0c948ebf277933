"""A spec's renderer: at hand or not, fit for its tools or not, and how many sequences its rollouts will have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hermes_rl.errors import Problem, UserError
from hermes_rl.spec.model import Spec

if TYPE_CHECKING:  # most specs are checked without a renderer, whose parts take long to import
    from hermes_rl.tokens.forecast import Forecast
    from hermes_rl.tokens.rendering import Renderer

TOKEN_LEVEL = ("vllm", "sglang", "atropos")
"""Server types whose policy needs a tokenizer that can be had, and a template that allows exact tokens."""
OF_SMALL = "a rollout has 1 sequence"
"""What is foretold of the small tokenizer: its template keeps all turns, with tools, users and reasoning."""


def tokenizer_of(spec: Spec) -> str | None:
    """Return the policy's tokenizer: its own key, else the model's; None is the small one of scripted policies."""
    server = spec.servers["policy"][0]
    if server.tokenizer is not None:
        return server.tokenizer
    return None if server.type == "scripted" else server.model


def renderer_of(spec: Spec) -> Renderer:
    """Return the renderer of the spec's policy. Slow: call it in a thread.

    Raises:
        TokenizerUnavailable: the tokenizer cannot be had.
        RendererRefused: its template does not allow exact tokens, or leaves out the spec's tools.
    """
    from hermes_rl.tokens.load import load_renderer
    from hermes_rl.tokens.rendering import RendererSettings, require_tools

    policy = spec.servers["policy"][0]
    settings = policy.renderer.model_dump(exclude_none=True) if policy.renderer is not None else None
    renderer = load_renderer(tokenizer_of(spec), RendererSettings.of(settings))
    if uses_tools(spec) and renderer.name == "template":
        require_tools(renderer.tokenizer)
    return renderer


def uses_tools(spec: Spec) -> bool:
    """Whether the policy may call anything."""
    return bool(spec.tools or spec.toolsets.enabled or spec.toolsets.distribution)


def forecast_of(spec: Spec) -> Forecast:
    """How many sequences a rollout of this spec will have; raises as `renderer_of`."""
    from hermes_rl.tokens.forecast import forecast
    from hermes_rl.tokens.rendering import RendererRefused
    from hermes_rl.tokens.tokenizer import TemplateRefused

    prompt = spec.prompt
    system = prompt.system is not None
    renderer = renderer_of(spec)
    try:
        return forecast(renderer, system=system, tools=uses_tools(spec), user=spec.user is not None)
    except TemplateRefused as error:
        raise RendererRefused(f"the chat template of {renderer.tokenizer.name} refuses a rollout: {error}") from error


def unknown_renderers(spec: Spec) -> list[Problem]:
    """Return a problem for each renderer or format of tool calls that does not exist."""
    problems = []
    for role, servers in spec.servers.items():
        for index, server in enumerate(servers):
            if server.renderer is None:
                continue
            from hermes_rl.tokens.families import require_family
            from hermes_rl.tokens.parsers import load_parser

            asked = (
                ("tool_parser", server.renderer.tool_parser, load_parser),
                ("name", server.renderer.name, require_family),
            )
            for key, name, require in asked:
                try:
                    if name is not None and name not in ("auto", "template"):
                        require(name)
                except UserError as error:
                    server_path = (
                        ("servers", role, index) if spec.is_written(("servers", role, index)) else ("servers", role)
                    )
                    problems.append(spec.problem((*server_path, "renderer", key), str(error)))
    return problems


def foretold(spec: Spec) -> str | None:
    """Return what can be told about a rollout's sequences without a network; None where the tokenizer is not at hand.

    Raises:
        UserError: the policy is a token-level server, and no run with this renderer can begin.
    """
    policy = spec.servers.get("policy")
    if not policy or policy[0].type not in (*TOKEN_LEVEL, "scripted"):
        return None
    name = tokenizer_of(spec)
    if name is None and policy[0].renderer is None:
        return OF_SMALL
    if name is not None and not Path(name).is_dir():
        return None
    try:
        return str(forecast_of(spec))
    except UserError as error:
        if policy[0].type in TOKEN_LEVEL:
            raise
        return f"its tokens cannot be exact: {error}"
