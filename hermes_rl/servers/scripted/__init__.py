"""Implement `type: scripted`: a real HTTP server on loopback that plays written turns instead of calling a model."""

from hermes_rl.servers.scripted.play import Script, ScriptedCall, ScriptedTurn, deviate_script, deviations
from hermes_rl.servers.scripted.server import ScriptedServer

__all__ = [
    "Script",
    "ScriptedCall",
    "ScriptedServer",
    "ScriptedTurn",
    "deviate_script",
    "deviations",
]
