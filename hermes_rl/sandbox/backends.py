"""From a configuration to a sandbox: the one place that knows which backends there are.

A package brings a backend of its own as an entry point of the group `hermes_rl.sandboxes`: a callable that takes a
`SandboxConfig` and returns a `Sandbox`. Names that are ours already cannot be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from hermes_rl.errors import UserError
from hermes_rl.plugins import SANDBOXES, did_you_mean
from hermes_rl.sandbox.base import Sandbox
from hermes_rl.sandbox.config import BACKENDS, SandboxConfig
from hermes_rl.sandbox.remote_machines import NAMES as REMOTE


def create_sandbox(config: SandboxConfig) -> Sandbox:
    """A sandbox that is not started yet.

    Raises `UserError` for what this backend, or this machine, can never run.
    """
    _check_known(config)
    if config.backend == "none":
        from hermes_rl.sandbox.none import NoSandbox

        return NoSandbox(config)
    if config.backend == "bubblewrap":
        from hermes_rl.sandbox.bubblewrap import BubblewrapSandbox

        return BubblewrapSandbox(config)
    if config.backend == "docker":
        from hermes_rl.sandbox.docker import DockerSandbox

        return DockerSandbox(config)
    if config.backend in REMOTE:
        from hermes_rl.sandbox.remote import RemoteSandbox

        return RemoteSandbox(config)
    return _load(published()[config.backend])(config)


def published() -> dict[str, EntryPoint]:
    """The backends of other packages, by name.

    Raises:
        UserError: two packages publish the same name.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=SANDBOXES):
        if point.name in found:
            raise UserError(
                f"two packages publish a sandbox backend {point.name!r} ({found[point.name].value} and {point.value}); "
                "remove one of them"
            )
        if point.name not in BACKENDS:
            found[point.name] = point
    return found


def _check_known(config: SandboxConfig) -> None:
    known = [*BACKENDS, *published()]
    if config.backend not in known:
        hint = did_you_mean(config.backend, known)
        raise UserError(f"no sandbox backend is named {config.backend!r}{hint} (there are {', '.join(known)})")


def _load(point: EntryPoint) -> Callable[[SandboxConfig], Sandbox]:
    try:
        return cast(Callable[[SandboxConfig], Sandbox], point.load())
    except (ImportError, AttributeError) as error:
        raise UserError(f"the sandbox backend {point.name!r} ({point.value}) cannot be loaded: {error}") from error
