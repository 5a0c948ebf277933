"""Read local json, jsonl and csv files without the `datasets` package, which takes seconds to import.

The result equals the result of `datasets`: every row has all columns (None if a row lacks one), and the columns of CSV
have types.
"""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import lzma
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.others_files import open_regular, read_regular
from hermes_rl.plugins import did_you_mean
from hermes_rl.values import read_json

Record = dict[str, Any]
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|(?i:inf|infinity))")
_DIGITS, _BLANKS = "0123456789.", " \t\n\r\v\f"
_BOOLEANS = {"true": True, "false": False}
_MISSING = frozenset(
    {"", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
     "NULL", "NaN", "None", "n/a", "nan", "null"}
)  # fmt: skip
"""Texts of CSV that are missing values, as in pandas."""
LONGEST_WHOLE = 1000
"""Maximum digits of a whole number."""


LARGEST_DATA = 16 << 30
"""Maximum bytes of a data file."""
LEAST_UNPACKED, MOST_RATIO = 1 << 30, 100
"""Unpacked size in bytes that any compressed file may have, and the maximum ratio of unpacked to packed size beyond
it.
"""
MOST_ENTRIES, DEEPEST = 200_000, 50
"""Maximum number of files and directories that a pattern may visit, and maximum depth of directories under `**`."""


def read_files(kind: str, patterns: Sequence[str]) -> list[Record]:
    """Return the rows of all files, in order.

    Args:
        kind: the format, "json" (also for jsonl) or "csv".
        patterns: file names or glob patterns.

    Raises:
        UserError: a file is missing or cannot be read; the message names file and line.
    """
    read = _read_json if kind == "json" else _read_csv
    rows = [row for pattern in patterns for path in _matching_files(pattern) for row in read(path)]
    names = dict.fromkeys(name for row in rows for name in row)
    return [row if len(row) == len(names) else {name: row.get(name) for name in names} for row in rows]


def _matching_files(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.exists():
        return [path]
    require_bounded(pattern)
    if glob.has_magic(pattern):
        names = glob.iglob(pattern, recursive=True)  # noqa: PTH207 - pathlib globs below one folder only
        if paths := sorted(Path(name) for name in names if Path(name).is_file()):
            return paths
    sibling_names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"{pattern}: no such file{did_you_mean(path.name, sibling_names)}")


def require_bounded(pattern: str) -> None:
    """Raise `UserError` for a pattern that visits more than `MOST_ENTRIES` files and directories, such as `/**/*`."""
    parts = Path(pattern).parts
    if not glob.has_magic(pattern):
        return
    first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    exact = parts.index("**") if "**" in parts else len(parts)  # before it, each name must match its part
    depth = len(parts) if "**" not in parts else exact + DEEPEST
    top, entry_count = Path(*parts[:first]), 0
    waiting = [(str(top), first)]
    while waiting:
        folder, level = waiting.pop()
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                entry_count += 1
                if entry_count > MOST_ENTRIES:
                    raise UserError(
                        f"{pattern}: this pattern looks at more than {MOST_ENTRIES:,} files and folders below {top}; "
                        "name the folder that has the data"
                    )
                matches = level >= exact or fnmatch(entry.name, parts[level])
                if matches and level + 1 < depth and entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, level + 1))


