"""Which files of an agent would decide over tests instead of passing them, by where they lie and what they are called.

Owns the rules alone; `tests_pass` applies them to a sandbox's files and to a patch. Paths are relative to the working
directory where they lie in it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase, translate

STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "unittest.cfg", "nose2.cfg", ".coveragerc", "pyvenv.cfg", "*.pth", "*._pth", "*.pyc"),
    *("sitecustomize", "sitecustomize.*", "usercustomize", "usercustomize.*", "site-packages", "dist-packages"),
    *("*.egg-info", "*.dist-info", "*.egg-link"),
)
"""Files and folders that steer how Python and pytest run, wherever they lie."""
MODULES = (
    *(*sys.stdlib_module_names, "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py", "nose2"),
    *("attr", "attrs", "six", "more_itertools", "atomicwrites", "wcwidth", "toml", "tomli", "exceptiongroup"),
    *("importlib_metadata", "zipp", "typing_extensions", "pathlib2", "funcsigs", "colorama", "setuptools"),
    *("pkg_resources", "_distutils_hack", "pytest_*", "xdist", "execnet", "anyio", "hypothesis", "_hypothesis_*"),
    *("coverage", "mock"),
)
"""What Python, pytest of any version and its plug-ins import: something new of that name would come instead."""
FOLDER_OF_TESTS = re.compile(r"(.*_)?(tests?|testing|hidden)(_.*)?", re.IGNORECASE)
INIT = "__init__.py"

_steering = re.compile("|".join(map(translate, STEERING)))
_modules = re.compile("|".join(map(translate, MODULES)))


class Steering:
    """The rules for tests in `tests`, which are paths of files; `trust` has patterns of what counts nevertheless."""

    def __init__(self, tests: Iterable[str], trust: Sequence[str] = ()) -> None:
        tests = [posixpath.normpath(path) for path in tests]
        self._trust = trust
        self._modules = {_module(path) for path in tests}
        """The tests themselves: a package of the same name wins over a module."""
        self._folders = {""}
        """Where Python looks for modules: where the command runs, and in each folder of tests and above it."""
        for path in tests:
            while path not in ("", "/"):
                path = posixpath.dirname(path)
                self._folders.add(path)

    def steers(self, path: str) -> bool:
        """Whether this file is never taken from the agent."""
        if self._trusted(path):
            return False
        folder, name = posixpath.split(path)
        if name == INIT and folder in self._folders and FOLDER_OF_TESTS.fullmatch(posixpath.basename(folder)):
            return True
        return any(_steering.match(part) for part in path.split("/"))

    def shadows(self, path: str) -> str | None:
        """Return the module that Python would find here, or in a folder above, instead of a test or its own."""
        if self._trusted(path):
            return None
        parts = path.split("/")
        for depth, part in enumerate(parts):
            folder = "/".join(parts[:depth])
            if folder in self._folders:
                last = depth == len(parts) - 1
                module = _module(posixpath.join(folder, part)) if last else posixpath.join(folder, part)
                beside = last and module != path and module in self._folders  # tests.py wins over a folder `tests`
                if module in self._modules or beside or _modules.match(posixpath.basename(module)):
                    return module
        return None

    def packages(self, paths: Iterable[str]) -> list[str]:
        """Those of `paths` that only make a folder of tests a package, as an empty file does."""
        return [path for path in paths if posixpath.basename(path) == INIT and self.steers(path)]

    def _trusted(self, path: str) -> bool:
        return any(fnmatchcase(path, form) for pattern in self._trust for form in (pattern, f"*/{pattern}"))


def _module(path: str) -> str:
    """``a/b.cpython-311.so`` → ``a/b``; what is no module stays as it is."""
    folder, name = posixpath.split(path)
    stem, _, extension = name.partition(".")
    return posixpath.join(folder, stem) if extension.rpartition(".")[2] in ("py", "so", "pyc") else path
