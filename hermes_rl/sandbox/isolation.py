"""Refuse to run code without the isolation that it needs.

`isolate: sandbox` needs more than a process, which not every machine offers. Backends of `ONE_ACCOUNT` isolate no
rollout from another, so that a reward cannot trust the files that it finds there, and no rollout may be used for
training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from hermes_rl.errors import UserError
from hermes_rl.sandbox.base import ONE_ACCOUNT

if TYPE_CHECKING:  # processes of user code import this module with the tools, and need no form of a spec
    from hermes_rl.spec.model import Spec
    from hermes_rl.spec.nodes import NodePath


def isolation_problems(spec: Spec) -> Iterator[tuple[NodePath, str]]:
    """Yield each key that isolates code in a way that is not available here, and the problem."""
    if paths := spec.in_sandboxes:
        from hermes_rl.sandbox.user_code import problem  # which most specs do not need

        if (reason := problem()) is not None:
            message = f"`isolate: sandbox` is not available on this machine: {reason}; write `isolate: process`"
            yield from ((path, message) for path in paths)


def require_isolation(spec: Spec) -> None:
    """Raise `UserError` if the spec isolates code in a way that is not available here."""
    _require_none(isolation_problems(spec))


def grading_problems(spec: Spec, looking: Collection[str]) -> Iterator[tuple[NodePath, str]]:
    """Yield each reward whose value any rollout could choose, and the problem.

    Args:
        spec: the spec.
        looking: names of the rewards that may run commands in a sandbox, the rollout's own or a fresh one.
    """
    if spec.sandbox.backend in ONE_ACCOUNT:
        message = (
            f"a reward cannot look into a sandbox of {_unsafe(spec.sandbox.backend)}: use another backend, or rewards "
            "that judge the conversation alone"
        )
        yield from ((("rewards", name), message) for name in spec.rewards if name in looking)


def training_problems(spec: Spec) -> Iterator[tuple[NodePath, str]]:
    """Yield each section of the spec about training, if its sandboxes are for use by hand only."""
    if spec.sandbox.backend in ONE_ACCOUNT:
        training = [path for path in (("serve",), ("process",), ("distill",)) if spec.is_written(path)]
        yield from ((path, _manual_backend(f"`{path[0]}`", spec.sandbox.backend)) for path in training)


def require_grading(spec: Spec, looking: Collection[str]) -> None:
    """Raise `UserError` for the problems of `grading_problems`."""
    _require_none(grading_problems(spec, looking))


def require_by_hand(backend: str, use: str) -> None:
    """Raise `UserError` if sandboxes of this backend are for use by hand only; `use` names what would be trained."""
    if backend in ONE_ACCOUNT:
        raise UserError(_manual_backend(use, backend))


def _manual_backend(use: str, backend: str) -> str:
    return (
        f"{use} cannot use sandboxes of {_unsafe(backend)}: use another backend, such as docker; `evaluate` and `play` "
        "take this one"
    )


def _unsafe(backend: str) -> str:
    return (
        f"`backend: {backend}`, which gives all rollouts one account of one machine, where each can read, change and "
        "end what others do, also after its end"
    )


def _require_none(problems: Iterator[tuple[NodePath, str]]) -> None:
    for path, problem in problems:
        raise UserError(f"{'.'.join(map(str, path))}: {problem}")
