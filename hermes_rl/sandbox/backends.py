"""From a configuration to a sandbox: the one place that knows which backends there are."""

from __future__ import annotations

from hermes_rl.errors import NotYetAvailable
from hermes_rl.sandbox.base import Sandbox
from hermes_rl.sandbox.config import SandboxConfig


def create_sandbox(config: SandboxConfig) -> Sandbox:
    """A sandbox that is not started yet."""
    raise NotYetAvailable(f"sandbox backend {config.backend!r} is not available yet")
