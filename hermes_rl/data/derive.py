"""Raw rows → `Row`s: derived columns in order, the filter, and the key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hermes_rl.data.hashing import digest
from hermes_rl.data.rows import Row
from hermes_rl.errors import SpecError, UserError
from hermes_rl.spec.model import FrozenDict, Spec
from hermes_rl.spec.suggest import did_you_mean
from hermes_rl.spec.templates import TemplateError, evaluate, render


def derive(spec: Spec, raw: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """The rows that pass the filter, each with its derived columns and its key.

    Raises:
        SpecError: a column or the filter does not work for a row; the place is the template's.
        UserError: the key column is missing, empty or not unique.
    """
    seen: Counter[str] = Counter()
    for index, source in enumerate(raw):
        content = digest(source)
        columns = _columns(spec, source, index)
        if not _passes(spec, columns, index):
            continue
        if spec.dataset.key is None:
            seen[content] += 1
            key = content[:16] if seen[content] == 1 else f"{content[:16]}-{seen[content]}"
        else:
            key = _named_key(spec.dataset.key, columns, index, seen)
        yield Row(key, FrozenDict(columns), index, content)


def _columns(spec: Spec, source: Mapping[str, Any], index: int) -> dict[str, Any]:
    columns = dict(source)
    for name, template in spec.dataset.columns.items():
        try:
            columns[name] = render(template, columns, where=f"dataset.columns.{name}", key=str(index + 1))
        except TemplateError as error:
            raise SpecError([spec.template_problem(("dataset", "columns", name), error)]) from None
    return columns


def _passes(spec: Spec, columns: Mapping[str, Any], index: int) -> bool:
    if spec.dataset.filter is None:
        return True
    try:
        return bool(evaluate(spec.dataset.filter, columns, where="dataset.filter", key=str(index + 1)))
    except TemplateError as error:
        raise SpecError([spec.template_problem(("dataset", "filter"), error)]) from None


def _named_key(name: str, columns: Mapping[str, Any], index: int, seen: Counter[str]) -> str:
    if name not in columns:
        raise UserError(f"dataset.key: row {index + 1} has no column `{name}`{did_you_mean(name, columns)}")
    if columns[name] is None or columns[name] == "":
        raise UserError(f"dataset.key: column `{name}` of row {index + 1} is empty")
    key = str(columns[name])
    seen[key] += 1
    if seen[key] > 1:
        raise UserError(f"dataset.key: `{key}` of row {index + 1} is there already; a key names one row")
    return key
