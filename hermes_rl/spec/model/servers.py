"""``servers``: the models that a run talks to, by role."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hermes_rl.spec.model.base import EMPTY, Late, Map, Section, Seq, wrong


def _type(value: Any) -> Any:
    if value == "trl":
        raise wrong(
            "there is no type trl: TRL's server is stock vLLM; use `type: vllm`, with /v1 at the end of base_url"
        )
    return value


ServerType = Literal["openai", "vllm", "sglang", "atropos", "scripted"]


class Renderer(Section):
    """How messages become tokens and back, for the token-level server types."""

    name: str = Field("auto", description="auto, a family such as qwen3, or template for the model's own template.")
    tool_parser: str | None = Field(None, description="Format of tool calls, such as hermes or qwen3_coder.")
    thinking_retention: str | None = Field(
        None, description="Which earlier reasoning stays in the prompt, such as all."
    )
    stop: Seq[str] = Field((), description="Texts that end a turn, besides the model's own.")


class Server(Section):
    """One model server."""

    type: Annotated[ServerType, BeforeValidator(_type)] = Field(
        "openai",
        description="openai: chat completions; vllm, sglang, atropos: token ids; scripted: no model.",
    )
    base_url: str | None = Field(None, description="Address, such as http://localhost:9001/v1.")
    model: str | None = Field(None, description="Name of the model as the server knows it.")
    api_key_env: str | None = Field(
        None, description="Environment variable that holds the key; default: no Authorization header."
    )
    headers_env: Map[str] = Field(EMPTY, description="HTTP header → environment variable that holds its value.")
    timeout: float = Field(1200.0, gt=0, description="Seconds per call.")
    max_concurrency: int = Field(1024, ge=1, description="Requests in flight at a time.")
    tokenizer: str | None = Field(
        None, description="Hub name or path; default: the model's own, or a small built-in one for scripted."
    )
    renderer: Late[Renderer] | None = Field(None, description="How messages become tokens; default: auto.")
    weights_path: str | None = Field(
        None,
        description="Path at the server that answers with the version of its weights; default: its type's own.",
    )
    deviate: float = Field(
        0.0, ge=0, le=1, description="scripted: share of each group that goes wrong on purpose, from 0 to 1."
    )
    seed: int | None = Field(None, description="scripted: seed of the deviations; default: the spec's seed.")


def _listed(value: Any) -> Any:
    """One server is a list of one, so that nobody has to ask which it is."""
    if not isinstance(value, dict):
        return value
    return {role: servers if isinstance(servers, list) else [servers] for role, servers in value.items()}


Servers = Annotated[Map[Seq[Late[Server]]], BeforeValidator(_listed)]
