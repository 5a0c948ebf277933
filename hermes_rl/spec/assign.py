"""Laying one option's value over the tree of a spec.

Owns the walk to the key, what an option that changes the kind of a block drops, and lists of policies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hermes_rl.spec.merge import changes_kind, expand_shorthand
from hermes_rl.spec.nodes import Entry, MappingNode, Node, NodePath, ScalarNode, SequenceNode, scalar
from hermes_rl.spec.places import is_in
from hermes_rl.spec.rules_run import REAL_ONLY, SCRIPTED_ONLY

_KIND_KEYS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("dataset",),
        ("path", "name", "split", "data_files", "revision", "streaming", "items", "generator", "fallback"),
    ),
    (("dataset", "eval"), ("split", "fraction", "only")),
    (("prompt",), ("messages", "system", "user")),
    (("toolsets",), ("enabled", "distribution")),
    (("sandbox",), ("image",)),
    (("rewards", "*"), ("args",)),
    (("agent", "reasoning"), ("effort", "max_tokens")),
    (("artifacts", "*"), ("path", "command")),
)
"""Block, and the keys that belong to one of its kinds: they go when an option changes the kind. The rest stays."""


@dataclass(frozen=True)
class Assignment:
    """One option: what the user typed, the keys that it stands for, and its value."""

    option: str
    path: NodePath
    node: Node
    all_servers: bool = False


class NoPlaceError(Exception):
    """The key of an option leads through something that has no keys."""


def assign(root: MappingNode, base: MappingNode, one: Assignment) -> MappingNode:
    """The tree with one option laid over it; `base` is what the file says, without any option.

    Raises:
        NoPlaceError: the key leads through something that has no keys.
    """
    changed = _assigned(root, base, one, ())
    assert isinstance(changed, MappingNode)
    return changed


def _assigned(node: Node | None, base: Node | None, one: Assignment, done: NodePath) -> Node:
    """`node` with the option's value at the rest of its path; `base` is what the file says there."""
    if len(done) == len(one.path):
        return one.node
    step = one.path[len(done)]
    here = expand_shorthand(node, done) if node is not None else None
    if isinstance(here, SequenceNode):
        return _assigned_item(here, base, one, done)
    if here is None or (isinstance(here, ScalarNode) and here.value is None):
        here = MappingNode(one.node.mark)
    if not isinstance(here, MappingNode):
        raise NoPlaceError(f"`{'.'.join(map(str, done))}` holds no keys")
    before = base.get(str(step)) if isinstance(base, MappingNode) else None
    value = _assigned(here.get(str(step)), before, one, (*done, step))
    entry = Entry(here.entries[str(step)].key if str(step) in here.entries else one.node.mark, value)
    return replace(_without_old_kind(here, base, one, done), entries=_placed(here, base, one, done, entry))


def _placed(here: MappingNode, base: Node | None, one: Assignment, done: NodePath, entry: Entry) -> dict[str, Entry]:
    step = str(one.path[len(done)])
    kept = _without_old_kind(here, base, one, done).entries
    entry = Entry(one.node.mark, entry.value) if len(done) + 1 == len(one.path) else entry
    return {**kept, step: entry}


def _without_old_kind(here: MappingNode, base: Node | None, one: Assignment, done: NodePath) -> MappingNode:
    """Without what the file wrote for another kind of this block than the option chooses."""
    if len(done) + 1 != len(one.path) or not isinstance(base, MappingNode):
        return here
    step = str(one.path[-1])
    change = MappingNode(one.node.mark, {step: Entry(one.node.mark, one.node)})
    if not changes_kind(base, change, done):
        return here
    gone = next((keys for pattern, keys in _KIND_KEYS if is_in(done, (pattern,))), ())
    if done[:1] == ("servers",):
        gone = SCRIPTED_ONLY if _is_scripted(base) else REAL_ONLY if _is_scripted(change) else ()
    own = [key for key in gone if key in base.entries and here.get(key) is base.get(key)]
    return here.without(*own)


def _assigned_item(here: SequenceNode, base: Node | None, one: Assignment, done: NodePath) -> Node:
    step = one.path[len(done)]
    items = list(here.items)
    if one.all_servers and not isinstance(step, int):
        bases = base.items if isinstance(base, SequenceNode) else items
        changed = [_assigned(item, bases[index], one, done) for index, item in enumerate(items)]
        return replace(here, items=tuple(changed))
    if not isinstance(step, int) or step >= len(items):
        raise NoPlaceError(f"`{'.'.join(map(str, done))}` is a list of {len(items)}; name an item by its number from 0")
    before = base.items[step] if isinstance(base, SequenceNode) and step < len(base.items) else None
    items[step] = _assigned(items[step], before, one, (*done, step))
    return replace(here, items=tuple(items))


def chat_server(root: MappingNode, assignments: list[Assignment]) -> MappingNode:
    """`--openai.base_url` says that there is a server, so the policy is no longer the scripted one."""
    by_flag = next((one for one in assignments if one.all_servers and one.path[-1] == "base_url"), None)
    if by_flag is None or any(one.path == ("servers", "policy", "type") for one in assignments):
        return root
    servers = root.get("servers")
    policy = servers.get("policy") if isinstance(servers, MappingNode) else None
    if not isinstance(servers, MappingNode) or not isinstance(policy, MappingNode) or not _is_scripted(policy):
        return root
    mark = by_flag.node.mark
    policy = policy.without(*SCRIPTED_ONLY).having(type=scalar(mark, "openai"))
    return root.having(servers=servers.having(policy=policy))


def _is_scripted(server: MappingNode) -> bool:
    kind = server.get("type")
    return isinstance(kind, ScalarNode) and kind.value == "scripted"
