"""The typed, frozen spec: a class for each section; attribute names are the keys of the YAML.

Annotations are not postponed in this module: pydantic would have to evaluate the text of each at every start.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    StringConstraints,
    Tag,
    WithJsonSchema,
)

from hermes_rl.errors import Problem, UserError
from hermes_rl.spec.nodes import (
    MappingNode,
    Mark,
    NodePath,
    ScalarNode,
    SourceText,
    find,
    locate,
    rewrite,
    to_builtins,
    walk,
)
from hermes_rl.spec.origin import find_position, line_mark
from hermes_rl.spec.section import (
    EMPTY,
    EnvText,
    FileText,
    Free,
    FreeMap,
    Late,
    Map,
    MayTemplate,
    Pair,
    PathText,
    Seconds,
    Section,
    Seq,
    Size,
    SystemText,
    UrlText,
    freeze,
    wrong,
)
from hermes_rl.spec.server_types import DEFAULT, ServerType, server_type

if TYPE_CHECKING:
    from hermes_rl.spec.templates import TemplateError


# ------------------------------------------------------------------------------- what several sections are made of


def _short_for(key: str, *kinds: type) -> BeforeValidator:
    """Return a validator that accepts the short form of a section: a value of these kinds becomes the section with
    that key."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, kinds) else value)


def _mode(value: Any) -> Any:
    """Return permission bits from octal digits, however YAML parsed them: ``0755`` is the YAML number 755."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    if not re.fullmatch(r"(0o)?[0-7]{1,5}", str(value)):
        raise wrong("expected octal permissions such as 0755")
    return int(str(value).removeprefix("0o"), 8)


# Written with the sign that says octal, so that a section that is written out and read again keeps its bits.
FileMode = Annotated[int, BeforeValidator(_mode), PlainSerializer(lambda value: f"0o{value:03o}"), MayTemplate()]


class File(Section):
    """A file put into the sandbox: exactly one of content, from, base64."""

    to: PathText = Field(description="Path in the sandbox, relative to its working directory.")
    content: FileText | None = Field(None, description="Text of the file.")
    from_: SystemText | None = Field(
        None, alias="from", description="File or folder to copy, below the folder of the spec after symlinks."
    )
    base64: str | None = Field(None, description="Bytes of the file in base64.")
    mode: FileMode | None = Field(
        None, description="Permissions in octal digits, such as 0755; default: the source's permissions, else 0644."
    )


# ----------------------------------------- ``agent``: how the policy is asked, and when a rollout has had enough


class Reasoning(Section):
    """Limit on the model's reasoning: exactly one of effort, max_tokens."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Effort by name, where the server takes one."
    )
    max_tokens: int | None = Field(
        None, ge=1024, le=32000, description="Tokens of reasoning per turn, from 1024 to 32000."
    )


def _to_argv(value: Any) -> Any:
    """Take a text for a command of the shell."""
    return ("/bin/sh", "-c", value) if isinstance(value, str) else value


PROGRAM_VALUES = ("prompt", "system", "endpoint", "token", "context")
"""Values that templates of a `program` can use in addition to the row's columns."""


class ProgramSection(Section):
    """An agent program that runs instead of the built-in loop and reaches the model at an address in its sandbox.

    Its templates can use the row's columns and these values: `prompt` (text of the prompt's last message; with several
    seats, the message that the seat receives before this turn), `system` (text of the system message), `endpoint` (the
    model's address, without /v1), `token` (its API key) and `context` (the maximum number of tokens of a
    conversation).
    """

    recipe: str | None = Field(
        None,
        description="Name of a shipped recipe, or path of one. Keys of the spec override the recipe's; lists of "
        "packages, files and setup are joined.",
    )
    name: str | None = Field(None, description="Name and version, for people; default: the recipe's.")
    command: Annotated[Seq[SystemText], BeforeValidator(_to_argv)] = Field(
        (), description="What is run in the sandbox: a list of words, or a text for a shell."
    )
    python: str | None = Field(
        None,
        description="file.py:function or package:function, called instead of a command, in a process outside of "
        "the sandbox.",
    )
    env: Map[EnvText] = Field(EMPTY, description="Environment variables of the program.")
    files: Seq[File] = Field(
        (), description="Files of the program, written before it starts, such as its configuration."
    )
    tools: Literal["mcp"] | None = Field(
        None, description="mcp: the spec's `tools` and `toolsets` are offered to it at the address, as …/mcp."
    )
    train: Seq[Literal["main", "subagents", "summaries", "side_calls", "rejected", "changed"]] = Field(
        ("main", "subagents"),
        description="Kinds of its calls that are trained on; all others are excluded, and counted in the record.",
    )


class Agent(Section):
    """Sampling and limits of one rollout."""

    max_turns: int = Field(30, ge=1, description="Model calls per rollout.")
    timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds of work (tools and generation, not queueing, retries or pauses); default: none.",
    )
    task_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds of the agent's work and of its rewards' commands together; they get what it leaves.",
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="Seconds of the clock until the rollout is stopped, whatever it waits for except other seats; "
        "default: 4 × timeout, an hour at least, and 24 hours without a timeout.",
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling; default: the server's.")
    max_tokens: int | None = Field(None, ge=1, description="Tokens per turn; default: the server's.")
    max_trajectory_tokens: int | None = Field(
        None, ge=1, description="Tokens of the whole conversation; default: no bound."
    )
    tool_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds per tool call; default: 300, or sandbox.timeout if it is longer.",
    )
    max_tool_errors: int | None = Field(
        None, ge=1, description="Tool calls that are errors, after which the rollout ends; default: no bound."
    )
    min_trained_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Minimum fraction of the sampled tokens that are trained on. A rollout of an agent program with "
        "less stops with `untrained`, which `on_stop` handles.",
    )
    repair_arguments: bool = Field(
        False,
        description="Convert arguments whose type differs from the tool's schema if possible, such as a list that is "
        "passed as JSON text; otherwise the model receives an error.",
    )
    reasoning: Late[Reasoning] | None = Field(None, description="How much the model should think.")
    seed: Literal["call", "none"] = Field(
        "call",
        description="call: every model call has its own sampling seed, drawn from the spec's seed; none: no seed is "
        "sent, for servers that refuse one.",
    )
    extra_body: FreeMap = Field(EMPTY, description="More fields for the body of each request; chat servers only.")
    program: Annotated[Late[ProgramSection], _short_for("recipe", str)] | None = Field(
        None, description="An agent program that runs instead of the loop: the name of its recipe, or its full section."
    )


