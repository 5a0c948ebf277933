"""Find a user's code by reference: ``file.py:name`` or ``package.module:name``.

This module imports files outside packages: each under a unique module name, once per content. The files in its
directory are importable while it loads, and nothing remains in `sys.path` or under common names in `sys.modules`, so
that two specs may both have a ``helpers.py``.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from hermes_rl.errors import UserError
from hermes_rl.others_files import read_regular

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_lock = threading.RLock()
_siblings: dict[Path, dict[str, ModuleType]] = {}
"""Modules that the files of a directory imported from this directory, shared by all files of the directory."""

_PREFIX = "_hermes_rl_plugin_"
_files: dict[str, str] = {}
"""Name of each module that was loaded from a file outside packages → the file."""
"""Prefix of the names of modules from files outside packages."""
SANDBOXES = "hermes_rl.sandboxes"
"""Group of entry points for packages with their own sandbox backend."""


def load_object(ref: str, base: Path | None = None) -> Any:
    """Return the object that `ref` names; a relative file is below `base` (default: the working directory).

    The name may be dotted (``file.py:Class.method``). Raises `UserError` with the available names.
    """
    module_ref, _, name = ref.rpartition(":")
    if not module_ref or not name:
        raise UserError(f"{ref!r} is not a reference to code; expected file.py:name or package.module:name")
    return _require_attribute(load_module(module_ref, base), name, module_ref)


def load_module(module_ref: str, base: Path | None = None) -> ModuleType:
    """Return the module that a reference names before its colon: a file (see `load_object`), or an installed one.

    Raises:
        UserError: it cannot be loaded.
    """
    if module_ref.endswith(".py"):
        return load_file((base or Path.cwd()) / Path(module_ref).expanduser())
    return _import_module(module_ref, module_ref)


class Code(NamedTuple):
    """Location of an object in user code, from which another process can load it."""

    module: str
    """Its module; for a file outside packages the name under which it was loaded, with a hash of its content."""
    name: str
    """Dotted name in that module."""
    file: str | None = None
    """The file, unless it is an importable module."""
    finds: str | None = None
    """Argument for the object, a function that returns the requested object; None if it is the requested object."""

    @classmethod
    def from_ref(cls, ref: str) -> Code:
        """Return the location of an object by its absolute reference, which `load_object` has loaded."""
        module_ref, _, name = ref.rpartition(":")
        return (
            cls(load_file(Path(module_ref)).__name__, name, module_ref)
            if module_ref.endswith(".py")
            else cls(module_ref, name)
        )

    def load(self) -> Any:
        """Return the object.

        Raises:
            UserError: it does not exist, its module cannot be loaded, or its file has changed since.
        """
        loaded = _require_attribute(self.load_module(), self.name, self.module)
        return loaded if self.finds is None else loaded(self.finds)

    def load_module(self) -> ModuleType:
        """Return its module. Raises `UserError` if it cannot be loaded, or its file has changed since."""
        module = sys.modules.get(self.module)
        if module is None and self.file is not None:
            module = load_file(Path(self.file))
            if module.__name__ != self.module:
                raise UserError(f"{self.file} was changed after the run had loaded it; start the run again")
        return module or _import_module(self.module, f"{self.module}:{self.name}")


def files_named_in(pickled: bytes) -> list[tuple[str, str]]:
    """Return name and file of each module from a file outside packages that a pickle refers to."""
    return [(name, file) for name, file in tuple(_files.items()) if name.encode() in pickled]


def identity(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of installed packages in one of hermes-rl's groups.

    `importlib.metadata.entry_points` reads the files of all packages each time, which took a fifth of a short run.
    """
    from importlib.metadata import distribution

    points: dict[EntryPoint, None] = {}
    for directory in sys.path:
        with suppress(OSError):
            for package, point in _published_in(directory, Path(directory).stat().st_mtime_ns):
                # Of two versions of a package, the first on the path counts.
                if point.group == group and point in distribution(package).entry_points:
                    points[point] = None
    return list(points)


@lru_cache(maxsize=256)
def _published_in(directory: str, changed: int) -> list[tuple[str, EntryPoint]]:
    """Return package and entry point of everything that a directory publishes for hermes-rl, until it changes."""
    from importlib.metadata import distributions  # processes for user code do not need it

    points = ((package, point) for package in distributions(path=[directory]) for point in package.entry_points)
    return [(package.name, point) for package, point in points if point.group.startswith("hermes_rl.")]


