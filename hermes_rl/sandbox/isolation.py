"""Which places for user code there are on this machine: `isolate: sandbox` needs more than a process."""

from __future__ import annotations

from collections.abc import Iterator

from hermes_rl.errors import UserError
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import NodePath


def isolation_problems(spec: Spec) -> Iterator[tuple[NodePath, str]]:
    """Yield each key that isolates code in a way that is not available here, and what is wrong with it."""
    if paths := spec.in_sandboxes:
        from hermes_rl.sandbox.user_code import problem  # which most specs do not need

        if (why := problem()) is not None:
            message = f"`isolate: sandbox` is not available on this machine: {why}; write `isolate: process`"
            yield from ((path, message) for path in paths)


def require_isolation(spec: Spec) -> None:
    """Raise `UserError` if the spec isolates code in a way that is not available here."""
    for path, problem in isolation_problems(spec):
        raise UserError(f"{'.'.join(map(str, path))}: {problem}")
