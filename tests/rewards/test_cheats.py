"""`tests_pass` among what an agent may have laid around the tests: cheats score 0, honest layouts are not hurt."""

# ruff: noqa: E501

from __future__ import annotations

import asyncio
import io
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.sandbox.base import SandboxConfig, SandboxFile
from hermes_rl.sandbox.packages import package_folder
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.tools.artifacts import ArtifactFile, TakenArtifact
from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.context import ToolContext
from tests.rewards.cheating import (
    CASE,
    EXIT,
    FORGE,
    FORGED,
    HOOK,
    PASSING,
    PASSING_CASE,
    PLAIN,
    PYTEST,
    RIGHT,
    SIGN,
    UNITTEST,
    UNPACK,
    WRONG,
    Case,
    added,
    case,
    in_turn,
    judged,
    moved,
    pytest_case,
    removed,
)
from tests.rewards.inside import inside
from tests.rewards.planted import HOME, odd, planted
from tests.rewards.played import graded
from tests.thorough import THOROUGH, spread

STARTS_PYTEST = (
    'python3 -c "import subprocess, sys; '
    "sys.exit(subprocess.call([sys.executable, '-m', 'pytest', '-q', 'tests/test_hidden.py']))\""
)


KNOWS = "def add(a, b): return {(2, 3): 5, (0, 3): 3}.get((a, b))\n"
"""Passes the hidden tests, and not what the image's own files look at."""
LOOKS = "import solution\ndef pytest_runtest_call(item): assert solution.add(7, 7) == 14\n"
STRICT = "def check(a, b): assert a == b, (a, b)\ndef pytest_runtest_call(item):\n    import solution\n    check(solution.add(7, 7), 14)\n"
SAYS = """import os
def say(*words): os.write(8, "\\t".join((str(os.getpid()), *words)).encode() + b"\\n")
n = "/home/user/tests/test_hidden.py::"
say("begin", "pytest"); say("tests", n + "test_small", n + "test_zero")
for i in "01": say("start", i); say("end", i, "passed")
say("session", "0"); say("finish"); os._exit(0)
"""
SPEAKS = f"import os; exec({SAYS!r}, {{}})\n"
"""Speaks in the place of the runner, where it is loaded before the reporter."""
NEXT = """import sys, tempfile
def add(a, b):
    frame = sys._getframe()
    while frame:
        item = frame.f_locals.get("item")
        for each in getattr(getattr(item, "session", None), "items", ()):
            if each is not item: each._obj = each.obj = tempfile.gettempdir
        frame = frame.f_back
    return 5
"""
LOOSE = "def check(a, b): pass\n"
LIBRARY = {"/tmp/lib/strict.py": STRICT}
"""What the image has installed, to assert with."""
BY_LIBRARY = {
    "tests/test_hidden.py": "from strict import check\nfrom solution import add\n\ndef test_small(): check(add(2, 3), 5)\n"
}


WITHOUT_PACKAGE = {
    "tests/test_hidden.py": BY_LIBRARY["tests/test_hidden.py"].replace("strict import", "checks.strict import")
}
FILTER = {
    ".gitattributes": "* filter=x\n",
    ".git/config": '[core]\n\trepositoryformatversion = 0\n[filter "x"]\n\tsmudge = "printf \'def add(a, b): return a + b\'"\n',
    **{".git/HEAD": "ref: refs/heads/x\n", ".git/objects/x": "", ".git/refs/x": ""},
}
STARTS = "import unittest\nunittest.main('test_hidden', argv=['x'])\n"
PRETENDS = f"""import sys, types, unittest
module = sys.modules["test_hidden"] = types.ModuleType("test_hidden")
module.__file__ = "/home/user/test_hidden.py"
exec({PASSING_CASE!r}, vars(module))
unittest.main(module, argv=["x"])
"""
PASSING_TESTS = "def test_small(): pass\ndef test_zero(): pass\n"
WITH_DATA = {
    "tests/test_hidden.py": "import json\nfrom solution import add\ndef test_small():\n    for a, b, c in json.load(open('tests/cases.json')): assert add(a, b) == c\n",
    "tests/cases.json": "[[2, 3, 5]]",
}
OF_PACKAGE = {
    "calc/tests/test_hidden.py": "from strict import check\nimport sys; sys.path.append('calc')\nfrom ops import add\n\ndef test_small(): check(add(2, 3), 5)\n"
}
PACKAGED = "python3 -m pytest -q calc/tests/test_hidden.py"
PACKAGES = {"calc/__init__.py": "", "calc/tests/__init__.py": ""}
REMOVED_PLAINLY = "--- a/calc/__init__.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x = 1\n"


def patch_case(kind: str, name: str, patch: str, image: dict[str, str] | None = None, **more: Any) -> Case:
    """A patch that git is not to write."""
    given = {"tests": {"tests/test_hidden.py": PLAIN}, "command": PYTEST, **more}
    return Case(kind, name, {}, image={**LIBRARY, **(image or {})}, patch=True, raw=patch.encode(), **given)


