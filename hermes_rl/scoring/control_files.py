"""Identify files of an agent that would steer the tests instead of passing them, by location and name.

This module owns only the rules; `tests_pass` applies them to a sandbox's files and to a patch. Paths inside the working
directory are relative to it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase, translate

STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "unittest.cfg", "nose2.cfg", ".coveragerc", "pyvenv.cfg", "*.pth", "*._pth", "*.pyc"),
    *("sitecustomize", "sitecustomize.*", "usercustomize", "usercustomize.*", "site-packages", "dist-packages"),
    *("*.egg-info", "*.dist-info", "*.egg-link"),
)
"""Files and directories that configure Python and pytest in any location."""
OF_GIT = re.compile(
    r"(^|.*/)(\.gitconfig|\.config/git/.*|\.git(/(modules/.*/)?(config(\.worktree)?|commondir|hooks/.*))?)", re.DOTALL
)
"""Files that let git run programs, as it does with filters of a configuration when it applies a patch."""
RUNNER_PROGRAMS = re.compile(r"(?<![\w-])(?:manage|runtests)\.py(?!\w)")
"""Programs of a repository that run its tests."""
IMPORTED_MODULES = (
    *(*sys.stdlib_module_names, "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py", "nose2"),
    *("attr", "attrs", "six", "more_itertools", "atomicwrites", "wcwidth", "toml", "tomli", "exceptiongroup"),
    *("importlib_metadata", "zipp", "typing_extensions", "pathlib2", "funcsigs", "colorama", "setuptools"),
    *("pkg_resources", "_distutils_hack", "pytest_*", "xdist", "execnet", "anyio", "hypothesis", "_hypothesis_*"),
    *("coverage", "mock"),
)
"""Modules imported by Python, by pytest of any version and by its plug-ins: a new file of that name would replace them.
"""
_EXTENSIONS = """
    py pyi pyx pxd ipynb c h cc cpp cxx hpp hh m cu rs go java kt scala rb php pl r jl lua swift hs ml ex exs erl
    js mjs cjs jsx ts tsx vue svelte css scss less html htm xml
    sh bash bat ps1 sql graphql proto tmpl tpl jinja jinja2 j2 mako
    md rst txt tex adoc pdf svg png jpg jpeg gif ico webp wav
    json jsonl yaml yml toml csv tsv ini cfg conf properties lock
    po pot mo dat data in out expected golden snap diff patch log
    npy npz parquet bin gz bz2 xz ttf woff woff2 mp3 typed example
"""
NEW_EXTENSIONS_ALLOWED = frozenset(f".{extension}" for extension in _EXTENSIONS.split())
"""File extensions that legitimate patches add: source, data, documents, additional tests."""
NEW_FILES_ALLOWED = re.compile(
    r"(README|LICEN[CS]E|COPYING|NOTICE|AUTHORS|CONTRIBUTORS|CHANGE(S|LOG)|HISTORY|NEWS|TODO|INSTALL|VERSION|MANIFEST)"
    r"|(GNU)?[Mm]akefile|Dockerfile|Jenkinsfile|Procfile|Gemfile|Rakefile|BUILD|WORKSPACE|CODEOWNERS|py\.typed"
    r"|\.(gitignore|gitattributes|gitkeep|keep|editorconfig|dockerignore|npmignore|eslintrc|prettierrc|flake8|pylintrc)"
)
"""Files without an extension, and dotfiles, that legitimate patches add."""
PATHS = re.compile(r"[\w.@+~-]+(?:/[\w.@+~-]*)*|/[\w.@+~/-]*")
"""Words of a command that may be directories: in PYTHONPATH, after ``cd``, in options, in a program after ``-c``."""
CONFIGURATIONS = ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg")
"""Configuration files in which pytest may find module directories; only the image's files count."""
PYTHONPATH = re.compile(r"^[ \t]*pythonpath[ \t]*=[ \t]*(\[[^\]]*\]|.*(?:\n[ \t]+.*)*)", re.MULTILINE)
RUN = re.compile(r"python[\d.]*(?:\s+-\w+)*\s+([\w./-]+\.py)")
FOLDER_OF_TESTS = re.compile(r"(.*_)?(tests?|testing|hidden)(_.*)?", re.IGNORECASE)
INIT, _PACKAGE = "__init__.py", "__init__"

