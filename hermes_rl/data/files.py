"""Local json, jsonl and csv files, read without the `datasets` package, which takes seconds to import.

What comes out is what `datasets` would give: every row has all columns (None where a row lacks one), and a
csv column of numbers is numbers.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import math
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.spec.suggest import did_you_mean
from hermes_rl.values import read_json

Record = dict[str, Any]
_INT = re.compile(r"-?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def read_files(kind: str, patterns: Sequence[str]) -> list[Record]:
    """Return the rows of all files, in order. Raises `UserError` where a file is missing or cannot be read; the message
    names file and line."""
    read = _read_json if kind == "json" else _read_csv
    rows = [row for pattern in patterns for path in _matching(pattern) for row in read(path)]
    names = dict.fromkeys(name for row in rows for name in row)
    return [row if len(row) == len(names) else {name: row.get(name) for name in names} for row in rows]


def _matching(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_file():
        return [path]
    if glob.has_magic(pattern):
        names = glob.iglob(pattern, recursive=True)  # noqa: PTH207 - pathlib globs below one folder only
        if paths := sorted(Path(name) for name in names if Path(name).is_file()):
            return paths
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"{pattern}: no such file{did_you_mean(path.name, beside)}")


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 at byte {error.start}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _read_json(path: Path) -> list[Record]:
    text = _text(path)
    if text.lstrip().startswith("["):
        return _rows(path, _loads(path, text, 1), lambda number: f"{path}: row {number}")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if len(lines) > 1 and not _is_json(lines[0][1]):
        return _rows(path, [_loads(path, text, 1)], lambda number: str(path))
    return [_row(_loads(path, line, number), f"{path}:{number}") for number, line in lines]


def _is_json(line: str) -> bool:
    """Return False for the first line of one object that is written over several lines."""
    try:
        read_json(line)
    except ValueError:
        return line.strip() not in ("{", "[")
    return True


def _loads(path: Path, text: str, line: int) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        at = line + getattr(error, "lineno", 1) - 1
        raise UserError(f"{path}:{at}: is not JSON: {getattr(error, 'msg', error)}") from None


def _rows(path: Path, values: Any, place: Callable[[int], str]) -> list[Record]:
    if not isinstance(values, list):
        raise UserError(f"{path}: expected a list of objects")
    return [_row(value, place(number)) for number, value in enumerate(values, start=1)]


def _row(value: Any, place: str) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{place}: expected an object with the columns of a row")
    return value


def _read_csv(path: Path) -> list[Record]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), restkey=None, strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: is not CSV: {error}") from None
    if any(None in row for row in rows):
        raise UserError(f"{path}: a line has more fields than there are columns")
    names = reader.fieldnames or []
    columns = {name: _typed([row[name] for row in rows]) for name in names}
    return [{name: columns[name][index] for name in names} for index in range(len(rows))]


def _typed(values: list[Any]) -> list[Any]:
    """Return a column as numbers where all of it is; identifiers such as 007 stay text."""
    for pattern, kind in ((_INT, int), (_FLOAT, float)):
        if any(values) and all(pattern.fullmatch(value) for value in values if value):
            with suppress(ValueError):  # a whole number of thousands of digits
                numbers = [kind(value) if value else None for value in values]
                if kind is int or math.inf not in map(abs, filter(None, numbers)):
                    return numbers
    return [value or None for value in values]
