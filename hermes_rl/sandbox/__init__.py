"""Sandbox of a rollout: provide files and commands through one interface, whatever isolates them."""

from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import (
    BACKENDS,
    BackgroundProcess,
    CommandResult,
    FileInfo,
    ResourceLimits,
    Sandbox,
    SandboxConfig,
    SandboxFile,
)

__all__ = [
    "BACKENDS",
    "BackgroundProcess",
    "CommandResult",
    "FileInfo",
    "ResourceLimits",
    "Sandbox",
    "SandboxConfig",
    "SandboxFile",
    "create_sandbox",
]
