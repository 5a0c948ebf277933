"""What a spec asks for that this version cannot run yet, said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from hermes_rl.errors import NotYetAvailable, Problem
from hermes_rl.sandbox.backends import AVAILABLE
from hermes_rl.sandbox.config import BACKENDS
from hermes_rl.spec.model import Mode, Spec


def require_available(spec: Spec, mode: Mode) -> None:
    """Raise NotYetAvailable with one line for each thing that a run in this mode would need."""
    problems = [spec.problem(path, f"{what} is not available yet") for path, what in _missing(spec, mode)]
    if problems:
        raise NotYetAvailable("\n".join(str(problem) for problem in problems))


def available(spec: Spec, mode: Mode) -> list[Problem]:
    """The same as problems, for `validate` to print as warnings."""
    return [
        spec.problem(path, f"a run needs {what}, which is not available yet") for path, what in _missing(spec, mode)
    ]


Place = tuple[str | int, ...]


def _missing(spec: Spec, mode: Mode) -> Iterator[tuple[Place, str]]:
    yield from _sandbox(spec)


def _sandbox(spec: Spec) -> Iterator[tuple[Place, str]]:
    sandbox = spec.sandbox
    if sandbox.backend in BACKENDS and sandbox.backend not in AVAILABLE:
        yield ("sandbox", "backend"), f"the sandbox backend {sandbox.backend}"
