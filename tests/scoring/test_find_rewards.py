"""Finding a reward by every way of naming it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hermes_rl import shipped
from hermes_rl.errors import UserError
from hermes_rl.scoring.reward_function import find_reward
from hermes_rl.shipped import published_rewards, shipped_rewards

Publish = Callable[..., None]


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Stands in for installed packages that publish rewards."""

    def these(**references: str | list[str]) -> None:
        points = [
            EntryPoint(name, value, shipped.REWARD_GROUP)
            for name, values in references.items()
            for value in ([values] if isinstance(values, str) else values)
        ]
        monkeypatch.setattr(shipped, "entry_points", lambda group: [p for p in points if p.group == group])

    return these


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module with a reward called `mine`."""
    (tmp_path / "reward_of_a_test.py").write_text("def mine(item): return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reward_of_a_test", raising=False)
    return "reward_of_a_test"


def test_the_shipped_rewards_are_all_there_and_load() -> None:
    names = {"exact_match", "regex_match", "math_equal", "file_matches", "tests_pass", "tool_usage", "turn_efficiency"}
    assert names <= set(shipped_rewards())
    for name in shipped_rewards():
        assert find_reward(name, None).function.__name__ == name


def test_without_fn_the_name_is_looked_up_and_fn_wins() -> None:
    assert find_reward("exact_match", None).function.__name__ == "exact_match"
    found = find_reward("exact_match", "regex_match")
    assert (found.name, found.function.__name__) == ("exact_match", "regex_match")


def test_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def close(item, *, by: float): return by\n")
    found = find_reward("near", f"{tmp_path}/mine.py:close")
    assert (found.name, found.arguments({"by": "2"})) == ("near", {"by": 2.0})


def test_a_function_of_a_package(module: str) -> None:
    assert find_reward("near", f"{module}:mine").function(None) == 0.5


def test_a_published_reward(module: str, publish: Publish) -> None:
    publish(near=f"{module}:mine")
    assert [point.name for point in published_rewards()] == ["near"]
    assert find_reward("near", None).function(None) == 0.5
    assert find_reward("other", "near").name == "other"


def test_a_shipped_name_wins_over_a_published_one(module: str, publish: Publish) -> None:
    publish(exact_match=f"{module}:mine")
    assert find_reward("exact_match", None).function.__name__ == "exact_match"


def test_two_packages_with_one_name_are_an_error_that_names_both(publish: Publish) -> None:
    publish(near=["a.b:mine", "c.d:mine"])
    with pytest.raises(UserError, match=r"a\.b:mine and c\.d:mine"):
        find_reward("near", None)


def test_unimportable_published_reward_is_named_in_the_error(publish: Publish) -> None:
    publish(near="no_such_package_at_all:mine")
    with pytest.raises(UserError, match=r"'near'.*no_such_package_at_all"):
        find_reward("near", None)


def test_an_unknown_name_is_an_error_with_a_suggestion_or_all_names() -> None:
    with pytest.raises(UserError, match=r"no reward 'exact_mach'; did you mean `exact_match`\?$"):
        find_reward("exact_mach", None)
    with pytest.raises(UserError, match=r"no reward 'zzz' \(there are: citations, command_output"):
        find_reward("zzz", None)


def test_a_missing_file_or_function_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def close(item): return 1\n")
    with pytest.raises(UserError, match="did you mean `close`"):
        find_reward("x", f"{tmp_path}/mine.py:clos")
    with pytest.raises(UserError, match=r"mime\.py: no such file"):
        find_reward("x", f"{tmp_path}/mime.py:close")


def test_a_file_that_fails_to_load_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("\n1 / 0\n")
    with pytest.raises(UserError, match=r"mine\.py:2: ZeroDivisionError"):
        find_reward("x", f"{tmp_path}/mine.py:close")


def test_reward_that_is_not_a_function_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("close = 3\n")
    with pytest.raises(UserError, match="'x'"):
        find_reward("x", f"{tmp_path}/mine.py:close")


def test_atroposlibs_registry() -> None:
    assert find_reward("x", "atropos:format").group_level
    with pytest.raises(UserError, match="atroposlib has no reward 'formt'; did you mean `format`"):
        find_reward("x", "atropos:formt")
    with pytest.raises(UserError, match=r"atropos:cosine_scaled cannot be loaded: "):
        find_reward("x", "atropos:cosine_scaled")
