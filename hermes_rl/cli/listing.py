"""`hermes-rl list`: list the names that a spec may use, one line each."""

from __future__ import annotations

import ast


def list_entries(kind: str) -> list[dict[str, str]]:
    """Return the entries of a kind as {name, description}, sorted by name if their order has no meaning."""
    entries = {
        "specs": _list_specs,
        "toolsets": _list_toolsets,
        "tools": _list_tools,
        "distributions": _list_distributions,
        "rewards": _list_rewards,
        "parsers": _list_parsers,
        "renderers": _list_renderers,
        "sandboxes": _list_sandboxes,
        "agents": _list_agents,
    }[kind]()
    return [{"name": name, "description": description} for name, description in entries.items()]


def _list_specs() -> dict[str, str]:
    from hermes_rl.spec.load import load_spec, shipped_specs

    return {name: load_spec(path, environ={}).description or "" for name, path in shipped_specs().items()}


def _list_toolsets() -> dict[str, str]:
    from hermes_rl.tools.catalogue import describe_toolsets
    from hermes_rl.tools.hermes_toolsets import NAMES, REFUSED, REMEDIES

    far = {
        name: "; ".join(["hermes-agent's, with the extra `hermes`", *filter(None, [REMEDIES.get(name)])])
        for name in NAMES
        if name not in REFUSED
    }
    return {**describe_toolsets(), **far}


def _list_tools() -> dict[str, str]:
    from hermes_rl.tools.catalogue import toolsets

    tools = [tool for toolset in toolsets().values() for tool in toolset.tools]
    return {tool.name: tool.description.partition("\n")[0] for tool in tools}


def _list_distributions() -> dict[str, str]:
    from hermes_rl.tools.catalogue import DISTRIBUTIONS

    distributions = sorted(DISTRIBUTIONS.items())
    return {
        name: ", ".join(f"{toolset} {chance:g}" for toolset, chance in chances.items())
        for name, chances in distributions
    }


def _list_rewards() -> dict[str, str]:
    from hermes_rl.shipped import published_rewards, shipped_rewards

    docs = {
        name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for name, path in shipped_rewards().items()
    }
    published = {point.name: point.value for point in sorted(published_rewards(), key=lambda point: point.name)}
    return {name: (doc or "").partition("\n")[0] for name, doc in docs.items()} | published


def _list_parsers() -> dict[str, str]:
    from hermes_rl.tokens.parsers.table import PARSERS

    return {name: f"tool calls of {models}" for name, models in PARSERS.items()}


def _list_renderers() -> dict[str, str]:
    from hermes_rl.tokens.families import family_names

    return {
        "auto": "the family of the model if it is known, else template",
        "template": "the tokenizer's own chat template, of any model",
        **dict.fromkeys(family_names(), "a renderer for this family of models"),
    }


def _list_agents() -> dict[str, str]:
    from hermes_rl.spec.recipes import ABOUT, about, shipped_recipes

    texts = {name: about(path) for name, path in shipped_recipes().items()}
    width = {key: max(len(text[key]) for text in texts.values()) for key in ABOUT[:-1]}
    return {
        name: "  ".join(text[key].ljust(width.get(key, 0)) for key in ABOUT).rstrip() for name, text in texts.items()
    }


def _list_sandboxes() -> dict[str, str]:
    return {
        "bubblewrap": "namespaces of the kernel; the default",
        "docker": "containers of an engine on this machine",
        "ssh": "a machine that ssh reaches, through hermes-agent",
        "modal": "sandboxes of Modal, through hermes-agent",
        "daytona": "sandboxes of Daytona, through hermes-agent",
        "singularity": "Apptainer or Singularity, through hermes-agent",
        "none": "this machine, without a fence",
    }
