"""Declare `toolsets`, `tools` and `state`: what the agent can do."""

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from hermes_rl.spec.section import EMPTY, EnvText, Late, Map, MayTemplate, Section, Seq, UrlText, wrong
from hermes_rl.spec.sections.common import File, short_for

Probability = Annotated[float, Field(ge=0, le=1)]


def _split_command(value: Any) -> Any:
    """Return a command line as a list, so that no shell is needed to start it."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise wrong(f"cannot be read as a command line: {error}") from None


Distribution = Annotated[
    Annotated[str, Tag("name")] | Annotated[Map[Probability], Tag("weights")],
    Discriminator(lambda value: "weights" if isinstance(value, Mapping) else "name"),
]


class Toolsets(Section):
    """Groups of tools by name: enabled, or drawn once per group from a distribution."""

    enabled: Seq[str] = Field((), description="Names of the toolsets; none when absent.")
    disabled: Seq[str] = Field((), description="Toolsets that are taken away again.")
    distribution: Distribution | None = Field(
        None, description="Name of a distribution, or a mapping from toolset to probability; drawn per group."
    )
    record: str | None = Field(
        None, description="Folder to keep the answers of tools that reach outside, such as recorded."
    )
    replay: str | None = Field(None, description="Folder of recorded answers to give instead of reaching outside.")
    demo_answers: Map[str] = Field(
        EMPTY, description="Tool → what it always answers where `--demo` keeps it from outside."
    )


class Mcp(Section):
    """A tool server that speaks the Model Context Protocol."""

    name: str = Field(description="Name of the server; prefix of its tools where names would collide.")
    command: Annotated[Seq[str], BeforeValidator(_split_command)] | None = Field(
        None, description="Program and arguments of a server over stdio."
    )
    url: UrlText | None = Field(None, description="Address of a server over HTTP, such as http://localhost:8000/mcp.")
    files: Seq[File] = Field((), description="Files copied next to the server before it starts.")
    scope: Literal["rollout", "shared"] = Field(
        "rollout", description="One server per rollout, or one for all; of a server at a `url` one session."
    )
    where: Literal["sandbox", "host"] = Field("sandbox", description="Where a server over stdio runs.")
    allow: Seq[str] | None = Field(None, description="Tools that the agent may use; default: all.")
    prefix: str | None = Field(None, description="Text in front of each tool's name.")
    timeout: float = Field(60.0, gt=0, description="Seconds for one call.")
    start_timeout: float = Field(120.0, gt=0, description="Seconds for the start of a server, or of a session.")
    env: Map[EnvText] = Field(EMPTY, description="Environment variables of a server over stdio.")
    headers_env: Map[str] = Field(EMPTY, description="HTTP header → environment variable that holds its value.")


class TextFile(Section):
    """A text stored in a separate file; it is a template like any other text here."""

    file: str = Field(description="Path relative to this file, such as system.md.")


ToolSchemas = Annotated[
    Annotated[str, Tag("text")] | Annotated[TextFile, Tag("file")],
    Discriminator(lambda value: "file" if isinstance(value, Mapping | TextFile) else "text"),
]


Isolate = Literal["none", "process", "reuse", "sandbox"]
"""Where code of the user runs."""


class ToolSection(Section):
    """One source of tools: exactly one of python, state, mcp."""

    python: str | None = Field(
        None,
        description="file.py:function; types and docstring become the schema that the model sees. file.py:* is all "
        "public functions of the file.",
    )
    state: str | None = Field(
        None, description="Name of an object on the rollout's state, for its public methods; or of one method."
    )
    schemas: ToolSchemas | None = Field(
        None,
        description="For state: a list of tools, each `{name, description, parameters}`, as the attribute of this "
        "name, a template over the row, or a JSON {file} has it; the method that `state` names is called with a "
        "tool's name and its arguments.",
    )
    names: Annotated[Seq[str], MayTemplate()] | None = Field(
        None, description="Names of the tools to offer, or patterns such as `get_*`; default: all."
    )
    decorated_with: str | None = Field(
        None, description="Only functions and methods on which a decorator has left this attribute are offered."
    )
    arguments: Literal["strict", "repair"] | None = Field(
        None,
        description="For python and state: `strict` hands on what was sent, unchecked; `repair` is "
        "`agent.repair_arguments` for these tools alone; default: as `agent` says.",
    )
    isolate: Isolate | None = Field(
        None,
        description="For python, where it runs. reuse: in a worker process that calls of other rollouts use too "
        "(default); process: in the rollout's own process, so that its modules are the rollout's own; sandbox: in a "
        "process inside a sandbox; none: in the runner.",
    )
    mcp: Late[Mcp] | None = Field(None, description="A server that speaks the Model Context Protocol.")
    external: bool = Field(
        False,
        description="For python: it reaches outside, so its answers are recorded and replayed too.",
    )
    ends_rollout: Seq[str] = Field(
        (), description="Names of its tools that end the rollout when they have answered without an error."
    )


class State(Section):
    """The object that a rollout's tools act on, an instance of a class of the spec."""

    python: str = Field(description="file.py:Class; one object Class(item) per rollout.")
    isolate: Isolate = Field(
        "process",
        description="process: the object, its tools and the rewards that name `state` run in a separate process per "
        "rollout, which imports its own modules; reuse: in a process that earlier rollouts may have used, for code "
        "that changes no module; sandbox: in a process inside a sandbox; none: in the runner.",
    )
    done: str | None = Field(
        None,
        description="Attribute, or method without arguments, that is true when the episode is over; checked after "
        "each turn that calls tools.",
    )
    before_user_turn: str | None = Field(
        None,
        description="Method without arguments that is called whenever the agent has answered its user, before the "
        "user speaks again.",
    )
    close: str | None = Field(None, description="Method without arguments that is called when all is graded.")


def _variable_name(name: str) -> str:
    """Return the name of an environment variable; refuse any other text."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise wrong(f"{name!r} is not the name of an environment variable, such as GAME_DIR")
    return name


class UserCode(Section):
    """Access of user code in worker processes (rewards, states and tools) to the host."""

    env: Seq[Annotated[str, AfterValidator(_variable_name)]] = Field(
        (),
        description="Names of environment variables that user code in worker processes can read, in addition to PATH, "
        "HOME, locale, proxies, CA certificates, HF_* and XDG_*.",
    )


StateField = Annotated[Late[State], short_for("python", str)]
ToolsetsField = Annotated[Late[Toolsets], short_for("enabled", list, tuple)]
NO_TOOLSETS = Toolsets.model_construct()
