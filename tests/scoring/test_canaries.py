"""Changed copies of tests: each fails for a right solution, and the tests themselves stay what they are."""

from __future__ import annotations

import ast
import re

import pytest

from hermes_rl.scoring.canaries import MOST, MOST_OF_A_TEST, Planted, add_canaries
from hermes_rl.scoring.test_names import collected

SOURCE = """import pytest, unittest
from solution import add, names

def check(f):
    assert f(1, 2) == 3
    assert f(0, 0) == 0, "zero"

@pytest.mark.parametrize("a,b,want", [(2, 3, 5), (0, 3, 3)])
def test_table(a, b, want):
    assert add(a, b) == want

def test_small():
    result = add(2, 3)
    assert result == 5

def test_raises():
    with pytest.raises(TypeError):
        add(None, 1)

def test_helped(): check(add)

class TestCase(unittest.TestCase):
    def test_äöü(self):
        self.assertEqual(add("ä", "ö"), "äö")
    def test_true(self):
        self.assertTrue(add(1, 1) > 0)"""
SOLUTION = "def add(a, b): return a + b\ndef names(t): return t.split()\n"


def planted(source: str, seed: str = "s") -> Planted:
    found = add_canaries(
        {"t/test_it.py": source}, collected("pytest t/test_it.py", {"t/test_it.py": source}) or [], seed
    )
    assert found is not None
    return found


def body(source: str) -> Planted | None:
    text = f"def test_it():\n    {source}\n"
    return add_canaries({"t.py": text}, ["t.py::test_it"], "s")


@pytest.mark.parametrize("seed", [str(number) for number in range(20)])
def test_planted_source_keeps_every_test_and_changes_each_copy(seed: str) -> None:
    found = planted(SOURCE, seed)
    tree = ast.parse(found.sources["t/test_it.py"])
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    before = {node.name: node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.FunctionDef)}
    renamed = {own.rpartition("::")[2]: new.rpartition("::")[2] for new, own in found.originals.items()}
    for name, node in before.items():
        now = functions[renamed.get(name, name)]
        assert list(map(ast.dump, now.body)) == list(map(ast.dump, node.body))
    for copy, own in found.copies.items():
        inner, test = functions[copy.rpartition("::")[2]], before[own.rpartition("::")[2]]
        assert ast.dump(ast.Module([*inner.body, *inner.decorator_list], [])) != ast.dump(
            ast.Module([*test.body, *test.decorator_list], [])
        )
    assert len(found.copies) <= MOST


def test_the_same_seed_gives_the_same_copies_and_another_gives_others() -> None:
    assert planted(SOURCE, "a") == planted(SOURCE, "a")
    assert len({planted(SOURCE, seed).sources["t/test_it.py"] for seed in "abcdefgh"}) > 6


@pytest.mark.parametrize("value", [8, -8, 7.5, "ab1"])
def test_changed_value_does_not_tell_which_one_is_right(value: object) -> None:
    """Code that reads the tests finds both values, and could compute which one was made of the other."""
    source = f"def test_it():\n    assert add(1) == {value!r}\n"
    sources = [planted(source, seed).sources["t/test_it.py"] for seed in map(str, range(60))]
    found = {ast.literal_eval(other) for text in sources for other in re.findall(r"== ([^\s)]+)", text)} - {value}
    assert {other > value for other in found} == {True, False}


def test_a_right_solution_fails_every_copy_of_plain_functions() -> None:
    source = re.sub(r"import pytest, unittest\n|@pytest.*\n|from.*\n", "", SOURCE.partition("class ")[0])
    source = source.replace("def test_table(a, b, want):\n    assert add(a, b) == want\n", "")
    source = source.partition("def test_raises")[0] + "def test_helped(): check(add)\n"
    for seed in map(str, range(20)):
        found = planted(source, seed)
        space: dict[str, object] = {}
        exec(SOLUTION + found.sources["t/test_it.py"], space)
        for name in [name.rpartition("::")[2] for name in found.copies]:
            with pytest.raises(AssertionError):
                space[name]()  # type: ignore[operator]
        for name in ("test_small", "test_helped"):
            own = {was.rpartition("::")[2]: now.rpartition("::")[2] for now, was in found.originals.items()}
            space[own.get(name, name)]()  # type: ignore[operator]


def test_reports_of_tests_and_copies_are_distinguished_by_name() -> None:
    found = Planted({}, {"t/a.py::C::test_x_3": "t/a.py::C::test_x"}, {"t/a.py::C::test_x": "t/a.py::C::test_x"})
    assert found.own_name("/home/t/a.py::C::test_x[1]") == ("t/a.py::C::test_x", True)
    assert found.own_name("/home/t/a.py::C::test_x_3[1]") == ("/home/t/a.py::C::test_x[1]", False)
    assert found.own_name("/home/t/a.py::C::test_y") == ("/home/t/a.py::C::test_y", False)
    assert found.own_name("/home/b.py::C::test_x") == ("/home/b.py::C::test_x", False)


@pytest.mark.parametrize(
    "source",
    [
        "pass",
        "assert True",
        "if add(1, 1): assert add(1, 1) == 2",
        "for x in add(1, 1): assert x == 2",
        "return\n    assert add(1, 1) == 2",
        "try: assert add(1, 1) == 2\n    finally: pass",
        "with pytest.raises(*ERRORS): assert add(1, 1) == 2",
    ],
)
def test_what_says_nothing_or_is_not_sure_to_be_reached_is_left_alone(source: str) -> None:
    assert body(source) is None


def test_what_the_code_is_given_is_never_changed() -> None:
    for source in ("assert add(7, 8) == 15", "assert add(7, 8) >= 15", "assert 15 == add(7, 8)", "assert add(7, 8)"):
        found = body(source)
        assert found is not None
        assert found.sources["t.py"].count("add(7, 8)") == 1 + len(found.copies)
        assert len(found.copies) <= MOST_OF_A_TEST


@pytest.mark.parametrize("source", ["def test_(", "\0", "(" * 500, "x = 1"])
def test_a_file_that_cannot_be_read_has_no_copies(source: str) -> None:
    assert add_canaries({"t.py": source}, ["t.py::test_x"], "s") is None
