"""Report the tests that have passed, from inside the process that runs them; `tests_pass` copies it into a sandbox.

It is loaded as ``sitecustomize``, so before any of the code under test, on any Python of the sandbox (3.6 or later).
It sends messages to the host over a file descriptor that only this process has, so that no program started later can
use it; `runner_report` interprets them on the host. Nothing here is secret: a report counts because of its sender and
its time, not because of a signature.

Each message is one line, ``<process id> <kind> <fields>`` with tabs between:

- ``begin pytest|unittest|script``: before anything else of this process
- ``tests NAME …``: tests that are going to run; `start` and `end` refer to them by index
- ``start NUMBER``
- ``end NUMBER OUTCOME``
- ``session STATUS``: pytest's exit status; for a script, its own exit status after a normal exit, or 1
- ``interrupted``
- ``finish CHANGED …``: when the interpreter exits, with the names of replaced functions
"""

# ruff: noqa: BLE001, PTH100, PTH115, PTH119, PTH120, PTH123, S110, SIM105

import atexit
import builtins
import fcntl
import importlib.machinery
import importlib.util
import os
import stat
import sys
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Sequence  # noqa: UP035  # Python 3.6

RUNNER_NAMES = ("pytest", "py.test", "unittest", "nose2", "manage.py", "runtests.py")
WORDS = slice(1, 12)
"""Words of a command line that may name the program, after options of Python."""
LISTS = ("failures", "errors", "unexpectedSuccesses", "skipped", "expectedFailures")
FAILED_LISTS = set(LISTS[:3])
SKIPPED, SKIPPED_ITSELF = "skipped", "skipped by what it calls"
"""Outcome of a test that is marked to be skipped or to fail, and of one that something skipped while it ran."""
MARKS = {"skip", "skipif", "xfail"}
JUDGES = ("AssertionError", "Exception", "BaseException", "isinstance", "all", "any", "len", "type", "__build_class__")
"""Built-in names that decide over tests. Others, such as `input` and `print`, are replaced by honest ones too."""
DECIDING = ("test", "assert", "fail", "run", "_")
"""How the names of methods of a test class begin that decide over tests."""
EXITS = ((builtins, "SystemExit"), (builtins, "exit"), (builtins, "quit"), (sys, "exit"))
"""By what a script says that something was wrong."""
SCRIPT = "script/run.py"
"""Path of the program that runs a script, in the directory of this code."""
HANDED = "hermes_rl_reporter"
"""Built-in name by which that program is given what it needs, and which it takes away."""
WATCHED = ("unittest", "_pytest", "pytest", "pluggy", "_frozen_importlib", "_frozen_importlib_external")
INSTALLED = ("site-packages", "dist-packages")
SPECIAL = ("__getattribute__", "__getattr__", "__new__")
"""Methods that decide over the others of a class."""
HIGH_FD = 200
"""From here on the descriptor is out of the way of programs that count theirs."""
MOST_LOOKED_AFTER = 1000
"""Maximum number of tests after each of which is looked at what was replaced, for some milliseconds."""
NAMES_AT_ONCE = 200
"""Maximum number of names in one message, which must fit into one write to a socket."""

Say = Callable[..., None]


def begin(folder: str, top: str, files: "list[str]", fd: int) -> None:
    """Report over descriptor `fd` if this process runs tests: with a test runner, or as one of `files`.

    `folder` is the directory of this code, and `top` the working directory, which contains the code under test.
    """
    _next_customization(folder)
    command_words = _command_line()[WORDS]
    if not any(os.path.basename(word) in RUNNER_NAMES or os.path.abspath(word) in files for word in command_words):
        if _is_ours(fd):
            _pass_on(fd)
        return
    report_fd = _taken(fd)
    if report_fd is None:
        return
    say = _voice(report_fd)
    by_pytest = bool({os.path.basename(word) for word in command_words} & {"pytest", "py.test"})
    by_script = f"{folder}/{SCRIPT}" in command_words
    say("begin", "script" if by_script else "pytest" if by_pytest else "unittest")
    tops = [top.rstrip("/") + "/", os.path.abspath("") + "/"]
    installed = [path for path in sys.path if not any((path + "/").startswith(each) for each in tops)]
    trusted = (*installed, *files)
    watched = []  # type: list[_Watched]

    def end() -> None:
        say("finish", *[name for watch in watched for name in (*watch.noted, *watch.changed())][:5])

    atexit.register(end)  # the first one, so it runs after all that the code under test registers
    if by_script:
        watched.append(_Watched(trusted))
        for owner, name in EXITS:
            watched[-1].remember(owner, name)
        vars(builtins)[HANDED] = say, watched[-1]
    elif by_pytest:
        _plug_in(say, lambda: watched.append(_Watched(trusted)), watched)
    else:
        _wrap_unittest(say, watched)
        watched.append(_Watched(trusted))


