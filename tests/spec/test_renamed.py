"""Old names of keys: refused with the new name, translated in stored specs, kept in fingerprints."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from hermes_rl.errors import SpecError
from hermes_rl.spec.fingerprint import fingerprint
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.spec.model import Spec
from hermes_rl.spec.new_names import KEYS, VALUES
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.overrides import parse_extra_args
from hermes_rl.spec.renamed import current
from hermes_rl.spec.section import keys_at, types_at
from hermes_rl.spec.sets import load_set

SHIPPED = ("rewards.world_rewards",)
"""Keys that are names which a spec chooses; without `fn` they mean shipped rewards."""
BASE = "dataset: {items: [{q: a, by: c}]}\nprompt: {user: '{{ q }}'}\n"
CODE = '''
class World:
    over = False

    def __init__(self, item): ...

    def between(self): ...

    def edit(self, text: str) -> str: ...


def look(where: str) -> str:
    """Look.

    Args:
        where: place
    """
'''


def paths_of(key: str) -> list[NodePath]:
    """Return the paths that a key of the table may mean: each `*` is an item of a list or an entry of a mapping."""
    steps: list[tuple[str | int, ...]] = [(0, "name") if step == "*" else (step,) for step in key.split(".")]
    return list(product(*steps))


def problems_of(text: str) -> list[str]:
    with pytest.raises(SpecError) as failed:
        parse_spec(text)
    return str(failed.value).splitlines()


@pytest.mark.parametrize("key", KEYS)
def test_new_name_is_a_key_of_the_spec_and_old_name_is_not(key: str) -> None:
    known = [keys for path in paths_of(key) if (keys := keys_at(Spec, path[:-1]))]
    assert known or key.startswith("on_stop.") or key in SHIPPED  # mappings whose keys the rules check
    for keys in known:
        assert KEYS[key] in keys
        assert key.rpartition(".")[2] not in keys


@pytest.mark.parametrize("key", VALUES.keys() - {"rewards.*.fn"})
def test_new_values_are_possible_and_old_values_are_not(key: str) -> None:
    types = str([kind for path in paths_of(key) for kind in types_at(Spec, path)])
    for old, new in VALUES[key].items():
        assert repr(new) in types
        assert repr(old) not in types


def test_old_key_is_an_error_with_the_new_one() -> None:
    (problem,) = problems_of(BASE + "evaluate: {rollouts: 2, success: 0.5}\n")
    assert problem == (
        "<text>:3:25: `evaluate.success` is now `evaluate.success_threshold`; "
        "`hermes-rl migrate <text>` rewrites the file"
    )


def test_old_key_with_the_new_one_is_one_error() -> None:
    (problem,) = problems_of(BASE + "evaluate: {success: 0.5, success_threshold: 1}\n")
    assert problem.startswith("<text>:3:12: ") and problem.endswith("; both are here: remove one")


def test_column_with_the_name_of_an_old_key_stays() -> None:
    assert parse_spec(BASE + "evaluate: {group_by: [by]}\n").evaluate.group_by == ("by",)


def test_old_key_of_a_parent_is_an_error_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(BASE + "process: {format: sft, best: 2}\n")
    (tmp_path / "child.yaml").write_text("extends: parent.yaml\nprocess: {keep_best: 1}\n")
    with pytest.raises(SpecError, match=r"parent\.yaml:3:24: `process\.best` is now `process\.keep_best`"):
        load_spec(tmp_path / "child.yaml")


@pytest.mark.parametrize("option", ["evaluate.by=[q]", "evaluate={by: [q]}"])
def test_old_key_of_an_option_is_an_error_with_the_new_one(option: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(BASE)
    with pytest.raises(SpecError, match=r"^--set [^:]*: `evaluate\.by` is now `evaluate\.group_by`$"):
        load_spec(tmp_path / "spec.yaml", overrides=parse_extra_args([], [option]))


def test_old_key_in_a_set_is_an_error_at_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(BASE)
    Path("set.yaml").write_text(
        "set:\n  name: s\n  specs: [spec.yaml]\n  models:\n    - {name: a, set: {evaluate.by: [q]}}\n"
    )
    (combination,) = load_set("set.yaml").combinations
    with pytest.raises(SpecError, match=r"^set\.yaml:5:23: `evaluate\.by` is now `evaluate\.group_by`$"):
        load_spec("spec.yaml", overrides=combination.overrides)


def test_stored_spec_with_old_keys_is_read_as_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(CODE)
    old = "state: {python: world.py:World, process: reused}\nevaluate: {by: [q], success: 0.5}\n"
    old += "endings: {max_turns: mask, lost: worst}\n"
    new = "state: {python: world.py:World, isolate: reuse}\nevaluate: {group_by: [q], success_threshold: 0.5}\n"
    new += "on_stop: {max_turns: mask, retries_exhausted: worst}\n"
    (tmp_path / "spec.yaml").write_text(BASE + old)
    stored = load_spec(tmp_path / "spec.yaml", resolved=True)
    assert stored == parse_spec(BASE + new, folder=tmp_path).model_copy(update={"name": "spec"})
    assert "success_threshold" in stored.resolved()["evaluate"]


def test_path_in_the_new_names_is_unchanged() -> None:
    assert current(("evaluate", "group_by", 0)) == ("evaluate", "group_by", 0)


# Written with the old keys, these specs had these fingerprints at commit 9de8fa2a.
SERVERS = """
servers:
  policy: {type: scripted, error_rate: 0.25}
  user: {type: scripted}
  old: [{type: scripted, error_rate: 0.5}]
"""
HEAD = "dataset: {items: [{q: a}, {q: b}], row_selection: skip_uniform}\nprompt: {user: '{{ q }}'}" + SERVERS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "toolsets: {enabled: [web], demo_answers: {web_search: nothing}}\n"
            'tools: [{python: "world.py:*", decorated_with: offered, external: true, ends_rollout: [look]}]\n'
            'state: {python: "world.py:World", done: over, before_user_turn: between}\n'
            "user: {speaks_first: true, turns: [a, {say: b, min_reward: 1}]}\n"
            "rewards: {exact_match: {args: {target: a}, per_step: last}}\n",
            "4e9922af",
        ),
        (
            'state: {python: "world.py:World", isolate: reuse}\n'
            "user: {transform: edit, speaks_first: true, "
            'tools: [{python: "world.py:*", decorated_with: offered, external: true}]}\n',
            "b747b595",
        ),
        (
            'agents: {a: {message_template: "{{ seat }}: {{ text }}"}, '
            "b: {opponents: [old], opponent_sampling: latest, train: false}}\n"
            "schedule: alternate\n",
            "e13db1c1",
        ),
    ],
)
def test_renamed_keys_keep_the_fingerprint_of_the_old_names(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(CODE)
    assert fingerprint(parse_spec(HEAD + text, folder=tmp_path)) == expected