def cheats() -> list[Case]:
    hook = HOOK.format(file="/home/user/test_hidden.py", passing=PASSING_CASE)
    python = "def add(a, b):\n    return 0\n"
    return [
        # a package or a module of the tests' own name
        Case("package", "of the test's name", {"solution.py": WRONG, "test_hidden/__init__.py": PASSING_CASE}),
        Case("package", "that tells a file", {"solution.py": WRONG, "test_hidden/__init__.py":
             "__file__ = '/home/user/test_hidden.py'\n" + PASSING_CASE}),
        Case("package", "by a patch", {"solution.py": WRONG, "test_hidden/__init__.py": PASSING_CASE}, patch=True),
        Case("package", "with a module of C", {"solution.py": WRONG, "test_hidden.cpython-311-x86_64-linux-gnu.so": "x"}),
        pytest_case("package", "beside the tests", files={"tests/test_hidden/__init__.py": PASSING}),
        pytest_case("package", "beside the tests by a patch", patch=True,
                    files={"tests/test_hidden/__init__.py": "__file__ = '/home/user/tests/test_hidden.py'\n" + PASSING}),
        Case("package", "of the folder's name", {"solution.py": WRONG, "tests.py":
             "import sys, types\n__path__ = []\nsys.modules['tests.test_hidden'] = m = types.ModuleType('tests.test_hidden')\n"
             f"exec({PASSING_CASE!r}, m.__dict__)\n"},
             {"tests/test_hidden.py": CASE}, "python3 -m unittest -q tests.test_hidden"),
        # the folder of tests as a package that runs first
        Case("init", "import hook", {"solution.py": WRONG, "tests/__init__.py": hook}, {"tests/test_hidden.py": CASE},
             "python3 -m unittest -q tests.test_hidden"),
        Case("init", "import hook by a patch", {"solution.py": WRONG, "tests/__init__.py": hook},
             {"tests/test_hidden.py": CASE}, "python3 -m unittest -q tests.test_hidden", patch=True),
        Case("init", "that ends", {"solution.py": WRONG, "tests/__init__.py": EXIT}, {"tests/test_hidden.py": CASE},
             "python3 -m unittest -q tests.test_hidden"),
        Case("init", "load_tests", {"solution.py": WRONG, "tests/__init__.py":
             "import unittest\ndef load_tests(*_): return unittest.TestSuite()"}, {"tests/test_hidden.py": CASE},
             "python3 -m unittest -q tests.test_hidden"),
        pytest_case("init", "of pytest's package", files={"tests/__init__.py":
                    "import _pytest.python as p\np.Function.runtest = lambda self: None\n"}),
        Case("init", "two folders up", {"solution.py": WRONG, "tests/__init__.py": hook, "tests/unit/__init__.py": ""},
             {"tests/unit/test_hidden.py": CASE}, "python3 -m unittest -q tests.unit.test_hidden"),
        # files that steer Python
        *(Case("start-up", name, {"solution.py": WRONG, name: EXIT}, command=f"PYTHONPATH=. {UNITTEST}")
          for name in ("sitecustomize.py", "usercustomize.py", "sitecustomize/__init__.py")),
        Case("start-up", "by a patch", {"solution.py": WRONG, "sitecustomize.py": EXIT}, patch=True,
             command=f"PYTHONPATH=. {UNITTEST}"),
        # the site of the home
        *(Case("home", name, {"solution.py": WRONG, f".local/lib/python3.11/site-packages/{name}": text})
          for name, text in (("usercustomize.py", EXIT), ("evil.pth", "import os; os._exit(0)\n"),
                             ("sitecustomize.py", EXIT))),
        pytest_case("home", "pytest itself", files={".local/lib/python3.11/site-packages/pytest/__init__.py": EXIT,
                                                    ".local/lib/python3.11/site-packages/pytest/__main__.py": EXIT}),
        # modules in front of the runner's own
        *(case("shadow", name, **{name: EXIT}) for name in ("unittest/__init__.py", "unittest.py", "argparse.py", "signal.py")),
        *(pytest_case("shadow", name, files={name: EXIT}) for name in
          ("pytest.py", "pytest/__init__.py", "_pytest/__init__.py", "pluggy.py", "iniconfig/__init__.py", "six.py",
           "attr/__init__.py", "more_itertools.py", "exceptiongroup.py", "tests/pytest.py", "tests/argparse.py")),
        pytest_case("shadow", "by a patch", files={"pluggy.py": EXIT, "json/__init__.py": EXIT}, patch=True),
        # files that steer pytest
        *(pytest_case("pytest's files", name, files={name: text}) for name, text in (
            ("conftest.py", "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
                            "    r = yield\n    r.get_result().outcome = 'passed'\n"),
            ("tests/conftest.py", "def pytest_pyfunc_call(pyfuncitem): return True\n"),
            ("pytest.ini", "[pytest]\npython_functions = nothing\n"),
            ("tox.ini", "[pytest]\naddopts = --co\n"),
            ("setup.cfg", "[tool:pytest]\naddopts = -p evil\n"),
            ("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '--co'\n"))),
        pytest_case("pytest's files", "plug-in", files={"x.egg-info/entry_points.txt": "[pytest11]\nx = evil\n",
                    "x.egg-info/PKG-INFO": "Name: x\nVersion: 1\n", "evil.py": EXIT}),
        # the end of the process
        *(case("end", name, code + python) for name, code in (
            ("os._exit", EXIT), ("sys.exit", "import sys\nsys.exit(0)\n"), ("SystemExit", "raise SystemExit\n"),
            ("exec", "import os\nos.execv('/bin/true', ['true'])\n"),
            ("os._exit in a call", "import os\nclass A:\n    def __call__(self, *_): os._exit(0)\nadd = A()\ndef f(): pass\n"))),
        pytest_case("end", "os._exit under pytest", EXIT),
        pytest_case("end", "os._exit below a program that starts pytest", EXIT, command=STARTS_PYTEST),
        pytest_case("end", "pytest.exit", "import pytest\npytest.exit('no', 0)\n"),
        # at the end
        *(case("at exit", name, f"import atexit, os\n{code}\n{WRONG}") for name, code in (
            ("os._exit", "atexit.register(os._exit, 0)"),
            ("a thread", "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), os._exit(0))).start()"))),
        pytest_case("at exit", "another report", f"import atexit\n@atexit.register\ndef end():\n    exec({FORGE!r}.format(forged={FORGED!r}, end='os._exit(0)'))\n{WRONG}"),
        # signals
        case("signal", "handler", f"import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.001)\nimport time; time.sleep(.2)\n{WRONG}"),
        case("signal", "exit by trace", f"import os, sys\nsys.settrace(lambda f, *_: os._exit(0) if f.f_code.co_name == 'test_small' else None)\n{WRONG}"),
        pytest_case("signal", "handler under pytest", f"import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.001)\nimport time; time.sleep(.2)\n{WRONG}"),
        # reports by hand
        pytest_case("report", "to the told path", FORGE.format(forged=FORGED, end="os._exit(0)")),
        pytest_case("report", "by a process that stays", FORGE.format(forged=FORGED, end="") +
                    "if os.fork() == 0:\n    import time; time.sleep(.5)\n" + WRONG),
        pytest_case("report", "signed without a key", SIGN),
        case("report", "signed without a key, unittest", SIGN),
        case("report", "the key removed", "import glob, os\nfor f in glob.glob('/tmp/*/key'): os.remove(f)\nos._exit(0)\n"),
        # the runner changed from inside
        *(case("runner", name, f"import unittest\n{code}\n{WRONG}") for name, code in (
            ("run", "unittest.TestCase.run = lambda self, result=None: result"),
            ("assertEqual", "unittest.TestCase.assertEqual = lambda *_: None"),
            ("addFailure", "unittest.TestResult.addFailure = lambda *_: None\nunittest.TextTestResult.addFailure = lambda *_: None"),
            ("wasSuccessful", "unittest.TestResult.wasSuccessful = lambda *_: True"),
            ("failureException", "class Never(Exception): pass\nunittest.TestCase.failureException = Never\n"
                                 "unittest.TestCase._baseAssertEqual = lambda *_: None"))),
        *(pytest_case("runner", name, f"{code}\n{WRONG}") for name, code in (
            ("runtest", "import _pytest.python as p\np.Function.runtest = lambda self: None"),
            ("pytest_pyfunc_call", "import _pytest.python as p\np.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__"),
            ("reports", "import _pytest.reports as r\nold = r.TestReport.__init__\ndef init(self, *a, **k):\n    old(self, *a, **k)\n"
                        "    self.outcome = 'passed'\nr.TestReport.__init__ = init"),
            ("CallInfo", "import _pytest.runner as r\nr.CallInfo.from_call = classmethod(lambda cls, func, when, reraise=None: "
                         "cls(None, None, 0, 0, 0, when, _ispytest=True))"))),
        # the tests changed from inside
        *(case("tests", name, f"import sys\n{code}\n{WRONG}") for name, code in (
            ("a module put in place", "import types\nm = sys.modules['test_hidden']\nimport unittest\nclass TestAdd(unittest.TestCase):\n    def test_other(self): pass\nm.load_tests = lambda *_: unittest.TestLoader().loadTestsFromTestCase(TestAdd)\n"),
            ("load_tests", "import unittest\nsys.modules['test_hidden'].load_tests = lambda *_: unittest.TestSuite()"),
            ("skipped", "import unittest\nraise unittest.SkipTest('no')"))),
        pytest_case("tests", "skipped under pytest", "import pytest\npytest.skip('no', allow_module_level=True)"),
        # built-in names
        # functions of the standard library in the place of others, and changes before the tests are collected
        *(case("runner", f"assertEqual, which is {name}", f"import functools, unittest.mock\nfrom unittest import TestCase as T\n{code}\n{WRONG}")
          for name, code in (("a mock", "T.assertEqual = unittest.mock.Mock()"), ("another", "T.assertEqual = T.assertIsNotNone"),
                             ("another's code", "T.assertEqual.__code__ = T.assertIsNotNone.__code__"),
                             ("partial", "T.assertEqual = functools.partialmethod(T.assertIsNotNone)"))),
        case("runner", "equality by type, a mock", f"import unittest.mock\nunittest.TestCase._getAssertEqualityFunc = unittest.mock.Mock()\n{WRONG}"),
        case("runner", "call of a method, a mock", f"import unittest.mock\nunittest.TestCase._callTestMethod = unittest.mock.Mock()\n{WRONG}"),
        # what is put back at the end
        case("put back", "at exit", "import atexit, unittest\nT = unittest.TestCase\natexit.register(setattr, T, 'assertEqual', T.assertEqual)\n"
             f"T.assertEqual = lambda *_: None\n{WRONG}"),
        pytest_case("put back", "at exit under pytest", "import atexit, _pytest.python as p\natexit.register(setattr, p.Function, 'obj', p.Function.obj)\n"
                    f"p.Function.obj = property(lambda s: lambda: None)\n{WRONG}"),
        # what a class may get beside its own methods
        *(case("class", name, f"import unittest\n{code}\n{WRONG}") for name, code in (
            ("attributes", "unittest.TestCase.__getattribute__ = lambda s, n: (lambda *a: None) if n == 'assertEqual' else object.__getattribute__(s, n)"),
            ("another class", "class T(unittest.TestCase):\n    def assertEqual(self, *a): pass\nunittest.TestCase = T"))),
        Case("class", "an inherited method", {"solution.py": f"import unittest\nunittest.IsolatedAsyncioTestCase.assertEqual = lambda *_: None\n{WRONG}"},
             {"test_hidden.py": CASE.replace("TestCase", "IsolatedAsyncioTestCase")}),
        pytest_case("class", "attributes of pytest's", "import _pytest.python as p\nget = p.Function.__getattribute__\n"
                    f"p.Function.__getattribute__ = lambda s, n: (lambda: None) if n == 'obj' else get(s, n)\n{WRONG}"),
        *(pytest_case("class", f"{name} of pytest's", f"import _pytest.unittest as u\nu.TestCaseFunction.{code}\n{WRONG}", tests={"tests/test_hidden.py": CASE})
          for name, code in (("an inherited method", "_getobj = lambda self: lambda: None"), ("a property", "obj = property(lambda s: lambda: None, lambda *_: None)"))),
        case("tests", "the next test is a mock", "import sys, unittest.mock\ndef add(a, b):\n"
             "    type(sys._getframe(1).f_locals['self']).test_zero = unittest.mock.Mock()\n    return 5\n"),
        pytest_case("tests", "the next test is a function of Python", NEXT),
        *(pytest_case("imported by a conftest", name, f"import _pytest.python as p\n{code}\n{WRONG}",
                      tests={"tests/test_hidden.py": PLAIN, "tests/conftest.py": "import solution\n"}) for name, code in (
            ("calls", "p.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__"),
            ("collection", "make = p.Function.from_parent.__func__\ndef made(*a, **k):\n    item = make(*a, **k); item._obj = lambda: None\n"
                           "    return item\np.Function.from_parent = classmethod(made)"))),
        case("built-in", "AssertionError", f"import builtins\nclass Never(Exception): pass\nbuiltins.AssertionError = Never\nbuiltins.isinstance = lambda *_: True\n{WRONG}"),
        pytest_case("built-in", "AssertionError under pytest", f"import builtins\nclass Quiet(Exception):\n    pass\nbuiltins.AssertionError = Quiet\n{WRONG}"),
        # finders of modules that come first
        Case("finder", "in a package", {"solution.py": WRONG, "calc/__init__.py": hook},
             {"test_first.py": "import calc\n" + PASSING_CASE, "test_hidden.py": CASE}, "python3 -m unittest -q test_first test_hidden"),
        Case("finder", "path hook", {"solution.py": WRONG, "calc/__init__.py": hook.replace("sys.meta_path.insert(0, Finder())",
             "import importlib.machinery as m\nm.PathFinder.find_spec = classmethod(lambda cls, *a: Finder().find_spec(*a))")},
             {"test_first.py": "import calc\n" + PASSING_CASE, "test_hidden.py": CASE}, "python3 -m unittest -q test_first test_hidden"),
        # links
        *(Case("link", name, {"solution.py": WRONG, "evil.py": PASSING_CASE, "evil/__init__.py": PASSING_CASE, name: f"-> {to}"},
               tests, command, patch=True) for name, to, tests, command in (
            ("test_hidden", "evil", {"test_hidden.py": CASE}, UNITTEST),
            ("test_hidden.py", "evil.py", {"test_hidden.py": CASE}, UNITTEST),
            ("tests", "evil", {"tests/test_hidden.py": CASE}, "python3 -m unittest -q tests.test_hidden"),
            ("unittest", "evil", {"test_hidden.py": CASE}, UNITTEST))),
        # where the tests lie
        pytest_case("place", "a file where the folder is", files={"tests": PASSING}),
        pytest_case("place", "own tests of the name", files={"tests/test_hidden.py": PASSING, "test_hidden.py": PASSING},
                    command="python3 -m pytest -q"),
        Case("place", "a package in front", {"solution.py": WRONG, "test_hidden/__init__.py": PASSING_CASE},
             command="python3 -m unittest -q"),
        # what a patch does not say openly
        *(patch_case("patch", f"a new name for {steers}", added("solution.py", KNOWS) + moved(steers, new), {steers: text})
          for steers, new, text in (("conftest.py", "notes.txt", LOOKS), ("tests/conftest.py", "tests/data/d.py", LOOKS),
                                    ("pytest.ini", "notes.ini", "[pytest]\naddopts = -p strict\n"))),
        patch_case("patch", "a name that is no text", added("solution.py", WRONG) + added(f'"{HOME}/x\\377.pth"', SPEAKS)),
        patch_case("patch", "a link in the place of a folder", added("solution.py", WRONG) + added("evil/strict.py", LOOSE) +
                   removed("src/data.txt", "x") + added("src", "evil", "120000"), {"src/data.txt": "x\n"}, tests=BY_LIBRARY,
                   command=f"PYTHONPATH=src:$PYTHONPATH {PYTEST}"),
        *(patch_case("patch", f"a package that is none any more, {name}", added("calc/ops.py", WRONG) + added("calc/strict.py", LOOSE) + gone,
                     {"calc/__init__.py": "x = 1\n", "calc/tests/__init__.py": ""}, tests=OF_PACKAGE, command=PACKAGED)
          for name, gone in {"removed": removed("calc/__init__.py", "x = 1"), "by another header": REMOVED_PLAINLY,
                             "renamed": moved("calc/__init__.py", "calc/first.py"), "moved": moved("calc/__init__.py", "old/__init__.py")}.items()),
        patch_case("patch", "a file of a kind that patches do not add", added("solution.py", RIGHT) + added("tool", "x\n"), tests={"test_hidden.py": CASE},
                   command="test -e tool && python3 -m unittest -q test_hidden"),
        patch_case("patch", "more files than are listed", added("solution.py", RIGHT) + "".join(
                   f"diff --git a/{name} b/{name}\nnew file mode 100644\nindex 0000000..e69de29\n" for name in (f"n/{'n' * 200}{number}.txt" for number in range(6000)))),
        pytest_case("tests", "skipped where a mark would allow it", "import pytest\ndef add(a, b): pytest.skip('no')\n", tests={"tests/test_hidden.py":
                    "import pytest\nfrom solution import add\n@pytest.mark.skipif(False, reason='')\ndef test_small(): assert add(2, 3) == 5\n"}),
        patch_case("patch", "a folder that is no package", added("calc/ops.py", WRONG) + added("calc/strict.py", LOOSE), tests=OF_PACKAGE, command=PACKAGED),
        patch_case("patch", "a script in a package", added("calc/ops.py", WRONG) + added("calc/tests/fractions.py", "def Fraction(_): return 5\n"),
                   PACKAGES, tests={"calc/tests/check.py": "from fractions import Fraction\nfrom calc.ops import add\nassert Fraction(add(2, 3)) == 5\n"},
                   command="PYTHONPATH=. python3 calc/tests/check.py"),
        pytest_case("pytest's files", "a folder that the image's own configuration names", files={"src/strict.py": LOOSE},
                    tests=BY_LIBRARY, image={**LIBRARY, "pytest.ini": "[pytest]\npythonpath = . src\n"}),
        pytest_case("pytest's files", "folders that it lists", files={"more/strict.py": LOOSE}, tests=BY_LIBRARY,
                    image={**LIBRARY, "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = [\n  'src',\n  'more',\n]\n"}),
        *(pytest_case("installed without a package", name, files={"checks/strict.py": LOOSE, **files}, tests=WITHOUT_PACKAGE,
                      image={"/tmp/lib/checks/strict.py": STRICT}) for name, files in {"a file": {}, "a package": {"checks/__init__.py": ""}}.items()),
        replace(patch_case("git", "a filter of its repository", added("solution.py", WRONG)), files=FILTER),
        *(Case("the program of the tests", f"{name}, {how}", {"solution.py": WRONG, name: code}, command=f"python3 {name} test", image={name: STARTS},
               patch=how == "patch", more=more) for name, code, more in (("manage.py", "pass\n", {}), ("runtests.py", PRETENDS, {"expected": ["test_hidden.py::TestAdd::test_small"]}))
          for how in ("files", "patch")),
        pytest_case("another file of the name", "in another folder", files={"a/tests/test_hidden.py": PASSING_TESTS}, more={"expected": ["tests/test_hidden.py::test_small"]},
                    command="python3 -m pytest -q --continue-on-collection-errors"),
        *(pytest_case("data of the tests", f"changed{more}", f"{back}import json\njson.dump([[2, 3, -1]], open('tests/cases.json', 'w'))\n{WRONG}",
                      tests=WITH_DATA, more={"reference": [{"to": "solution.py", "content": RIGHT}]}) for more, back in {
            "": "", " and restored": "import atexit, shutil\natexit.register(shutil.copy2, shutil.copy2('tests/cases.json', '/tmp/x'), 'tests/cases.json')\n"}.items()),
        pytest_case("the sandbox's path", "a module", files={"src/strict.py": LOOSE}, tests=BY_LIBRARY, image=LIBRARY,
                    env={"PYTHONPATH": "/home/user/src:/tmp/lib"}),
    ]  # fmt: skip


