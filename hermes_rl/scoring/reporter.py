"""Tells which tests have passed, from inside of the process that runs them; `tests_pass` lays it into a sandbox.

It is loaded as ``sitecustomize``, so before anything of the code under test, under whatever Python the sandbox has (3.6
or later). It takes the key that signs its report before that code runs, and removes it: whoever comes later can write
a report, but none that counts. A process that ends otherwise than through the interpreter's own end reports nothing.

A report is ``<SHA-256 over key and body> <body>``; the body is ``{"tests": [[name, outcome], …], "tampered": […]}``.
The key of the next process of the same command follows from that of this one, and is laid down when this one has ended.
"""

# ruff: noqa: PTH100, PTH107, PTH118, PTH119, PTH120, PTH123

import atexit
import builtins
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import Any, Callable, Sequence  # noqa: UP035  # Python 3.6

RUNNERS = ("pytest", "py.test", "unittest", "nose2", "manage.py", "runtests.py")
LISTS = ("failures", "errors", "unexpectedSuccesses", "skipped", "expectedFailures")
FAILED = set(LISTS[:3])
JUDGES = ("AssertionError", "Exception", "BaseException", "isinstance", "all", "any", "len", "type")
"""Built-in names that decide over tests. Others, such as `input` and `print`, are replaced by honest ones too."""
WATCHED = ("unittest", "_pytest", "pluggy", "_frozen_importlib", "_frozen_importlib_external")
INSTALLED = ("site-packages", "dist-packages")


def sign(key: str, body: str) -> str:
    return hashlib.sha256((key + body).encode("utf-8", "surrogateescape")).hexdigest()


def begin(folder: str, top: str, files: "list[str]") -> None:
    """Report into `folder` where this process is one that runs tests: by a test runner, or as one of `files`.

    `top` is the working directory, in which the code under test lies.
    """
    _next_customization(folder)
    words = _command_line()
    if not any(os.path.basename(word) in RUNNERS or os.path.abspath(word) in files for word in words[1:5]):
        return
    try:
        with open(folder + "/key") as file:
            number, key = file.read().split()
        os.remove(folder + "/key")
    except (OSError, ValueError):
        return
    outcomes = []  # type: list[tuple[str, str]]
    tops = [top.rstrip("/") + "/", os.path.abspath("") + "/"]
    installed = [place for place in sys.path if not any((place + "/").startswith(each) for each in tops)]
    trusted = (*installed, *files)
    watched = []  # type: list[_Watched]

    def note(name: str, outcome: str) -> None:
        outcomes.append((name, outcome))

    def end() -> None:
        tampered = [name for watch in watched for name in watch.changed()]
        body = json.dumps({"tests": outcomes, "tampered": tampered[:5]})
        with open(f"{folder}/report.{number}", "w") as report:
            report.write(f"{sign(key, body)} {body}")
        with open(folder + "/key", "w") as following:
            following.write(f"{int(number) + 1} {sign(key, 'next')}")

    atexit.register(end)  # the first one, so it runs after all that the code under test registers
    if {os.path.basename(word) for word in words[1:5]} & {"pytest", "py.test"}:
        _plug_in(note, lambda: watched.append(_Watched(trusted)))
    else:
        _wrap_unittest(note)
        watched.append(_Watched(trusted))


def _command_line() -> "list[str]":
    with open("/proc/self/cmdline") as file:
        return file.read().split("\0")


def _next_customization(folder: str) -> None:
    """Run the image's own `sitecustomize`, which this one has taken the place of."""
    rest = [place for place in sys.path if os.path.abspath(place) != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _plug_in(note: "Callable[[str, str], None]", watch: "Callable[[], None]") -> None:
    """Write a plug-in for pytest, which finds it by the variable that names further ones."""
    name = "reporter_" + os.urandom(8).hex()
    plugin = ModuleType(name, "PYTEST_DONT_REWRITE")
    root = [""]
    earlier = os.environ.get("PYTEST_PLUGINS")

    def pytest_configure(config: Any) -> None:
        # What this process starts is not to look for it, and nobody is to find it by its name.
        if earlier is None:
            os.environ.pop("PYTEST_PLUGINS", None)
        else:
            os.environ["PYTEST_PLUGINS"] = earlier
        sys.modules.pop(name, None)
        root[0] = str(getattr(config, "rootpath", None) or config.rootdir)

    def pytest_sessionstart() -> None:
        watch()  # plug-ins of the image have changed by now what they change

    def pytest_runtest_logreport(report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            path, mark, test = report.nodeid.partition("::")
            note(os.path.join(root[0], path) + mark + test, str(report.outcome))

    for hook in (pytest_configure, pytest_sessionstart, pytest_runtest_logreport):
        setattr(plugin, hook.__name__, hook)
    sys.modules[name] = plugin
    os.environ["PYTEST_PLUGINS"] = name if earlier is None else f"{earlier},{name}"


def _wrap_unittest(note: "Callable[[str, str], None]") -> None:
    from unittest import case

    original = case.TestCase.run

    def run(self: Any, result: Any = None) -> Any:
        lists = [name for name in LISTS if isinstance(getattr(result, name, None), list)]
        before = [len(getattr(result, name)) for name in lists]
        returned = original(self, result)
        grown = {name for name, size in zip(lists, before) if len(getattr(result, name)) > size}  # noqa: B905
        if lists:
            kind = type(self)
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__
            test = [os.path.abspath(file), *kind.__qualname__.split("."), getattr(self, "_testMethodName", "")]
            note("::".join(test), "failed" if grown & FAILED else "skipped" if grown else "passed")
        return returned

    case.TestCase.run = run  # type: ignore[method-assign]


class _Watched:
    """What decides over tests, as it was before the code under test was there."""

    def __init__(self, trusted: "Sequence[str]") -> None:
        self.trusted = (*filter(None, trusted), os.path.dirname(os.__file__))
        self.before = self._now()

    def changed(self) -> "list[str]":
        """Names of what was replaced by code that is neither installed nor one of the tests' own files."""
        now = self._now()
        found = [name for name, value in self.before.items() if now.get(name, value) is not value]
        own = next((i for i, finder in enumerate(sys.meta_path) if finder is importlib.machinery.PathFinder), 0)
        first = [f"sys.meta_path: {finder}" for finder in sys.meta_path[:own] if not self._installed(finder)]
        return [name for name in found if not self._installed(now[name])] + first

    def _now(self) -> "dict[str, Any]":
        found = {f"builtins.{name}": getattr(builtins, name, None) for name in JUDGES}  # type: dict[str, Any]
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in WATCHED and isinstance(module, ModuleType):
                for inner, value in list(vars(module).items()):
                    if getattr(value, "__module__", None) == name and callable(value):
                        found[f"{name}.{inner}"] = _identity(value)
                        if isinstance(value, type):
                            methods = [(key, each) for key, each in vars(value).items() if _runs(each)]
                            found.update((f"{name}.{inner}.{key}", _identity(each)) for key, each in methods)
        return found

    def _installed(self, value: Any) -> bool:
        file = getattr(value, "co_filename", None)
        if file is None:
            kind = value if isinstance(value, type) else type(value)
            if kind.__module__.startswith("_frozen_importlib"):
                return True
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        return str(file).startswith(self.trusted) or any(f"/{part}/" in file for part in INSTALLED)


def _runs(value: Any) -> bool:
    return callable(value) or isinstance(value, (classmethod, staticmethod))


def _identity(value: Any) -> Any:
    """Return what a function runs, which may be replaced while the function stays."""
    function = getattr(value, "__func__", value)
    return getattr(function, "__code__", function)
