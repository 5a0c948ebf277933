"""Load the agent's modules and execute the operations that the tests request.

The server runs in a sandbox without the tests, in a separate process for each test process. The peer does not trust its
messages, so this module needs no protection against the code that it loads.
"""

# ruff: noqa: PTH118  # Python 3.8, and no pathlib before the code runs

from __future__ import annotations

import asyncio
import copy
import importlib
import io
import os
import sys
import types
import warnings
from typing import Any

from hermes_rl.scoring.isolated_protocol import Peer


class Answering(Peer):
    """Execute operations on behalf of the tests."""

    def __init__(self, wire: Any, folder: str) -> None:
        super().__init__(wire, 2)
        self.folder = folder
        self.printed: list[Any] = []
        self.before: dict[tuple[int, str], Any] = {}
        self.loop: Any = None

    def output(self) -> list[Any]:
        printed, self.printed[:] = list(self.printed), []
        return printed

    def perform(self, operation: str, *args: Any) -> Any:
        return getattr(self, f"do_{operation}")(*args)

    def do_import(self, name: str, directories: list[str]) -> Any:
        for directory in reversed(directories):
            path = os.path.normpath(os.path.join(self.folder, directory))
            if path not in sys.path:
                sys.path.insert(0, path)
        return importlib.import_module(name)

    def do_has(self, name: str, directories: list[str]) -> bool:
        from importlib.machinery import PathFinder

        paths = [os.path.normpath(os.path.join(self.folder, directory)) for directory in directories]
        return PathFinder.find_spec(name, [*paths, self.folder]) is not None

    def do_call(self, function: Any, args: Any, more: Any) -> Any:
        return function(*args, **more)

    def do_get(self, owner: Any, name: str) -> Any:
        if name == "__all__" and isinstance(owner, types.ModuleType) and not hasattr(owner, "__all__"):
            public = {key: value for key, value in vars(owner).items() if not key.startswith("_")}
            return [key for key, value in public.items() if not isinstance(value, types.ModuleType)]
        return getattr(owner, name)

    def do_set(self, owner: Any, name: str, value: Any) -> None:
        if isinstance(owner, type):
            self.before.setdefault((id(owner), name), vars(owner).get(name, self))
        setattr(owner, name, value)

    def do_del(self, owner: Any, name: str) -> None:
        before = self.before.pop((id(owner), name), self)
        if before is self:
            delattr(owner, name)
        else:  # code that patched a class restores it this way, because the proxy's own dictionary lacks the name
            setattr(owner, name, before)

    def do_method(self, this: Any, name: str, args: Any, more: Any) -> Any:
        return getattr(this, name)(*args, **more)

    def do_special(self, this: Any, name: str, args: Any, more: Any = None) -> Any:
        if not hasattr(type(this), name):
            return NotImplemented
        return getattr(type(this), name)(this, *args, **(more or {}))

    def do_item(self, this: Any, key: Any) -> Any:
        return this[key]

    def do_copy(self, this: Any, deep: bool) -> Any:
        return copy.deepcopy(this) if deep else copy.copy(this)

    def do_await(self, awaitable: Any) -> Any:
        async def wait_for_result() -> Any:
            return await awaitable

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        return self.loop.run_until_complete(wait_for_result())


class Printed(io.RawIOBase):
    """Store printed text for the next reply."""

    def __init__(self, name: str, printed: list[Any]) -> None:
        self._stream, self._printed = name, printed

    def write(self, data: Any) -> int:
        text = bytes(data).decode("utf-8", "replace")
        self._printed.append([self._stream, text])
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2  # output that bypasses this stream goes to descriptor 2, which is not read


def stream(name: str, printed: list[Any]) -> Any:
    """Return a standard stream that stores its text and bytes."""
    raw: Any = Printed(name, printed)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def serve(wire: Any, folder: str) -> None:
    """Serve one test process until it ends."""
    os.chdir(folder)
    sys.path[0:0] = [folder]
    server = Answering(wire, folder)
    sys.stdout, sys.stderr = stream("out", server.printed), stream("err", server.printed)
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, kind, *_, **__: server.printed.append(
        ["warning", str(message), kind.__name__]
    )
    while True:
        server.serve(server.receive())