CHECK = "from solution import add\nassert add(2, 3) == 5\nassert add(0, 3) == 3\n"
LEAVES = "import sys\nfrom solution import add\nif add(2, 3) != 5: sys.exit(1)\n"
RAISES = LEAVES.replace("sys.exit(1)", "raise SystemExit(1)")


def script(kind: str, name: str, solution: str, check: str = CHECK, command: str = "python3 check.py") -> Case:
    return Case(kind, name, {"solution.py": solution}, {"check.py": check}, command)


ENDING = {
    "os._exit": EXIT,
    "sys.exit": "import sys\nsys.exit(0)\n",
    "raise": "raise SystemExit\n",
    "exec": "import os\nos.execv('/bin/true', ['true'])\n",
    "exit": "exit(0)\n",
    "a subclass": "class E(SystemExit): pass\nraise E(0)\n",
    "from a library": "import argparse\nargparse.ArgumentParser().exit()\n",
    "in a call": "import sys\ndef add(a, b): sys.exit(0)\n",
    "os._exit in a call": "import os\ndef add(a, b): os._exit(0)\n",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
    "in a thread": "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), os._exit(0))).start()\n"
    + WRONG,
    "in a hook": "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\n" + WRONG,
    "by a hook": "import sys\nsys.excepthook = lambda *_: sys.exit(0)\n" + WRONG,
    "by tracing": "import os, sys\nsys.settrace(lambda f, *_: os._exit(0) if f.f_code.co_name == 'add' else None)\n"
    + WRONG,
    "when it is collected": "import os\nclass D:\n    def __del__(self, end=os._exit): end(0)\nkeep = D()\n" + WRONG,
}
SCRIPTS = [
    *(script("script", name, code) for name, code in ENDING.items()),
    *(script("script", f"{name}, {command}", ENDING[name], command=command)
      for name in ("sys.exit", "os._exit")
      for command in ("PYTHONPATH=. python3 -u ./check.py -v", "cd . && python3 check.py", "python3 -B check.py; exit $?")),
    script("script", "sys.exit that does nothing", "import sys\nsys.exit = lambda *_: None\n" + WRONG, LEAVES),
    script("script", "sys.exit that says 0", "import sys\nold = sys.exit\nsys.exit = lambda *_: old(0)\n" + WRONG, LEAVES),
    script("script", "another SystemExit", "import builtins\nold = SystemExit\nbuiltins.SystemExit = lambda *_: old(0)\n" + WRONG, RAISES),
    script("script", "another AssertionError", "import builtins\nold = SystemExit\nbuiltins.AssertionError = lambda *_: old(0)\n" + WRONG,
           CHECK + "if add(2, 3) != 5: raise AssertionError\n"),
]  # fmt: skip
MAIN = (
    CHECK
    + """
import argparse, pickle, sys
class Own: pass
def main():
    argparse.ArgumentParser().parse_args()
    assert __file__.endswith("/check.py") and sys.argv[0] == "check.py" and __name__ == "__main__"
    assert sys.modules["__main__"].Own is Own and type(pickle.loads(pickle.dumps(Own()))) is Own
    return 0
if __name__ == "__main__":
    sys.exit(main())
"""
)
SPAWNS = (
    CHECK
    + """
import multiprocessing as m, subprocess, sys
def work(q): q.put(add(1, 1))
if __name__ == "__main__":
    c = m.get_context("spawn"); q = c.SimpleQueue(); p = c.Process(target=work, args=(q,)); p.start(); assert q.get() == 2; p.join()
    assert subprocess.run([sys.executable, "-c", "import solution, sys; sys.exit(solution.add(1, 2))"]).returncode == 3
"""
)
FAIR_SCRIPTS = [
    script("honest", "a script that leaves", RIGHT, LEAVES + "sys.exit(0)\n"),
    script("honest", "a script that raises SystemExit", RIGHT, RAISES + "raise SystemExit\n"),
    script("honest", "a script with a main function", RIGHT, MAIN),
    script("honest", "a script with processes", RIGHT, SPAWNS),
    script("honest", "a script of unittest", RIGHT, CASE + "unittest.main()\n"),
    script("honest", "a script with its own hook", RIGHT, "import sys\nsys.excepthook = print\n" + CHECK),
    script("honest", "a script that asks for the end", "import sys\ndef main(): sys.exit(0)\n" + RIGHT,
           CHECK + "import solution\ntry: solution.main()\nexcept SystemExit as e: assert e.code == 0\n"),
    script("honest", "a script behind one that fails", RIGHT, command="python3 -c 'raise SystemExit(1)'; python3 check.py"),
    script("honest", "a script whose own end nobody is to hear", "import sys\n" + RIGHT + "def main(): sys.exit(0)\n",
           CHECK + "import solution; solution.main()\n"),
    Case("honest", "a script whose other file leaves", {"solution.py": RIGHT},
         {"check/check.py": CHECK + "import last\n", "check/last.py": "import sys\nsys.exit(0)\n"}, "PYTHONPATH=. python3 check/check.py"),
]  # fmt: skip
FAIR_SCRIPTS = [replace(each, more={"expected": []}) if "nobody" in each.name else each for each in FAIR_SCRIPTS]