def run_script(space: "dict[str, Any]") -> None:
    """Run the script that the command line names in `space`, and report whether it exited by itself.

    It did if it reached its last line, if an exception ended it, or if it left by `SystemExit` without involvement of
    the code under test. The exit status is reported too, because code may change it while modules are unloaded.
    """
    say, watched = vars(builtins).pop(HANDED, (None, None))
    reporter_directory = os.path.dirname(sys.argv.pop(0))
    path = os.path.abspath(sys.argv[0])
    if sys.path[0] == reporter_directory:  # options of Python can prevent this entry
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    space.clear()
    space.update(__name__="__main__", __file__=path, __loader__=loader, __builtins__=builtins)
    space.update(__doc__=None, __package__=None, __spec__=None)
    end, by_itself = None, True  # type: SystemExit | None, bool
    try:
        exec(code, space)
    except SystemExit as error:
        end, step = error, error.__traceback__
        while watched is not None and step is not None and step.tb_next is not None:
            step = step.tb_next
            by_itself = by_itself and watched.knows(step.tb_frame.f_code)
    except BaseException as error:
        end, user_traceback = SystemExit(1), error.__traceback__ and error.__traceback__.tb_next
        try:
            sys.excepthook(type(error), error.with_traceback(user_traceback), user_traceback)
        except BaseException:  # whatever it does, the script has failed
            pass
    if say is not None and by_itself:
        status = None if end is None else end.code
        well = status is None or (isinstance(status, int) and int.__eq__(status, 0))
        say("session", "0" if well else "1")
    if end is not None:
        raise end


def _is_ours(fd: int) -> bool:
    """Return True if this descriptor is the host's, and not something that a script has opened."""
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode) or "/report-" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def _pass_on(fd: int) -> None:
    """Let programs that this one starts have the descriptor, which Python would close: one of them may run tests."""
    import _posixsubprocess

    start = _posixsubprocess.fork_exec

    def fork_exec(arguments: Any, programs: Any, closes: Any, descriptors: Any, *more: Any) -> Any:
        return start(arguments, programs, closes, tuple(sorted({*descriptors, fd})), *more)

    _posixsubprocess.fork_exec = fork_exec


def _taken(fd: int) -> "int | None":
    """Take the descriptor for this process alone; return None if it does not exist or is not the host's."""
    if not _is_ours(fd):
        return None
    try:
        private_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    except OSError:  # fewer are allowed
        private_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    os.close(fd)
    return private_fd


def _voice(fd: int) -> Say:
    """Return a function that sends one message. It calls no other function, since any may have been replaced."""
    write, process = os.write, os.getpid

    def say(kind: str, *fields: str) -> None:
        clean_fields = [field.replace("\t", " ").replace("\n", " ") for field in fields]
        line = "\t".join([str(process()), kind, *clean_fields]) + "\n"
        try:
            write(fd, line.encode("utf-8", "backslashreplace"))
        except OSError:
            return  # closed by the code under test: then nothing more is heard of this process, and it does not count

    return say


class _Tests:
    """The tests of this process, by their index in the announcement, and the running one."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.numbers = {}  # type: dict[int, int]
        self.held = []  # type: list[Any]
        self.running = None  # type: Any
        self.entered = self.returned = False
        """Whether the running test's own function was called, and came back."""

    def announce(self, tests: "list[tuple[Any, str]]") -> None:
        for test, _ in tests:
            self.numbers[id(test)] = len(self.held)
            self.held.append(test)  # so that no other object ever has its place in memory
        names = [name for _, name in tests]
        for first in range(0, len(names), NAMES_AT_ONCE):
            self.say("tests", *names[first : first + NAMES_AT_ONCE])

    def start(self, test: Any) -> None:
        self.running, self.entered, self.returned = test, False, False
        self.say("start", str(self.numbers[id(test)]))

    def end(self, outcome: str) -> None:
        test_index = self.numbers[id(self.running)]
        self.running = None
        self.say("end", str(test_index), outcome)


