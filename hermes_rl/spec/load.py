"""`load_spec`: a file, a folder, a shipped spec or a repository becomes a `Spec`, or a `SpecError` with all problems.

Owns the order of the passes: read, extend, override, recipe, secrets, variables, demo, paths, templates,
types and rules.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from hermes_rl.errors import Problem, SpecError, UserError
from hermes_rl.others_files import read_regular
from hermes_rl.repositories.address import Address, address_of
from hermes_rl.repositories.cache import Fetched, fetched
from hermes_rl.shipped import shipped_dir
from hermes_rl.spec.demo import for_demo
from hermes_rl.spec.merge import read_spec_file, read_spec_text
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.nodes import MappingNode, SourceText, scalar
from hermes_rl.spec.origin import literal_secrets
from hermes_rl.spec.partial import Draft, salvage
from hermes_rl.spec.paths import absolute, kind_of, leading_out
from hermes_rl.spec.reader import check_templates
from hermes_rl.spec.recipes import with_recipe
from hermes_rl.spec.renamed import renamed
from hermes_rl.spec.substitution import substitute
from hermes_rl.spec.suggest import choices
from hermes_rl.spec.validate import Validated, corrected, in_order, validate

if TYPE_CHECKING:
    from hermes_rl.spec.overrides import Overrides

_SPEC = re.compile(r"^[\"']?(?:rewards|extends)[\"']?[ \t]*:", re.MULTILINE)
"""What every spec has, and other YAML files in its folder do not."""


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
        source: path of a YAML file or of an environment's folder, name of a shipped spec, address of a repository, or
            ``harbor:`` and a folder of tasks in Harbor's format.
        overrides: what the command line changes (`parse_extra_args`).
        demo: change the spec so that it runs without model, network and containers.
        environ: variables for `${VAR}`; default: the environment.
        mode: which of process and serve a flag such as `--env.group_size` is for.
        resolved: the file was written by `Spec.resolved`; its absolute paths refer to the user's directories.

    Raises:
        SpecError: with every problem at its place.
        UserError: there is no such spec.
    """
    path, name, repository, _ = spec = find_spec(source)
    try:
        root, problems = _tree_of(spec)
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from None
    if root is not None and "set" in root.entries:
        raise UserError(
            f"{name} is a set of specs: `hermes-rl run {name} evaluate` and `hermes-rl validate {name}` take it; every "
            "other command takes a spec"
        )
    loading = _Loading(path.stem, environ, overrides, demo, mode, confined=not resolved, repository=repository)
    return loading.finish(root, problems)


def load_draft(
    source: str | Path, *, overrides: Overrides | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Draft | None, list[Problem]]:
    """Load a spec without its parts that have problems; return None if nothing remains, and the problems."""
    try:
        return Draft(load_spec(source, overrides=overrides, environ=environ), has_rows=True), []
    except SpecError as error:
        problems = list(error.problems)
    spec = find_spec(source)
    root, unreadable = _tree_of(spec)
    if root is None or unreadable:
        return None, problems  # what could not be read may be what the rest depends on
    loading = _Loading(spec.path.stem, environ, overrides, repository=spec.repository)
    return salvage(loading.validated(root)[0]), problems


def parse_spec(
    text: str,
    *,
    name: str = "<text>",
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    demo: bool = False,
) -> Spec:
    """Return a spec from text, whose paths start from `folder` (default: the working directory); raises SpecError."""
    root, problems = read_spec_text(text, SourceText(name, (folder or Path.cwd()).resolve()))
    return _Loading("spec", environ, demo=demo).finish(root, problems)


class Found(NamedTuple):
    """The file of a spec, its name in messages, the repository that it came from, and its Harbor tasks."""

    path: Path
    name: str
    repository: Fetched | None = None
    tasks: Path | None = None


TASKS = "harbor:"
"""Prefix of a directory of tasks in Harbor's format, used instead of the name of a spec."""


def _tree_of(spec: Found) -> tuple[MappingNode | None, list[Problem]]:
    """Read the file of a spec; its own tasks, if any, become the dataset. Raises OSError."""
    root, problems = read_spec_file(spec.path, spec.name, None if spec.repository is None else spec.repository.folder)
    dataset = None if root is None or spec.tasks is None else root.get("dataset")
    if root is None or not isinstance(dataset, MappingNode):
        return root, problems
    return root.having(dataset=dataset.having(harbor=scalar(dataset.position, str(spec.tasks)))), problems