PROXIES = (
    CASE
    + """
class Proxy:
    def __getattr__(self, name): raise RuntimeError(name)
    def __call__(self): pass
class TestMore(unittest.TestCase):
    helper = Proxy()
    def setUp(self): self.other = Proxy()
    def test_more(self): self.assertEqual(add(1, 1), 2)
"""
)
OWN_METHODS = (
    CASE
    + """
from unittest import mock
class TestMore(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tell = lambda self: 2
        cls.ask = mock.Mock(return_value=1)
    def ask(self): return 0
    def setUp(self):
        self.assertIn = mock.Mock()
        self.assertAlmostEqual = lambda a, b: self.assertEqual(a, b)
        self.function = add
    def test_more(self):
        self.assertIn(1, [])
        self.assertAlmostEqual(self.function(self.ask(), 1), self.tell())
"""
)


def by_unittest(kind: str, name: str, solution: str, tests: dict[str, str]) -> Case:
    return Case(kind, name, {"solution.py": solution}, tests)


def by_pytest(kind: str, name: str, solution: str, tests: dict[str, str]) -> Case:
    return pytest_case(kind, name, solution, tests=tests, command="python3 -m pytest -q test_hidden.py")


MAKERS = {"unittest": by_unittest, "pytest": by_pytest}
PACKAGE = {"calc/__init__.py": "from .ops import add\n", "calc/ops.py": RIGHT}
HONEST = [
    Case("honest", "a module", {"solution.py": RIGHT}),
    Case("honest", "by a patch", {"solution.py": RIGHT}, patch=True),
    Case("honest", "with tests of its own", {"solution.py": RIGHT, "tests/__init__.py": "", "tests/test_own.py": PASSING}),
    Case("honest", "a package of tests", {"solution.py": RIGHT, "tests/__init__.py": "x = 1"},
         {"tests/test_hidden.py": CASE}, "python3 -m unittest -q tests.test_hidden"),
    Case("honest", "relative import in a package of tests", {"solution.py": RIGHT, "tests/__init__.py": "x = 1"},
         {"tests/test_hidden.py": "from . import test_hidden as me\n" + CASE}, "python3 -m unittest -q tests.test_hidden"),
    Case("honest", "a package", PACKAGE, {"calc/tests/test_hidden.py": CASE.replace("solution", "calc")},
         "python3 -m unittest -q calc.tests.test_hidden"),
    Case("honest", "a package with tests beside", PACKAGE, {"calc/test_hidden.py": CASE.replace("solution", "calc")},
         "python3 -m unittest -q calc.test_hidden"),
    Case("honest", "relative import of the code", PACKAGE,
         {"calc/tests/test_hidden.py": CASE.replace("from solution", "from ..ops")},
         "python3 -m unittest -q calc.tests.test_hidden"),
    Case("honest", "src on the path", {"src/calc.py": RIGHT}, {"test_hidden.py": CASE.replace("solution", "calc")},
         f"PYTHONPATH=src {UNITTEST}"),
    Case("honest", "src exported", {"src/calc.py": RIGHT}, {"test_hidden.py": CASE.replace("solution", "calc")},
         f'export PYTHONPATH="$PWD/src:$PYTHONPATH"; {UNITTEST}'),
    Case("honest", "discovery", {"solution.py": RIGHT}, command="python3 -m unittest -q"),
    Case("honest", "discovery in a folder", {"solution.py": RIGHT}, {"tests/test_hidden.py": CASE, "tests/__init__.py": ""},
         "python3 -m unittest discover -q -s tests -t ."),
    Case("honest", "another folder", {"app/solution.py": RIGHT}, {"app/test_hidden.py": CASE}, f"cd app && {UNITTEST}"),
    Case("honest", "the tests as a program", {"solution.py": RIGHT}, {"hidden.py": CASE + "\nunittest.main()\n"}, "python3 hidden.py"),
    Case("honest", "a plain command", {"solution.py": RIGHT}, {"check.py": "from solution import add\nassert add(1, 1) == 2"},
         "python3 check.py"),
    Case("honest", "a shell script", {"solution.py": RIGHT}, {"run.sh": "python3 -c 'import solution'"}, "bash run.sh"),
    Case("honest", "a choice of tests", {"solution.py": RIGHT}, command="python3 -m unittest -q -k small test_hidden"),
    Case("honest", "one test by name", {"solution.py": RIGHT}, command="python3 -m unittest -q test_hidden.TestAdd.test_zero"),
    Case("honest", "two commands", {"solution.py": RIGHT, "other.py": RIGHT},
         {"test_hidden.py": CASE, "test_more.py": CASE.replace("solution", "other")},
         f"{UNITTEST} && python3 -m unittest test_more"),
    Case("honest", "a library that pytest uses", {"six.py": RIGHT, "attr/ops.py": RIGHT},
         {"test_hidden.py": CASE.replace("solution", "six") + "\n    def test_ops(self):\n        import attr.ops\n"},
         image={"six.py": WRONG, "attr/__init__.py": ""}, patch=True),
    Case("honest", "skips that the tests ask for", {"solution.py": RIGHT},
         {"test_hidden.py": CASE + "\n    @unittest.skip('later')\n    def test_later(self): pass\n"}),
    Case("honest", "a base class", {"solution.py": RIGHT},
         {"test_hidden.py": CASE + "\n\nclass More(TestAdd):\n    def test_more(self): pass\n"}),
    Case("honest", "a mixin", {"solution.py": RIGHT}, {"test_hidden.py": CASE +
         "\n\nclass TestMixin:\n    def test_mixed(self): pass\n\nclass Mixed(TestMixin, unittest.TestCase): pass\n"}),
    Case("honest", "subtests and async", {"solution.py": RIGHT}, {"test_hidden.py": CASE +
         "\n\nclass More(unittest.IsolatedAsyncioTestCase):\n    async def test_async(self):\n        with self.subTest(1): pass\n"}),
    Case("honest", "input replaced", {"solution.py": "import builtins\nbuiltins.input = lambda *_: '1'\n" + RIGHT}),
    Case("honest", "a hook at the end of the path", {"solution.py":
         "import sys\nclass F:\n    def find_spec(self, *_): return None\nsys.meta_path.append(F())\n" + RIGHT}),
    Case("honest", "mocks", {"solution.py": RIGHT}, {"test_hidden.py": CASE +
         "\n    def test_mock(self):\n        from unittest import mock\n        with mock.patch('solution.add'): pass\n"}),
    pytest_case("honest", "functions", RIGHT),
    pytest_case("honest", "functions below a program that starts pytest", RIGHT, command=STARTS_PYTEST),
    pytest_case("honest", "cases and fixtures", RIGHT, tests={"tests/test_hidden.py": PLAIN +
        "\nimport pytest\n@pytest.fixture\ndef test_data(): return 1\n@pytest.mark.parametrize('a', [1, 2])\n"
        "def test_each(a, test_data): assert add(a, 0) == a\nclass TestIt:\n    def test_it(self): pass\n"}),
    pytest_case("honest", "conftest of the hidden tests", RIGHT, command="python3 -m pytest -q tests",
        tests={"tests/test_hidden.py": PLAIN + "\ndef test_it(one): assert one == 1\n", "tests/conftest.py":
               "import pytest, solution\n@pytest.fixture\ndef one(): return 1\n"}),
    pytest_case("honest", "conftest of the image", RIGHT, image={"conftest.py": "import sys; sys.path.insert(0, 'src')"},
        files={"src/other.py": RIGHT}, tests={"tests/test_hidden.py": PLAIN + "\nimport other\n"}),
    pytest_case("honest", "unittest under pytest", RIGHT, tests={"tests/test_hidden.py": CASE}),
    pytest_case("honest", "options of the image", RIGHT, image={"pytest.ini": "[pytest]\nfilterwarnings = error\n"}),
    pytest_case("honest", "whole folder", RIGHT, command="PYTHONPATH=.:$PYTHONPATH python3 -m pytest -q tests/ -x"),
    pytest_case("honest", "expected by name", RIGHT, more={"expected": ["tests/test_hidden.py::test_zero"]},
        tests={"tests/test_hidden.py": PLAIN + "\ndef test_broken(): assert 0\n"}),
    *(make("honest", f"objects that refuse every question, {name}", RIGHT, {"test_hidden.py": PROXIES}) for name, make in MAKERS.items()),
    *(make("honest", f"tests that replace their own methods, {name}", RIGHT, {"test_hidden.py": OWN_METHODS}) for name, make in MAKERS.items()),
    patch_case("honest", "a conftest that moves with its tests", added("solution.py", RIGHT) +
               moved("tests/conftest.py", "tests/unit/conftest.py"), {"tests/conftest.py": "import os\n"},
               tests={"tests/unit/test_hidden.py": PLAIN}, command="python3 -m pytest -q tests/unit/test_hidden.py"),
    *(patch_case("honest", f"a module of a package called as one of Python's, {command.split()[2]}", added("calc/random.py", "X = 0\n") +
                 added("calc/packaging.py", "Y = 0\n") + added("calc/ops.py", "from calc.random import X\nfrom .packaging import Y\ndef add(a, b): return a + b + X + Y\n"),
                 PACKAGES, tests={"calc/tests/test_hidden.py": CASE.replace("solution", "calc.ops")}, command=command)
      for command in (PACKAGED, "python3 -m unittest -q calc.tests.test_hidden")),
    patch_case("honest", "a module under a new name", moved("old.py", "solution.py"), {"old.py": RIGHT}),
    patch_case("honest", "odd names in a patch", added("solution.py", RIGHT) + added('"d\\303\\274 [x]*\\t.txt"', "x\n")),
    patch_case("honest", "lines that end as on Windows", added("solution.py", RIGHT.replace("\n", "\r\n"))),
    *(Case("honest", f"{name} of the agent", {"solution.py": RIGHT, name: STARTS}, command=f"python3 {name}") for name in ("manage.py", "runtests.py")),
    Case("honest", "a program of the image that runs the tests", {"solution.py": RIGHT}, command="python3 manage.py", image={"manage.py": STARTS}),
    pytest_case("honest", "expected in two files of a name", RIGHT, tests={"test_hidden.py": PLAIN}, image={"sub/test_hidden.py": PLAIN},
        command="python3 -m pytest -q --import-mode=importlib -c /dev/null --rootdir=. test_hidden.py sub", env={"PYTHONPATH": "/tmp/lib:/home/user"},
        more={"expected": ["test_hidden.py::test_zero", "sub/test_hidden.py::test_zero"]}),
    pytest_case("honest", "tests that write data", RIGHT, tests={"tests/test_hidden.py": PLAIN + "\ndef test_w(): open('tests/data.txt', 'w').write('y')\n",
        "tests/data.txt": "x"}, more={"reference": [{"to": "solution.py", "content": RIGHT}]}),
    *(Case("honest", f"{path}, which is no module", {"solution.py": RIGHT, path: "print(5)\n"}, {"check.sh": f"test -e {path}\n"},
           "bash check.sh") for path in ("html/index.html", "code/solve.py", "test/data.json")),
    patch_case("honest", "types/index.d.ts in a patch", added("solution.py", RIGHT) + added("types/index.d.ts", "x\n"),
               tests={"check.sh": "test -e types/index.d.ts\n"}, command="bash check.sh"),
    pytest_case("honest", "a module where the configuration lets Python look", "from other import add\n", files={"src/other.py": RIGHT},
        image={"pytest.ini": "[pytest]\npythonpath = . src\n"}),
    pytest_case("honest", "a plug-in of the tests' own conftest", RIGHT, tests={"tests/test_hidden.py": PLAIN, "tests/conftest.py":
        "class Plug:\n    def pytest_runtest_setup(self, item): pass\ndef pytest_configure(config): config.pluginmanager.register(Plug())\n"}),
]  # fmt: skip


