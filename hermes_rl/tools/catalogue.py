"""Which toolsets there are, and which tools a list of their names stands for.

Owns the names. Each module of `hermes_rl.tools.toolsets` declares one toolset as ``TOOLSET``, so a new one
is a new file. The toolsets of hermes-agent that act on the outside world are known by name, so that a spec
which names one is valid; running them needs what this version does not have yet.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Mapping, Sequence

from hermes_rl.errors import NotYetAvailable, UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.tools.base import Tool, Toolset
from hermes_rl.tools.distributions import draw, find_distribution

log = logging.getLogger(__name__)

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "browser": (
        "browser_navigate",
        "browser_snapshot",
        "browser_click",
        "browser_type",
        "browser_scroll",
        "browser_back",
        "browser_press",
        "browser_get_images",
        "browser_vision",
        "browser_console",
    ),
    "clarify": ("clarify",),
    "computer_use": ("computer_use",),
    "cronjob": ("cronjob",),
    "delegation": ("delegate_task",),
    "discord": ("discord",),
    "discord_admin": ("discord_admin",),
    "homeassistant": ("ha_list_entities", "ha_get_state", "ha_list_services", "ha_call_service"),
    "image_gen": ("image_generate",),
    "memory": ("memory",),
    "search": ("web_search",),
    "session_search": ("session_search",),
    "skills": ("skills_list", "skill_view", "skill_manage"),
    "spotify": ("spotify_playback", "spotify_search", "spotify_queue", "spotify_playlists"),
    "tts": ("text_to_speech",),
    "video": ("video_analyze",),
    "video_gen": ("video_generate",),
    "vision": ("vision_analyze",),
    "web": ("web_search", "web_extract"),
    "x_search": ("x_search",),
}
"""Toolsets that people know from hermes-agent and that are not there yet, with their tools."""


@functools.cache
def toolsets() -> dict[str, Toolset]:
    """The toolsets that this version can run, by name."""
    from hermes_rl.tools import toolsets as package

    found: dict[str, Toolset] = {}
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    for module in (name for name in names if not name.startswith("_")):
        toolset: Toolset = importlib.import_module(f"{package.__name__}.{module}").TOOLSET
        found[toolset.name] = toolset
    return found


def known_toolsets() -> tuple[str, ...]:
    """Every name that a spec may use, also those that cannot run yet."""
    return tuple(sorted({*toolsets(), *ELSEWHERE}))


def describe_toolsets() -> dict[str, str]:
    """What each toolset that this version can run is for, by name."""
    return {name: toolset.description for name, toolset in toolsets().items()}


def find_tool(name: str) -> Tool:
    """A built-in tool by its name."""
    tools = {tool.name: tool for toolset in toolsets().values() for tool in toolset.tools}
    if name not in tools:
        raise UserError(f"no built-in tool is named {name!r}{did_you_mean(name, set(tools))}")
    return tools[name]


def check_toolsets(names: Sequence[str]) -> None:
    """Raise `UserError` for a name that no toolset has."""
    for name in names:
        if name not in known_toolsets():
            choices = ", ".join(known_toolsets())
            hint = did_you_mean(name, known_toolsets())
            raise UserError(f"no toolset is named {name!r}{hint} (there are {choices})")


def resolve_toolsets(enabled: Sequence[str] | None, disabled: Sequence[str] = ()) -> tuple[Tool, ...]:
    """The tools of the toolsets `enabled` without those `disabled`, each once; None enables all there are."""
    if enabled is None:
        enabled = tuple(toolsets())
        log.warning("no toolsets are named: the model gets all of them (%s)", ", ".join(enabled))
    check_toolsets([*enabled, *disabled])
    wanted = [name for name in dict.fromkeys(enabled) if name not in disabled]
    missing = [name for name in wanted if name not in toolsets()]
    if missing:
        raise NotYetAvailable(f"toolset {missing[0]!r} is not there yet; this version has {', '.join(toolsets())}")
    return tuple(tool for name in wanted for tool in toolsets()[name].tools)


def sample_distribution(distribution: str | Mapping[str, float], seed: int | str) -> tuple[str, ...]:
    """The toolsets of one draw from a named distribution or one of the user's own; see `draw`."""
    chances = find_distribution(distribution) if isinstance(distribution, str) else distribution
    check_toolsets(tuple(chances))
    return draw(chances, seed)
