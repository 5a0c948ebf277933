"""Isolate tests from the code under test: its modules are stubs here, and run in another sandbox.

`install` runs in each Python process of the test command, before anything else. Packages installed for the tests, and
the tests' own files, are imported normally; every other module is requested from the sandbox with the agent's work.
This side trusts nothing from the other side. It accepts values, stand-ins and exceptions, and never passes a frame, a
module or a class of the tests; it only passes functions that may be called and objects of the tests, which are usable
by their public names.

A comparison of an object of the code with a plain value of a test does not call the object, since its `__eq__` could
always return True. Honest code may need that call (``Money(5) == 5``): the run of the reference solution records these
comparisons, and only they call the object.
"""

# ruff: noqa: PTH100, PTH119, PTH122, PTH123, PTH206  # Python 3.8, and no pathlib before the code runs

from __future__ import annotations

import atexit
import builtins
import collections.abc
import importlib
import importlib.machinery
import json
import os
import socket
import sys
import time
import types
import warnings
from typing import Any

from hermes_rl.scoring.isolated_protocol import (
    BINARY,
    COMPARISONS,
    EXACT,
    NAMED,
    GoneError,
    Meta,
    Peer,
    Remote,
    Stub,
    is_special,
)

OF_STUBS = frozenset({"__all__", "__doc__", "__version__", "__author__", "__members__", "__dict__", "__wrapped__"})
"""Names with underscores that are asked for; others are looked up by libraries, and are none of the code's."""
OF_LIBRARIES = frozenset({"pytestmark", "pytest_plugins", "_pytestfixturefunction", "pytest_wrapped", "place_as"})
CONNECT_SECONDS = 20.0
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class Asking(Peer):
    """Asks the code; `files` are the tests' own, and `places` where operators with plain values are asked."""

    def __init__(self, wire: Any, files: frozenset[str], operator_locations: set[str] | None) -> None:
        super().__init__(wire, 1)
        self.files = files
        self.operator_locations = operator_locations
        self.noted: set[str] = set()

    def fetch(self, owner: Any, name: str) -> Any:
        if (name.startswith("__") and name not in OF_STUBS) or name in OF_LIBRARIES or name in ("_number", "_peer"):
            raise AttributeError(name)
        value = self.ask("get", owner, name)
        return self.brought(value, sys._getframe(2).f_globals) if name == "__all__" else value

    def brought(self, names: Any, space: Any) -> list[str]:
        """Return the names that ``import *`` brings: none that is built in or that the file has, but from the code."""
        remote_types = (Remote, Meta, Stub)
        return [
            name
            for name in (names if isinstance(names, list) else [])
            if isinstance(name, str)
            and not hasattr(builtins, name)
            and isinstance(space.get(name, self.base), remote_types)
        ]

    def operate(self, this: Any, name: str, args: Any, more: Any) -> Any:
        if name in COMPARISONS or name in BINARY:
            other = args[0] if args else None
            related = isinstance(other, Remote) and (isinstance(other, type(this)) or isinstance(this, type(other)))
            if not related and not self.may_ask(this, name):
                if name == "__contains__":
                    raise TypeError(
                        f"'in' is not asked of {type(this).__name__}, which the reference does not give here"
                    )
                return NotImplemented
        value = self.ask("special", this, name, args, more)
        if name in EXACT and value is not NotImplemented and type(value) is not EXACT[name]:
            raise TypeError(f"{name} of {type(this).__name__} gives {type(value).__name__}")
        return value

    def may_ask(self, this: Any, name: str) -> bool:
        frame: Any = sys._getframe(2)
        while frame is not None and os.path.abspath(frame.f_code.co_filename) not in self.files:
            frame = frame.f_back
        if frame is None:
            return False
        file = os.path.basename(frame.f_code.co_filename)
        location = f"{file}:{frame.f_lineno}:{name}:{type(this).__name__}"
        if self.operator_locations is None:
            self.noted.add(location)
            return True
        return location in self.operator_locations

    # ---- what the code may ask

    def require_given(self, value: Any) -> None:
        if isinstance(value, (*CALLABLE, type, BaseException, types.GeneratorType, types.CoroutineType)):
            return
        if isinstance(value, collections.abc.Iterator) and type(value).__module__ in ("builtins", "itertools"):
            return
        kind = type(value)
        source = getattr(sys.modules.get(kind.__module__), "__file__", None)
        of_tests = isinstance(source, str) and os.path.abspath(source) in self.files
        if not of_tests and kind.__module__ not in ("unittest.mock", "io", "functools", "types"):
            raise TypeError(f"{kind.__name__} cannot be passed to isolated code")

    def overrides(self, kind: type, name: str) -> bool:
        return super().overrides(kind, name) and name not in ("__repr__", "__str__", "__format__")

    def perform(self, operation: str, *args: Any) -> Any:
        this = args[0] if args else None
        name: Any = args[1] if len(args) > 1 else None
        if isinstance(this, (Remote, Meta, Stub)):
            raise GoneError("it sent back a reference to one of its objects as an operand")
        if operation == "call" and callable(this):
            return this(*args[1], **args[2])
        if operation == "special" and is_special(name):
            return getattr(type(this), name)(this, *args[2], **(args[3] if len(args) > 3 else {}))
        public = isinstance(name, str) and not name.startswith("_")
        closed = isinstance(this, (*CALLABLE, type, types.ModuleType, types.CoroutineType))
        generator = isinstance(this, types.GeneratorType)
        if public and not closed and (not generator or name in ("send", "throw", "close")):
            if operation == "get":
                return getattr(this, name)
            if operation == "set":
                return setattr(this, name, args[2])
            if operation == "method":
                return getattr(this, name)(*args[2], **args[3])
        raise AttributeError(f"{name} is not accessible to isolated code")

    def forgets(self) -> None:
        raise GoneError("isolated code must not reset the shared objects")

    def show(self, output: Any) -> None:
        for stream, text, *more in output:
            if stream == "warning":
                kind = NAMED.get(more[0], UserWarning)
                category: Any = kind if issubclass(kind, Warning) else UserWarning
                self.warnings.append((str(text), category))
            else:
                (sys.stdout if stream == "out" else sys.stderr).write(str(text))

    @property
    def warnings(self) -> list[Any]:
        return self.__dict__.setdefault("_warnings", [])  # type: ignore[no-any-return]

    def ask(self, operation: str, *args: Any) -> Any:
        """See `Peer.ask`; what the code has warned of is warned of here, where a filter may make it an error."""
        try:
            return super().ask(operation, *args)
        finally:
            while self.warnings:
                text, category = self.warnings.pop(0)
                warnings.warn(text, category, stacklevel=3)


