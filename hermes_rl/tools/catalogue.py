"""Catalogue of toolsets, and the tools that a list of toolset names selects.

Each module of `hermes_rl.tools.toolsets` declares the toolset of its name as ``TOOLSET``, and is imported when that
toolset is requested. A package publishes a `Toolset` as an entry point of the group `hermes_rl.toolsets`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pkgutil
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean, load_published, published
from hermes_rl.tools import toolsets as package
from hermes_rl.tools.base import Schemas, Tool, Toolkit, Toolset
from hermes_rl.tools.hermes_toolsets import NAMES, HermesToolsets

# --------------------------- Distributions: toolsets of a group of rollouts, drawn at random from a seed

logger = logging.getLogger(__name__)

TOOLSETS = "hermes_rl.toolsets"
"""Entry points of packages that bring a toolset."""

DISTRIBUTIONS: dict[str, dict[str, float]] = {
    "default": {"web": 1, "vision": 1, "image_gen": 1, "terminal": 1, "file": 1, "browser": 1},
    "image_gen": {"image_gen": 0.9, "vision": 0.9, "web": 0.55, "terminal": 0.45},
    "research": {"web": 0.9, "browser": 0.7, "vision": 0.5, "terminal": 0.1},
    "science": {"web": 0.94, "terminal": 0.94, "file": 0.94, "vision": 0.65, "browser": 0.5, "image_gen": 0.15},
    "development": {"terminal": 0.8, "file": 0.8, "web": 0.3, "vision": 0.1},
    "safe": {"web": 0.8, "browser": 0.7, "vision": 0.6, "image_gen": 0.6},
    "balanced": {"web": 0.5, "vision": 0.5, "image_gen": 0.5, "terminal": 0.5, "file": 0.5, "browser": 0.5},
    "minimal": {"web": 1},
    "terminal_only": {"terminal": 1, "file": 1},
    "terminal_web": {"terminal": 1, "file": 1, "web": 1},
    "creative": {"image_gen": 0.9, "vision": 0.9, "web": 0.3},
    "reasoning": {"web": 0.9, "file": 0.6, "terminal": 0.2},
    "browser_use": {"browser": 1, "web": 0.8, "vision": 0.7},
    "browser_only": {"browser": 1},
    "browser_tasks": {"browser": 0.97, "vision": 0.12, "terminal": 0.15},
    "terminal_tasks": {"terminal": 0.97, "file": 0.97, "web": 0.97, "browser": 0.75, "vision": 0.5, "image_gen": 0.1},
    "mixed_tasks": {"browser": 0.92, "terminal": 0.92, "file": 0.92, "web": 0.35, "vision": 0.15, "image_gen": 0.15},
}
"""Name → toolset → probability, as in hermes-agent."""


def draw(chances: Mapping[str, float], seed: int | str) -> tuple[str, ...]:
    """Draw each toolset independently with its probability; the result is the same for the same seed.

    A draw without any toolset takes the most probable one instead, since a group without tools would be another task.
    """
    if any(not 0 <= chance <= 1 for chance in chances.values()):
        raise UserError("the probabilities of a distribution of toolsets must be between 0 and 1")
    if not any(chances.values()):
        raise UserError("the distribution of toolsets is empty: no toolset has a probability above 0")
    source = random.Random(f"toolsets {seed}")
    drawn = tuple(name for name, chance in chances.items() if source.random() < chance)
    if drawn:
        return drawn
    likeliest = max(chances, key=lambda name: chances[name])
    logger.info("the draw from the distribution was empty: taking %s, the most probable toolset", likeliest)
    return (likeliest,)


# -------------------------------------------------------------------------------- catalogue


class Supplier(Protocol):
    """Provides the toolsets of hermes-agent."""

    def tools(self, source: str) -> tuple[Tool, ...]:
        """Return the tools of one toolset; raises `UserError` if it is not available."""


@functools.cache
def own_names() -> tuple[str, ...]:
    """Return the names of the bundled toolsets; nothing is imported for them."""
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return tuple(name for name in names if not name.startswith("_"))


@functools.cache
def _load_builtin(name: str) -> Toolset:
    toolset: Toolset = importlib.import_module(f"{package.__name__}.{name}").TOOLSET
    return toolset


def _published() -> dict[str, EntryPoint]:
    return published(TOOLSETS, "toolset", (*own_names(), *NAMES))


def _loaded(point: EntryPoint) -> Toolset:
    toolset = load_published(point, "toolset")
    if not isinstance(toolset, Toolset):
        raise UserError(
            f"the toolset {point.name!r} ({point.value}) is not a hermes_rl.tools.base.Toolset, but "
            f"{type(toolset).__name__}"
        )
    return toolset


def toolsets() -> dict[str, Toolset]:
    """Load all toolsets that need no hermes-agent, by name: bundled ones, and toolsets of other packages."""
    return {name: _load_builtin(name) for name in own_names()} | {
        name: _loaded(point) for name, point in _published().items()
    }


def known_toolsets() -> tuple[str, ...]:
    """Return every name that a spec may use, including toolsets that lack a requirement here."""
    return tuple(sorted({*own_names(), *_published(), *NAMES}))


def describe_toolsets() -> dict[str, str]:
    """Return the description of each toolset of `toolsets`, by name."""
    return {name: toolset.description for name, toolset in toolsets().items()}


def find_tool(name: str) -> Tool:
    """Return a built-in tool by its name."""
    tools = {tool.name: tool for toolset in toolsets().values() for tool in toolset.tools}
    if name not in tools:
        raise UserError(f"no built-in tool is named {name!r}{did_you_mean(name, tools)}")
    return tools[name]


def toolkit_of(
    schemas: Sequence[dict[str, Any]], names: Collection[str] | None = None, among: Toolkit | None = None
) -> Toolkit:
    """Return the toolkit of a list of schemas: the list's own if it has one, else built-in tools with these schemas.

    Args:
        schemas: schemas in the form for a server.
        names: the tools to select; None selects all.
        among: searched for tools before the built-in ones.

    Raises:
        UserError: there is no built-in tool of such a name.
    """
    if isinstance(schemas, Schemas):
        return schemas.toolkit.only(names)
    available = among or Toolkit()
    tools = [available.get(name := schema["function"]["name"]) or find_tool(name) for schema in schemas]
    return Toolkit(tools, schemas).only(names)


def check_toolsets(names: Sequence[str]) -> None:
    """Raise `UserError` for a name that no toolset has."""
    for name in names:
        # Other packages are searched only for a name that is unknown without them.
        if name not in own_names() and name not in NAMES and name not in (available := known_toolsets()):
            choices = ", ".join(available)
            raise UserError(f"no toolset is named {name!r}{did_you_mean(name, available)} (there are {choices})")


def resolve_toolsets(
    enabled: Iterable[str] | None, disabled: Sequence[str] = (), others: Supplier | None = None
) -> tuple[Tool, ...]:
    """Return the tools of the toolsets `enabled` without the `disabled` ones, each once; None enables all of
    `toolsets`.

    Toolsets of hermes-agent come from `others` (default: hermes-agent with this process's environment, where describing
    a toolset takes a second). Raises `UserError` for one that cannot work here.
    """
    if enabled is None:
        enabled = tuple(toolsets())
        logger.warning("no toolsets are named: the model gets all of them (%s)", ", ".join(enabled))
    enabled = tuple(enabled)
    check_toolsets([*enabled, *disabled])
    selected_names = [name for name in dict.fromkeys(enabled) if name not in disabled]
    tools = [tool for name in selected_names for tool in _tools_of(name, others)]
    return tuple({tool.name: tool for tool in tools}.values())


def _tools_of(name: str, others: Supplier | None) -> tuple[Tool, ...]:
    if name in own_names():
        return _load_builtin(name).tools
    if name in NAMES:
        return (others or _hermes_of_process()).tools(name)
    return _loaded(_published()[name]).tools


@functools.cache
def _hermes_of_process() -> HermesToolsets:
    return HermesToolsets(os.environ)


def sample_distribution(distribution: str | Mapping[str, float], seed: int | str) -> tuple[str, ...]:
    """Return the toolsets of one draw from a named distribution or a user's distribution; see `draw`."""
    chances = _chances(distribution)
    check_toolsets(tuple(chances))
    return draw(chances, seed)


def drawable(distribution: str | Mapping[str, float]) -> list[str]:
    """Return the toolsets that a draw may contain; raises `UserError` if no distribution has the name."""
    return [name for name, chance in _chances(distribution).items() if chance > 0]


def _chances(distribution: str | Mapping[str, float]) -> Mapping[str, float]:
    """Return a distribution, which may be given by its name; raises `UserError` if none has the name."""
    if not isinstance(distribution, str):
        return distribution
    if distribution not in DISTRIBUTIONS:
        choices = ", ".join(sorted(DISTRIBUTIONS))
        hint = did_you_mean(distribution, DISTRIBUTIONS)
        raise UserError(f"no distribution is named {distribution!r}{hint} (there are {choices})")
    return DISTRIBUTIONS[distribution]
