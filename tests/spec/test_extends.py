"""`extends`: what a child changes, what it replaces whole, and where paths start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.errors import SpecError
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.merge import merge
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import Entry, MappingNode, Mark, Node, ScalarNode, SequenceNode, SourceText, to_builtins
from tests.thorough import examples

PARENT = """\
version: 1
name: parent
dataset: {items: [{q: a}], columns: {x: "{{ q }}", y: "{{ x }}"}, shuffle: 3, eval: {fraction: 0.5, limit: 3}}
prompt: {user: "{{ q }}"}
toolsets: [terminal]
sandbox: {backend: docker, image: debian, timeout: 9}
agent: {max_turns: 3, max_tokens: 5}
rewards:
  a: {fn: exact_match, weight: 2, args: {target: x}}
  b: {fn: exact_match, args: {target: y}}
servers: {policy: {type: scripted, error_rate: 0.4}, judge: {base_url: "http://j", model: j}}
wandb: project
"""


def child(folder: Path, text: str, parent: str = PARENT) -> Spec:
    (folder / "parent.yaml").write_text(parent)
    path = folder / "child.yaml"
    path.write_text("extends: parent.yaml\n" + text)
    return load_spec(path)


def test_nothing_changes_but_the_name(tmp_path: Path) -> None:
    spec = child(tmp_path, "")
    assert spec.name == "child"
    assert spec == load_spec(tmp_path / "parent.yaml").model_copy(update={"name": "child"})


def test_mappings_merge_lists_replace_null_deletes(tmp_path: Path) -> None:
    spec = child(tmp_path, "agent: {max_turns: 4}\ntoolsets: [file]\nrewards: {a: null, b: {weight: 5}}\nwandb: null\n")
    assert (spec.agent.max_turns, spec.agent.max_tokens) == (4, 5)
    assert spec.toolsets.enabled == ("file",)
    assert list(spec.rewards) == ["b"]
    assert (spec.rewards["b"].weight, spec.rewards["b"].fn, spec.wandb) == (5, "exact_match", None)


def test_order_is_the_parents_then_the_childs(tmp_path: Path) -> None:
    spec = child(tmp_path, "dataset: {columns: {z: '{{ y }}', x: '{{ q }}!'}}\n")
    assert list(spec.dataset.columns.items()) == [("x", "{{ q }}!"), ("y", "{{ x }}"), ("z", "{{ y }}")]


def test_a_block_of_another_kind_is_replaced_whole(tmp_path: Path) -> None:
    spec = child(
        tmp_path,
        "dataset: {path: json, data_files: a.json}\nrewards: {a: {fn: regex_match}}\n"
        "sandbox: {backend: none}\nservers: {policy: {type: openai, base_url: 'http://a', model: m}}\n",
    )
    assert spec.dataset.items is None and spec.dataset.shuffle is None and not spec.dataset.columns
    assert (spec.rewards["a"].weight, dict(spec.rewards["a"].args)) == (1, {})
    assert (spec.sandbox.image, spec.sandbox.timeout) == (None, 120)
    assert spec.servers["policy"][0].error_rate == 0
    assert spec.servers["judge"][0].model == "j"


def test_the_same_kind_merges(tmp_path: Path) -> None:
    spec = child(
        tmp_path,
        "dataset: {items: [{q: b}]}\n"
        "rewards: {a: {fn: exact_match, weight: 3}}\nsandbox: {backend: docker, timeout: 1}\n",
    )
    assert spec.dataset.shuffle == 3
    assert dict(spec.rewards["a"].args) == {"target": "x"}
    assert spec.sandbox.image == "debian"


def test_shorthands_merge(tmp_path: Path) -> None:
    spec = child(
        tmp_path,
        "wandb: {mode: offline}\ntoolsets: {disabled: [file]}\ndataset: {eval: {split: test}}\n".replace(
            "dataset: {eval: {split: test}}\n", ""
        ),
    )
    assert spec.wandb is not None and (spec.wandb.project, spec.wandb.mode) == ("project", "offline")
    assert (spec.toolsets.enabled, spec.toolsets.disabled) == (("terminal",), ("file",))


def test_paths_start_at_the_file_that_wrote_them(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "p.yaml").write_text(PARENT + "tools: [{python: t.py:f}]\nstate: w/world.py:World\n")
    path = tmp_path / "c.yaml"
    path.write_text(
        "extends: base/p.yaml\nrewards: {c: {fn: r.py:g}, d: {fn: pkg.mod:g}}\nprompt: {system: {file: s.j2}}\n"
        "sandbox: {files: [{to: a, from: data/x}]}\natropos: {data_path_to_save_groups: out/g.jsonl}\n"
    )
    spec = load_spec(path)
    assert spec.tools[0].python == f"{tmp_path}/base/t.py:f"
    assert spec.state is not None
    assert spec.state.python == f"{tmp_path}/base/w/world.py:World"
    assert spec.rewards["c"].fn == f"{tmp_path}/r.py:g"
    assert spec.rewards["d"].fn == "pkg.mod:g"
    assert spec.prompt.system is not None and spec.prompt.system.file == f"{tmp_path}/s.j2"  # type: ignore[union-attr]
    assert spec.sandbox.files[0].from_ == f"{tmp_path}/data/x"
    assert spec.atropos["data_path_to_save_groups"] == f"{tmp_path}/out/g.jsonl"
    assert spec.folder == tmp_path
    assert spec.folder_of(("tools", 0, "python")) == tmp_path / "base"


def test_from_is_below_the_folder_after_symlinks(tmp_path: Path) -> None:
    (tmp_path / "spec").mkdir()
    (tmp_path / "secret").write_text("s")
    (tmp_path / "spec" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "spec" / "parent.yaml").write_text(PARENT)
    with pytest.raises(SpecError, match="symlinks included"):
        child(tmp_path / "spec", "sandbox: {files: [{to: a, from: link}]}\n")


@pytest.mark.parametrize(
    ("parent", "said"),
    [("/dev/zero", "is a device; expected a file"), ("pipe", "is a named pipe"), (".", "is a directory"),
     ("link", "is a device"), ("large.yaml", "has more than 16777216 bytes, and is not read")],
)  # fmt: skip
def test_parent_that_is_not_a_regular_file_is_refused(tmp_path: Path, parent: str, said: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "child.yaml").write_text(f"extends: {parent}\n")
    with pytest.raises(SpecError, match=rf"child\.yaml:1:10: cannot be read: {parent}: {said}"):
        load_spec(tmp_path / "child.yaml")


def test_a_longer_cycle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: ./sub/../a.yaml\n")
    with pytest.raises(SpecError, match=r"b\.yaml:1:10: .*cycle"):
        load_spec(tmp_path / "a.yaml")


MARK = Mark(SourceText("t", Path("/")), 1, 1)


def node(value: Any) -> Node:
    if isinstance(value, dict):
        return MappingNode(MARK, {key: Entry(MARK, node(item)) for key, item in value.items()})
    if isinstance(value, list):
        return SequenceNode(MARK, tuple(node(item) for item in value))
    return ScalarNode(MARK, value, str(value), is_plain=True)


def mapping(value: dict[str, Any]) -> MappingNode:
    made = node(value)
    assert isinstance(made, MappingNode)
    return made


KEYS = st.sampled_from(["a", "b", "c"])
LEAVES: st.SearchStrategy[Any] = st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2)
TREES = st.dictionaries(
    KEYS, st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=6), max_size=3
)


def reference(before: Any, after: Any) -> Any:
    if not isinstance(after, dict):
        return after
    merged = dict(before) if isinstance(before, dict) else {}
    if not isinstance(before, dict):
        return after
    for key, value in after.items():
        if value is None and key in merged:
            del merged[key]
        else:
            merged[key] = reference(merged[key], value) if key in merged else value
    return merged


@settings(max_examples=examples(300), deadline=None)
@given(TREES, TREES)
def test_merging_is_the_usual_one(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert to_builtins(merge(mapping(before), mapping(after))) == reference(before, after)