def find_spec(source: str | Path) -> Found:
    """Return the file of a spec, fetching its repository if necessary.

    Raises `UserError` if there is no such file, directory or shipped spec, if a directory has no spec or several, if a
    repository cannot be fetched, or if its content is not trusted yet.
    """
    if str(source).startswith(TASKS):
        tasks = Path(str(source).removeprefix(TASKS)).expanduser().absolute()
        if not tasks.is_dir():
            raise UserError(f"{source}: there is no folder {tasks}; name a task folder, or a folder of task folders")
        return Found(shipped_specs()["harbor"], f"{TASKS}{tasks}", tasks=tasks)
    path = Path(source)
    kind = kind_of(path) if source != "" else 0  # which Path takes for the working directory
    if kind == stat.S_IFREG:
        if path.suffix == ".py":
            raise UserError(
                f"{source} is Python code, not a spec: name the YAML file that uses it. A file that defines its own "
                f"environment class runs directly: python {source} serve|process|evaluate"
            )
        return Found(path, str(source))
    shipped = shipped_specs()
    # A run directory may have the name of its spec.
    if kind == stat.S_IFDIR and not (str(source) in shipped and (path / "run.json").is_file()):
        only = spec_in(path)
        return Found(only, str(only))
    if str(source) in shipped:
        return Found(shipped[str(source)], str(shipped[str(source)]))
    address = repository_of(source)
    if address is None:
        raise UserError(
            f"there is no spec `{source}`: no such file, and no shipped spec{choices(str(source), shipped)}"
        )
    repository = fetched(address)
    if not repository.trusted:
        raise UserError(
            f"{repository.address} has not been confirmed on this machine: its code would run with your rights. "
            f"`hermes-rl validate {repository.address}` shows what it is and asks; `--trust` agrees without being asked"
        )
    file = spec_of(repository)
    inside = file.relative_to(repository.folder).as_posix()
    return Found(file, str(replace(repository.address, inside=inside)), repository)


def repository_of(source: str | Path) -> Address | None:
    """Return the repository that a source names, or None for a local one. Raises UserError for a bad address."""
    is_local = (source != "" and kind_of(Path(source))) or str(source) in shipped_specs()
    return None if is_local else address_of(str(source))


def spec_of(repository: Fetched) -> Path:
    """Return the spec that a repository's address refers to. Raises UserError if there is none, or more than one."""
    if repository.path.is_file():
        return repository.path
    if not repository.path.is_dir():
        raise UserError(f"{repository.address}: the repository has no {repository.address.inside}")
    return spec_in(repository.path, repository.address)


def specs_in(folder: Path, called: str | None = None) -> list[Path]:
    """Return the YAML files right in a folder with `rewards` or `extends`; raises UserError if there are none."""
    files = sorted(path for suffix in ("yaml", "yml") for path in folder.glob(f"[!.]*.{suffix}") if path.is_file())
    try:
        specs = [path for path in files if _SPEC.search(read_regular(path).decode("utf-8-sig", "replace"))]
    except OSError as error:
        raise UserError(f"{called or folder}: a YAML file right in it cannot be read: {error}") from None
    if not specs:
        raise UserError(f"{called or folder} has no spec: no YAML file right in it has the key `rewards` or `extends`")
    return specs


def spec_in(folder: Path, address: Address | None = None) -> Path:
    """Return the only spec right in a folder; raises UserError for none or several."""
    called = str(folder) if address is None else str(address)
    specs = specs_in(folder, called)
    if len(specs) == 1:
        return specs[0]
    if address is None:
        ways = [str(path) for path in specs]
    else:
        ways = [str(replace(address, inside=str(PurePosixPath(address.inside, path.name)))) for path in specs]
    raise UserError(f"{called} has {len(specs)} specs: name one of {', '.join(ways)}")


def shipped_specs() -> dict[str, Path]:
    """Return the shipped specs by name, from `specs/` and its subdirectories."""
    folder = shipped_dir("specs")
    paths = [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


@dataclass(frozen=True)
class _Loading:
    """The loading passes over a parsed tree, and their settings."""

    default_name: str
    environ: Mapping[str, str] | None
    overrides: Overrides | None = None
    demo: bool = False
    mode: Mode | None = None
    confined: bool = True
    repository: Fetched | None = None

    def finish(self, root: MappingNode | None, problems: list[Problem]) -> Spec:
        if root is None:
            raise SpecError(in_order(problems))
        validated, more = self.validated(root)
        spec, problems = validated.spec, in_order([*problems, *more, *validated.problems])
        if spec is None or problems:
            raise SpecError(problems)
        spec._demo = self.demo
        spec._repository = None if self.repository is None else self.repository.to_record()
        spec._overrides = self.overrides
        spec._policy_key = self.overrides.api_key if self.overrides is not None else None
        return spec

    def validated(self, root: MappingNode) -> tuple[Validated, list[Problem]]:
        """Return the validated tree after all passes, and the problems reported by the passes before the last."""
        tree, changes = renamed(root)
        assert isinstance(tree, MappingNode)
        root, problems = (tree, []) if self.overrides is None else self.overrides.apply(tree, self.mode)
        problems += [change.problem for change in changes if self.confined]  # a run's stored spec may use old keys
        root, unfit = with_recipe(root, None if self.repository is None else self.repository.folder)
        tree, misspelt = corrected(root)
        assert isinstance(tree, MappingNode)
        if tree.get("name") is None:
            tree = tree.having(name=scalar(tree.position, self.default_name))
        secrets = list(literal_secrets(tree))
        tree, unset = substitute(tree, os.environ if self.environ is None else self.environ)
        assert isinstance(tree, MappingNode)
        tree, broken = check_templates(absolute(for_demo(tree) if self.demo else tree))
        assert isinstance(tree, MappingNode)
        outside = () if self.repository is None else leading_out(tree, self.repository.folder)
        problems += [*unfit, *misspelt.values(), *secrets, *unset, *broken, *outside]
        return validate(tree, confined=self.confined, misspelt=misspelt), problems
