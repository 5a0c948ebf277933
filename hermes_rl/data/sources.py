"""Open the source of raw rows: items in the spec, a generator, local files, or `datasets`.

An opened split of a source can be read repeatedly. `files` and `hub` read the formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.spec.model import Spec
from hermes_rl.spec.paths import ENDINGS, FILE_FORMATS, may_mean_hub
from hermes_rl.spec.section import to_plain
from hermes_rl.spec.sections.dataset import Source
from hermes_rl.spec.suggest import choices

Raw = Mapping[str, Any]
READABLE = ("json", "csv")
"""Formats in `dataset.path` that are read without the `datasets` package."""
PROBE = 1000
"""Number of rows of a generator that are read to find out if it ends; one that ends counts as finite, like a file."""
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


class Opened(NamedTuple):
    """One split of a source; `finite` is True if all rows can be read before the first one is used."""

    read: Callable[[], Iterator[Raw]]
    finite: bool


def is_on_hub(source: Source) -> bool:
    """Return True if rows are only available over the network, or from the cache of an earlier download."""
    return source.path is not None and source.path not in FILE_FORMATS and not source.path.startswith(("/", "~"))


LARGE = 50 << 20
"""Size in bytes from which reading a file is reported."""


def open_source(source: Source, split: str, seed: int, notify: Callable[[str], None] | None = None) -> Opened:
    """Return one split of a source.

    Args:
        source: the dataset of a spec, or its fallback.
        split: the name of the split.
        seed: the seed for a generator.
        notify: called with a message before a large file is read.

    Raises:
        HubOutOfReachError: the hub does not respond.
        UserError: the source is wrong.
    """
    if source.items is not None:
        items = [to_plain(item) for item in source.items]
        return Opened(lambda: iter(items), finite=True)
    if source.generator is not None:
        return _open_generator(source.generator, split, seed)
    patterns = local_files(source, split)
    if patterns is not None and not source.streaming:
        from hermes_rl.data.files import read_files

        for path in map(Path, patterns):
            if notify is not None and path.is_file() and (size := path.stat().st_size) > LARGE:
                notify(f"reading {path} ({size >> 20} MiB)")
        rows = read_files(str(source.path), patterns)
        return Opened(lambda: iter(rows), finite=True)
    if not is_on_hub(source):
        from hermes_rl.data.files import require_bounded

        _require_readable(str(source.path))
        for pattern in [*_file_patterns(source), *([f"{source.path}/**"] if Path(str(source.path)).is_dir() else ())]:
            if not _URL.match(pattern):
                require_bounded(pattern)
    from hermes_rl.data.hub import load_hub

    loaded = load_hub(source, split)
    return Opened(lambda: iter(loaded), finite=not source.streaming)


def taken_for_local(spec: Spec) -> str | None:
    """Return a warning if `dataset.path` may be a name on the hub but a directory next to the spec has this name."""
    written, path = spec.written_at(("dataset", "path")), spec.dataset.path or ""
    if written is None or not may_mean_hub(written) or not (path.startswith("/") and Path(path).is_dir()):
        return None
    return (
        f"`{written}` is read from {path}, not from the hub's dataset of that name; write `./{written}` to be explicit"
    )


def _require_readable(path: str) -> None:
    """Raise `UserError` for a local path that `datasets` would not understand."""
    if path in FILE_FORMATS or Path(path).is_dir():
        return
    if not Path(path).exists():
        sibling_names = [entry.name for entry in Path(path).parent.iterdir()] if Path(path).parent.is_dir() else []
        raise UserError(f"{path}: no such file or folder{did_you_mean(Path(path).name, sibling_names)}")
    endings = ", ".join(ENDINGS)
    raise UserError(f"{path}: its suffix names no format ({endings}); write {{path: FORMAT, data_files: FILE}}")


def is_fetched(source: Source) -> bool:
    """Return True if reading rows needs the network: a dataset on the hub, or files at an address."""
    return is_on_hub(source) or any(_URL.match(name) for name in _file_patterns(source))


def _file_patterns(source: Source) -> list[str]:
    """Return all names and patterns of `data_files`."""
    files: Any = to_plain(source.data_files)
    entries = files.values() if isinstance(files, dict) else [files]
    return [name for entry in entries for name in ([entry] if isinstance(entry, str) else entry or ())]


def local_files(source: Source, split: str) -> list[str] | None:
    """Return the files of a split that are read without `datasets`, or None if that package must read them.

    Raises:
        UserError: the source has no files for the split.
    """
    if source.path not in READABLE or source.data_files is None or "[" in split or "+" in split:
        return None
    files: Any = source.data_files
    if isinstance(files, Mapping):
        if split not in files:
            raise UserError(f"dataset.data_files has no split `{split}`{choices(split, files)}")
        files = files[split]
    elif split != "train":
        splits = f"{{path: {source.path}, data_files: {{train: …, {split}: …}}}}"
        raise UserError(f"files without splits are `train`; for `{split}` write dataset: {splits}")
    patterns = [files] if isinstance(files, str) else list(files)
    return None if any(_URL.match(pattern) for pattern in patterns) else patterns


def _open_generator(reference: str, split: str, seed: int) -> Opened:
    from hermes_rl.plugins import load_object, place_of

    function = load_object(reference)

    def read() -> Iterator[Raw]:
        try:
            yield from _check_rows(function(seed=seed, split=split), reference)
        except UserError:
            raise
        except Exception as error:  # the spec's user code: any exception is the spec's error
            raise UserError(f"the generator {reference} raised {place_of(error, function)}") from error

    head = list(islice(read(), PROBE + 1))
    if len(head) <= PROBE:
        return Opened(lambda: iter(head), finite=True)
    return Opened(read, finite=False)


def _check_rows(rows: Iterable[Any], reference: str) -> Iterator[Raw]:
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise UserError(f"{reference}: row {index} is a {type(row).__name__}; yield dicts with string keys")
        yield row