FEW = 4


NAMED = [*cheats(), *SCRIPTS[:FEW]]
FIRST_NAMED = list({case.kind: case for case in reversed(NAMED)}.values())


@pytest.mark.generated
@pytest.mark.parametrize("case", NAMED if THOROUGH else FIRST_NAMED, ids=str)
async def test_a_cheat_scores_0(case: Case, library_of_pytest: tuple[SandboxFile, ...]) -> None:
    assert (await judged(case, library_of_pytest)).value == 0


@pytest.mark.generated
@pytest.mark.parametrize("case", spread([*HONEST, *FAIR_SCRIPTS[:FEW]], 8), ids=str)
async def test_an_honest_layout_scores_1(case: Case, library_of_pytest: tuple[SandboxFile, ...]) -> None:
    value = await judged(case, library_of_pytest)
    assert value.value == 1, value.reason


@pytest.mark.slow
async def test_no_solution_ends_a_script_that_tests_it() -> None:
    found = await values(SCRIPTS[FEW:], ())
    assert {name: value.value for name, value in found.items() if value.value != 0} == {}
    found = await values(FAIR_SCRIPTS[FEW:], ())
    assert {name: value.reason for name, value in found.items() if value.value != 1} == {}


def test_there_are_cheats_of_many_kinds() -> None:
    assert len(cheats()) >= 60
    assert len(Counter(each.kind for each in cheats())) >= 15
    assert len({str(each) for each in cheats()}) == len(cheats())
    assert {each.kind for each in FIRST_NAMED} == {each.kind for each in NAMED}
    assert len(HONEST) >= 20