class AgentOverrides(Agent):
    """Agent settings for evaluation; absent keys take their values from `agent`."""

    temperature: float = Field(
        1.0, ge=0, description="Sampling temperature; default: 0 when evaluate.rollouts is 1, else the agent's."
    )


# ------------------------- ``dataset``: the source of the rows, derived columns, and the rows reserved for evaluation


def _data_files(value: Any) -> Any:
    """Return one path, several, or one or several per split: the forms that `datasets.load_dataset` accepts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(value, Mapping) and value:
        return freeze({split: _data_files(files) for split, files in value.items()})
    raise wrong("expected a path, a list of paths, or a mapping from split to paths")


_FILES_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {
            "type": "object",
            "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        },
    ]
}
DataFiles = Annotated[Any, PlainValidator(_data_files), WithJsonSchema(_FILES_SCHEMA)]
Items = Seq[FreeMap]


class EvalRows(Section):
    """Selection of the rows for evaluation, which are never trained on: exactly one of split, fraction, only."""

    split: str | None = Field(None, description="Name of another split of the dataset.")
    fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the rows, between 0 and 1; which ones depends on seed and content.",
    )
    only: bool = Field(False, description="Every row is for evaluation; serve and process refuse to run.")
    limit: int | None = Field(None, ge=1, description="At most this many evaluation rows.")


class Source(Section):
    """Source of the rows: exactly one of path, items, generator, harbor."""

    path: str | None = Field(
        None,
        description="A file (questions.jsonl), pattern or directory relative to this file, a dataset on the hub, or a "
        "format (json, csv, parquet, text) with data_files.",
    )
    name: str | None = Field(None, description="Configuration of the dataset on the hub.")
    split: str = Field("train", description="Split that training rows come from.")
    data_files: DataFiles | None = Field(
        None,
        description="Files to read, relative to this file: a path or glob, a list, or a mapping by split.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of the dataset on the hub.")
    streaming: bool = Field(False, description="Read rows when they are needed instead of all at the start.")
    items: Items | None = Field(None, description="Rows written here; never substituted, never rendered.")
    generator: str | None = Field(
        None, description="file.py:function, called as fn(*, seed, split); it yields rows and may be endless."
    )
    harbor: str | None = Field(
        None, description="A task folder in Harbor's format, or a folder of such folders; a row for each task."
    )


class Dataset(Source):
    """The rows that rollouts start from."""

    fallback: Late[Source] | None = Field(
        None, description="Rows for when the hub is out of reach; their use is said aloud."
    )
    columns: FreeMap = Field(
        EMPTY, description="New columns, each a template over the row; later ones see earlier ones."
    )
    filter: str | None = Field(None, description="Expression without braces; rows for which it is false are excluded.")
    key: str | None = Field(
        None, description="Column that identifies a row; default: a hash of its content, and the occurrence."
    )
    shuffle: int | None = Field(None, description="Seed of the shuffle; absent keeps the order of the source.")
    order: str | None = Field(
        None, description="Column that training rows are ordered by, smallest first; with `-` in front, largest first."
    )
    row_selection: Literal["all", "skip_uniform"] = Field(
        "all",
        description="all: every row in every pass; skip_uniform: rows whose last groups were uniform more rarely.",
    )
    limit: int | None = Field(
        None, ge=1, description="At most this many training rows; with `eval: only`, of evaluation rows."
    )
    eval: Annotated[Late[EvalRows], BeforeValidator(lambda rows: {"only": True} if rows == "only" else rows)] | None = (
        Field(None, description="Rows for evaluation: {split}, {fraction} or only, each with an optional limit.")
    )


# ``serve``, ``process``, ``evaluate``, ``budget`` and ``wandb``: the amount of work, and the destination of results

_CONCURRENCY = "Rollouts in flight at a time; default: found by itself."
_WORKERS = "Processes that run rollouts; each has its own sandboxes and connections."


class Serve(Section):
    """Groups for a trainer."""

    trainer: str = Field(
        "atropos",
        description="Who is served: atropos is its trajectory API; or your own as file.py:Class, "
        "package.module:Class, or a name that a package publishes.",
    )
    group_size: int = Field(4, ge=1, description="Rollouts per row.")
    total_steps: int = Field(1000, ge=1, description="Trainer steps after which the environment ends.")
    max_token_length: int | None = Field(
        None, ge=1, description="Tokens of the longest sequence sent; default: the trainer's."
    )
    api_url: UrlText = Field("http://localhost:8000", description="Address of the trajectory API.")
    eval_every: int = Field(100, ge=0, description="Trainer steps between evaluations; 0 is never.")
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Maximum age of a rollout that is trained on, in weight versions; default: no limit.",
    )
    on_stale: Literal["drop", "keep"] = Field("drop", description="What happens to a group that is too old.")
    on_too_long: Literal["drop", "truncate", "mask"] = Field(
        "drop",
        description="A sequence longer than the trainer takes: drop its group, truncate its end, or mask it.",
    )
    drop_uniform: bool = Field(True, description="Leave out groups in which every score is the same.")
    concurrency: int | None = Field(None, ge=1, description=_CONCURRENCY)
    workers: int = Field(1, ge=1, le=256, description=_WORKERS)
    allow_inexact: bool = Field(
        False,
        description="Send groups whose tokens were not recorded as sampled; they train on a reconstruction.",
    )


class Process(Section):
    """Groups into a file, without a trainer."""

    group_size: int = Field(4, ge=1, description="Rollouts per row.")
    groups: int = Field(100, ge=1, description="Groups that are written.")
    drop_uniform: bool = Field(False, description="Leave out groups in which every score is the same.")
    concurrency: int | None = Field(None, ge=1, description=_CONCURRENCY)
    workers: int = Field(1, ge=1, le=256, description=_WORKERS)
    format: Literal["atropos", "sft", "dpo", "kto", "openai", "sharegpt", "parquet", "jsonl", "atif"] = Field(
        "atropos", description="Format of the files that are written besides the groups."
    )
    min_score: float | None = Field(
        None, description="Omit rollouts with a lower score from the files of `format`; default: omit none."
    )
    keep_best: int | None = Field(
        None, ge=1, description="Write at most this many rollouts of a group to them, those with the highest scores."
    )


class Evaluate(Section):
    """Scores on the evaluation rows."""

    limit: int | None = Field(None, ge=1, description="At most this many rows; default: all.")
    rollouts: int = Field(1, ge=1, description="Rollouts per row.")
    concurrency: int | None = Field(None, ge=1, description=_CONCURRENCY)
    workers: int = Field(1, ge=1, le=256, description=_WORKERS)
    agent: Late[AgentOverrides] = Field(
        AgentOverrides.model_construct(), description="What the agent does differently in evaluation."
    )
    group_by: Seq[str] = Field((), description="Columns of the rows; metrics are also told for the rows of each value.")
    success_threshold: float = Field(
        1.0, description="Score from which a rollout counts as solved, for pass@k and pass^k."
    )


class Budget(Section):
    """Limits that end a run early."""

    max_failures: int | None = Field(
        None, ge=0, description="Maximum number of groups that may fail; default: the number of groups of the run."
    )
    max_tokens: int | None = Field(None, ge=1, description="Tokens of the policy, prompts included.")
    max_cost: float | None = Field(
        None, gt=0, description="US dollars for all models, as servers tell them or `prices` says."
    )
    deadline: Seconds | None = Field(None, gt=0, description="Seconds from the start of the run, or 2h30m.")


class Wandb(Section):
    """Logging to Weights & Biases; absent is off."""

    project: str | None = Field(None, description="Project; default: the trainer's, else the name of the spec.")
    name: str | None = Field(None, description="Name of the run; default: the name of the spec.")
    mode: Literal["online", "offline", "disabled"] = Field("online", description="offline keeps it on this machine.")


WandbField = Annotated[Late[Wandb], _short_for("project", str)]


# ---------------- ``sandbox`` and ``artifacts``: where the agent's commands run, and the files saved from there

BACKENDS = ("bubblewrap", "docker", "modal", "daytona", "ssh", "singularity", "none")
"""Backends by name; a package may publish more."""


Network = Annotated[
    Annotated[bool, Tag("switch")] | Annotated[Seq[str], Tag("hosts")],
    Discriminator(lambda value: "hosts" if isinstance(value, list | tuple) else "switch"),
]


def _package(form: str, expected: str) -> BeforeValidator:
    """Return a validator that rejects a text that an installer would parse as an option, a file or an address."""

    def checked(value: Any) -> Any:
        if isinstance(value, str) and not re.fullmatch(form, value):
            raise wrong(f"expected {expected}, got {value!r}")
        return value

    return BeforeValidator(checked)


_VERSION = r"[<>=!~]=?=?\s*[\w.*+!-]+"
_PYTHON = rf"[A-Za-z0-9][\w.-]*(\[[\w.,\s-]+\])?\s*({_VERSION}(\s*,\s*{_VERSION})*)?"
_NPM = r"(@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*@\d+\.\d+\.\d+([.+-][\w.+-]*)?"  # it is the same tomorrow
Package = Annotated[str, _package(_PYTHON, "a package such as pytest, numpy==2.1.0 or requests[socks]>=2")]
NpmPackage = Annotated[
    str, _package(_NPM, "a package of npm with its version, such as prettier@3.1.0 or @scope/name@1.2.3")
]


class Limits(Section):
    """Resource limits of the agent's commands; an absent limit is the backend's default."""

    memory: Annotated[Size, Field(gt=0), MayTemplate()] | None = Field(None, description="Bytes of memory, or 2GiB.")
    processes: Annotated[int, Field(ge=1), MayTemplate()] | None = Field(None, description="Processes at a time.")
    disk: Annotated[Size, Field(gt=0), MayTemplate()] | None = Field(None, description="Bytes on disk, or 4GiB.")
    cpu: Annotated[float, Field(gt=0), MayTemplate()] | None = Field(None, description="Processor cores.")
    open_files: Annotated[int, Field(ge=1), MayTemplate()] | None = Field(None, description="Open files per process.")
    best_effort: Annotated[bool, MayTemplate()] = Field(
        False, description="Ignore a limit that the backend cannot enforce instead of raising an error."
    )


class ServiceSection(Section):
    """A program in its own image, next to the sandbox, such as a database. Supported by docker."""

    image: SystemText = Field(description="Container image, or ./folder with a Dockerfile.")
    command: Seq[SystemText] = Field((), description="What it runs, a list of words; default: what the image starts.")
    env: Annotated[Mapping[SystemText, EnvText], AfterValidator(freeze), MayTemplate()] = Field(
        EMPTY, description="Environment variables of it."
    )
    files: Seq[File] = Field((), description="Files in place before it starts, by absolute paths.")
    healthy: SystemText | None = Field(
        None,
        description="Shell command in it, repeated until it passes, before which the sandbox is not used; default: "
        "the image's own check.",
    )


ServiceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$")]


class SshSection(Section):
    """Host keys that the backend ssh trusts; by default, the keys that this host already trusts."""

    known_hosts: SystemText | None = Field(
        None, description="File of known hosts, the only trusted keys; default: the known hosts of ssh on this host."
    )
    accept_unknown_host: bool = Field(
        False, description="Trust and remember the key of a host that is not known; a changed key is always refused."
    )


class SandboxSection(Section):
    """The sandbox in which commands run; started only when something uses it."""

    backend: str = Field(
        "bubblewrap",
        description="bubblewrap, docker, modal, daytona, singularity, none (no isolation from the host), or ssh, which "
        "does not separate rollouts: for `evaluate` and `play` only.",
    )
    image: SystemText | None = Field(
        None,
        description="Container image, or for docker a ./folder with a Dockerfile; for bubblewrap a folder or archive "
        "with a root file system.",
    )
    workdir: PathText | None = Field(None, description="Working directory in the sandbox; default: its home.")
    env: Annotated[Mapping[SystemText, EnvText], AfterValidator(freeze), MayTemplate()] = Field(
        EMPTY, description="Environment variables of every command."
    )
    python: Seq[Package] = Field(
        (),
        description="Python packages for bubblewrap and docker, as pip names them, and `python>=3.12` if they need it. "
        "Installed once, by the host's pip, and mounted read-only.",
    )
    npm: Seq[NpmPackage] = Field(
        (),
        description="npm packages for bubblewrap and docker, each as name@version. Installed once, by the host's npm "
        "without running their scripts, and mounted read-only.",
    )
    files: Annotated[Seq[File], MayTemplate()] = Field((), description="Files in place before setup.")
    setup: Annotated[Seq[SystemText], MayTemplate()] = Field(
        (), description="Commands before the agent starts; one that fails is our failure, not the agent's."
    )
    scrub_git: bool = Field(
        False,
        description="After setup, remove from the git repositories of the working directory all that HEAD does not "
        "reach: branches, tags, the stash, logs and objects. Set-up fails if something is left.",
    )
    services: Annotated[Mapping[ServiceName, ServiceSection], AfterValidator(freeze), MayTemplate()] = Field(
        EMPTY,
        description="Programs on the sandbox's network, by host name; docker only. Each starts when the one before it "
        "is ready.",
    )
    ssh: SshSection = Field(SshSection.model_construct(), description="Which host keys the backend ssh trusts.")
    network: Network = Field(False, description="false: none; true: all; or a list of host names.")
    limits: Limits = Field(
        Limits.model_construct(), description="Limits on memory, processes, disk, cpu and open files."
    )
    timeout: float = Field(120.0, gt=0, description="Seconds per command.")
    lifetime: float | None = Field(None, gt=0, description="Seconds that a sandbox may live; default: no bound.")
    keep_processes: bool = Field(
        False, description="Leave the agent's processes running while rewards look; false kills them first."
    )


class Artifact(Section):
    """Something taken from the sandbox when the agent has ended: exactly one of path, command."""

    path: PathText | None = Field(None, description="File or folder in the sandbox.")
    command: SystemText | None = Field(None, description="Command whose standard output is saved.")
    restore: bool = Field(True, description="false: it is only kept; fresh sandboxes of rewards do not get it.")


# ------------------------------------------------------------- ``toolsets`` and ``tools``: what the agent can do

Probability = Annotated[float, Field(ge=0, le=1)]


def _argv(value: Any) -> Any:
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
    record: str | None = Field(None, description="Folder to keep the answers of tools that reach outside.")
    replay: str | None = Field(None, description="Folder of recorded answers to give instead of reaching outside.")
    demo_answers: Map[str] = Field(
        EMPTY, description="Tool → what it always answers where `--demo` keeps it from outside."
    )


class Mcp(Section):
    """A tool server that speaks the Model Context Protocol."""

    name: str = Field(description="Name of the server; prefix of its tools where names would collide.")
    command: Annotated[Seq[str], BeforeValidator(_argv)] | None = Field(
        None, description="Program and arguments of a server over stdio."
    )
    url: UrlText | None = Field(None, description="Address of a server over HTTP.")
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

    file: str = Field(description="Path, relative to this file.")


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


StateField = Annotated[Late[State], _short_for("python", str)]
ToolsetsField = Annotated[Late[Toolsets], _short_for("enabled", list, tuple)]
NO_TOOLSETS = Toolsets.model_construct()


# --------------------- ``prompt`` and ``user``: the agent's first messages, and the user that replies to it


def _shape(value: Any) -> str:
    if isinstance(value, Mapping | TextFile):
        return "file"
    return "parts" if isinstance(value, list | tuple) else "text"


class Part(Section):
    """A part of a message: text, or an image of the row (omitted if the row has none)."""

    type: Literal["text", "image_url"] | None = Field(None, description="Kind of the part; follows from its key.")
    text: str | None = Field(None, description="Text of this part.")
    image: str | None = Field(None, description="Template that gives an image, its bytes, a data URL or a path.")
    image_url: FreeMap | str | None = Field(None, description="Image as the OpenAI API takes it.")


Text = Annotated[Annotated[str, Tag("text")] | Annotated[TextFile, Tag("file")], Discriminator(_shape)]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[TextFile, Tag("file")] | Annotated[Seq[Late[Part]], Tag("parts")],
    Discriminator(_shape),
]


class Message(Section):
    """One message of the conversation that a rollout starts with."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], MayTemplate()] = Field(
        description="Who speaks: system, user, assistant or tool."
    )
    content: Content | None = Field(None, description="Text, a list of parts, or {file}.")
    name: str | None = Field(None, description="Name of the speaker, where the model's template knows one.")
    reasoning_content: str | None = Field(None, description="Reasoning of an earlier assistant turn.")
    tool_calls: Annotated[Seq[FreeMap], MayTemplate()] | None = Field(
        None, description="Calls of an earlier assistant turn, as the OpenAI API has them."
    )
    tool_call_id: str | None = Field(None, description="Call that a tool message answers.")


