"""`hermes-rl list`: what a spec may name, one line each."""

from __future__ import annotations

import ast
from pathlib import Path


def listed(kind: str) -> list[dict[str, str]]:
    """Entries of {name, description}, sorted by name where the order means nothing."""
    return {
        "specs": _specs,
        "toolsets": _toolsets,
        "tools": _tools,
        "distributions": _distributions,
        "rewards": _rewards,
        "parsers": _parsers,
        "renderers": _renderers,
        "sandboxes": _sandboxes,
    }[kind]()


def _entry(name: str, description: str) -> dict[str, str]:
    return {"name": name, "description": description}


def _specs() -> list[dict[str, str]]:
    from hermes_rl.spec.load import load_spec, shipped_specs

    return [_entry(name, load_spec(path, environ={}).description or "") for name, path in shipped_specs().items()]


def _toolsets() -> list[dict[str, str]]:
    from hermes_rl.tools.catalogue import describe_toolsets
    from hermes_rl.tools.hermes_toolsets import NAMES, REFUSED, REMEDIES

    far = {
        name: "; ".join(["hermes-agent's, with the extra `hermes`", *filter(None, [REMEDIES.get(name)])])
        for name in NAMES
        if name not in REFUSED
    }
    return [_entry(name, description) for name, description in {**describe_toolsets(), **far}.items()]


def _tools() -> list[dict[str, str]]:
    from hermes_rl.tools.catalogue import toolsets

    tools = [tool for toolset in toolsets().values() for tool in toolset.tools]
    return [_entry(tool.name, tool.description.partition("\n")[0]) for tool in tools]


def _distributions() -> list[dict[str, str]]:
    from hermes_rl.tools.catalogue import DISTRIBUTIONS

    return [
        _entry(name, ", ".join(f"{toolset} {chance:g}" for toolset, chance in chances.items()))
        for name, chances in sorted(DISTRIBUTIONS.items())
    ]


def _rewards() -> list[dict[str, str]]:
    from hermes_rl.shipped import published_rewards, shipped_rewards

    shipped = [_entry(name, _first_line(path)) for name, path in shipped_rewards().items()]
    published = sorted((point.name, point) for point in published_rewards())
    return shipped + [_entry(name, point.value) for name, point in published]


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _parsers() -> list[dict[str, str]]:
    from hermes_rl.tokens.parsers import PARSERS

    return [_entry(name, f"tool calls of {models}") for name, models in PARSERS.items()]


def _renderers() -> list[dict[str, str]]:
    from hermes_rl.tokens.families import family_names

    own = [
        _entry("auto", "the family of the model where it is known, else template"),
        _entry("template", "the tokenizer's own chat template, of any model"),
    ]
    return own + [_entry(name, "written by hand for this family of models") for name in family_names()]


def _sandboxes() -> list[dict[str, str]]:
    described = {
        "bubblewrap": "namespaces of the kernel; the default",
        "docker": "containers of an engine on this machine",
        "ssh": "a machine that ssh reaches, through hermes-agent",
        "modal": "sandboxes of Modal, through hermes-agent",
        "daytona": "sandboxes of Daytona, through hermes-agent",
        "singularity": "Apptainer or Singularity, through hermes-agent",
        "none": "this machine, without a fence",
    }
    return [_entry(name, text) for name, text in described.items()]
