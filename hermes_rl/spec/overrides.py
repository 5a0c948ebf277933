"""Apply command-line changes to a spec: `--set KEY=VALUE`, and the flags that users of Atropos know.

This module parses the options and applies their values to the tree. `hermes_rl.spec.flags` has the key of each flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr

from hermes_rl.errors import Problem, SpecError
from hermes_rl.spec.flags import FLAGS, REFUSED, Flag
from hermes_rl.spec.hints import option_for
from hermes_rl.spec.merge import changes_kind, expand_shorthand, keys_of_kinds
from hermes_rl.spec.model import Mode
from hermes_rl.spec.nodes import (
    Entry,
    MappingNode,
    Mark,
    Node,
    NodePath,
    ScalarNode,
    SequenceNode,
    SourceText,
    mapping,
    scalar,
    to_builtins,
)
from hermes_rl.spec.reader import read_text
from hermes_rl.spec.renamed import current, renamed
from hermes_rl.spec.rules import REAL_ONLY, SCRIPTED_ONLY
from hermes_rl.spec.section import is_template
from hermes_rl.spec.server_types import DEFAULT
from hermes_rl.spec.suggest import choices

# -------------------------------------------------------------------------------- Laying one value over the tree
# Owns the walk to the key, what an option that changes the kind of a block drops, and lists of policies.


class Assignment(NamedTuple):
    """One option: what the user typed, the keys that it stands for, and its value."""

    option: str
    path: NodePath
    node: Node
    all_servers: bool = False
    written: Mark | None = None
    """Where its key is written, if it is in a file."""

    @property
    def position(self) -> Mark:
        """The place of its key."""
        return self.written or self.node.position


class NoPlaceError(Exception):
    """The key of an option leads through something that has no keys."""


def _assign(node: Node | None, base: Node | None, assignment: Assignment, done: NodePath) -> Node:
    """Return `node` with the option's value in it; `base` is what the file says there. Raises NoPlaceError."""
    if len(done) == len(assignment.path):
        return assignment.node
    step = assignment.path[len(done)]
    current_node = expand_shorthand(node, done) if node is not None else None
    if isinstance(current_node, SequenceNode):
        return _assigned_item(current_node, base, assignment, done)
    if current_node is None or (isinstance(current_node, ScalarNode) and current_node.value is None):
        current_node = MappingNode(assignment.node.position)
    if not isinstance(current_node, MappingNode):
        raise NoPlaceError(f"`{'.'.join(map(str, done))}` holds no keys")
    before = base.get(str(step)) if isinstance(base, MappingNode) else None
    value = _assign(current_node.get(str(step)), before, assignment, (*done, step))
    is_existing = str(step) in current_node.entries and len(done) + 1 < len(assignment.path)
    entry = Entry(current_node.entries[str(step)].key if is_existing else assignment.position, value)
    current_node = _without_old_kind(current_node, base, assignment, done)
    return replace(current_node, entries={**current_node.entries, str(step): entry})


def _without_old_kind(
    current_node: MappingNode, base: Node | None, assignment: Assignment, done: NodePath
) -> MappingNode:
    """Return the block without the keys that the file wrote for another kind of block than the option selects."""
    if len(done) + 1 != len(assignment.path) or not isinstance(base, MappingNode):
        return current_node
    step = str(assignment.path[-1])
    change = mapping(assignment.node.position, **{step: assignment.node})
    if not changes_kind(base, change, done):
        return current_node
    stale_keys: Sequence[str] = keys_of_kinds(done)
    if done[:1] == ("servers",):
        stale_keys = SCRIPTED_ONLY if _is_scripted(base) else REAL_ONLY if _is_scripted(change) else ()
    image = base.get("image")
    if done == ("sandbox",) and "backend" not in base.entries and image is not None and is_template(to_builtins(image)):
        stale_keys = ()  # the row selects the image, and the file leaves the backend to the user
    inherited_keys = [key for key in stale_keys if key in base.entries and current_node.get(key) is base.get(key)]
    return current_node.without(*inherited_keys)


