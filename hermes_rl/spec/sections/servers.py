"""Declare `servers`: the models that a run calls, by role."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from hermes_rl.errors import UserError
from hermes_rl.spec.section import EMPTY, Late, Map, Section, Seq, UrlText, wrong
from hermes_rl.spec.server_types import DEFAULT, ServerType, server_type


def _require_known_type(name: str) -> str:
    """Refuse a type of which there is none, neither here nor in another package."""
    try:
        server_type(name)
    except UserError as error:
        raise wrong(str(error)) from None
    return name


class RendererSection(Section):
    """Renderer that converts messages to tokens and back, for the token-level server types."""

    name: str = Field("auto", description="auto, a family such as qwen3, or template for the model's own template.")
    tool_parser: str | None = Field(None, description="Format of tool calls, such as hermes or qwen3_coder.")
    thinking_retention: str | None = Field(
        None, description="Which earlier reasoning stays in the prompt, such as all."
    )
    stop: Seq[str] = Field((), description="Texts that end a turn, besides the model's own.")


class Prices(Section):
    """Prices of a model."""

    prompt: float = Field(ge=0, allow_inf_nan=False, description="US dollars for a million prompt tokens.")
    completion: float = Field(ge=0, allow_inf_nan=False, description="US dollars for a million completion tokens.")
    cached: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="For a million prompt tokens from the cache; default: as `prompt`."
    )


class Server(Section):
    """One model server."""

    type: Annotated[str, AfterValidator(_require_known_type)] = Field(
        DEFAULT,
        description="openai: chat completions; vllm, sglang, atropos: token ids; scripted: no model; vllm-score, "
        "vllm-classify, vllm-pooling: a reward model; or of a package.",
    )
    base_url: UrlText | None = Field(None, description="Address, such as http://localhost:9001/v1.")
    model: str | None = Field(None, description="Name of the model as the server knows it.")
    api_key_env: str | None = Field(
        None,
        description="Environment variable that holds the key, such as MY_API_KEY; default: no Authorization header.",
    )
    headers_env: Map[str] = Field(EMPTY, description="HTTP header → environment variable that holds its value.")
    timeout: float = Field(1200.0, gt=0, description="Seconds per call.")
    max_concurrency: int = Field(1024, ge=1, description="Requests in flight at a time.")
    tokenizer: str | None = Field(
        None,
        description="Hub name or path, such as Qwen/Qwen3-8B; default: the model's own, or a small built-in one for "
        "scripted.",
    )
    renderer: Late[RendererSection] | None = Field(None, description="How messages become tokens; default: auto.")
    weights_path: str | None = Field(
        None,
        description="Path at the server that answers with the version of its weights; default: its type's own.",
    )
    session_header: bool = Field(
        True,
        description="Send the header X-Session-ID, which names the rollout of a call, for routers; it is a hint only.",
    )
    prices: Late[Prices] | None = Field(
        None, description="US dollars for a million tokens, where the server does not tell what a call costs."
    )
    error_rate: float = Field(
        0.0, ge=0, le=1, description="scripted: share of each group that goes wrong on purpose, from 0 to 1."
    )
    seed: int | None = Field(None, description="scripted: seed of the deviations; default: the spec's seed.")

    @property
    def kind(self) -> ServerType:
        """Properties of the server's type."""
        return server_type(self.type)


def _wrap_single_servers(value: Any) -> Any:
    """Return the servers with each single server as a list of one, so that callers handle one form."""
    if not isinstance(value, dict):
        return value
    return {role: servers if isinstance(servers, list) else [servers] for role, servers in value.items()}


Servers = Annotated[Map[Seq[Late[Server]]], BeforeValidator(_wrap_single_servers)]
