"""``toolsets`` and ``tools``: what the agent can do."""

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from hermes_rl.spec.model.base import EMPTY, EnvText, Late, Map, Section, Seq, wrong
from hermes_rl.spec.model.sandbox import File

Probability = Annotated[float, Field(ge=0, le=1)]


def _list(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, list | tuple) else value


def _argv(value: Any) -> Any:
    """A command line as a list, so that no shell is needed to start it."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise wrong(f"cannot be read as a command line: {error}") from None


def _kind(value: Any) -> str:
    return "weights" if isinstance(value, Mapping) else "name"


Distribution = Annotated[
    Annotated[str, Tag("name")] | Annotated[Map[Probability], Tag("weights")], Discriminator(_kind)
]


class Toolsets(Section):
    """Groups of tools by name: enabled, or drawn once per group from a distribution."""

    enabled: Seq[str] = Field((), description="Names of the toolsets; none when absent.")
    disabled: Seq[str] = Field((), description="Toolsets that are taken away again.")
    distribution: Distribution | None = Field(
        None, description="Name of a distribution, or a mapping from toolset to probability; drawn per group."
    )
    record: str | None = Field(None, description="Folder to keep the answers of tools that reach outside.")
    replay: str | None = Field(None, description="Folder of recorded answers to give instead of reaching outside.")
    canned: Map[str] = Field(EMPTY, description="Tool → what it always answers where `--demo` keeps it from outside.")


class Mcp(Section):
    """A tool server that speaks the Model Context Protocol."""

    name: str = Field(description="Name of the server; prefix of its tools where names would collide.")
    command: Annotated[Seq[str], BeforeValidator(_argv)] | None = Field(
        None, description="Program and arguments of a server over stdio."
    )
    url: str | None = Field(None, description="Address of a server over HTTP; it is shared by all rollouts.")
    files: Seq[File] = Field((), description="Files put beside the server before it starts.")
    scope: Literal["rollout", "shared"] = Field("rollout", description="One server per rollout, or one for all.")
    where: Literal["sandbox", "host"] = Field("sandbox", description="Where a server over stdio runs.")
    allow: Seq[str] | None = Field(None, description="Tools that the agent may use; default: all.")
    prefix: str | None = Field(None, description="Text in front of each tool's name.")
    timeout: float = Field(60.0, gt=0, description="Seconds for one call.")
    env: Map[EnvText] = Field(EMPTY, description="Environment variables of a server over stdio.")
    headers_env: Map[str] = Field(EMPTY, description="HTTP header → environment variable that holds its value.")


class Tool(Section):
    """One source of tools: exactly one of python, state, mcp."""

    python: str | None = Field(
        None, description="file.py:function; types and docstring become the schema that the model sees."
    )
    state: str | None = Field(
        None, description="Name of an object on the rollout's state, for its public methods; or of one method."
    )
    mcp: Late[Mcp] | None = Field(None, description="A server that speaks the Model Context Protocol.")
    outside: bool = Field(
        False,
        description="For python: it reaches outside, so its answers are recorded and replayed too.",
    )


ToolsetsField = Annotated[Late[Toolsets], BeforeValidator(_list)]
NO_TOOLSETS = Toolsets.model_construct()