def _assigned_item(current_node: SequenceNode, base: Node | None, assignment: Assignment, done: NodePath) -> Node:
    step = assignment.path[len(done)]
    items = list(current_node.items)
    if assignment.all_servers and not isinstance(step, int):
        bases = base.items if isinstance(base, SequenceNode) else items
        changed = [_assign(item, bases[index], assignment, done) for index, item in enumerate(items)]
        return replace(current_node, items=tuple(changed))
    if not isinstance(step, int) or step >= len(items):
        raise NoPlaceError(f"`{'.'.join(map(str, done))}` is a list of {len(items)}; name an item by its number from 0")
    before = base.items[step] if isinstance(base, SequenceNode) and step < len(base.items) else None
    items[step] = _assign(items[step], before, assignment, (*done, step))
    return replace(current_node, items=tuple(items))


def chat_server(root: MappingNode, assignments: list[Assignment]) -> MappingNode:
    """Return the spec with a chat server as policy if `--openai.base_url` names a server."""
    by_flag = next(
        (assignment for assignment in assignments if assignment.all_servers and assignment.path[-1] == "base_url"), None
    )
    if by_flag is None or any(assignment.path == ("servers", "policy", "type") for assignment in assignments):
        return root
    servers = root.get("servers")
    policy = servers.get("policy") if isinstance(servers, MappingNode) else None
    if not isinstance(servers, MappingNode) or not isinstance(policy, MappingNode) or not _is_scripted(policy):
        return root
    position = by_flag.node.position
    policy = policy.without(*SCRIPTED_ONLY).having(type=scalar(position, DEFAULT))
    return root.having(servers=servers.having(policy=policy))


def _is_scripted(server: MappingNode) -> bool:
    kind = server.get("type")
    return isinstance(kind, ScalarNode) and kind.value == "scripted"


# ------------------------------------------------------------------------------------------- Reading the options


class _FlagUse(NamedTuple):
    """A flag whose key depends on the mode."""

    option: str
    flag: Flag
    node: Node

    def assignments(self, mode: Mode | None) -> list[Assignment]:
        node, flag = self.flag.convert(self.node), self.flag
        keys = flag.keys_in(mode) if node is not None else []
        return [Assignment(self.option, tuple(key.split(".")), node, flag.all_servers) for key in keys if node]


class Overrides(NamedTuple):
    """Everything that the command line changes."""

    sets: tuple[Assignment, ...] = ()
    flags: tuple[_FlagUse, ...] = ()
    api_key: SecretStr | None = None
    earlier: Overrides | None = None
    """What was changed before, over which these changes win."""

    def stack_on(self, earlier: Overrides | None) -> Overrides:
        """Return these changes over earlier ones: the same key may be in both."""
        key = self.api_key or (earlier.api_key if earlier is not None else None)
        return self._replace(api_key=key, earlier=earlier)

    def apply(self, root: MappingNode, mode: Mode | None) -> tuple[MappingNode, list[Problem]]:
        """Return the tree with every option applied, and the problems of the options."""
        problems: list[Problem] = []
        if self.earlier is not None:
            root, problems = self.earlier.apply(root, mode)
        sets = [_with_new_names(assignment, problems) for assignment in self.sets]
        assignments = [*sets, *(assignment for use in self.flags for assignment in use.assignments(mode))]
        problems += _double_options(assignments)
        base = root
        for assignment in sorted(assignments, key=lambda assignment: len(assignment.path)):
            try:
                changed = _assign(root, base, assignment, ())
                assert isinstance(changed, MappingNode)
                root = changed
            except NoPlaceError as error:
                problems.append(assignment.position.problem(str(error)))
        return chat_server(root, assignments), problems


def parse_extra_args(argv: Sequence[str], sets: Sequence[str]) -> Overrides:
    """Read the values of `--set` and the other options; raises SpecError with every option that is wrong."""
    problems: list[Problem] = []
    assignments = [assignment for text in sets if (assignment := _read_set(text, problems)) is not None]
    uses: list[_FlagUse] = []
    key: SecretStr | None = None
    for option, text in _option_pairs(argv, problems):
        if option == "--openai.api_key":
            if key is not None:
                problems.append(Problem(option, None, None, "is given twice"))
            key = SecretStr(text or "")
            continue
        use = _read_flag(option, text, problems)
        uses += [use] if use is not None else []
    options = [use.option for use in uses]
    double = dict.fromkeys(option for option in options if options.count(option) > 1)
    problems += [Problem(option, None, None, "is given twice") for option in double]
    if problems:
        raise SpecError(problems)
    return Overrides(tuple(assignments), tuple(uses), key)


