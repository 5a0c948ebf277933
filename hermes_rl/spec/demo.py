"""Change a spec for `--demo`, so that it runs without model, network and containers."""

from __future__ import annotations

from hermes_rl.spec.nodes import MappingNode, Node, ScalarNode, mapping, scalar

DEVIATE = 0.4
"""Share of each group that goes wrong in a demo, so that scores differ."""


def for_demo(root: MappingNode) -> MappingNode:
    """Return the spec with scripted servers and the default sandbox. `hermes_rl.data` takes the rows from the
    fallback."""
    root = root.having(servers=_demo_servers(root))
    sandbox = root.get("sandbox")
    if isinstance(sandbox, MappingNode) and _needs_more(sandbox):
        root = root.having(sandbox=sandbox.without("backend", "image", "ssh"))
    return root


def _demo_servers(root: MappingNode) -> MappingNode:
    node = root.get("servers")
    servers = node if isinstance(node, MappingNode) else MappingNode(root.position)
    roles = {role: entry.value for role, entry in servers.entries.items()}
    return servers.having(**{role: _scripted(role, server) for role, server in {"policy": servers, **roles}.items()})


def _scripted(role: str, server: Node) -> Node:
    if isinstance(server, MappingNode) and _node_text(server.get("type")) == "scripted":
        return server
    position = server.position
    values = {"type": "scripted", "error_rate": DEVIATE} if role == "policy" else {"type": "scripted"}
    return mapping(position, **{key: scalar(position, value) for key, value in values.items()})


def _needs_more(sandbox: MappingNode) -> bool:
    """Return True for a container backend, or for an image that is not an existing directory or archive."""
    if _node_text(sandbox.get("backend")) not in ("", "bubblewrap", "none"):
        return True
    image = sandbox.get("image")
    at_hand = (
        _node_text(image) != "" and image is not None and (image.position.source.folder / _node_text(image)).exists()
    )
    return isinstance(image, ScalarNode) and not at_hand


def _node_text(node: Node | None) -> str:
    return node.value if isinstance(node, ScalarNode) and isinstance(node.value, str) else ""
