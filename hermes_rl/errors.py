"""Define the exceptions of hermes-rl, the position of a problem in a spec, and the command that installs an extra.

::

    HermesRLError
    ├── UserError              the user's input is wrong: exit status 2, no traceback
    │   ├── SpecError          one or more problems in a spec, each with its place
    │   ├── TokenizerUnavailable   (hermes_rl.tokens.tokenizer) callers may continue without tokens
    │   └── NotYetAvailable    the format defines it, but this version does not support it yet
    ├── ContextLengthExceeded  (hermes_rl.servers.base) caused by the policy: the token budget is used up
    ├── RunError               the run could not be completed: exit status 1
    ├── AgentFault             the agent made a reward fail, which gets the end of its range that lowers the score
    └── Failure                infrastructure failed; never a reward (cause: `hermes_rl.stop_reasons.StopReason`)
        ├── ServerFailure      a model server, after retries
        ├── SandboxFailure     a sandbox could not start, or its backend was lost
        ├── ToolServerFailure  the server of a tool was lost
        ├── RewardFailure      a reward raised, returned None, or was not finite
        ├── JudgeFailure       a judge failed or its verdict could not be read
        └── RowFailure         a row cannot be used, so a retry would fail too

A `Failure` stops a rollout, which is then retried; it never becomes a score. A mistake of the policy (a bad tool call,
an empty reply) is not an exception: it is a `ToolError` or a `StopReason`. Only a reward that cannot continue because
of it raises `AgentFault`: otherwise an agent could avoid being graded. `UserError` and `RunError` end a run before its
first rollout; after it, whatever an agent can cause counts as caused by the policy.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hermes_rl.stop_reasons import StopReason


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong with a spec; `line` and `column` count from 1, `file` is as the user wrote it.

    A problem on the command line has `file` = ``--set KEY`` (or the flag) and no line.
    """

    file: str
    line: int | None
    column: int | None
    message: str

    def __str__(self) -> str:
        if self.line is None:
            return f"{self.file}: {self.message}"
        return f"{self.file}:{self.line}:{self.column}: {self.message}"


def is_panic(error: BaseException) -> bool:
    """Return True if a library written in Rust has failed. Such an error is not an `Exception`, and has no module."""
    return type(error).__name__ == "PanicException"


class HermesRLError(Exception):
    """Base of every exception that hermes-rl raises on purpose."""


class UserError(HermesRLError):
    """The user's input is wrong; the message says where and what to do. Exit status 2, no traceback."""


class SpecError(UserError):
    """All problems of a spec at once; `str()` has one line each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NotYetAvailable(UserError):
    """The spec is valid, but it needs something that this version cannot run yet."""


class RunError(HermesRLError):
    """A run cannot continue (budget of failures used up, every row failed, disk full). Exit status 1."""


class AgentFault(HermesRLError):
    """The agent made a reward fail, which gets the end of its range that lowers the score, with this as the reason."""


class KilledByAgentError(AgentFault, OSError):
    """The agent's own commands ended the sandbox: there is nothing to look at, and rewards are to see that."""

    def __init__(self) -> None:
        super().__init__(errno.ENODEV, "the agent's own commands ended its sandbox")

    def __reduce__(self) -> tuple[type[KilledByAgentError], tuple[()]]:
        return KilledByAgentError, ()

    def __str__(self) -> str:
        return str(self.strerror)


@cache
def agent_error(kind: type[OSError]) -> type[OSError]:
    """Return a class of errors that rewards can catch as `kind`. An uncaught one counts as caused by the agent."""

    def text(error: OSError) -> str:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror)

    def reduced(error: OSError) -> tuple[Callable[..., OSError], tuple[Any, ...]]:
        return _agent_error, (kind, error.errno, error.strerror, error.filename)

    body: dict[str, Any] = {"__str__": text, "__reduce__": reduced, "__doc__": "What the agent left is in the way."}
    kinds: tuple[type, ...] = (AgentFault, kind)
    return type(kind.__name__, kinds, body)


def _agent_error(kind: type[OSError], error_number: int, problem: str, filename: str | None) -> OSError:
    return agent_error(kind)(error_number, problem, filename)  # type: ignore[arg-type]  # classes are hashable


LONGEST_DETAIL = 20_000
"""Characters of the detail of a failure, which is recorded, logged and shown for each attempt."""


class Failure(HermesRLError):
    """An infrastructure failure. `stop_reason` is the cause; `detail` is stored in the rollout's record.

    `result` is the part of the conversation before the failure, if the agent loop raised it.
    """

    stop_reason: StopReason = StopReason.SERVER_FAILURE
    result: Any = None

    def __init__(self, detail: str, *, stop_reason: StopReason | None = None) -> None:
        if len(detail) > LONGEST_DETAIL:  # of the spec's code, whose errors may repeat what a model has written
            detail = f"{detail[: LONGEST_DETAIL // 2]} … {detail[-LONGEST_DETAIL // 2 :]}"
        super().__init__(detail)
        self.detail = detail
        if stop_reason is not None:
            self.stop_reason = stop_reason


class ServerFailure(Failure):
    """A model server did not give a usable answer after all retries."""

    stop_reason = StopReason.SERVER_FAILURE
    about_the_call = False
    """Servers were up, so that what was asked may be the reason."""
    refused = False
    """The last server refused this very call, and would refuse it again."""


class SandboxFailure(Failure):
    """A sandbox could not be started, set up, or was lost by us."""

    stop_reason = StopReason.SANDBOX_FAILURE


class ToolServerFailure(Failure):
    """The server of a tool (MCP, hermes-agent backend) was lost."""

    stop_reason = StopReason.TOOL_SERVER_FAILURE


class RewardFailure(Failure):
    """A reward raised, returned None although weighted, or gave a value that is not finite."""

    stop_reason = StopReason.REWARD_FAILURE


class JudgeFailure(Failure):
    """A judge's server failed or its verdict could not be read after repair."""

    stop_reason = StopReason.JUDGE_FAILURE


class RowFailure(Failure):
    """A row cannot be used: its prompt does not fit the model's context, or the server refuses it."""

    stop_reason = StopReason.ROW_FAILURE


@dataclass(frozen=True)
class ToolError:
    """One call that failed because of the policy or of the tool; the rollout continues."""

    turn: int
    """Counts from 1."""
    tool_name: str
    arguments: str
    """As the model wrote them; an object is written as JSON."""
    error: str
    """Description of the error for the user; may contain more than the message to the model."""
    tool_result: str
    """Message that the model received."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this installation, whatever it was installed from.

    Only a package of an index can be named alone; a checkout, a wheel or a repository has to be named with its address.
    """
    import json
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution

    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    requirement = f"hermes-rl[{extra}]"
    try:
        text = distribution("hermes-rl").read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    if text is not None:  # PEP 610
        source = json.loads(text)
        vcs = source.get("vcs_info", {})
        commit = f"@{vcs['commit_id']}" if "commit_id" in vcs else ""
        requirement += f" @ {vcs['vcs']}+{source['url']}{commit}" if vcs else f" @ {source['url']}"
    return f"pip install {shlex.quote(requirement)}"