def _command_line() -> "list[str]":
    with open("/proc/self/cmdline") as file:
        return file.read().split("\0")


def _next_customization(folder: str) -> None:
    """Run the image's own `sitecustomize`, which this one has taken the place of."""
    rest = [path for path in sys.path if os.path.abspath(path) != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _plug_in(say: Say, watch: "Callable[[], None]", watched: "list[_Watched]") -> None:
    """Write a plug-in for pytest, which finds it by the variable that names further ones."""
    name = "reporter_" + os.urandom(8).hex()
    plugin = ModuleType(name, "PYTEST_DONT_REWRITE")
    hooks = _Plugin(name, say, watch, watched)
    for hook in dir(hooks):
        if hook.startswith("pytest_"):
            setattr(plugin, hook, getattr(hooks, hook))
    sys.modules[name] = plugin
    earlier = hooks.earlier
    os.environ["PYTEST_PLUGINS"] = name if earlier is None else f"{earlier},{name}"


def _around(hook: Any) -> Any:
    """Let a hook of pytest run around all others of its name."""
    hook.pytest_impl = {"hookwrapper": True, "tryfirst": True}
    return hook


class _Plugin:
    """The hooks of pytest.

    A test has passed where its function was entered and came back, as seen by calls of this plug-in's own, and where
    no report of it says otherwise: reports alone can be made by anybody.
    """

    def __init__(self, name: str, say: Say, watch: "Callable[[], None]", watched: "list[_Watched]") -> None:
        self.name, self.say, self.watch, self.watched = name, say, watch, watched
        self.tests = _Tests(say)
        self.calls = _follow_calls(watched, self.tests)
        self.reports = []  # type: list[tuple[str, str]]
        self.earlier = os.environ.get("PYTEST_PLUGINS")
        self.root = ""
        self.apart = False
        """True if other processes run the tests, such as the workers of xdist; then only their reports exist."""
        self.function = object  # type: type
        self.skips = set()  # type: set[int]
        """Tests that marks let be skipped, or fail as expected, by conditions that hold."""

    def pytest_configure(self, config: Any) -> None:
        # Child processes must not load it, and no code may find it by its name.
        if self.earlier is None:
            os.environ.pop("PYTEST_PLUGINS", None)
        else:
            os.environ["PYTEST_PLUGINS"] = self.earlier
        sys.modules.pop(self.name, None)
        self.root = str(getattr(config, "rootpath", None) or config.rootdir).rstrip("/") + "/"

    def pytest_addoption(self) -> None:
        self.watch()  # installed plug-ins are loaded; conftest.py files are not, and may import the code under test
        self.function = sys.modules["_pytest.python"].Function

    def pytest_sessionstart(self, session: Any) -> None:
        self.watched[-1].hooks = session.config.hook
        self.watched[-1].known_hooks = {code for _, code in _hooks(session.config.hook)}
        elsewhere = session.config.pluginmanager.hasplugin("dsession")
        self.apart = elsewhere or bool(getattr(session.config.option, "forked", False))

    def pytest_collection_finish(self, session: Any) -> None:
        self.tests.announce([(item, self.root + item.nodeid) for item in session.items])
        self.skips = {id(item) for item in session.items if _is_to_be_skipped(item)}
        for item in session.items:
            self.watched[-1].remember(item, "runtest")
            self.watched[-1].remember(item, "_obj")
            if isinstance(getattr(item, "cls", None), type):
                self.watched[-1].remember_class(item.cls)
            self.watched[-1].remember(getattr(item, "function", None), "__code__")

    @_around
    def pytest_runtest_protocol(self, item: Any) -> Any:
        if self.tests.running is not None or id(item) not in self.tests.numbers:
            yield
            return
        del self.reports[:]
        self.tests.start(item)
        outcome = yield
        self.watched[-1].note_after(len(self.tests.held))
        self.tests.end("failed" if outcome.excinfo is not None else self.judged(item))

    def judged(self, item: Any) -> str:
        outcomes = [word for when, word in self.reports if when == "call" or word != "passed"]
        if not outcomes or set(outcomes) - {"passed", "skipped"}:
            return "failed"
        if "skipped" in outcomes:
            marked = _marked(getattr(item, "cls", None), getattr(item, "obj", None))
            return SKIPPED if marked or id(item) in self.skips else SKIPPED_ITSELF
        kind = getattr(item, "cls", None)
        tracked = isinstance(item, self.function) and (
            not hasattr(kind, "_callTestMethod") or _calls_by(kind, self.calls)
        )
        return "passed" if self.apart or not tracked or self.tests.returned else "failed without a word"

    @_around
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
        is_running_test = pyfuncitem is self.tests.running
        if is_running_test:
            self.tests.entered = True
        outcome = yield
        if is_running_test and pyfuncitem is self.tests.running:
            self.tests.returned = outcome.excinfo is None

    def pytest_runtest_logreport(self, report: Any) -> None:
        when, word, test = report.when, report.outcome, report.nodeid
        if not type(when) is type(word) is type(test) is str:
            return
        if self.tests.running is not None:
            if test == self.tests.running.nodeid:
                self.reports.append((when, word))
        elif self.apart and (when == "call" or word != "passed"):
            self.tests.announce([(report, self.root + test)])
            self.tests.start(report)
            self.tests.end(word if word in ("passed", "skipped") else "failed")

    def pytest_keyboard_interrupt(self) -> None:
        self.say("interrupted")

    def pytest_internalerror(self) -> None:
        self.say("interrupted")

    def pytest_sessionfinish(self, exitstatus: Any) -> None:
        self.watched[-1].note()
        self.say("session", str(int(exitstatus)))


def _is_to_be_skipped(item: Any) -> bool:
    """Return True if a mark of pytest skips a test, or expects it to fail, by conditions that hold."""
    if not {marker.name for marker in item.iter_markers()} & MARKS:
        return False
    skipping = sys.modules["_pytest.skipping"]
    evaluate = [getattr(skipping, f"evaluate_{kind}_marks", None) for kind in ("skip", "xfail")]
    try:
        return None in evaluate or any(each(item) is not None for each in evaluate)  # type: ignore[misc]
    except BaseException:  # a condition that raises fails its test
        return False


def _wrap_unittest(say: Say, watched: "list[_Watched]") -> None:
    from unittest import case, suite

    tests = _Tests(say)
    run_case, run_suite = case.TestCase.run, suite.TestSuite.run
    within = []  # type: list[Any]
    has_announced = []  # type: list[bool]

    def announce(cases: "list[Any]") -> None:
        if not has_announced:  # all test classes are there, and none of their tests has run
            has_announced.append(True)
            for kind in _kinds(case.TestCase):
                watched[-1].remember_class(kind)
        tests.announce([(test, _name(test)) for test in cases if isinstance(test, case.TestCase)])

    def run_all(self: Any, *arguments: Any, **more: Any) -> Any:
        if not within and tests.running is None:
            announce(_flat(self))
        within.append(self)
        try:
            return run_suite(self, *arguments, **more)
        finally:
            within.pop()

    def run(self: Any, result: Any = None) -> Any:
        if tests.running is not None:  # a test that runs tests
            return run_case(self, result)
        if id(self) not in tests.numbers:
            announce([self])
        judge = _judge(self, result, watched, calls, tests)
        tests.start(self)
        outcome = "failed"
        try:
            returned = run_case(self, result)
            outcome = judge()
        finally:
            watched[-1].note_after(len(tests.held))
            tests.end(outcome)
        return returned

    suite.TestSuite.run = run_all  # type: ignore[method-assign]
    case.TestCase.run = run  # type: ignore[method-assign]
    calls = _follow_calls(watched, tests)


def _judge(test: Any, result: Any, watched: "list[_Watched]", calls: "list[Any]", tests: _Tests) -> "Callable[[], str]":
    """Return a function that determines the outcome of a unittest test from the entries added to its result."""
    lists = [name for name in LISTS if isinstance(getattr(result, name, None), list)]
    before = [len(getattr(result, name)) for name in lists]
    marked = _marked(type(test), getattr(test, getattr(test, "_testMethodName", ""), None))

    def outcome() -> str:
        grown = {name for name, size in zip(lists, before) if len(getattr(result, name)) > size}  # noqa: B905
        replaced = watched[-1].overrides(result, type(result))
        if replaced:
            return "with " + replaced[0]
        if not lists or grown & FAILED_LISTS:
            return "failed"
        if grown:
            return SKIPPED if marked else SKIPPED_ITSELF
        return "passed" if tests.returned or not _calls_by(type(test), calls) else "failed without a word"

    return outcome


def _calls_by(kind: Any, calls: "list[Any]") -> bool:
    """Return True if unittest itself calls the tests of this class; some libraries call them differently."""
    from unittest import case

    return getattr(kind, "_callTestMethod", None) in calls and kind.run is case.TestCase.run


def _marked(*owners: Any) -> bool:
    """Return True if a unittest decorator skips a test or expects its failure, on the test or on its class."""
    marks = ("__unittest_skip__", "__unittest_expecting_failure__")
    return any(getattr(each, marker, False) for each in owners for marker in marks)


def _flat(suite: Any) -> "list[Any]":
    """Return the tests of a suite and of its nested suites."""
    try:
        members = list(suite)
    except TypeError:
        return [suite]
    return [test for each in members for test in _flat(each)]


def _follow_calls(watched: "list[_Watched]", tests: _Tests) -> "list[Any]":
    """Observe the end of each TestCase test directly, without its result object, which tests can modify.

    Return the methods of unittest that call a test; empty before Python 3.8.
    """
    from unittest import case

    if not hasattr(case.TestCase, "_callTestMethod"):
        return []
    from unittest import async_case

    def followed(original_call: Any) -> Any:
        def call(self: Any, method: Any) -> None:
            if tests.running is None or tests.entered:  # of a test that runs tests
                original_call(self, method)
                return
            tests.entered = True
            outcome = self._outcome
            result = getattr(outcome, "result", None)
            original_call(self, method)
            unchanged = self._outcome is outcome and getattr(outcome, "result", None) is result
            tests.returned = unchanged and not watched[-1].overrides(self, case.TestCase)

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
    kinds = kind.__subclasses__()  # type: list[type]
    return kinds + [subclass for each in kinds for subclass in _kinds(each)]


def _hooks(hook: Any) -> "list[tuple[str, Any]]":
    """Return the functions of each pytest hook, identified by their code."""
    functions = []  # type: list[tuple[str, Any]]
    for name, caller in list(vars(hook).items()):
        if hasattr(caller, "get_hookimpls"):
            functions += [(name, _identity(each.function)) for each in caller.get_hookimpls()]
    return functions


class _Watched:
    """Snapshot of the functions that determine test outcomes, taken before the code under test was loaded."""

    hooks = None  # type: Any
    """Functions of pytest's hooks; only installed plug-ins and conftest.py files may add to them."""
    known_hooks = frozenset()  # type: Any

    def __init__(self, trusted: "Sequence[str]") -> None:
        self.trusted = (*filter(None, trusted), os.path.dirname(os.__file__))
        self.before = []  # type: list[tuple[str, Any, str, Any]]
        self.noted = []  # type: list[str]
        """Names of functions that were replaced after a test or at the end of the session: code may put them back."""
        self.remembered_keys = set()  # type: set[tuple[int, str]]
        for name in JUDGES:
            self.remember(builtins, name)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in WATCHED and isinstance(module, ModuleType):
                for attribute_name, value in list(vars(module).items()):
                    if str(getattr(value, "__module__", None)).split(".")[0] in WATCHED and callable(value):
                        self.remember(module, attribute_name)
                        if isinstance(value, type) and (id(value), SPECIAL[0]) not in self.remembered_keys:
                            self.remember_class(value)

    def remember(self, owner: Any, name: str) -> None:
        """Watch what an object, a class or a module has under this name."""
        if owner is not None and (id(owner), name) not in self.remembered_keys:
            self.remembered_keys.add((id(owner), name))
            self.before.append((getattr(owner, "__name__", type(owner).__name__), owner, name, _code_of(owner, name)))

    def remember_class(self, kind: type) -> None:
        """Watch all methods of a class, including inherited ones, and those that it may get."""
        for name in {
            *SPECIAL,
            *(name for base in kind.__mro__[:-1] for name, value in list(vars(base).items()) if _runs(value)),
        }:
            self.remember(kind, name)

    def note(self) -> None:
        self.noted = self.noted or self._replaced()

    def note_after(self, test_count: int) -> None:
        """Look after a test, if there are not so many that this takes long."""
        if test_count <= MOST_LOOKED_AFTER:
            self.note()

    def _replaced(self) -> "list[str]":
        now = [(*remembered, _code_of(*remembered[1:3])) for remembered in self.before]
        return [
            f"{owner_name}.{name}"
            for owner_name, owner, name, then, value in now
            if value is not then and value is not None and not self._may_replace(owner, name, then, value)
        ]

    def changed(self) -> "list[str]":
        """Return the names of functions replaced by code that is neither installed nor in the tests' own files."""
        names = self._replaced()
        path_finder_index = next(
            (i for i, finder in enumerate(sys.meta_path) if finder is importlib.machinery.PathFinder), 0
        )
        names += [
            f"sys.meta_path: {finder}" for finder in sys.meta_path[:path_finder_index] if not self._installed(finder)
        ]
        new = [] if self.hooks is None else [each for each in _hooks(self.hooks) if each[1] not in self.known_hooks]
        return names + [name for name, code in new if not self._installed(code) and not _of_conftest(code)]

    def _may_replace(self, owner: Any, name: str, then: Any, value: Any) -> bool:
        """Return True for code of an installed plug-in, a conftest.py or the tests.

        The standard library replaces nothing by itself: another function of it, or a mock, was put there. Only for
        methods of test classes that decide nothing, tests do that.
        """
        if not self._installed(value):
            return _of_conftest(value)
        file = self._file(value)
        if not file.startswith(self.trusted[-1]) or any(f"/{part}/" in file for part in (*INSTALLED, "_pytest")):
            return True  # pytest replaces methods of its own, and some images have it beside the standard library
        if isinstance(owner, type) and owner.__module__.split(".")[0] not in WATCHED and not name.startswith(DECIDING):
            return True
        places = [(getattr(each, "co_filename", None), getattr(each, "co_name", None)) for each in (then, value)]
        return isinstance(value, CodeType) and places[0] == places[1]

    def overrides(self, owner: Any, kind: type) -> "list[str]":
        """Return the names of methods that code under test has overridden on this object alone."""
        instance_attributes = getattr(owner, "__dict__", {})
        return [
            name for name, value in list(instance_attributes.items())
            if callable(value) and hasattr(kind, name) and not self._installed(_identity(value))
        ]  # fmt: skip

    def knows(self, code: CodeType) -> bool:
        """Return True for code that is installed, in the tests' own files, or part of Python's import system."""
        return code.co_filename.startswith("<frozen ") or self._installed(code)

    def _installed(self, value: Any) -> bool:
        if not isinstance(value, CodeType) and _kind(value).__module__.startswith("_frozen_importlib"):
            return True
        file = self._file(value)
        return file.startswith(self.trusted) or any(f"/{part}/" in file for part in INSTALLED)

    def _file(self, value: Any) -> str:
        if isinstance(value, CodeType):
            return str(value.co_filename)
        return str(getattr(sys.modules.get(_kind(value).__module__), "__file__", None) or "")


def _kind(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _runs(value: Any) -> bool:
    return isinstance(value, (FunctionType, classmethod, staticmethod, property))


def _identity(value: Any) -> Any:
    """Return the code object of a function, which may be replaced while the function stays the same.

    Attributes of other objects are not read: some return a value for every name, and some raise.
    """
    if isinstance(value, (classmethod, staticmethod, MethodType)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    return value.__code__ if isinstance(value, FunctionType) else value


def _code_of(owner: Any, name: str) -> Any:
    """Return the code that a name refers to: the object's own attribute, else its class's."""
    if name == "__code__":
        return getattr(owner, name, None)
    for holder in owner.__mro__ if isinstance(owner, type) else (owner, *type(owner).__mro__):
        if name in getattr(holder, "__dict__", ()):
            return _identity(holder.__dict__[name])
    return None


def _of_conftest(code: Any) -> bool:
    return os.path.basename(str(getattr(code, "co_filename", ""))) == "conftest.py"
