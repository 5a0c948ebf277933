"""What the command line changes in a spec: `--set KEY=VALUE` and the flags that Atropos users know.

Owns reading the options and laying their values over the tree. Which key each flag stands for is in `flags`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr

from hermes_rl.errors import Problem, SpecError
from hermes_rl.spec.assign import Assignment, NoPlaceError, assign, chat_server
from hermes_rl.spec.flags import Flag, find_flag, refusal
from hermes_rl.spec.hints import option_for
from hermes_rl.spec.model.spec import Mode
from hermes_rl.spec.nodes import MappingNode, Mark, Node, NodePath, ScalarNode, SourceText
from hermes_rl.spec.reader import read_text
from hermes_rl.spec.suggest import choices


@dataclass(frozen=True)
class _FlagUse:
    """A flag whose key depends on the mode."""

    option: str
    flag: Flag
    node: Node


@dataclass(frozen=True)
class Overrides:
    """Everything that the command line changes."""

    sets: tuple[Assignment, ...] = ()
    flags: tuple[_FlagUse, ...] = ()
    api_key: SecretStr | None = None

    def apply(self, root: MappingNode, mode: Mode | None) -> tuple[MappingNode, list[Problem]]:
        """The tree with every option laid over it, and what is wrong with the options."""
        assignments = [*self.sets, *(made for use in self.flags for made in _assignments(use, mode))]
        problems = list(_doubles(assignments))
        base = root
        for assignment in sorted(assignments, key=lambda one: len(one.path)):
            try:
                root = assign(root, base, assignment)
            except NoPlaceError as error:
                problems.append(assignment.node.mark.problem(str(error)))
        return chat_server(root, assignments), problems


def parse_extra_args(argv: Sequence[str], sets: Sequence[str]) -> Overrides:
    """Read the values of `--set` and the options that the command line does not know itself.

    Raises:
        SpecError: with every option that is wrong.
    """
    problems: list[Problem] = []
    assignments = [one for text in sets if (one := _read_set(text, problems)) is not None]
    uses: list[_FlagUse] = []
    key: SecretStr | None = None
    for option, text in _pairs(argv, problems):
        if option == "--openai.api_key":
            if key is not None:
                problems.append(Problem(option, None, None, "is given twice"))
            key = SecretStr(text or "")
            continue
        use = _read_flag(option, text, problems)
        uses += [use] if use is not None else []
    problems.extend(_twice([use.option for use in uses]))
    if problems:
        raise SpecError(problems)
    return Overrides(tuple(assignments), tuple(uses), key)


def _source(option: str) -> SourceText:
    return SourceText(option, Path.cwd(), has_lines=False)


def _value(text: str, option: str, problems: list[Problem]) -> Node:
    """The YAML value of an option; a template or variable needs no quotes, since the shell has taken them."""
    mark = Mark(_source(option), 1, 1)
    if text.startswith(("{{", "{%", "${")):
        return ScalarNode(mark, text, text, plain=text.startswith("${"))
    node, found = read_text(text, mark.source)
    problems.extend(found)
    return node if node is not None else ScalarNode(mark, None, "", plain=True, broken=bool(found))


def _read_set(text: str, problems: list[Problem]) -> Assignment | None:
    key, equals, value = text.partition("=")
    option = f"--set {key}"
    steps = [step for step in key.split(".") if step]
    if not equals or len(steps) != len(key.split(".")):
        problems.append(Problem(option, None, None, "expected KEY=VALUE, such as process.groups=10"))
        return None
    return Assignment(
        option, tuple(int(step) if step.isdigit() else step for step in steps), _value(value, option, problems)
    )


def _pairs(argv: Sequence[str], problems: list[Problem]) -> list[tuple[str, str | None]]:
    """Options with their values, written `--a.b V` or `--a.b=V`; a value may start with a minus sign."""
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
    refused = refusal(option)
    if refused is not None:
        problems.append(Problem(option, None, None, refused))
        return None
    flag, known = find_flag(option)
    if flag is None:
        hint = option_for(option) or choices(option, known)
        problems.append(Problem(option, None, None, f"there is no such option{hint}"))
        return None
    if text is None and flag.type != "boolean":
        problems.append(Problem(option, None, None, "needs a value"))
        return None
    found: list[Problem] = []
    node = _value("true" if text is None else text, option, found)
    problems.extend(found)
    return _FlagUse(option, flag, _as_text(node, flag, text))


def _as_text(node: Node, flag: Flag, text: str | None) -> Node:
    """A value for a text field is text, whatever it looks like: a model may be called 7."""
    if flag.type != "string" or not isinstance(node, ScalarNode) or text is None:
        return node
    if isinstance(node.value, str) or text in ("", "null", "None"):
        return node if isinstance(node.value, str) else replace(node, value=None)
    return replace(node, value=text)


def _assignments(use: _FlagUse, mode: Mode | None) -> list[Assignment]:
    node = use.flag.convert(use.node)
    if node is None:
        return []
    return [Assignment(use.option, tuple(key.split(".")), node, use.flag.all_servers) for key in use.flag.keys_in(mode)]


def _twice(options: list[str]) -> list[Problem]:
    double = dict.fromkeys(option for option in options if options.count(option) > 1)
    return [Problem(option, None, None, "is given twice") for option in double]


def _doubles(assignments: list[Assignment]) -> list[Problem]:
    first: dict[NodePath, Assignment] = {}
    problems = []
    for one in assignments:
        before = first.setdefault(one.path, one)
        if before is not one:
            message = "is given twice" if before.option == one.option else f"sets the same key as {before.option}"
            problems.append(Problem(one.option, None, None, message))
    return problems