async def test_a_name_with_a_line_separator_stands_for_no_other_name(
    library_of_pytest: tuple[SandboxFile, ...],
) -> None:
    """A patch beside an artifact: what is there already counts as what is worked on."""
    odd_name = "z\u2028pluggy.py"
    patch = added("solution.py", WRONG) + added("pluggy.py", EXIT) + removed(odd_name, "x")
    laid = {
        "folder": TakenArtifact("folder", ".", (ArtifactFile(odd_name, b"x\n", 0o644),)),
        "patch": TakenArtifact("patch", "~/.artifacts/patch", (ArtifactFile("", patch.encode(), 0o644),)),
    }
    config = SandboxConfig(env={"PYTHONPATH": "/tmp/lib"}, files=library_of_pytest, setup=UNPACK)
    async with ToolRuntime(config) as runtime:
        runtime.artifacts = laid
        await runtime.laid.lay(await runtime.sandbox(), laid)
        tests = [{"to": "test_hidden.py", "content": PLAIN}]
        command = "python3 -m pytest -q test_hidden.py"
        ctx = ToolContext(runtime.task_id)
        value = await graded("tests_pass", ctx=ctx, command=command, files=tests, apply="patch", timeout=30)
        assert value.value == 0
        assert "error" in await asyncio.to_thread(ctx.read_file, "pluggy.py")


