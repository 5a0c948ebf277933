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
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Sequence  # noqa: UP035  # Python 3.6

RUNNERS = ("pytest", "py.test", "unittest", "nose2", "manage.py", "runtests.py")
LISTS = ("failures", "errors", "unexpectedSuccesses", "skipped", "expectedFailures")
FAILED = set(LISTS[:3])
JUDGES = ("AssertionError", "Exception", "BaseException", "isinstance", "all", "any", "len", "type", "__build_class__")
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
        _plug_in(note, lambda: watched.append(_Watched(trusted)), watched)
    else:
        _wrap_unittest(note, watched)
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


def _plug_in(note: "Callable[[str, str], None]", watch: "Callable[[], None]", watched: "list[_Watched]") -> None:
    """Write a plug-in for pytest, which finds it by the variable that names further ones."""
    _follow_calls(watched, lambda _: None, lambda test: note(_name(test), "failed"))
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

    def pytest_sessionstart(session: Any) -> None:
        watch()  # plug-ins of the image have changed by now what they change
        watched[-1].hooks = session.config.hook
        watched[-1].known = {code for _, code in _hooks(session.config.hook)}

    def pytest_collection_finish(session: Any) -> None:
        for item in session.items:
            watched[-1].remember(item, "runtest")
            watched[-1].remember(item, "_obj")
            if isinstance(getattr(item, "cls", None), type):
                watched[-1].remember_class(item.cls)
            watched[-1].remember(getattr(item, "function", None), "__code__")

    def pytest_runtest_logreport(report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            path, mark, test = report.nodeid.partition("::")
            note(os.path.join(root[0], path) + mark + test, str(report.outcome))

    for hook in (pytest_configure, pytest_sessionstart, pytest_collection_finish, pytest_runtest_logreport):
        setattr(plugin, hook.__name__, hook)
    sys.modules[name] = plugin
    os.environ["PYTEST_PLUGINS"] = name if earlier is None else f"{earlier},{name}"


def _wrap_unittest(note: "Callable[[str, str], None]", watched: "list[_Watched]") -> None:
    from unittest import case

    original = case.TestCase.run
    ended = []  # type: list[Any]
    seen = []  # type: list[bool]

    def run(self: Any, result: Any = None) -> Any:
        if not seen:  # all test classes are there, and none of their tests has run
            seen.append(True)
            for kind in _kinds(case.TestCase):
                watched[-1].remember_class(kind)
        lists = [name for name in LISTS if isinstance(getattr(result, name, None), list)]
        before = [len(getattr(result, name)) for name in lists]
        returned = original(self, result)
        grown = {name for name, size in zip(lists, before) if len(getattr(result, name)) > size}  # noqa: B905
        if lists:
            outcome = "failed" if grown & FAILED else "skipped" if grown else "passed"
            tracked = getattr(type(self), "_callTestMethod", None) in calls
            if outcome == "passed" and tracked and not any(one is self for one in ended):
                outcome = "failed without a word"
            replaced = watched[-1].overrides(result, type(result))
            note(_name(self), f"with {replaced[0]}" if replaced else outcome)
            del ended[:]
        return returned

    case.TestCase.run = run  # type: ignore[method-assign]
    calls = _follow_calls(watched, ended.append, lambda _: None)


def _follow_calls(
    watched: "list[_Watched]", ended: "Callable[[Any], None]", failed: "Callable[[Any], None]"
) -> "list[Any]":
    """Hear of each test of a TestCase whether it came to its end, and not from the result, which tests can reach.

    Returns what the methods of unittest are now that call a test; there are none before Python 3.8.
    """
    from unittest import case

    if not hasattr(case.TestCase, "_callTestMethod"):
        return []
    from unittest import async_case

    def followed(inner: Any) -> Any:
        def call(self: Any, method: Any) -> None:
            outcome = self._outcome
            result = getattr(outcome, "result", None)
            try:
                inner(self, method)
            except BaseException as error:
                expected = [getattr(each, "__unittest_expecting_failure__", False) for each in (self, method)]
                if not isinstance(error, case.SkipTest) and not any(expected):
                    failed(self)
                raise
            kept = self._outcome is outcome and getattr(outcome, "result", None) is result
            if kept and not watched[-1].overrides(self, case.TestCase):
                ended(self)
            else:
                failed(self)

        return call

    calls = []
    for kind in (case.TestCase, async_case.IsolatedAsyncioTestCase):
        calls.append(followed(kind._callTestMethod))  # type: ignore[attr-defined]
        kind._callTestMethod = calls[-1]  # type: ignore[attr-defined]
    return calls


def _name(test: Any) -> str:
    """Return the name of a test of a TestCase, with the whole path of its file."""
    kind = type(test)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__
    return "::".join([os.path.abspath(file), *kind.__qualname__.split("."), getattr(test, "_testMethodName", "")])


def _kinds(kind: type) -> "list[type]":
    """Return all classes that are made of this one."""
    found = kind.__subclasses__()  # type: list[type]
    return found + [further for each in found for further in _kinds(each)]


def _hooks(hook: Any) -> "list[tuple[str, Any]]":
    """Return the functions behind each hook of pytest, by what they run."""
    found = []  # type: list[tuple[str, Any]]
    for name, caller in list(vars(hook).items()):
        if hasattr(caller, "get_hookimpls"):
            found += [(name, _identity(each.function)) for each in caller.get_hookimpls()]
    return found


class _Watched:
    """What decides over tests, as it was before the code under test was there."""

    hooks = None  # type: Any
    """Of pytest; no functions may come to them but those of installed plug-ins and of conftest.py."""
    known = frozenset()  # type: Any

    def __init__(self, trusted: "Sequence[str]") -> None:
        self.trusted = (*filter(None, trusted), os.path.dirname(os.__file__))
        self.before = []  # type: list[tuple[str, Any, str, Any]]
        self.seen = set()  # type: set[tuple[int, str]]
        for name in JUDGES:
            self.remember(builtins, name)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in WATCHED and isinstance(module, ModuleType):
                for inner, value in list(vars(module).items()):
                    if getattr(value, "__module__", None) == name and callable(value):
                        self.remember(module, inner)
                        for key, each in list(vars(value).items()) if isinstance(value, type) else ():
                            if _runs(each):
                                self.remember(value, key)

    def remember(self, owner: Any, name: str) -> None:
        """Watch what an object, a class or a module has under this name."""
        if owner is not None and (id(owner), name) not in self.seen:
            self.seen.add((id(owner), name))
            self.before.append((getattr(owner, "__name__", type(owner).__name__), owner, name, _found(owner, name)))

    def remember_class(self, kind: type) -> None:
        """Watch all methods of a class of tests, those that it inherits too."""
        for name in {name for base in kind.__mro__[:-1] for name, value in list(vars(base).items()) if _runs(value)}:
            self.remember(kind, name)

    def changed(self) -> "list[str]":
        """Names of what was replaced by code that is neither installed nor one of the tests' own files."""
        now = [(where, name, value, _found(owner, name)) for where, owner, name, value in self.before]
        found = [
            f"{where}.{name}"
            for where, name, then, value in now
            if value is not then and value is not None and not self._installed(value)
        ]
        own = next((i for i, finder in enumerate(sys.meta_path) if finder is importlib.machinery.PathFinder), 0)
        found += [f"sys.meta_path: {finder}" for finder in sys.meta_path[:own] if not self._installed(finder)]
        new = [] if self.hooks is None else [each for each in _hooks(self.hooks) if each[1] not in self.known]
        return found + [name for name, code in new if not self._installed(code) and not _of_conftest(code)]

    def overrides(self, owner: Any, kind: type) -> "list[str]":
        """Names of methods of a class that this one object has of its own, from the code under test."""
        own = getattr(owner, "__dict__", {})
        return [
            name for name, value in list(own.items())
            if callable(value) and hasattr(kind, name) and not self._installed(_identity(value))
        ]  # fmt: skip

    def _installed(self, value: Any) -> bool:
        file = value.co_filename if isinstance(value, CodeType) else None
        if file is None:
            kind = value if isinstance(value, type) else type(value)
            if kind.__module__.startswith("_frozen_importlib"):
                return True
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        return str(file).startswith(self.trusted) or any(f"/{part}/" in file for part in INSTALLED)


def _runs(value: Any) -> bool:
    return isinstance(value, (FunctionType, classmethod, staticmethod))


def _identity(value: Any) -> Any:
    """Return what a function runs, which may be replaced while the function stays.

    Nothing is asked of other objects: some answer to every name, and some raise.
    """
    if isinstance(value, (classmethod, staticmethod, MethodType)):
        value = value.__func__
    return value.__code__ if isinstance(value, FunctionType) else value


def _found(owner: Any, name: str) -> Any:
    """Return what runs under this name: of an object what it has of its own, else what its class has."""
    if name == "__code__":
        return getattr(owner, name, None)
    for place in owner.__mro__ if isinstance(owner, type) else (owner, *type(owner).__mro__):
        if name in getattr(place, "__dict__", ()):
            return _identity(place.__dict__[name])
    return None


def _of_conftest(code: Any) -> bool:
    return os.path.basename(str(getattr(code, "co_filename", ""))) == "conftest.py"
