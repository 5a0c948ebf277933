"""Create a sandbox from a configuration: the one module that knows which backends exist.

`create_sandbox` creates one that has not been started. A package provides a backend as an entry point of the group
`hermes_rl.sandboxes`: a callable that takes a `SandboxConfig` and returns a `Sandbox`. Names of built-in backends
cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from hermes_rl.errors import UserError
from hermes_rl.plugins import SANDBOXES, did_you_mean, load_published, published
from hermes_rl.sandbox.base import BACKENDS, Sandbox, SandboxConfig
from hermes_rl.sandbox.bubblewrap import Bubblewrap
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.sandbox.remote import NAMES as REMOTE


def create_sandbox(config: SandboxConfig) -> Sandbox:
    """Return a sandbox that is not started yet.

    Raises `UserError` for a configuration that this backend, or this machine, can never run, such as a limit that it
    does not enforce.
    """
    sandbox = _of_backend(config)
    config.limits.require_at_most(sandbox.enforced, f"by the backend {config.backend}")
    return sandbox


def _of_backend(config: SandboxConfig) -> Sandbox:
    if config.backend == "none":
        from hermes_rl.sandbox.none import NoIsolation

        return HelperSandbox(config, NoIsolation(config))
    if config.backend == "bubblewrap":
        return HelperSandbox(config, Bubblewrap(config))
    if config.backend == "docker":
        from hermes_rl.sandbox.docker import Docker

        return HelperSandbox(config, Docker(config))
    if config.backend in REMOTE:
        from hermes_rl.sandbox.remote import RemoteSandbox

        return RemoteSandbox(config)
    return _package_backend(config.backend)(config)


def _package_backend(name: str) -> Callable[[SandboxConfig], Sandbox]:
    points = published(SANDBOXES, "sandbox backend", BACKENDS)
    if name not in points:
        known_names = [*BACKENDS, *points]
        raise UserError(
            f"no sandbox backend is named {name!r}{did_you_mean(name, known_names)} (there are "
            f"{', '.join(known_names)})"
        )
    return cast(Callable[[SandboxConfig], Sandbox], load_published(points[name], "sandbox backend"))