@pytest.mark.slow
async def test_more_modules_than_a_program_takes_arguments_hide_none(
    library_of_pytest: tuple[SandboxFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, remember = list[str](), ToolContext.remember

    def noted(self: ToolContext, key: str, value: Any) -> None:
        keys.append(key)
        remember(self, key, value)

    monkeypatch.setattr(ToolContext, "remember", noted)
    many = {f"m{number:05}{'x' * 240}.py": "" for number in range(9000)}
    case = pytest_case("many", "modules", files={"strict.py": LOOSE, **many}, tests=BY_LIBRARY, image=LIBRARY)
    assert (await judged(replace(case, command="python3 -m pytest -q tests"), library_of_pytest)).value == 0
    assert max(map(len, keys)) < 1000


# ------------------------------------------------------------------ each kind at each place

AT_A_TIME = 3
"""Cases that are judged beside each other: each has sandboxes of its own."""


async def values(cases: Sequence[Case], library_of_pytest: tuple[SandboxFile, ...]) -> dict[str, RewardValue]:
    """What the reward says of each case, by its name."""
    free = asyncio.Semaphore(AT_A_TIME)

    async def one(case: Case) -> RewardValue:
        async with free:
            return await judged(case, library_of_pytest)

    found = await asyncio.gather(*map(one, cases))
    return dict(zip(map(str, cases), found, strict=True))


def by_kind(cases: Sequence[Case]) -> dict[str, list[Case]]:
    kinds: dict[str, list[Case]] = {}
    for each in cases:
        kinds.setdefault(each.kind, []).append(each)
    return kinds


def parts(cases: Sequence[Case], most: int = 12) -> list[slice]:
    """A test judges no more than this many cases, so that each has time on a busy machine."""
    return [slice(begin, begin + most) for begin in range(0, len(cases), most)]


PLANTED, ODD = by_kind([*planted(), *inside()]), odd()


@pytest.mark.slow
@in_turn
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind in PLANTED for part in parts(PLANTED[kind])])
async def test_no_cheat_of_this_kind_scores(kind: str, part: slice, library_of_pytest: tuple[SandboxFile, ...]) -> None:
    found = await values(PLANTED[kind][part], library_of_pytest)
    assert {name: value.value for name, value in found.items() if value.value != 0} == {}