def published(group: str, kind: str, reserved: Container[str] = ()) -> dict[str, EntryPoint]:
    """Return the entry points of installed packages in a group, by name, without `reserved` names.

    Args:
        kind: kind of the published objects, for error messages.

    Raises:
        UserError: two packages publish one name.
    """
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name in points:
            both = f"{points[point.name].value} and {point.value}"
            raise UserError(f"two packages publish a {kind} {point.name!r} ({both}); remove one of them")
        if point.name not in reserved:
            points[point.name] = point
    return points


def load_published(point: EntryPoint, kind: str) -> Any:
    """Return the object of an entry point; raise `UserError` if it cannot be loaded."""
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # its module may raise anything
        raise UserError(
            f"the {kind} {point.name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def load_file(path: Path) -> ModuleType:
    """Return the module of a file; the same one until the file's content changes."""
    path = path.resolve()
    try:
        source = read_regular(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{_suggest_file(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()[:16]
    name = f"{_PREFIX}{path.stem}_{digest}"
    with _lock:
        return sys.modules.get(name) or _execute_module(name, path, source)


def _execute_module(name: str, path: Path, source: bytes) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UserError(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name], _files[name] = module, str(path)
    try:
        with _folder_importable(path.parent):
            # The source read above, and not Python's compiled cache, which may belong to another file of equal size and
            # time.
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[name], _files[name]
        if isinstance(error, Exception | SystemExit):  # a file that exits would otherwise end the run silently
            hint = ""
            if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
                hint = f"; install the package `{error.name}`, or copy the module into {path.parent}"
            raise UserError(f"{_locate_error(error, path)}: {type(error).__name__}: {error}{hint}") from error
        raise
    return module


@contextmanager
def _folder_importable(folder: Path) -> Iterator[None]:
    """Make the files of a directory importable under their plain names while a file loads."""
    sibling_modules = _siblings.setdefault(folder, {})
    names = _importable_names(folder)
    hidden = {key: sys.modules.pop(key) for key in _modules_below(names)}
    sys.modules.update(sibling_modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sibling_modules.update({key: sys.modules.pop(key) for key in _modules_below(names)})
        sys.modules.update(hidden)


def _importable_names(folder: Path) -> set[str]:
    files = {path.stem for path in folder.glob("*.py")}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    # A file named like a standard module must not replace it for other code.
    return (files | packages) - sys.stdlib_module_names


def _modules_below(names: set[str]) -> list[str]:
    return [key for key in sys.modules if key.partition(".")[0] in names]


def _import_module(module: str, ref: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        hint = "" if missing != module.partition(".")[0] else "; is its package installed?"
        raise UserError(f"{ref}: no module named {missing!r}{hint}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{ref}: importing failed: {type(error).__name__}: {error}") from error


def _require_attribute(module: ModuleType, name: str, module_ref: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            names = [n for n in vars(value) if not n.startswith("_")] if hasattr(value, "__dict__") else []
            hint = f" (it has: {', '.join(sorted(names)[:12])})" if names else ""
            raise UserError(f"{module_ref}: has no {name!r}{did_you_mean(part, names)}{hint}")
        value = getattr(value, part)
    return value


LONGEST = 100
"""Maximum characters of a name for which similar names are searched; a comparison takes the product of the lengths."""


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the known name that this one misspells, or None."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6) if len(name) <= LONGEST else []
    return matches[0] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``; did you mean `x`?`` if one of the known names is close to this one, else an empty text."""
    meant = closest(name, candidates)
    return f"; did you mean `{meant}`?" if meant else ""


def _suggest_file(path: Path) -> str:
    try:
        names = {entry.name for entry in path.parent.iterdir()}
    except OSError:
        return f" (and no folder {path.parent})"
    return did_you_mean(path.name, names)


def _locate_error(error: BaseException, path: Path) -> str:
    """Return the file and line where loading failed, as near to the user's own file as the traceback goes."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{path}:{line}" if line is not None else str(path)


def place_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the error as text, with the last line of `function`'s file that led to it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    if code is not None and code.co_filename.startswith(_PACKAGE):  # it has called other code
        file = next((frame.filename for frame in frames if not frame.filename.startswith(_PACKAGE)), code.co_filename)
        user_frames = [frame for frame in frames if frame.filename == file]
    location = f" at {(user_frames or frames)[-1].filename}:{(user_frames or frames)[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{location}"