QUOTED = re.compile(rb"\\([0-3][0-7]{2}|.)")
MEANT = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
"""Git's escapes for special characters in a name."""
MOST_NAMES = 3
"""Maximum number of further new names in one header that are checked; git uses the last one, and writes one."""

_steering = re.compile("|".join(map(translate, STEERING)))
_modules = re.compile("|".join(map(translate, IMPORTED_MODULES)))


class Steering:
    """The rules for tests in `tests`, which are file paths, and for paths named in `command`.

    `trust` contains patterns of files that are allowed nevertheless. `packages` are directories above tests with an
    ``__init__.py``: Python searches the directory above them, and files inside may have the name of any module.
    """

    def __init__(
        self, tests: Iterable[str], trust: Sequence[str] = (), command: str = "", packages: Collection[str] = ()
    ) -> None:
        tests = [posixpath.normpath(path) for path in tests]
        self._trust, self._packages = trust, packages
        self._runners = set(RUNNER_PROGRAMS.findall(command))
        self._modules = {_module_path(path) for path in tests}
        """The tests themselves: a package of the same name takes precedence over a module."""
        self._folders = {""}
        """Directories in which Python searches for modules: the working directory, directories named in the command,
        and the directories of tests and their parents.
        """
        self._around = {folder for path in tests for folder in parent_folders(path)}
        self._folders |= self._around - set(packages)
        for directory in _extract_directories(command, tests):
            self._folders |= {directory, *parent_folders(directory)}
        self._around |= self._folders

    def may_add(self, path: str) -> bool:
        """Return True if a patch may add a file of this name, of a kind that legitimate patches add."""
        name = posixpath.basename(path)
        return (
            self._trusted(path)
            or posixpath.splitext(name)[1].lower() in NEW_EXTENSIONS_ALLOWED
            or NEW_FILES_ALLOWED.fullmatch(name) is not None
        )

    def modules(self, paths: Iterable[str]) -> dict[str, list[str]]:
        """Return the modules, by dotted name, that these files define in directories where Python searches modules.

        A directory without ``__init__.py`` takes precedence over no module, but its files do over those of a directory
        of the same name.
        """
        modules: dict[str, list[str]] = {}
        for path in paths:
            parts = path.split("/")
            name = _module_path(parts[-1])
            if name == parts[-1] or self._trusted(path):
                continue
            inner = [] if name == _PACKAGE else [name]
            for depth in range(len(parts)):
                dotted = [*parts[depth:-1], *inner]
                if "/".join(parts[:depth]) in self._folders and dotted and all(map(str.isidentifier, dotted)):
                    modules.setdefault(".".join(dotted), []).append(path)
        return modules

    def steers(self, path: str) -> bool:
        """Return True if this file is never accepted from the agent."""
        if self._trusted(path):
            return False
        folder, name = posixpath.split(path)
        if name == INIT and folder in self._around and FOLDER_OF_TESTS.fullmatch(posixpath.basename(folder)):
            return True
        return OF_GIT.fullmatch(path) is not None or any(_steering.match(part) for part in path.split("/"))

    def runs_tests(self, path: str) -> bool:
        """Return True if this is the program that runs the tests, which stays if the image has it."""
        return posixpath.basename(path) in self._runners and not self._trusted(path)

    def holds(self, path: str) -> bool:
        """Return True if, without this file, Python would search modules in its directory."""
        folder, name = posixpath.split(path)
        return name == INIT and folder in self._packages

    def shadows(self, path: str) -> str | None:
        """Return the module that Python would find here, or in a parent directory, instead of a test or its own."""
        if self._trusted(path):
            return None
        parts = path.split("/")
        for depth, part in enumerate(parts):
            folder = "/".join(parts[:depth])
            if folder in self._folders:
                last = depth == len(parts) - 1
                if not last and (depth < len(parts) - 2 or _module_path(parts[-1]) != _PACKAGE):
                    continue  # a directory is a package only with an `__init__.py`
                module = _module_path(posixpath.join(folder, part)) if last else posixpath.join(folder, part)
                # tests.py takes precedence over a directory `tests`
                hides_directory = last and module != path and module in self._folders
                if module in self._modules or hides_directory or _modules.match(posixpath.basename(module)):
                    return module
        return None

    def packages(self, paths: Iterable[str]) -> list[str]:
        """Return the `paths` that only make a directory of tests a package, as an empty file does."""
        return [path for path in paths if posixpath.basename(path) == INIT and self.steers(path)]

    def _trusted(self, path: str) -> bool:
        return any(fnmatchcase(path, form) for pattern in self._trust for form in (pattern, f"*/{pattern}"))