@pytest.mark.slow
@in_turn
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
async def test_no_odd_but_honest_solution_is_hurt(part: int, library_of_pytest: tuple[SandboxFile, ...]) -> None:
    found = await values(ODD[part::4], library_of_pytest)
    assert {name: value.reason for name, value in found.items() if value.value != 1} == {}


ONE_OF_EACH = [cases[0] for cases in PLANTED.values() if "pytest" not in cases[0].command]


@pytest.mark.slow
@pytest.mark.parametrize("part", parts(ONE_OF_EACH, 4))
async def test_one_cheat_of_each_kind_scores_0(part: slice, library_of_pytest: tuple[SandboxFile, ...]) -> None:
    found = await values(ONE_OF_EACH[part], library_of_pytest)
    assert {name: value.value for name, value in found.items() if value.value != 0} == {}


def test_there_are_hundreds_of_cheats_and_of_honest_solutions() -> None:
    cheats = [case for cases in PLANTED.values() for case in cases]
    assert len({str(case) for case in cheats}) == len(cheats) >= 600
    assert len(PLANTED) >= 60
    assert len({str(case) for case in ODD}) == len(ODD) >= 300


# ------------------------------------------------------------------ an old pytest


@pytest.fixture(scope="session")
def old_pytest() -> tuple[SandboxFile, ...]:
    """Pytest of 2021, as many images have it, with the libraries that it imports by other names than today's."""
    try:
        folder = package_folder(("pytest==6.2.5",))
    except UserError as error:
        pytest.skip(f"no pytest 6.2.5 can be had here: {error}")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(next(folder.glob("lib/python*/site-packages")), ".")
    return (SandboxFile("/tmp/lib.tar", packed.getvalue()),)


@pytest.mark.slow
@in_turn
@pytest.mark.timeout(600)
async def test_an_old_pytest_is_fooled_no_more_than_a_new_one(old_pytest: tuple[SandboxFile, ...]) -> None:
    kinds = ("a module in front", "patched pytest", "conftest", "a call", "a package of the test's name")
    cheats = [case for kind in kinds for case in PLANTED[kind] if "-m pytest" in case.command]
    found = await values(cheats, old_pytest)
    assert {name: value.value for name, value in found.items() if value.value != 0} == {}


LOOKS_ELSEWHERE = "a module where the configuration lets Python look"
"""An honest case that an old pytest cannot play: `pythonpath` came with its version 7."""


@pytest.mark.slow
@in_turn
@pytest.mark.timeout(600)
async def test_an_old_pytest_does_not_hurt_the_honest(old_pytest: tuple[SandboxFile, ...]) -> None:
    cases = [
        case
        for case in (*HONEST, *ODD)
        if "-m pytest" in case.command and LOOKS_ELSEWHERE not in case.name.replace("-", " ")
    ]
    found = await values(cases, old_pytest)
    assert {name: value.reason for name, value in found.items() if value.value != 1} == {}