class Prompt(Section):
    """The messages that a rollout starts with: system and user, or messages."""

    system: Text | None = Field(None, description="System message: a template over the row, or {file}.")
    user: Content | None = Field(None, description="First user message: a template over the row, parts, or {file}.")
    messages: Annotated[Seq[Late[Message]], MayTemplate()] | None = Field(
        None, description="The whole conversation so far, instead of system and user."
    )


LeastReward = Annotated[
    Annotated[float, Tag("number")] | Annotated[Map[float], Tag("names")],
    Discriminator(lambda value: "names" if isinstance(value, Mapping) else "number"),
]


class UserWords(Section):
    """One scripted message of the user, with the changes that it brings."""

    say: str = Field(description="Text of the message.")
    tools: Seq[str] | None = Field(
        None, description="Names of the tools that the agent may call from now on; default: unchanged."
    )
    files: Annotated[Seq[File], MayTemplate()] = Field((), description="Files copied into the sandbox first.")
    setup: Annotated[Seq[SystemText], MayTemplate()] = Field(
        (), description="Commands run before the message, after the files are copied; one that fails ends the rollout."
    )
    min_reward: Annotated[LeastReward, MayTemplate()] | None = Field(
        None,
        description="Said only where each reward with `per_step` gave at least this much for the step before; or a "
        "mapping from names of such rewards, or of their metrics, to numbers.",
    )


