"""Rendering every template of a spec with sample rows: missing columns, None in text, values that do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_rl.spec.findings import Findings
from hermes_rl.spec.model.base import Section, is_template
from hermes_rl.spec.model.prompt import Content, TextFile
from hermes_rl.spec.model.spec import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.suggest import choices
from hermes_rl.spec.templates import TemplateError, coerce, render, render_section, render_text

Row = Mapping[str, Any]


def check_samples(spec: Spec, samples: Sequence[Row], findings: Findings) -> None:
    """Render everything with each row; a template that fails is reported once."""
    failed: set[NodePath] = set()
    for index, column in enumerate(spec.evaluate.by):
        lacking = next((row for row in samples if column not in row), None)
        if lacking is not None:
            findings.problem(("evaluate", "by", index), f"there is no column `{column}`{choices(column, lacking)}")
    for number, row in enumerate(samples, start=1):
        key = str(number)
        for path, text, kind in _texts(spec):
            if path not in failed and not _works(path, text, kind, row, key, findings):
                failed.add(path)
        for path, section in _sections(spec):
            if not any(other[: len(path)] == path for other in failed):
                _check_section(path, section, row, key, failed, findings)


def _texts(spec: Spec) -> Iterator[tuple[NodePath, Any, Any]]:
    """Path, value, and declared type of every single value that is rendered."""
    for name in ("system", "user"):
        yield from _content(("prompt", name), getattr(spec.prompt, name))
    yield from _messages(spec)
    if spec.user is not None:
        yield from _content(("user", "system"), spec.user.system)
    for name, artifact in spec.artifacts.items():
        yield from _below(("artifacts", name), artifact.model_dump(exclude_none=True), str)
    yield from _arguments(spec)
    if spec.solution is not None:
        yield from _below(("solution",), spec.solution.model_dump(by_alias=True, exclude_unset=True), None)


def _arguments(spec: Spec) -> Iterator[tuple[NodePath, Any, Any]]:
    if not spec.rewards:
        return
    from hermes_rl.spec.annotations import type_of
    from hermes_rl.spec.check_rewards import signature_of

    for name, reward in spec.rewards.items():
        signature = signature_of(spec, name)
        types = {one.name: type_of(one.annotation) for one in signature.parameters} if signature else {}
        for argument, value in reward.args.items():
            yield from _below(("rewards", name, "args", argument), value, types.get(argument))


def _messages(spec: Spec) -> Iterator[tuple[NodePath, Any, Any]]:
    messages = spec.prompt.messages
    if not isinstance(messages, tuple):
        yield ("prompt", "messages"), messages, list[dict[str, Any]]
        return
    for index, message in enumerate(messages):
        path = ("prompt", "messages", index)
        yield (*path, "role"), message.role, str
        yield from _content((*path, "content"), message.content)


def _content(path: NodePath, content: Content | None) -> Iterator[tuple[NodePath, Any, Any]]:
    if isinstance(content, tuple):
        for index, part in enumerate(content):
            yield (*path, index, "text"), part.text, str
            yield (*path, index, "image"), part.image, None
            yield (*path, index, "image_url"), part.image_url, None
    elif content is not None:
        yield path, content, str


def _below(path: NodePath, value: Any, kind: Any) -> Iterator[tuple[NodePath, Any, Any]]:
    """Each template on its own, so that its place can be named; only a whole value has a declared type."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _below((*path, name), item, str if kind is str else None)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _below((*path, index), item, str if kind is str else None)
    else:
        yield path, value, kind


def _works(path: NodePath, value: Any, kind: Any, row: Row, key: str, findings: Findings) -> bool:
    file = Path(value.file) if isinstance(value, TextFile) else None
    try:
        if file is not None:
            value = file.read_text(encoding="utf-8")
        _render_one(value, kind, row, key)
    except TemplateError as error:
        findings.template(path, error, file)
        return False
    except (OSError, UnicodeDecodeError):
        return False  # a missing file is reported where files are checked
    return True


def _render_one(value: Any, kind: Any, row: Row, key: str) -> None:
    if not is_template(value):
        return
    if kind is str:
        render_text(value, row, key=key)
        return
    result = render(value, row, key=key)
    if kind is not None:
        coerce(result, kind, key=key)


def _sections(spec: Spec) -> Iterator[tuple[NodePath, Section]]:
    if spec.sandbox.model_fields_set:
        yield ("sandbox",), spec.sandbox


def _check_section(
    path: NodePath, section: Section, row: Row, key: str, failed: set[NodePath], findings: Findings
) -> None:
    """A section whose values have types of their own; a fault is looked for value by value first."""
    values = section.model_dump(by_alias=True, exclude_unset=True)
    for inner, value, _ in _below(path, values, None):
        if not _works(inner, value, None, row, key, findings):
            failed.add(inner)
            return
    try:
        render_section(section, row, key=key)
    except TemplateError as error:
        failed.add((*path, *error.path))
        findings.template((*path, *error.path), error)
