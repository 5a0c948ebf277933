"""From a configuration to a sandbox: the one place that knows which backends there are."""

from __future__ import annotations

from hermes_rl.errors import NotYetAvailable, UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.sandbox.base import Sandbox
from hermes_rl.sandbox.config import BACKENDS, SandboxConfig

AVAILABLE = ("bubblewrap", "none")


def create_sandbox(config: SandboxConfig) -> Sandbox:
    """A sandbox that is not started yet.

    Raises `NotYetAvailable` for what this version cannot run, `UserError` for what nothing can.
    """
    check_available(config)
    if config.backend == "none":
        from hermes_rl.sandbox.none import NoSandbox

        return NoSandbox(config)
    from hermes_rl.sandbox.bubblewrap import BubblewrapSandbox

    return BubblewrapSandbox(config)


def check_available(config: SandboxConfig) -> None:
    """Raise where this version has no such sandbox, without looking at the machine."""
    if config.backend not in BACKENDS:
        hint = did_you_mean(config.backend, BACKENDS)
        raise UserError(f"no sandbox backend is named {config.backend!r}{hint} (there are {', '.join(BACKENDS)})")
    if config.backend not in AVAILABLE:
        raise NotYetAvailable(
            f"sandbox.backend {config.backend!r} is not there yet; this version runs {' and '.join(AVAILABLE)}"
        )