class User(Section):
    """The user that replies to each turn without tool calls: a model, code of the state, or a script. Never trained
    on."""

    state: str | None = Field(
        None,
        description="Method of the state that replies instead of a model. It receives the agent's message, or None if "
        "the user speaks first.",
    )
    turns: Annotated[Seq[Annotated[Late[UserWords], _short_for("say", str)]], MayTemplate()] | None = Field(
        None, description="Fixed words, one after the other; the agent's answer to the last ones is the end."
    )
    max_agent_turns: int | None = Field(
        None, ge=1, description="Model calls until the agent has to answer its user; default: no bound."
    )
    server: str = Field("user", description="Server role of the model that simulates the user.")
    system: Text | None = Field(None, description="What the user wants and knows: a template over the row, or {file}.")
    transform: str | None = Field(
        None,
        description="Method of the state that receives the model's message and returns the message for the agent, in "
        "the same form as `state`.",
    )
    speaks_first: bool = Field(False, description="The user speaks first.")
    stop: Seq[str] = Field((), description="Phrases of the user that end the rollout.")
    max_turns: int = Field(30, ge=1, description="Turns of the user after which the rollout ends.")
    tools: Seq[Late[ToolSection]] = Field((), description="Tools that the user may call.")

    @property
    def simulated(self) -> bool:
        """True if a model simulates the user."""
        return self.state is None and self.turns is None