def _read_unpacked(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if its suffix requires it.

    Raises:
        UserError: the unpacked file is much larger than the packed one.
    """
    if path.suffix not in _OPENERS:
        return read_regular(path, LARGEST_DATA)
    max_bytes = max(LEAST_UNPACKED, MOST_RATIO * path.stat().st_size)
    with open_regular(path) as packed, _OPENERS[path.suffix](packed, "rb") as file:
        data: bytes = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(
            f"{path}: unpacks to more than {max_bytes >> 20} MiB, {MOST_RATIO} times its size; unpack it yourself "
            "if it is not a decompression bomb"
        )
    return data


_OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def _read_text(path: Path) -> str:
    try:
        return _read_unpacked(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 at byte {error.start}") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _read_json(path: Path) -> list[Record]:
    text = _read_text(path)
    if text.lstrip().startswith("["):
        return _check_rows(path, _parse_json(path, text, 1), lambda number: f"{path}: row {number}")
    lines = [(position, line) for position, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if len(lines) > 1 and not _is_json(lines[0][1]):
        return _check_rows(path, [_parse_json(path, text, 1)], lambda number: str(path))
    return [_check_row(_parse_json(path, line, position), f"{path}:{position}") for position, line in lines]


def _is_json(line: str) -> bool:
    """Return False for the first line of one object that spans several lines."""
    try:
        read_json(line)
    except ValueError:
        return line.strip() not in ("{", "[")
    return True


def _parse_json(path: Path, text: str, line: int) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        error_line = line + getattr(error, "lineno", 1) - 1
        raise UserError(f"{path}:{error_line}: is not JSON: {getattr(error, 'msg', error)}") from None


def _check_rows(path: Path, values: Any, locate: Callable[[int], str]) -> list[Record]:
    if not isinstance(values, list):
        raise UserError(f"{path}: expected a list of objects")
    return [_check_row(value, locate(row_number)) for row_number, value in enumerate(values, start=1)]


def _check_row(value: Any, location: str) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{location}: expected an object with the columns of a row")
    return value


def _read_csv(path: Path) -> list[Record]:
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    try:
        header, *rows = [row for row in reader if row and not (len(row) == 1 and row[0].isspace())] or [[]]
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: is not CSV: {error}") from None
    names = _column_names(header)
    if any(len(row) > len(names) for row in rows):
        raise UserError(f"{path}: a line has more fields than there are columns")
    columns = [
        _convert_column([row[index] if index < len(row) else None for row in rows]) for index in range(len(names))
    ]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _column_names(header: list[str]) -> list[str]:
    """Return the names of columns as pandas does: `Unnamed: N` for an empty name, and a suffix for a duplicate."""
    names: list[str] = []
    for index, name in enumerate(header):
        name, count = name or f"Unnamed: {index}", 0
        other = name
        while other in names or (count and other in header):
            count += 1
            other = f"{name}.{count}"
        names.append(other)
    return names


def _convert_column(values: list[str | None]) -> list[Any]:
    """Return a column converted to the type of all of its values: int, float, bool or str.

    The conversion follows pandas, with which `datasets` reads CSV: whole numbers with a missing value become floats,
    and whole numbers that 64 bits cannot hold stay texts. A column with a number that would become infinite stays text
    too, since such a number is an identifier.
    """
    present_values = [value for value in values if value is not None and value not in _MISSING]
    bare = [value.strip(_BLANKS) for value in present_values]
    if present_values and all(map(_FLOAT.fullmatch, bare)):
        wholes = [value for value in bare if _INT.fullmatch(value)]
        if any(len(value) > LONGEST_WHOLE for value in wholes):
            return list(values)
        unsigned = len(present_values) == len(values) and not any(value.startswith("-") for value in bare)
        bits = 64 if unsigned or len(wholes) < len(present_values) else 63
        if not all(-(2**63) <= int(value) < 2**bits for value in wholes):
            return list(values)
        kind = int if len(wholes) == len(values) else float
        if any(math.isinf(float(value)) and value[-1] in _DIGITS for value in bare):
            return [None if value in _MISSING else value for value in values]
        return _replace_values(values, map(kind, bare))
    if present_values and all(value.lower() in _BOOLEANS for value in present_values):
        return _replace_values(values, (_BOOLEANS[value.lower()] for value in present_values))
    return _replace_values(values, present_values)


def _replace_values(values: list[str | None], replacements: Iterable[Any]) -> list[Any]:
    """Return a column in which `replacements` replaces the values that are not missing, in order.

    Missing ones are None.
    """
    rest = iter(replacements)
    return [None if value is None or value in _MISSING else next(rest) for value in values]
