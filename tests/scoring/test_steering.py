"""Which files of an agent decide over tests: by the folders of tests and of the command, and by what patches add."""

from __future__ import annotations

import time

import pytest

from hermes_rl.scoring.steering import Steering, created

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


def test_modules_are_named_by_files_and_folders_where_python_looks() -> None:
    steering = Steering(["tests/test_it.py"], trust=["mine.py"])
    paths = ["numpy.py", "tests/pandas/__init__.py", "a/b/c.py", "notes.txt", "x.abi3.so", "mine.py"]
    assert sorted(steering.modules(paths)) == ["a", "numpy", "pandas", "tests", "x"]


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


@pytest.mark.parametrize(
    "text",
    [
        "diff --git a/" + " b/" * 300_000,
        "diff --git a/x b/x\n" * 50_000,
        "cd " * 300_000,
        "a/" * 500_000,
        " " * 1_000_000,
    ],
)
def test_what_an_agent_may_write_at_length_is_read_in_no_time(text: str) -> None:
    began = time.process_time()
    created(text + "\nnew file mode 100644\n")
    Steering(["t.py"]).may_add(text)
    assert time.process_time() - began < 2