class SeatSection(Section):
    """An agent's place in an episode of several agents."""

    server: str = Field("policy", description="Server role of the model at this seat.")
    opponents: Seq[str] = Field(
        (), description="Server roles, such as earlier checkpoints; each episode uses one of them for the seat."
    )
    opponent_sampling: Literal["uniform", "latest", "rated"] = Field(
        "uniform",
        description="Which of the opponents: any, as the seed has it; the last of the list; or rather those against "
        "whom the first seat's scores, from 0 to 1, were near a half.",
    )
    prompt: Late[Prompt] | None = Field(None, description="How its conversation starts; default: the spec's prompt.")
    tools: Seq[str] | None = Field(None, description="Names of the spec's tools that the seat may call; default: all.")
    sandbox: Literal["shared", "own"] = Field(
        "shared", description="shared: the seat shares one sandbox with all such seats; own: it has its own."
    )
    train: bool = Field(True, description="Whether what it samples is trained on.")
    baseline: Literal["seat", "row", "episode"] = Field(
        "seat",
        description="Scores that its score is compared with: seat, the same seat in the other episodes of the group; "
        "row, all seats with `row` in all episodes of the group; episode, all with `episode` in the same episode.",
    )
    message_template: Annotated[str, MayTemplate()] = Field(
        "{{ text }}",
        description="What it hears where another seat speaks: a template over `seat`, its name, and `text`.",
    )
    description: str | None = Field(None, description="schedule: call: its tool description for the first seat.")
    agent: Late[Agent] = Field(Agent.model_construct(), description="Settings that override `agent`.")


class ScheduleSection(Section):
    """Order in which several agents speak."""

    order: Literal["alternate", "simultaneous", "call"] | None = Field(
        None,
        description="alternate: one after the other; simultaneous: all at a time, who then hear each other; call: the "
        "others are tools of the first.",
    )
    rounds: int | None = Field(
        None, ge=1, description="Rounds of alternate and simultaneous; default: until a seat is out."
    )
    fn: str | None = Field(
        None, description="file.py:function, async, which gets the `seats` and awaits what they `say`."
    )
    state: str | None = Field(
        None, description="Method of the state that gets the messages so far and returns the next seat, or null to end."
    )


