"""Which files of an agent influence tests, by the directories of tests and command and by patches."""

from __future__ import annotations

import time

import pytest

from hermes_rl.scoring.control_files import Steering, created, named_in_configuration, renamed

COMMANDS = {
    "PYTHONPATH=src python3 -m pytest": "src",
    "PYTHONPATH='a:lib/code' pytest": "lib/code",
    'export PYTHONPATH="$PWD/src:$PYTHONPATH"; pytest': "src",
    "cd src && python -m pytest": "src",
    "cd src && PYTHONPATH=inner pytest": "src/inner",
    "pytest --rootdir=src/x": "src/x",
    "pytest --rootdir src/x": "src/x",
    "python3 -c \"import sys; sys.path.insert(0, 'code')\"": "code",
    "python3 src/run.py": "src",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_folder_that_the_command_names_is_one_where_python_looks(command: str) -> None:
    steering = Steering(["tests/test_it.py"], command=command)
    assert steering.shadows(f"{COMMANDS[command]}/pytest.py") is not None
    assert steering.shadows(f"{COMMANDS[command]}/json/__init__.py") is not None
    assert steering.shadows("elsewhere/json.py") is None
    assert "numpy" in steering.modules([f"{COMMANDS[command]}/numpy.py"])


def test_module_name_in_a_package_shadows_only_if_the_command_runs_there() -> None:
    tests, packages = ["calc/tests/test_it.py"], {"calc", "calc/tests"}
    for command, anywhere in (
        ("pytest calc/tests/test_it.py", False),
        ("python3 -m unittest calc.tests.test_it", False),
        ("python3 calc/tests/test_it.py", True),
        ("PYTHONPATH=calc/tests pytest calc/tests/test_it.py", True),
        ("cd calc/tests && pytest test_it.py", True),
    ):
        steering = Steering(tests, command=command, packages=packages)
        assert (steering.shadows("calc/tests/random.py") is not None) == anywhere, command
        assert steering.shadows("random.py") is not None
        assert steering.steers("calc/tests/__init__.py") and steering.holds("calc/__init__.py")
    assert Steering(tests).shadows("calc/random.py") is not None


def test_modules_are_named_by_files_and_folders_where_python_looks() -> None:
    steering = Steering(["tests/test_it.py"], trust=["mine.py"])
    paths = ["numpy.py", "tests/pandas/__init__.py", "a/b/c.py", "notes.txt", "x.abi3.so", "mine.py"]
    names = {"a.b.c", "numpy", "pandas", "tests.pandas", "x"}
    assert set(steering.modules(paths)) == names


def test_directory_without_init_shadows_no_module() -> None:
    steering = Steering(["tests/test_it.py"])
    for path in ("html/index.html", "code/solve.py", "types/index.d.ts", "test/data/a.json", "site/a/__init__.py"):
        assert steering.shadows(path) is None
    assert steering.shadows("html/__init__.py") == steering.shadows("html/__init__.abi3.so") == "html"


def test_a_patch_may_add_what_honest_ones_add() -> None:
    steering = Steering([], trust=["lib.so"])
    for path in (
        "a/b.py",
        "README",
        "docs/x.md",
        "data/t.csv",
        "Makefile",
        ".gitignore",
        "py.typed",
        "LICENSE",
        "lib.so",
    ):
        assert steering.may_add(path), path
    for path in (
        "x.so",
        "x.pth",
        "x.egg",
        "x.zip",
        "x.whl",
        "python3",
        "bin/pytest",
        "a.pyd",
        ".env",
        ".bashrc",
        "x.pyc",
    ):
        assert not steering.may_add(path), path


def test_what_a_patch_creates_is_read_line_by_line() -> None:
    new = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+x\n"
    old = "diff --git a/old b/old\nindex 1..2 100644\n--- a/old\n+++ b/old\n@@ -1 +1 @@\n-a\n+b\n"
    assert created(new.format("a b/c d.py") + old + new.format("x")) == {"a b/c d.py", "x"}
    assert created("diff --git a/x b/y\nnew file mode 100644\n") == set()


def test_new_names_in_a_patch_are_read_as_git_does() -> None:
    head = "diff --git a/x b/y\n"
    assert list(renamed(f"rename from before\n{head}rename from a b\nrename to c d\n{head}")) == [("a b", "c d")]
    assert list(renamed(f'{head}rename old "\\303\\274\\t\\"x"\nrename new "ü"\n')) == [('ü\t"x', "ü")]
    assert set(renamed(f"{head}rename to y\nrename from one\nrename from conftest.py\n")) == {
        ("one", "y"),
        ("conftest.py", "y"),
    }
    assert len(list(renamed(head + "rename from x\nrename to y\n" * 1000))) <= 16


def test_module_directories_are_read_from_pythonpath_settings() -> None:
    for text in (
        "pythonpath = . src\ntestpaths = tests\n",
        "  pythonpath=\n    .\n    src\n[tool]\n",
        "pythonpath = ['.', \n 'src']\nx = 'tests'\n",
    ):
        steering = Steering([], command=named_in_configuration(text))
        assert (steering.modules(["src/numpy.py"]), steering.modules(["tests/numpy.py"])) == (
            {"numpy": ["src/numpy.py"], "src.numpy": ["src/numpy.py"]},
            {"tests.numpy": ["tests/numpy.py"]},
        )


@pytest.mark.parametrize(
    "text",
    [
        "diff --git a/" + " b/" * 300_000,
        "diff --git a/x b/x\n" * 50_000,
        "cd " * 300_000,
        "a/" * 500_000,
        "diff --git a/x b/x\n" + "rename from x\nrename to y\n" * 30_000,
        "diff --git a/x b/x\n" + 'rename from "' + "\\303" * 200_000 + '"',
        "pythonpath = [" * 50_000,
        "pythonpath =\n " * 50_000,
        " " * 1_000_000,
    ],
)
def test_what_an_agent_may_write_at_length_is_read_in_no_time(text: str) -> None:
    began = time.process_time()
    created(text + "\nnew file mode 100644\n")
    list(renamed(text))
    named_in_configuration(text[:20_000])  # as much of an image's files is looked at
    Steering(["t.py"]).may_add(text)
    assert time.process_time() - began < 2
