"""A command's own message names the program that it lacks."""

from __future__ import annotations

import pytest

from hermes_rl.scoring.missing_programs import last_command, missing, programs


@pytest.mark.parametrize(
    ("command", "status", "output", "name"),
    [
        ("pytst a.py", 127, "bash: line 1: pytst: command not found", "pytst"),
        ("pytst a.py", 127, "sh: 1: pytst: not found", "pytst"),
        ("pytst a.py", 127, "zsh: command not found: pytst", "pytst"),
        ("env pytst", 127, "env: ‘pytst’: No such file or directory", "pytst"),
        ("make test", 2, "make: pytst: No such file or directory\nmake: *** [test] Error 127", "pytst"),
        ("python3 -m pytest", 1, "/usr/bin/python3: No module named pytest", "pytest"),
        ("hidden/run", 126, "bash: hidden/run: Permission denied", "run"),
        ("./solve", 127, "bash: ./solve: No such file or directory", None),
        ("bash solve.sh", 127, "bash: solve.sh: No such file or directory", None),
        ("python3 -m solve", 1, "/usr/bin/python3: No module named solve", None),
        ("env ./solve", 127, "env: ‘./solve’: No such file or directory", None),
        ("cat python3", 1, "cat: python3: No such file or directory", None),
        ("a || b", 1, "bash: a: command not found", None),
        ("a || b", 127, "bash: a: command not found\nbash: b: command not found", "a"),
        ("a || b", 1, "bash: a: command not found\nbash: b: command not found", "a"),
        ("a || ./made", 127, "bash: a: command not found\nbash: ./made: No such file or directory", None),
        ("cd x && a -q || b -q || ./made", 127, "sh: a: not found\nsh: b: not found\nsh: ./made: not found", None),
        ("a || ./made; b", 127, "sh: a: not found\nsh: ./made: not found\nsh: b: not found", "b"),
        ("sh -c 'a || ./made'", 127, "sh: a: not found\nsh: ./made: not found", None),
        ("a; b", 1, "bash: a: command not found", "a"),
        ("a", 1, "", None),
    ],
)
def test_what_is_not_there_is_named(command: str, status: int, output: str, name: str | None) -> None:
    assert missing(command, status, output, None) == name


def test_with_needs_only_those_count() -> None:
    assert missing("x", 127, "x: command not found", ["y"]) is None
    assert missing("x", 1, "ModuleNotFoundError: No module named 'numpy.linalg'", ["numpy"]) == "numpy"


def test_the_programs_of_a_command_are_what_its_parts_start_with() -> None:
    assert programs("A=1 make x && cd y; ./run | tee log") == [["make"], ["cd"], ["tee"]]
    assert programs("'") == [["'"]]


def test_alternative_programs_are_grouped_and_created_ones_excluded() -> None:
    """Fault 29."""
    assert programs("a x || b; c || ./made || d && e") == [["a", "b"], ["e"]]


@pytest.mark.parametrize(
    ("command", "last"),
    [
        ("pytest -q", "pytest -q"),
        ("cd src && PYTHONPATH=. python3 -m pytest x 2>&1", "PYTHONPATH=. python3 -m pytest x 2 '>&' 1"),
        ("export A=1 && pytest > log", "pytest '>' log"),
        ("pip install pytest && make build && pytest -q", "pytest -q"),
        (
            "set -e\npython -m pip install -q pytest  # its runner\npytest \\\n  tests/test_a.py\n",
            "pytest tests/test_a.py",
        ),
        ("mkdir -p tests; pytest;", "pytest"),
        ("pytest; true", None),
        ("pytest && ./check", None),
        ("make test && pytest", None),
        ("bash run-tests.sh; pytest", None),
        ("pytest a.py && pytest b.py", None),
        ("pytest | tee x", None),
        ("a || b", None),
        ("pytest &", None),
        ("(pytest)", None),
        ("$(x)", None),
        ("`x`", None),
        ("! pytest", None),
        ("cat <<A\nA\npytest", None),
        ("if true; then pytest; fi", None),
        ("", None),
    ],
)
def test_the_last_command_is_known_where_it_alone_decides(command: str, last: str | None) -> None:
    assert last_command(command) == last