class Distill(Section):
    """A teacher that returns the log-probability of each token of a rollout, and the tokens that it finds most
    probable."""

    server: str = Field("teacher", description="Server role that is the teacher, with the policy's tokenizer.")
    top_k: int = Field(
        8, ge=0, description="Tokens that the teacher finds the most probable at each place; 0 asks for none."
    )


# ---------------- ``rewards``, ``score``, ``on_stop`` and ``solution``: how a rollout is graded, and a right one

INJECTED = frozenset({"item", "result", "ctx", "state", "group", "roles", "seats", "paid"})
"""Parameters of a reward that the run fills in; all others are arguments or server roles."""


PaidSeats = Annotated[
    Annotated[Seq[str], Tag("names")] | Annotated[Map[float], Tag("factors")],
    Discriminator(lambda value: "factors" if isinstance(value, Mapping) else "names"),
]


class Reward(Section):
    """One function that looks at a finished rollout and returns a value."""

    fn: str = Field(
        description="Shipped name, file.py:function, package.module:function, atropos:<name>, or a name "
        "that a package publishes; default: the reward's own name."
    )
    weight: float = Field(1.0, description="Factor in the score; may be negative, 0 makes it a metric only.")
    gate: bool = Field(False, description="Multiplies the score, with a value from 0 to 1, instead of adding to it.")
    range: Pair | None = Field(
        None,
        description="[lowest, highest] value; others are clamped. A reward that fails because of the policy gets the "
        "lowest (the highest with a negative weight). Default: the function's range, else [0, 1].",
    )
    args: FreeMap = Field(EMPTY, description="Keyword arguments of the function; templates over the row.")
    per_step: Literal["mean", "last"] | None = Field(
        None,
        description="Call the reward after each step, that is after the agent's answer to a message of `user.turns`. "
        "Templates can use `step`, its index from 0. The value is the mean over the completed steps, or the value "
        "of the last.",
    )
    sandbox: Literal["rollout", "fresh"] = Field(
        "rollout",
        description="rollout: the agent's sandbox; fresh: a new sandbox with the artifacts restored.",
    )
    isolate: Isolate | None = Field(
        None,
        description="Where the function runs. process or reuse: in a worker process, which is ended when it takes too "
        "long (default); sandbox: in a process inside a sandbox; none: in the runner, for code that shares what it "
        "keeps in memory with other rollouts. One that names `state` runs where the state is.",
    )
    timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds that one call may take; default: 300, and 3600 where it asks a sandbox or a model. One "
        "that takes longer is ended.",
    )
    seats: PaidSeats | None = Field(
        None,
        description="Seats that it pays: names, for each of which it is called; or factors by name, by which they "
        "share what it gives for the first. Default: all.",
    )


def _add_function_names(value: Any) -> Any:
    """Return the rewards with `fn` filled in: without it, the key is the name of the function."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: {"fn": name, **(reward or {})} if isinstance(reward, Mapping | None) else reward
        for name, reward in value.items()
    }


class ScoreRule(Section):
    """Rule that combines the values of the rewards into the score."""

    combine: Literal["sum", "product", "minimum"] = Field(
        "sum", description="What is made of weight × value of all rewards, before gates and clamp."
    )
    clamp: Pair | None = Field(None, description="[lowest, highest] score.")


EndingPolicy = Annotated[
    Annotated[Literal["grade", "mask", "drop", "worst"], Tag("name")] | Annotated[float, Tag("score")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "score"),
]


class Call(Section):
    """One tool call of a gold turn."""

    name: str = Field(description="Name of the tool.")
    args: Free = Field(EMPTY, description="Arguments; templates over the row.")


class Turn(Section):
    """One turn of the gold solution: tool calls, text, or both."""

    tools: Annotated[Seq[Call], MayTemplate()] | None = Field(None, description="Tool calls of this turn, in order.")
    say: str | None = Field(None, description="Text of this turn.")
    reasoning: str | None = Field(None, description="Reasoning of this turn.")
    user: str | None = Field(
        None, description="Message of a scripted user: a reply, or the first message in a separate turn."
    )
    seat: str | None = Field(None, description="Seat that has this turn; default: the first.")
    user_tools: Annotated[Seq[Call], MayTemplate()] | None = Field(
        None, description="What a scripted user calls before it says that, in order."
    )


class Solution(Section):
    """Reference solution, run by the scripted policy. Other keys are for rewards."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Free] = Field(init=False)

    turns: Annotated[Seq[Turn], MayTemplate()] | None = Field(None, description="Gold turns, in order.")
    patch: str | None = Field(None, description="Gold patch of the working directory, as git diff writes it.")


Rewards = Annotated[Map[Late[Reward]], BeforeValidator(_add_function_names)]
OnStop = Map[EndingPolicy]


