"""`load_spec`: a file, or the name of a shipped spec, becomes a `Spec`, or a `SpecError` with all problems.

Owns the order of the passes: read, extend, override, secrets, variables, demo, paths, templates,
types and rules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_rl.errors import Problem, SpecError, UserError
from hermes_rl.shipped import shipped_dir
from hermes_rl.spec.demo import for_demo
from hermes_rl.spec.merge import read_spec_file, read_spec_text
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.nodes import MappingNode, SourceText, scalar
from hermes_rl.spec.origin import literal_secrets
from hermes_rl.spec.paths import absolute
from hermes_rl.spec.reader import check_templates
from hermes_rl.spec.salvage import Draft, salvage
from hermes_rl.spec.substitution import substitute
from hermes_rl.spec.suggest import choices
from hermes_rl.spec.validate import in_order, validate

if TYPE_CHECKING:
    from hermes_rl.spec.overrides import Overrides


def load_spec(
    source: str | Path,
    *,
    overrides: Overrides | None = None,
    demo: bool = False,
    environ: Mapping[str, str] | None = None,
    mode: Mode | None = None,
    resolved: bool = False,
) -> Spec:
    """Load a spec from a path or by the name of a shipped one.

    Args:
        source: path of a YAML file, or name of a shipped spec.
        overrides: what the command line changes (`parse_extra_args`).
        demo: change the spec so that it runs without model, network and containers.
        environ: variables for `${VAR}`; default: the environment.
        mode: which of process and serve a flag such as `--env.group_size` is for.
        resolved: the file is one that `Spec.resolved` gave, whose absolute paths lead where the user's spec lies.

    Raises:
        SpecError: with every problem at its place.
        UserError: there is no such spec.
    """
    path, name = find_spec(source)
    try:
        root, problems = read_spec_file(path, name)
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from None
    if root is not None and "set" in root.entries:
        raise UserError(
            f"{name} is a set of specs: `hermes-rl run {name} evaluate` and `hermes-rl validate {name}` take it; every "
            "other command takes a spec"
        )
    return _Loading(path.stem, environ, overrides, demo, mode, confined=not resolved).finish(root, problems)


def load_draft(
    source: str | Path, *, overrides: Overrides | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Draft | None, list[Problem]]:
    """As `load_spec`, but of a spec with problems the parts without them; None where nothing is left to check.

    Raises:
        UserError: there is no such spec.
    """
    try:
        return Draft(load_spec(source, overrides=overrides, environ=environ), has_rows=True), []
    except SpecError as error:
        problems = list(error.problems)
    path, name = find_spec(source)
    root, unreadable = read_spec_file(path, name)
    if root is None or unreadable:
        return None, problems  # what could not be read may be what the rest depends on
    loading = _Loading(path.stem, environ, overrides)
    tree, _ = loading._prepared(loading._overridden(root)[0])
    return salvage(validate(tree)), problems


def parse_spec(
    text: str,
    *,
    name: str = "<text>",
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    demo: bool = False,
) -> Spec:
    """Return a spec from text; relative paths start from `folder` (default: the working directory).

    Raises:
        SpecError: with every problem at its place.
    """
    root, problems = read_spec_text(text, SourceText(name, (folder or Path.cwd()).resolve()))
    return _Loading("spec", environ, demo=demo).finish(root, problems)


def find_spec(source: str | Path) -> tuple[Path, str]:
    """Return the file of a spec, and what to call it in messages.

    Raises:
        UserError: there is neither such a file nor a shipped spec of that name.
    """
    path = Path(source)
    if path.is_file():
        return path, str(source)
    shipped = shipped_specs()
    if str(source) in shipped:
        return shipped[str(source)], str(shipped[str(source)])
    raise UserError(f"there is no spec `{source}`: no such file, and no shipped spec{choices(str(source), shipped)}")


def shipped_specs() -> dict[str, Path]:
    """Return the specs that come with hermes-rl, by name."""
    return {path.stem: path for path in sorted(shipped_dir("specs").glob("*.yaml"))}


@dataclass(frozen=True)
class _Loading:
    """The passes over a tree that was read, and what they depend on."""

    default_name: str
    environ: Mapping[str, str] | None
    overrides: Overrides | None = None
    demo: bool = False
    mode: Mode | None = None
    confined: bool = True

    def finish(self, root: MappingNode | None, problems: list[Problem]) -> Spec:
        if root is None:
            raise SpecError(in_order(problems))
        root, found = self._overridden(root)
        tree, more = self._prepared(root)
        validated = validate(tree, confined=self.confined)
        spec, problems = validated.spec, in_order([*problems, *found, *more, *validated.problems])
        if spec is None or problems:
            raise SpecError(problems)
        spec._demo = self.demo
        spec._overrides = self.overrides
        spec._policy_key = self.overrides.api_key if self.overrides is not None else None
        return spec

    def _overridden(self, root: MappingNode) -> tuple[MappingNode, list[Problem]]:
        return (root, []) if self.overrides is None else self.overrides.apply(root, self.mode)

    def _prepared(self, root: MappingNode) -> tuple[MappingNode, list[Problem]]:
        """Return the tree with name, variables, demo, and absolute paths, and what is wrong so far."""
        if root.get("name") is None:
            root = root.having(name=scalar(root.mark, self.default_name))
        secrets = list(literal_secrets(root))
        tree, unset = substitute(root, os.environ if self.environ is None else self.environ)
        assert isinstance(tree, MappingNode)
        tree, broken = check_templates(absolute(for_demo(tree) if self.demo else tree))
        assert isinstance(tree, MappingNode)
        return tree, [*secrets, *unset, *broken]
