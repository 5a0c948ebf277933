"""What a spec asks for that this version cannot run yet, said before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hermes_rl.errors import NotYetAvailable, Problem
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.tools.catalogue import known_toolsets, toolsets
from hermes_rl.tools.distributions import DISTRIBUTIONS

_BACKENDS = {"bubblewrap", "none"}


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
    yield from _toolsets(spec)
    yield from _tools(spec)
    yield from _scoring(spec)
    if spec.user is not None:
        yield ("user",), "a simulated user"
    if mode == "process" and spec.process.format != "atropos":
        yield ("process", "format"), f"the format {spec.process.format}"


def _sandbox(spec: Spec) -> Iterator[tuple[Place, str]]:
    sandbox = spec.sandbox
    if sandbox.backend not in _BACKENDS:
        yield ("sandbox", "backend"), f"the sandbox backend {sandbox.backend}"


def _toolsets(spec: Spec) -> Iterator[tuple[Place, str]]:
    distribution = spec.toolsets.distribution
    if isinstance(distribution, str):
        far = _elsewhere(spec, DISTRIBUTIONS.get(distribution, {}))
        if far:
            yield ("toolsets", "distribution"), f"what the distribution {distribution} draws from: {_listed(far)}"
    elif distribution is not None:
        drawn = _elsewhere(spec, [name for name, chance in distribution.items() if chance > 0])
        yield from ((("toolsets", "distribution", name), _listed([name])) for name in drawn)
    else:
        enabled = spec.toolsets.enabled
        far = _elsewhere(spec, enabled)
        yield from ((("toolsets", "enabled", enabled.index(name)), _listed([name])) for name in far)


def _elsewhere(spec: Spec, names: Iterable[str]) -> list[str]:
    """Those that exist but not here, each once; names that nobody knows are a problem, which is told elsewhere."""
    far = set(known_toolsets()) - set(toolsets()) - set(spec.toolsets.disabled)
    return [name for name in dict.fromkeys(names) if name in far]


def _listed(names: list[str]) -> str:
    return f"the toolset{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _tools(spec: Spec) -> Iterator[tuple[Place, str]]:
    for key in ("record", "replay"):
        if getattr(spec.toolsets, key) is not None:
            yield ("toolsets", key), f"toolsets.{key}"


def _scoring(spec: Spec) -> Iterator[tuple[Place, str]]:
    for name, reward in spec.rewards.items():
        if reward.fn.startswith("atropos:"):
            yield ("rewards", name, "fn"), "a reward of atroposlib's registry"