# ---------------------------------------------------------- ``servers``: the models that a run talks to, by role


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
        None, description="Environment variable that holds the key; default: no Authorization header."
    )
    headers_env: Map[str] = Field(EMPTY, description="HTTP header → environment variable that holds its value.")
    timeout: float = Field(1200.0, gt=0, description="Seconds per call.")
    max_concurrency: int = Field(1024, ge=1, description="Requests in flight at a time.")
    tokenizer: str | None = Field(
        None, description="Hub name or path; default: the model's own, or a small built-in one for scripted."
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


# ----------------------------------------------------------------------- `Spec`: a complete spec as one frozen value
# It stores the position of each part in its file, which equality ignores, so that later checks can report it.

Mode = Literal["serve", "process", "evaluate"]
NOWHERE = MappingNode(Mark(SourceText("spec", Path(), has_lines=False), 1, 1))
"""The tree of a spec that was not read from anywhere."""
TOOL_TIMEOUT = 300.0
"""Seconds per tool call where the spec says nothing."""


class Spec(Section):
    """An environment: rows, prompt, tools, sandbox, agent, rewards, and the number of rollouts."""

    version: Literal[1] = Field(1, description="Version of the format: 1.")
    name: str = Field("spec", min_length=1, description="Name of the environment; default: the name of the file.")
    description: str | None = Field(None, description="One line for lists.")
    seed: int = Field(
        0,
        ge=0,
        description="Feeds split, distributions, scripted deviations and the sampling seed of each rollout.",
    )
    dataset: Late[Dataset] = Field(description="The rows that rollouts start from.")
    prompt: Late[Prompt] = Field(Prompt.model_construct(), description="How a rollout starts.")
    toolsets: ToolsetsField = Field(NO_TOOLSETS, description="Groups of tools by name; none when absent.")
    tools: Seq[Late[ToolSection]] = Field(
        (), description="User-defined tools: Python functions, state objects, MCP servers."
    )
    state: StateField | None = Field(
        None,
        description="file.py:Class, or {python: file.py:Class, isolate: reuse}; one object Class(item) per rollout.",
    )
    user_code: Late[UserCode] = Field(
        UserCode.model_construct(), description="Which environment variables the code of the spec sees."
    )
    user: Late[User] | None = Field(None, description="Who answers the agent's turns without tool calls.")
    agents: Map[Late[SeatSection]] = Field(EMPTY, description="The seats of an episode of several agents, by name.")
    schedule: Annotated[Late[ScheduleSection], _short_for("order", str)] | None = Field(
        None, description="Who of several agents speaks when."
    )
    distill: Late[Distill] | None = Field(None, description="A teacher whose log-probabilities groups carry.")
    sandbox: Late[SandboxSection] = Field(SandboxSection.model_construct(), description="Where commands run.")
    artifacts: Map[Late[Artifact]] = Field(EMPTY, description="Files saved from the sandbox, by name.")
    agent: Late[Agent] = Field(Agent.model_construct(), description="Sampling and limits of one rollout.")
    rewards: Rewards = Field(EMPTY, description="Functions that grade a rollout, by name, in order.")
    score: Late[ScoreRule] = Field(
        ScoreRule.model_construct(), description="How the values of the rewards become the score."
    )
    on_stop: OnStop = Field(
        EMPTY, description="Stop reason → grade, mask, drop, or a number as score; retries_exhausted → drop or worst."
    )
    solution: Late[Solution] | None = Field(None, description="What a perfect agent would do.")
    checks: Map[Literal["off", "warning", "error"]] = Field(
        EMPTY,
        description="Checks of `validate --deep`, each off, a warning or an error; default: as docs/rewards.md has.",
    )
    servers: Servers = Field(EMPTY, description="Model servers by role; policy is the model that acts.")
    serve: Late[Serve] = Field(Serve.model_construct(), description="Groups for a trainer.")
    process: Late[Process] = Field(Process.model_construct(), description="Groups into a file.")
    evaluate: Late[Evaluate] = Field(Evaluate.model_construct(), description="Scores on the evaluation rows.")
    budget: Late[Budget] = Field(Budget.model_construct(), description="What ends a run early.")
    atropos: FreeMap = Field(EMPTY, description="Other fields of Atropos' environment configuration.")
    wandb: WandbField | None = Field(None, description="Project, or {project, name, mode}; absent is off.")

    _tree: MappingNode = PrivateAttr(default_factory=lambda: NOWHERE)  # merged and substituted
    _policy_key: SecretStr | None = PrivateAttr(default=None)
    _demo: bool = PrivateAttr(default=False)
    _overrides: Any = PrivateAttr(default=None)
    _repository: dict[str, str] | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        """Return True if all keys are equal, regardless of their positions."""
        return isinstance(other, Spec) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def demo(self) -> bool:
        """True where the spec was changed to run without model, network and containers."""
        return self._demo

    @property
    def overrides(self) -> Any:
        """Changes by a command line or a program (`overrides.Overrides`), or None."""
        return self._overrides

    @property
    def repository(self) -> dict[str, str] | None:
        """The repository that the spec came from: `address`, `commit` and `digest`; None for a file of this machine."""
        return self._repository

    @property
    def policy_api_key(self) -> SecretStr | None:
        """The key given as `--openai.api_key`; it is nowhere else."""
        return self._policy_key

    @property
    def trained_seats(self) -> list[str]:
        """Seats that are trained; empty for a single agent.

        A seat without a reward has no score. Training on a score of 0 would teach it that it always loses.
        """
        return [name for name, seat in self.agents.items() if seat.train and name not in self.unpaid_seats]

    @property
    def unpaid_seats(self) -> list[str]:
        """Seats without a reward whose weight and factor are not 0; empty if no reward counts."""
        counting = [reward for reward in self.rewards.values() if reward.gate or reward.weight]
        return [
            name
            for name in self.agents
            if counting and not any(each.seats is None or self._factor(each, name) for each in counting)
        ]

    @staticmethod
    def _factor(reward: Reward, seat: str) -> float:
        """Return the factor by which a reward with `seats` pays one of them."""
        return reward.seats.get(seat, 0.0) if isinstance(reward.seats, Mapping) else float(seat in (reward.seats or ()))

    @property
    def other_policies(self) -> str:
        """Description of the trained seats that have another server than `policy`; empty if there are none."""
        others = {name: self.agents[name].server for name in self.trained_seats}
        return ", ".join(f"{name} by `{role}`" for name, role in others.items() if role != "policy")

    @property
    def folder(self) -> Path:
        """The folder that relative paths in the spec's own file start from."""
        return self.folder_of(())

    @property
    def folders(self) -> frozenset[Path]:
        """The folders of all files that the spec was read from."""
        sources = {node.position.source for node in (self._tree, *(node for _, _, node in walk(self._tree)))}
        return frozenset(source.folder for source in sources if source.has_lines)

    @property
    def source(self) -> str:
        """The file as the user named it."""
        return self._tree.position.source.name

    @property
    def in_sandboxes(self) -> list[NodePath]:
        """The keys that let user code run in a sandbox."""
        entries: dict[NodePath, str | None] = {
            **{(*path, "isolate"): tool.isolate for path, tool in self.all_tools.items()},
            **{("rewards", name, "isolate"): reward.isolate for name, reward in self.rewards.items()},
            ("state", "isolate"): None if self.state is None else self.state.isolate,
        }
        return [path for path, isolate in entries.items() if isolate == "sandbox"]

    @property
    def state_apart(self) -> bool:
        """True if the state of a rollout lives in a separate process."""
        return self.state is not None and self.state.isolate != "none"

    @property
    def tool_timeout(self) -> float:
        """Seconds per tool call: the agent's setting, else 300 or the sandbox's timeout, whichever is longer."""
        timeout = self.agent.tool_timeout or max(TOOL_TIMEOUT, self.sandbox.timeout)
        return min(timeout, self.agent.timeout or timeout)

    @property
    def command_timeout(self) -> float:
        """Seconds per command: never longer than the tool call that it is part of."""
        return min(self.sandbox.timeout, self.tool_timeout)

    @property
    def programs(self) -> dict[tuple[str, ...], ProgramSection]:
        """Agent programs by their path in the spec: the single agent's, or one per seat."""
        agents: dict[tuple[str, ...], Agent] = {("agent",): self.agent}
        agents |= {("agents", seat, "agent"): seat_config.agent for seat, seat_config in self.agents.items()}
        return {(*path, "program"): agent.program for path, agent in agents.items() if agent.program is not None}

    @property
    def all_tools(self) -> dict[NodePath, ToolSection]:
        """The tools of the agent and of the simulated user, by where they stand."""
        owners: dict[NodePath, Seq[ToolSection]] = {("tools",): self.tools}
        owners |= {("user", "tools"): self.user.tools} if self.user is not None else {}
        return {(*path, index): tool for path, tools in owners.items() for index, tool in enumerate(tools)}

    def section(self, mode: Mode) -> Serve | Process | Evaluate:
        """Return the section of a mode."""
        return self.evaluate if mode == "evaluate" else self.process if mode == "process" else self.serve

    def group_size(self, mode: Mode) -> int:
        """Return the rollouts per row."""
        section = self.section(mode)
        return section.rollouts if isinstance(section, Evaluate) else section.group_size

    def drops_uniform(self, mode: Mode) -> bool:
        """Return True if groups whose scores are all equal are dropped."""
        section = self.section(mode)
        return not isinstance(section, Evaluate) and section.drop_uniform

    def agent_for(self, mode: Mode) -> Agent:
        """Return the agent's settings in a mode: with the overrides for evaluation."""
        if mode != "evaluate":
            return self.agent
        agent = self.evaluate.agent
        changes: dict[str, Any] = {key: getattr(agent, key) for key in agent.model_fields_set}
        if self.evaluate.rollouts == 1:
            changes.setdefault("temperature", 0.0)
        return self.agent.model_copy(update=changes)

    def problem(self, path: NodePath, message: str, *, part: Literal["key", "value"] = "value") -> Problem:
        """Return a problem with the place where `path` was written, or where its nearest parent was."""
        return find_position(self._tree, path, part).problem(message)

    def is_written(self, path: NodePath) -> bool:
        """Return True if the spec itself contains the key; False for a default."""
        return len(locate(self._tree, path)[0]) == len(path)

    def written_at(self, path: NodePath) -> str | None:
        """Return the text of a value before it was made an absolute path, or None for a value that is not written."""
        node = find(self._tree, path)
        return node.text if isinstance(node, ScalarNode) else None

    def template_problem(self, path: NodePath, error: "TemplateError") -> Problem:
        """Return the problem of a template at its line, inside a block if the error is there."""
        row = f" (row {error.row})" if error.row else ""
        node = locate(self._tree, path)[2]
        return line_mark(node, error.line or 1, error.column).problem(f"{error.message}{row}")

    def row_problem(self, error: "TemplateError", path: NodePath = ()) -> Problem:
        """Return the problem of a value from a row, at the place that the error names, else at `path`."""
        if error.location.startswith("/"):
            return Problem(error.location, error.line or 1, 1, f"{error.message} (row {error.row})")
        steps = [step for step in re.split(r"[.\[\]]", error.location) if step]
        error_path: NodePath = tuple(int(step) if step.isdecimal() else step for step in steps)
        subpath = error.path if not error.location.endswith(".".join(map(str, error.path))) else ()
        return self.template_problem((*error_path, *subpath) or path, error)

    def folder_of(self, path: NodePath) -> Path:
        """Return the folder that a relative path written at `path` starts from."""
        return locate(self._tree, path)[2].position.source.folder.absolute()

    def resolved(self) -> dict[str, Any]:
        """Return the spec that ran, for `spec.yaml`: `${VAR}` unexpanded, no secrets, paths absolute."""
        if not self._tree.entries:
            return dict(self.model_dump(mode="json", by_alias=True, exclude_unset=True))
        as_written = rewrite(
            self._tree, lambda _, node: node if node.written is None else replace(node, value=node.written)
        )
        return dict(to_builtins(as_written))
