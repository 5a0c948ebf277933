"""Check a spec's renderer: its availability, its support for the spec's tools, and the number of sequences per
rollout.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hermes_rl.errors import Problem, UserError
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.sections.servers import Server

if TYPE_CHECKING:  # most specs are checked without a renderer, whose parts take long to import
    from hermes_rl.tokens.forecast import Forecast
    from hermes_rl.tokens.rendering import Renderer

OF_SMALL = "a rollout has 1 sequence"
"""Forecast for the small tokenizer: its template keeps all turns, with tools, users and reasoning."""


def tokenizer_of(spec: Spec) -> str | None:
    """Return the policy's tokenizer: its own key, else the model's; None is the small one of scripted policies."""
    return _tokenizer_name(spec.servers["policy"][0])


def _tokenizer_name(server: Server) -> str | None:
    if server.tokenizer is not None:
        return server.tokenizer
    return None if server.kind.embedded else server.model


def foreign_teachers(spec: Spec, *, at_hand: bool = False) -> list[Problem]:
    """Return the problems of teacher servers whose tokenizer differs from the policy's, so that ids would mean other
    texts.

    Models of one family have different names and one tokenizer, so tokenizers with other names are loaded and compared;
    with `at_hand` only tokenizers that need no network. Slow: call it in a thread.
    """
    if spec.distill is None or "policy" not in spec.servers:
        return []
    from hermes_rl.tokens.load import load_tokenizer
    from hermes_rl.tokens.tokenizer import TokenizerUnavailable

    role, problems = spec.distill.server, []
    policy_tokenizer = tokenizer_of(spec)
    for index, server in enumerate(spec.servers.get(role, ())):
        name = _tokenizer_name(server)
        if name == policy_tokenizer or (
            at_hand and not all(model is None or Path(model).is_dir() for model in (name, policy_tokenizer))
        ):
            continue
        path = _server_path(spec, role, index)
        try:
            is_same_vocabulary = load_tokenizer(name).vocabulary == load_tokenizer(policy_tokenizer).vocabulary
        except TokenizerUnavailable as error:
            problems.append(spec.problem(path, f"its tokenizer cannot be compared with the policy's: {error}"))
            continue
        if not is_same_vocabulary:
            theirs, policy_label = (each or "the small built-in one" for each in (name, policy_tokenizer))
            message = (
                f"the teacher's tokenizer ({theirs}) differs from the policy's ({policy_label}), so it would read "
                "other "
                "texts; if only their names differ, set the teacher's `tokenizer` to the policy's"
            )
            problems.append(spec.problem(path, message))
    return problems


def require_same_tokenizer(spec: Spec) -> None:
    """Raise UserError if the teacher's tokenizer is not known to be the policy's. Slow: call it in a thread."""
    if problems := foreign_teachers(spec):
        raise UserError("\n".join(map(str, problems)))


def _server_path(spec: Spec, role: str, index: int) -> NodePath:
    """Return where a server is written: alone, or in a list."""
    path: NodePath = ("servers", role, index)
    return path if spec.is_written(path) else path[:2]


def renderer_of(spec: Spec) -> Renderer:
    """Return the renderer of the spec's policy. Slow: call it in a thread.

    Raises `TokenizerUnavailable` if the tokenizer is not available; `RendererRefused` if its template does not allow
    exact tokens, or omits the spec's tools.
    """
    from hermes_rl.tokens.load import load_renderer
    from hermes_rl.tokens.rendering import RendererSettings, require_tools

    policy = spec.servers["policy"][0]
    settings = policy.renderer.model_dump(exclude_none=True) if policy.renderer is not None else None
    renderer = load_renderer(tokenizer_of(spec), RendererSettings.from_mapping(settings))
    if uses_tools(spec) and renderer.name == "template":
        require_tools(renderer.tokenizer)
    return renderer


def uses_tools(spec: Spec) -> bool:
    """Return True if the policy may call a tool."""
    return bool(spec.tools or spec.toolsets.enabled or spec.toolsets.distribution)


def forecast_of(spec: Spec) -> Forecast:
    """Return the expected number of sequences of a rollout of this spec; raises the same errors as `renderer_of`."""
    from hermes_rl.tokens.forecast import forecast
    from hermes_rl.tokens.rendering import RendererRefused
    from hermes_rl.tokens.tokenizer import TemplateRefused

    renderer, system = renderer_of(spec), spec.prompt.system is not None
    try:
        return forecast(renderer, system=system, tools=uses_tools(spec), user=spec.user is not None)
    except TemplateRefused as error:
        raise RendererRefused(f"the chat template of {renderer.tokenizer.name} refuses a rollout: {error}") from error


def describe_forecast(forecast: Forecast | str, spec: Spec) -> str:
    """Return a forecast as a message; an agent program may start several conversations."""
    subject = "each seat" if spec.agents else "each conversation" if spec.programs else "a rollout"
    return str(forecast).replace("a rollout", subject)


def unknown_renderers(spec: Spec) -> list[Problem]:
    """Return a problem for each renderer or format of tool calls that does not exist."""
    problems = []
    for role, servers in spec.servers.items():
        for index, server in enumerate(servers):
            if server.renderer is None:
                continue
            from hermes_rl.tokens.families import require_family
            from hermes_rl.tokens.parsers.table import load_parser

            renderers = (
                ("tool_parser", server.renderer.tool_parser, load_parser),
                ("name", server.renderer.name, require_family),
            )
            for key, name, require in renderers:
                try:
                    if name is not None and name not in ("auto", "template"):
                        require(name)
                except UserError as error:
                    problems.append(spec.problem((*_server_path(spec, role, index), "renderer", key), str(error)))
    return problems


def estimate_sequences(spec: Spec) -> str | None:
    """Return the forecast of a rollout's sequences that needs no network, or None if the tokenizer is not available
    locally.

    Raises `UserError` if the policy is a token-level server and no run with this renderer can start.
    """
    policy = spec.servers.get("policy")
    if not policy or not policy[0].kind.exact:
        return None
    name = tokenizer_of(spec)
    if name is None and policy[0].renderer is None:
        return describe_forecast(OF_SMALL, spec)
    if name is not None and not Path(name).is_dir():
        return None
    try:
        return describe_forecast(forecast_of(spec), spec)
    except UserError as error:
        if policy[0].kind.token_level:
            raise
        return f"its tokens cannot be exact: {error}"