def _parse_value(text: str, option: str, problems: list[Problem]) -> Node:
    """Return the YAML value of an option; a template or variable needs no quotes, since the shell has taken them."""
    position = Mark(SourceText(option, Path.cwd(), has_lines=False), 1, 1)
    if text.startswith(("{{", "{%", "${")):
        return ScalarNode(position, text, text, is_plain=text.startswith("${"))
    node, unreadable = read_text(text, position.source)
    problems.extend(unreadable)
    return node if node is not None else ScalarNode(position, None, "", is_plain=True, broken=bool(unreadable))


def _read_set(text: str, problems: list[Problem]) -> Assignment | None:
    key, equals, value = text.partition("=")
    option = f"--set {key}"
    steps = [step for step in key.split(".") if step]
    if not equals or len(steps) != len(key.split(".")):
        problems.append(Problem(option, None, None, "expected KEY=VALUE, such as process.groups=10"))
        return None
    return Assignment(
        option, tuple(int(step) if step.isdigit() else step for step in steps), _parse_value(value, option, problems)
    )


def _option_pairs(argv: Sequence[str], problems: list[Problem]) -> list[tuple[str, str | None]]:
    """Return options with their values, written `--a.b V` or `--a.b=V`; a value may start with a minus sign."""
    pairs: list[tuple[str, str | None]] = []
    rest = list(argv)
    while rest:
        option, equals, text = rest.pop(0).partition("=")
        if not option.startswith("--"):
            problems.append(Problem(option, None, None, "is not expected here; options start with --"))
        elif equals:
            pairs.append((option, text))
        elif rest and not rest[0].startswith("--"):
            pairs.append((option, rest.pop(0)))
        else:
            pairs.append((option, None))
    return pairs


def _read_flag(option: str, text: str | None, problems: list[Problem]) -> _FlagUse | None:
    flag = FLAGS.get(option)
    wrong = REFUSED.get(option)
    if wrong is None and flag is None:
        wrong = f"there is no such option{option_for(option) or choices(option, FLAGS)}"
    elif wrong is None and flag is not None and text is None and flag.type != "boolean":
        wrong = "needs a value"
    if wrong is not None or flag is None:
        problems.append(Problem(option, None, None, str(wrong)))
        return None
    return _FlagUse(
        option, flag, _as_text(_parse_value("true" if text is None else text, option, problems), flag, text)
    )


def _as_text(node: Node, flag: Flag, text: str | None) -> Node:
    """Return the value, as text for a text field: a model may be called 7."""
    if flag.type != "string" or not isinstance(node, ScalarNode) or text is None:
        return node
    if isinstance(node.value, str) or text in ("", "null", "None"):
        return node if isinstance(node.value, str) else replace(node, value=None)
    return replace(node, value=text)


def _with_new_names(assignment: Assignment, problems: list[Problem]) -> Assignment:
    """Return the assignment with the new names of its keys, each of which is a problem."""
    path = current(assignment.path)
    if path != assignment.path:
        old, new = (".".join(map(str, steps)) for steps in (assignment.path, path))
        problems.append(assignment.position.problem(f"`{old}` is now `{new}`"))
    node, changes = renamed(assignment.node, path)
    problems += [change.key.problem(change.message) for change in changes]
    return assignment._replace(path=path, node=node)


def _double_options(assignments: list[Assignment]) -> list[Problem]:
    first: dict[NodePath, Assignment] = {}
    problems = []
    for assignment in assignments:
        before = first.setdefault(assignment.path, assignment)
        if before is not assignment:
            message = (
                "is given twice" if before.option == assignment.option else f"sets the same key as {before.option}"
            )
            problems.append(Problem(assignment.option, None, None, message))
    return problems
