"""Load a set: a YAML file that names specs, models and settings; each combination is a separate evaluation.

This module defines the form of the file and the changes of each combination to its spec. It checks no combination:
`hermes_rl.spec.load` turns it into a spec, and its messages contain the position in the set at which a value was
written.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, WithJsonSchema

from hermes_rl.errors import Problem, SpecError, UserError
from hermes_rl.others_files import read_regular
from hermes_rl.spec.load import Found, find_spec
from hermes_rl.spec.nodes import (
    Entry,
    MappingNode,
    Mark,
    Node,
    ScalarNode,
    SequenceNode,
    find,
    is_null,
    locate,
    to_builtins,
)
from hermes_rl.spec.overrides import Assignment, Overrides
from hermes_rl.spec.reader import MAX_SPEC_BYTES, read_file
from hermes_rl.spec.section import EMPTY, FreeMap, Section, Seq, wrong
from hermes_rl.spec.validate import corrected, in_order, problem_of

# ------------------------------------------------------------------------------------------- The form of the file

LONGEST = 60
"""Characters of a name: a folder is called so."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SET = re.compile(r"^[\"'{\s]*set[\"']?\s*:", re.MULTILINE)


def _file_name(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > LONGEST or name.endswith(".json"):
        raise wrong(
            f"expected a directory name: letters, digits, `.`, `_` and `-`, a letter or a digit first, at most "
            f"{LONGEST} characters, and no file name that ends in .json"
        )
    return name


_NAMED = {"type": "string", "pattern": f"^{_NAME.pattern}$", "maxLength": LONGEST, "not": {"pattern": r"\.json$"}}
Name = Annotated[str, AfterValidator(_file_name), WithJsonSchema(_NAMED)]
Several = Field(min_length=1)


class SetSpec(Section):
    """A spec of a set."""

    spec: str = Field(
        description="Path from the set's folder, name of a shipped spec, or a repository; alone it may be a text."
    )
    name: Name | None = Field(None, description="Its column and folder; default: the name of the file.")
    changes: FreeMap = Field(EMPTY, alias="set", description="Keys of the spec, written with dots, and their values.")


class SetEntry(Section):
    """A model or a setting of a set."""

    name: Name = Field(description="Its row and folder.")
    changes: FreeMap = Field(EMPTY, alias="set", description="Keys of the spec, written with dots, and their values.")


class SetBody(Section):
    """The content of `set`."""

    name: Name = Field(description="The folder of the set, below outputs.")
    specs: Annotated[Seq[SetSpec], Several] = Field(description="Specs to run.")
    models: Annotated[Seq[SetEntry], Several] = Field(description="Who plays.")
    settings: Annotated[Seq[SetEntry], Several] | None = Field(None, description="How; default: as the specs say.")
    by: Seq[str] = Field((), description="Columns of the rows; scores are also told for the rows of each value.")


class SetFile(Section):
    """Top level of a set's YAML file, with the single key `set`."""

    body: SetBody = Field(alias="set", description="The set.")


def set_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a set's YAML."""
    from hermes_rl.spec.schema import YamlSchema  # which a set is read without

    schema = SetFile.model_json_schema(by_alias=True, schema_generator=YamlSchema)
    sections: dict[str, Any] = schema["$defs"]
    for section in sections.values():
        del section["title"]
        for name, field in section["properties"].items():
            field.pop("title", None)
            annotations = {key: field.pop(key) for key in ("description", "default") if key in field}
            choices = field.pop("anyOf", [field])
            if name not in section["required"] and {"type": "null"} not in choices:
                choices = [*choices, {"type": "null"}]  # a key without a value is as good as absent
            section["properties"][name] = {**(choices[0] if len(choices) == 1 else {"anyOf": choices}), **annotations}
    specs = sections["SetBody"]["properties"]["specs"]
    specs["items"] = {"anyOf": [specs["items"], {"type": "string"}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://hermes-rl.example/set.schema.json",
        **schema,
        "title": "hermes-rl set",
        "description": "Specs, models and settings, each combination of which is an evaluation.",
    }


# ------------------------------------------------------------------------------------------- Combinations


@dataclass(frozen=True)
class Combination:
    """A spec with the changes of a model and a setting; `setting` is empty if the set has none.

    `source` is the spec in the form that `load_spec` accepts; `mark` is the position of the model, for faults of the
    model.
    """

    spec: str
    model: str
    setting: str
    source: str
    overrides: Overrides
    position: Mark

    @property
    def names(self) -> tuple[str, str, str]:
        """Spec, model and setting."""
        return self.spec, self.model, self.setting

    @property
    def label(self) -> str:
        """Name of the combination in messages and tables."""
        return " × ".join(filter(None, self.names))

    @property
    def folder(self) -> Path:
        """Its run directory, from the folder of the set."""
        return Path(self.spec, f"{self.model}-{self.setting}" if self.setting else self.model)


@dataclass(frozen=True)
class SpecSet:
    """A set that was read: its combinations, spec by spec."""

    file: str
    name: str
    by: tuple[str, ...]
    combinations: tuple[Combination, ...]


def is_set(source: str | Path) -> bool:
    """Say whether a file is a set; what cannot be read is none."""
    path = Path(source)
    try:
        text = read_regular(path, MAX_SPEC_BYTES).decode("utf-8-sig") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return False
    if not _SET.search(text):
        return False  # most specs need not be read twice
    root, _ = read_file(path, str(source))
    return isinstance(root, MappingNode) and "set" in root.entries


def load_set(source: str | Path) -> SpecSet:
    """Read a set; raises SpecError with every problem of it, or UserError where the file cannot be read."""
    try:
        root, problems = read_file(Path(source), str(source))
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from None
    if not isinstance(root, MappingNode):
        raise SpecError(problems or [Problem(str(source), 1, 1, "a set is a mapping")])
    for key, entry in root.entries.items():
        if key != "set":
            problems.append(entry.key.problem(f"unknown key `{key}`; a set has the key `set` alone, a spec has others"))
    tree, misspelt = corrected(_expand_texts(root.without(*(key for key in root.entries if key != "set"))), SetFile)
    assert isinstance(tree, MappingNode)
    problems += misspelt.values()
    try:
        body = SetFile.model_validate(to_builtins(tree)).body
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        more = [problem for each in errors if (problem := problem_of(tree, each, SetFile)) is not None]
        raise SpecError(in_order([*problems, *more])) from None
    reading = _Reading(tree, body, problems)
    combinations = tuple(reading.combinations())
    if problems:
        raise SpecError(in_order(problems))
    return SpecSet(str(source), body.name, body.by, combinations)


def _expand_texts(root: MappingNode) -> MappingNode:
    """Return the tree in which a text among the specs is a mapping; a key without a value is as good as absent."""
    body = root.get("set")
    if not isinstance(body, MappingNode):
        return root
    body = _without_nulls(body)
    for key, entry in body.entries.items():
        if isinstance(entry.value, SequenceNode) and key in ("specs", "models", "settings"):
            body = body.having(**{key: replace(entry.value, items=tuple(map(_clean_item, entry.value.items)))})
    return root.having(set=body)


def _clean_item(node: Node) -> Node:
    if isinstance(node, ScalarNode) and isinstance(node.value, str):
        return MappingNode(node.position, {"spec": Entry(node.position, node)})
    return _without_nulls(node) if isinstance(node, MappingNode) else node


def _without_nulls(node: MappingNode) -> MappingNode:
    return node.without(*(key for key, entry in node.entries.items() if is_null(entry.value)))


@dataclass
class _Reading:
    """Makes combinations of the checked file, and collects what is wrong with them."""

    tree: MappingNode
    body: SetBody
    problems: list[Problem]

    def combinations(self) -> Iterator[Combination]:
        body = self.body
        sources = [self._source(index, entry.spec) for index, entry in enumerate(body.specs)]
        specs = [
            entry.name or (Path(entry.spec) if source is None else source.path).stem
            for entry, source in zip(body.specs, sources, strict=True)
        ]
        models = [model.name for model in body.models]
        settings = [setting.name for setting in body.settings] if body.settings is not None else [""]
        changes = []
        for kind, names in (("specs", specs), ("models", models), ("settings", settings)):
            for index, name in enumerate(names):
                if name in names[:index]:
                    position = locate(self.tree, ("set", kind, index, "name"))[2].position
                    self.problems.append(position.problem(f"two {kind} are called `{name}`; give one another `name`"))
            changes.append([self._changes(kind, index) for index in range(len(names))])
        folders: dict[str, str] = {}
        for (a, spec), (b, model), (c, setting) in product(enumerate(specs), enumerate(models), enumerate(settings)):
            position, source = locate(self.tree, ("set", "models", b))[2].position, sources[a]
            overrides = changes[2][c].stack_on(changes[1][b].stack_on(changes[0][a]))
            combination = Combination(spec, model, setting, "" if source is None else source.name, overrides, position)
            other = folders.setdefault(str(combination.folder), combination.label)
            if other != combination.label and len(set(models)) == len(models) and len(set(settings)) == len(settings):
                problem = f"{other} and {combination.label} would both use the directory {combination.folder}"
                self.problems.append(position.problem(problem))
            yield combination

    def _source(self, index: int, written: str) -> Found | None:
        """Return the spec that an entry names, with its name for messages, or None if there is none."""
        position = locate(self.tree, ("set", "specs", index, "spec"))[2].position
        local_path = posixpath.normpath(posixpath.join(posixpath.dirname(position.source.name), written))
        try:
            return find_spec(local_path if (position.source.folder / written).exists() else written)
        except UserError as error:
            self.problems.append(position.problem(str(error)))
        return None

    def _changes(self, kind: str, index: int) -> Overrides:
        """Return the changes of an entry to a spec, in the form of `--set`, with the positions of its keys."""
        node = find(self.tree, ("set", kind, index, "set"))
        if not isinstance(node, MappingNode):
            return Overrides()
        assignments = []
        for key, entry in node.entries.items():
            steps = key.split(".")
            if not all(steps):
                self.problems.append(entry.key.problem(f"`{key}` is not a key such as agent.max_turns"))
                continue
            path = tuple(int(step) if step.isdigit() else step for step in steps)
            assignments.append(Assignment(key, path, entry.value, written=entry.key))
        return Overrides(tuple(assignments))
