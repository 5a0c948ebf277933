"""Finding a user's code by reference."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hermes_rl.errors import UserError
from hermes_rl.plugins import load_object


def test_function_class_and_method(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("class A:\n    @staticmethod\n    def m():\n        return 7\n\nx = 1\n")
    assert load_object(f"{file}:A.m")() == 7
    assert load_object("code.py:x", tmp_path) == 1
    assert load_object("os.path:join") is os.path.join


def test_loaded_once_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("import itertools\nobject_ = object()\n")
    first = load_object(f"{file}:object_")
    assert load_object(f"{file}:object_") is first
    file.write_text("object_ = 'new'\n")
    assert load_object(f"{file}:object_") == "new"


def test_neighbouring_files_are_importable_and_separate_per_directory(tmp_path: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "package").mkdir(parents=True)
        (folder / "package" / "__init__.py").write_text(f"inner = '{name} inner'\n")
        (folder / "helpers.py").write_text(f"name = '{name}'\n")
        (folder / "code.py").write_text(
            "import helpers\nfrom package import inner\ndef f(): return helpers.name, inner\n"
        )
        (folder / "other.py").write_text("import helpers\n")
    assert load_object(f"{tmp_path}/one/code.py:f")() == ("one", "one inner")
    assert load_object(f"{tmp_path}/two/code.py:f")() == ("two", "two inner")
    assert load_object(f"{tmp_path}/one/other.py:helpers") is load_object(f"{tmp_path}/one/code.py:helpers")
    assert sys.path == path
    assert {name for name in set(sys.modules) - modules if not name.startswith("_hermes_rl_plugin_")} <= {"package"} - {
        "package"
    }


def test_two_files_of_one_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text(f"x = '{name}'\n")
    assert [load_object(f"{tmp_path}/{name}/code.py:x") for name in "ab"] == ["a", "b"]


def test_file_named_like_the_standard_library(tmp_path: Path) -> None:
    import json

    (tmp_path / "json.py").write_text("x = 1\n")
    assert load_object(f"{tmp_path}/json.py:x") == 1
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("no_colon", "expected file.py:name"),
        ("code.py:", "expected file.py:name"),
        ("cod.py:f", r"cod\.py: no such file; did you mean `code\.py`"),
        ("code.py:funktion", r"has no 'funktion'; did you mean `function`.*it has: function"),
        ("broken.py:x", r"broken\.py:2: SyntaxError"),
        ("raises.py:x", r"raises\.py:2: ZeroDivisionError"),
        (
            "needs.py:x",
            r"needs\.py:1: ModuleNotFoundError: No module named 'not_there_'; install the package .* or copy",
        ),
        ("ends.py:x", r"ends\.py:1: SystemExit: 3"),
        ("not_there_.module:x", "no module named 'not_there_'; is its package installed"),
        ("os.path:jion", "did you mean `join`"),
    ],
)
def test_errors_name_the_place(tmp_path: Path, reference: str, why: str) -> None:
    (tmp_path / "code.py").write_text("def function(): pass\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef (:\n")
    (tmp_path / "raises.py").write_text("x = 1\n1 / 0\n")
    (tmp_path / "needs.py").write_text("import not_there_\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UserError, match=why):
        load_object(reference, tmp_path)


def test_a_file_that_failed_can_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("1 / 0\n")
    with pytest.raises(UserError):
        load_object(f"{file}:x")
    file.write_text("x = 2\n")
    assert load_object(f"{file}:x") == 2
