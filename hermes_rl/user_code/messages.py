"""Define the messages from a process for user code to the runner, with strict validation of each kind.

Any code may have written a message: even the policy's, if a reward executes it. So each kind has its keys, types and
limits, and `WireError` is raised for anything else. A reply contains the number of its call and the secret sent with
the call; both are only in a local variable of the process's work loop. Code in the same process can still find them
with effort, so code that executes a policy's text belongs in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from hermes_rl.user_code.wire import LARGEST, WireError

MOST_NUMBER = 1 << 64
"""Upper limit of the numbers of calls, questions and objects."""
LONGEST_NAME = 1_000
"""Maximum characters of the name of a method, logger, class or exception."""
LONGEST_LOG = 4_000
"""Maximum characters of a log line."""
LONGEST_TEXT = 10_000
"""Maximum characters of the text of an exception, and of the reason of a score."""
MOST_ARGUMENTS = 1_000
MOST_KINDS = 100
"""Maximum number of base classes of an exception."""
DEEPEST = 8
"""Maximum nesting of lists and scores in the return value of a reward."""


class Question(NamedTuple):
    """A method call on an object that lives in the runner."""

    question_id: int
    object_id: int
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


class LogLine(NamedTuple):
    """A line for the runner's log."""

    logger: str
    level: int
    text: str


class Raised(NamedTuple):
    """An exception; `ours` are the names of its classes if it is one of hermes-rl's."""

    text: str
    class_names: tuple[str, ...] | None = None
    stop_reason: str | None = None


class Reply(NamedTuple):
    """The only reply to a call: `raised`, or the plain return value."""

    call: int
    secret: str
    returned: Any = None
    raised: Raised | None = None


def read_message(content: Any) -> Question | LogLine | Reply:
    """Return the message of a process; raise `WireError` if it has no valid form."""
    match content:
        case {"ask": question_id, "of": object_id, "method": method, "args": args, "kwargs": kwargs} if (
            len(content) == 5
        ):
            if not (isinstance(args, list) and isinstance(kwargs, dict)) or len(args) + len(kwargs) > MOST_ARGUMENTS:
                raise WireError("a question has a list and an object of arguments")
            return Question(
                _require_number(question_id), _require_number(object_id), _read_text(method, LONGEST_NAME), args, kwargs
            )
        case {"log": [logger, level, text]} if len(content) == 1:
            return LogLine(
                _read_text(logger, LONGEST_NAME), _require_number(level, 1 << 16), _read_text(text, LONGEST_LOG)
            )
        case {"call": call, "secret": secret, "returned": returned} if len(content) == 3:
            return Reply(_require_number(call), _read_text(secret, LONGEST_NAME), returned)
        case {"call": call, "secret": secret, "raised": raised} if len(content) == 3:
            return Reply(_require_number(call), _read_text(secret, LONGEST_NAME), raised=_read_raised(raised))
    raise WireError("neither a reply, a question nor a line of the log")


def _read_raised(content: Any) -> Raised:
    match content:
        case {"ours": class_names, "text": text, "stop_reason": stop_reason} if len(content) == 3:
            stop_reason = None if stop_reason is None else _read_text(stop_reason, LONGEST_NAME)
            return Raised(_read_text(text, LONGEST_TEXT), _read_names(class_names), stop_reason)
        case {"text": text} if len(content) == 1:
            return Raised(_read_text(text, LONGEST_TEXT))
    raise WireError("an exception without its text, or with unknown keys")


def require_score(value: Any, depth: int = DEEPEST) -> None:
    """Raise `WireError` for a value that `hermes_rl.scoring.reward_value.to_builtin` does not return."""
    match value:
        case None | bool() | int() | float():
            return
        case list() if depth:
            for each in value:
                require_score(each, depth - 1)
        case {"type": kind} if len(value) == 1:
            _read_text(kind, LONGEST_NAME)
        case {"value": score_value, "reason": reason, "metrics": metrics, "overrides": more} if (
            len(value) == 4 and depth
        ):
            require_score(score_value, depth - 1)
            _require_short(more)
            if reason is not None:
                _read_text(reason, LONGEST_TEXT)
            if isinstance(metrics, dict):
                require_score(list(metrics.values()), depth - 1)
            else:
                _read_text(metrics, LONGEST_NAME)
        case _:
            raise WireError("the return value of a reward has an unexpected form")


def _require_short(overrides: Any) -> None:
    try:
        length = len(json.dumps(overrides))
    except (ValueError, RecursionError) as error:
        raise WireError(f"overrides are JSON: {error}") from error
    if length > LONGEST_TEXT:
        raise WireError(f"overrides have at most {LONGEST_TEXT} characters of JSON")


def require_texts(value: Any, *keys: Collection[str]) -> Mapping[str, str]:
    """Return an object of texts with one of these sets of keys; raise `WireError` for anything else."""
    if not isinstance(value, dict) or not any(value.keys() == set(each) for each in keys):
        raise WireError("an answer has other keys")
    if not all(isinstance(text, str) for text in value.values()):
        raise WireError("an answer is of texts")
    return value


def require_text(value: Any) -> str:
    """Return a text; raise `WireError` for anything else."""
    return _read_text(value, LARGEST)


def _require_number(value: Any, limit: int = MOST_NUMBER) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise WireError("a number is an integer from 0")
    return value


def _read_text(value: Any, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise WireError(f"a text has at most {longest} characters")
    return value


def _read_names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MOST_KINDS:
        raise WireError(f"an exception has at most {MOST_KINDS} classes")
    return tuple(_read_text(name, LONGEST_NAME) for name in value)
