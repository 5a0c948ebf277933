"""Which places for user code there are on this machine: `isolate: sandbox` needs more than a process."""

from __future__ import annotations

from collections.abc import Iterator

from hermes_rl.errors import UserError
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import NodePath


def sandbox_problem() -> str | None:
    """Return why user code cannot run in a sandbox here; None if it can."""
    from hermes_rl.sandbox.user_code import problem  # which most specs do not need

    return problem()


def isolation_problems(spec: Spec) -> Iterator[tuple[NodePath, str]]:
    """Yield each key that isolates code in a way that is not available here, and what is wrong with it."""
    entries: dict[NodePath, str | None] = {
        **{(*path, "isolate"): tool.isolate for path, tool in spec.all_tools.items()},
        **{("rewards", name, "isolate"): reward.isolate for name, reward in spec.rewards.items()},
    }
    if spec.state is not None:
        entries["state", "isolate"] = spec.state.isolate
    for path, isolate in entries.items():
        if isolate == "sandbox" and (why := sandbox_problem()) is not None:
            yield path, f"`isolate: sandbox` is not available on this machine: {why}; write `isolate: process`"


def require_isolation(spec: Spec) -> None:
    """Raise `UserError` if the spec isolates code in a way that is not available here."""
    for path, problem in isolation_problems(spec):
        raise UserError(f"{'.'.join(map(str, path))}: {problem}")
