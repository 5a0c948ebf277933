"""Relative paths → absolute ones, each from the folder of the file that wrote it.

Also decides what `dataset.path` means: a format, files, a folder, or a dataset on the hub.
"""

from __future__ import annotations

import glob
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from os.path import normpath
from pathlib import Path

from hermes_rl.errors import Problem
from hermes_rl.spec import nodes
from hermes_rl.spec.nodes import Entry, MappingNode, Node, NodePath, ScalarNode, find, rewrite
from hermes_rl.spec.section import is_template

FILE_FORMATS = frozenset({"json", "csv", "parquet", "arrow", "text", "xml", "webdataset", "imagefolder", "audiofolder"})
"""Names in `dataset.path` that mean a format of local files, not a dataset on the hub."""
ENDINGS = {
    ".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow",
    ".txt": "text",
}  # fmt: skip
"""Suffixes of data files and their formats; a suffix of `PACKED` may follow."""
PACKED = (".gz", ".bz2", ".xz")
_HUB_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_DATA_FILES = (("dataset", "data_files"), ("dataset", "fallback", "data_files"))
_DATASETS = (("dataset", "path"), ("dataset", "fallback", "path"))


def absolute(root: MappingNode) -> Node:
    """Return the tree with absolute paths. Templates stay: what they render to starts from the spec's folder."""
    dataset = root.get("dataset")
    if isinstance(dataset, MappingNode):
        fallback = dataset.get("fallback")
        if isinstance(fallback, MappingNode):
            dataset = dataset.having(fallback=_with_format(fallback))
        root = root.having(dataset=_with_format(dataset))

    def change(path: NodePath, node: ScalarNode) -> ScalarNode:
        if (
            not isinstance(node.value, str)
            or not node.value
            or is_template(node.value)
            or not _is_path(root, path, node)
        ):
            return node
        folder = node.position.source.folder
        value = _join_code_path(node.value, folder) if nodes.is_in(path, nodes.CODE) else _join_path(folder, node.value)
        return replace(node, value=value)

    return rewrite(root, change)


def leading_out(root: Node, folder: Path) -> Iterator[Problem]:
    """Yield a problem for each file outside of `folder` that a spec in it names; the tree has absolute paths."""
    top = folder.resolve()
    for path, _, node in nodes.walk(root):
        if not isinstance(node, ScalarNode) or not isinstance(node.value, str):
            continue
        if not node.position.source.folder.resolve().is_relative_to(top) or nodes.is_in(path, nodes.OUTPUTS):
            continue  # a command line or a set may name what it likes
        if names_host_file(path, lambda other: _value_at(root, other)):
            file = node.value.rpartition(":")[0] if nodes.is_in(path, nodes.CODE) else node.value
            if file.startswith("/") and not Path(file).resolve().is_relative_to(top):
                yield node.position.problem(f"a spec of a repository names files of it alone; this is {file}")


def file_format(path: str) -> str | None:
    """Return the format that the suffix of a file's name means."""
    packed = next((stop_reason for stop_reason in PACKED if path.endswith(stop_reason)), "")
    return ENDINGS.get(Path(path.removesuffix(packed)).suffix.lower())


def may_mean_hub(written: str) -> bool:
    """Return True for text that could as well be the name of a dataset on the hub."""
    return _HUB_NAME.fullmatch(written) is not None


def _with_format(node: MappingNode) -> MappingNode:
    """Return `{path: questions.jsonl}` in its full form: `{path: json, data_files: questions.jsonl}`."""
    path = node.get("path")
    if not isinstance(path, ScalarNode) or not isinstance(path.value, str) or node.get("data_files") is not None:
        return node
    kind = _format_of(path.value, path.position.source.folder)
    if kind is None or is_template(path.value):
        return node
    files = Entry(node.entries["path"].key, path)
    format_node = node.having(path=replace(path, value=kind, written=None))
    return replace(format_node, entries={**format_node.entries, "data_files": files})


def _format_of(value: str, folder: Path) -> str | None:
    """Return the format of the files that `dataset.path` names, or None if it is not a file path."""
    if _URL.match(value):
        return file_format(value)
    if glob.has_magic(value) and file_format(value) is None:
        paths = glob.iglob(_join_path(folder, value), recursive=True)  # noqa: PTH207 - pathlib globs below one folder only
        kinds = {file_format(name) for name in paths if Path(name).is_file()}
        return kinds.pop() if len(kinds) == 1 else None
    return None if kind_of(Path(_join_path(folder, value))) == stat.S_IFDIR else file_format(value)


def names_host_file(path: NodePath, value_at: Callable[[NodePath], object]) -> bool:
    """Return True for a key whose value may be the path of a file of this machine; `value_at` reads other keys."""
    if nodes.is_in(path, (*nodes.CODE, *nodes.TEXT_FILES, *nodes.SOURCE_FILES, *nodes.OUTPUTS)):
        return True
    if _is_data_file(path):
        return value_at((*path[: path.index("data_files")], "path")) in FILE_FORMATS
    if path == ("sandbox", "image"):
        return value_at(("sandbox", "backend")) in (None, "bubblewrap")
    return _may_be_on_hub(path)


def _is_path(root: MappingNode, path: NodePath, node: ScalarNode) -> bool:
    if not names_host_file(path, lambda other: _value_at(root, other)):
        return False
    if _is_data_file(path):
        return not _URL.match(node.value)
    return not _may_be_on_hub(path) or (
        looks_local(node.value, node.position.source.folder) and node.value not in FILE_FORMATS
    )


def _is_data_file(path: NodePath) -> bool:
    """Return False where `data_files` is a column of a row."""
    return path[:2] in _DATA_FILES or path[:3] in _DATA_FILES


def _may_be_on_hub(path: NodePath) -> bool:
    return path in _DATASETS or (path[:1] == ("servers",) and path[-1] == "tokenizer")


def _value_at(root: Node, path: NodePath) -> object:
    node = find(root, path)
    return node.value if isinstance(node, ScalarNode) and isinstance(node.value, str) else None


def looks_local(value: str, folder: Path) -> bool:
    """Return True for a path: it starts like one, is a pattern of several, or there is something of that name."""
    if value.startswith((".", "/", "~")) or (glob.has_magic(value) and not _URL.match(value)):
        return True
    return not _URL.match(value) and "\0" not in value and len(value) < 4096 and kind_of(folder / value) != 0


def kind_of(path: Path) -> int:
    """Return the file type from `stat`; 0 if nothing exists, or the text is not a valid path."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):
        return 0


def _join_path(folder: Path, value: str) -> str:
    expanded = Path(value).expanduser() if value.startswith("~/") else Path(value)
    return normpath(folder / expanded)  # keep symlinks, so that the user recognizes the path


def _join_code_path(value: str, folder: Path) -> str:
    file, colon, name = value.rpartition(":")
    return f"{_join_path(folder, file)}:{name}" if colon and file.endswith(".py") else value