def parent_folders(path: str) -> list[str]:
    """Return the directories above a path, the nearest first."""
    folders = []
    while path not in ("", "/"):
        path = posixpath.dirname(path)
        folders.append(path)
    return folders


def _extract_directories(command: str, tests: Collection[str]) -> set[str]:
    """Return the directories that a command may name, also below directories that it changes to before.

    A test file is not one, unless Python runs it, which then searches its directory.
    """
    path_words = [posixpath.normpath(word).removeprefix("~/") for word in PATHS.findall(command.replace("$PWD/", ""))]
    relative = [word for word in dict.fromkeys(path_words) if not word.startswith(("/", "..", "-")) and word != "."][
        :100
    ]
    gone_to = [
        posixpath.normpath(directory) for directory in re.findall(r"(?:^|[\s;&(])cd\s+[\"']?([\w./-]+)", command)
    ]
    within = [directory for directory in gone_to if not directory.startswith(("/", "..", "-"))][:10]
    run = {posixpath.normpath(path) for path in RUN.findall(command)}
    relative = [posixpath.dirname(word) if word in tests and word in run else word for word in relative]
    relative = [word for word in relative if word not in tests]
    return {*relative, *(posixpath.join(directory, word) for directory in within for word in relative)}


def created(patch: str) -> set[str]:
    """Return the files that a patch in `git diff` format creates; parsed line by line, since an agent wrote it."""
    paths: set[str] = set()
    header = ""
    for line in patch.split("\n"):
        if line.startswith("new file mode") and header:
            half = (len(header) - 1) // 2  # both names are equal
            first, second = header[:half], header[half + 1 :]
            if first.startswith("a/") and second.startswith("b/") and first[2:] == second[2:]:
                paths.add(first[2:])
        header = line.removeprefix("diff --git ") if line.startswith("diff --git ") else ""
    return paths


def renamed(patch: str) -> Iterator[tuple[str, str]]:
    """Yield each file that a patch renames, with its new name; if a header has several, all of them."""
    sources, targets = list[str](), list[str]()
    for line in (*patch.split("\n"), "diff --git "):
        if line.startswith("diff --git "):
            yield from ((source, target) for source in sources for target in targets)
            sources, targets = [], []
        elif line.startswith(("rename from ", "rename old ")):
            sources = [_unquote_name(line.split(" ", 2)[2]), *sources[:MOST_NAMES]]
        elif line.startswith(("rename to ", "rename new ")):
            targets = [_unquote_name(line.split(" ", 2)[2]), *targets[:MOST_NAMES]]


def _unquote_name(name: str) -> str:
    """Return a file name of a patch, without git's quoting of special characters."""
    if not (name.startswith('"') and name.endswith('"') and len(name) > 1):
        return name
    quoted = name[1:-1].encode("utf-8", "surrogatepass")
    raw_name = QUOTED.sub(
        lambda part: bytes([int(part[1], 8)]) if part[1].isdigit() else MEANT.get(part[1], part[1]), quoted
    )
    return raw_name.decode("utf-8", "replace")


def named_in_configuration(text: str) -> str:
    """Return the ``pythonpath`` values of a pytest configuration."""
    return " ".join(PYTHONPATH.findall(text))


def _module_path(path: str) -> str:
    """Return the module path, as in ``a/b.cpython-311.so`` → ``a/b``; other paths are returned unchanged."""
    folder, name = posixpath.split(path)
    stem, _, extension = name.partition(".")
    return posixpath.join(folder, stem) if extension.rpartition(".")[2] in ("py", "so", "pyc") else path