class Finder:
    """Finds the modules of the code, in the process of the tests."""

    def __init__(
        self, path: str, top: str, files: frozenset[str], operator_locations: set[str] | None, noted: str
    ) -> None:
        self.path, self.top, self.files, self.operator_locations, self.noted = (
            path,
            top,
            files,
            operator_locations,
            noted,
        )
        self.peer: Any = None
        self.names: dict[str, bool] = {}
        self.test_modules = {part for file in files for part in self.parts(file)}

    def parts(self, file: str) -> list[str]:
        """Return the names under which a file of the tests may be imported, and the packages that contain it."""
        relative_parts = os.path.relpath(file, self.top).split(os.sep)
        return [os.path.splitext(relative_parts[-1])[0], *relative_parts[:-1]]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        first = name.partition(".")[0]
        if first not in self.names:
            self.names[first] = self.is_apart(first)
        if not self.names[first]:
            return None
        loader: Any = self
        return importlib.machinery.ModuleSpec(name, loader, is_package=True)

    def is_apart(self, name: str) -> bool:
        if (
            name in sys.builtin_module_names
            or name in self.test_modules
            or name in ("conftest", "sitecustomize", "usercustomize")
        ):
            return False
        spec = importlib.machinery.PathFinder.find_spec(name)
        origin = getattr(spec, "origin", None) or next(
            iter(getattr(spec, "submodule_search_locations", None) or ()), ""
        )
        if spec is not None and (not origin.startswith(self.top + os.sep) or "-packages" + os.sep in origin):
            return False
        return self.connected().ask("has", name, self.search()) is True

    def search(self) -> list[str]:
        """Return the entries of `sys.path` inside the working directory, relative to it."""
        paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]
        relative_paths = [
            os.path.relpath(path, self.top) for path in paths if (path + os.sep).startswith(self.top + os.sep)
        ]
        return list(dict.fromkeys(relative_paths))

    def create_module(self, spec: Any) -> Any:
        try:
            module = self.connected().ask("import", spec.name, self.search())
        except SystemExit:
            raise ImportError(f"{spec.name} ends the process") from None
        if not isinstance(module, Stub):
            raise ImportError(f"{spec.name} is not a module")
        return module

    def exec_module(self, module: Any) -> None:
        return

    def connected(self) -> Asking:
        if self.peer is None:
            wire, end = socket.socket(socket.AF_UNIX), time.monotonic() + CONNECT_SECONDS
            while True:
                try:
                    wire.connect(self.path)
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.02)
            self.peer = Asking(wire, self.files, self.operator_locations)
            os.register_at_fork(after_in_child=self.part)
            if self.operator_locations is None:
                atexit.register(self.note)
        return self.peer  # type: ignore[no-any-return]

    def part(self) -> None:
        """Leave the wire to the parent: a child that spoke on it would speak in the middle of its messages."""
        self.peer.gone_reason = "a forked process has no code under test"

    def note(self) -> None:
        """Write down where operators with plain values were asked."""
        with open(self.noted, "a") as file:
            file.writelines(json.dumps(location) + "\n" for location in sorted(self.peer.noted))


def install(path: str, top: str, files: list[str], operator_locations: list[str] | None, noted: str) -> None:
    """Let modules of the code be imported from the other sandbox, over the socket at `path`.

    `top` is the working directory, `files` the tests' own, and `operator_locations` what a run before has written to
    `noted`; None where this is that run.
    """
    test_files = frozenset(os.path.abspath(file) for file in files)
    location_set = None if operator_locations is None else set(operator_locations)
    finder: Any = Finder(path, top.rstrip("/"), test_files, location_set, noted)
    sys.meta_path.insert(0, finder)
