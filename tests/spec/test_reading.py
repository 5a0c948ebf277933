"""The YAML dialect: values of the 1.2 core schema, places of keys and values, and texts that are no YAML at all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.errors import SpecError
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.nodes import MappingNode, ScalarNode, SourceText, to_builtins
from hermes_rl.spec.reader import read_text, resolve
from tests.thorough import examples

SOURCE = SourceText("t.yaml", Path("/tmp"))


def read(text: str) -> Any:
    root, problems = read_text(text, SOURCE)
    assert not problems, problems
    assert root is not None
    return to_builtins(root)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("tRue", "tRue"),
        ("", None),
        ("~", None),
        ("null", None),
        ("nULL", "nULL"),
        ("2001-12-14", "2001-12-14"),
        ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
        ("12:30", "12:30"),
        ("12:30:45", "12:30:45"),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("0b1", "0b1"),
        ("1_000", "1_000"),
        ("-3", -3),
        ("+3", 3),
        ("1e-4", 1e-4),
        ("1E4", 1e4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.5e3", -500.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("1.2.3", "1.2.3"),
        ("=", "="),
    ],
)
def test_plain_scalars(text: str, value: object) -> None:
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)
    assert read(f"a: {text}") == {"a": value}


def test_nan_and_quoted_text() -> None:
    assert math.isnan(read("a: .NaN")["a"])
    assert read("a: '010'\nb: \"true\"\nc: |\n  12\n") == {"a": "010", "b": "true", "c": "12\n"}


def test_keys_that_other_readers_take_for_booleans() -> None:
    assert read("on: 1\noff: 2\nyes: 3\n2001-01-01: 4\n") == {"on": 1, "off": 2, "yes": 3, "2001-01-01": 4}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{question: What is 1+1?}", {"question": "What is 1+1?"}),
        ("{a: x?, b: [Why?, how? so, ?yes]}", {"a": "x?", "b": ["Why?", "how? so", "?yes"]}),
        ("{at: http://host/?a=1, really?: 1}", {"at": "http://host/?a=1", "really?": 1}),
        ("{? key : value}", {"key": "value"}),
    ],
)
def test_a_question_mark_in_a_flow_mapping_is_text(text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("text", "column"),
    [("{q: why: so}", 8), ("{q: see [1]}", 9), ("q: why: so", 7), ("{q: %}", 5)],
)
def test_unquoted_text_that_breaks_yaml_gets_a_hint_to_quote_it(text: str, column: int) -> None:
    _, problems = read_text(text, SOURCE)
    assert [(problem.line, problem.column) for problem in problems] == [(1, column)]
    assert "in quotes" in problems[0].message, problems[0].message


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("d:\n  path: r\n   split: t\n", 3, "`split` starts after 3 spaces, `path` in line 2 after 2"),
        ("p:\n  user: 'u'\n   system: s\n", 3, "`system` starts after 3 spaces, `user` in line 2 after 2"),
        ("d:\n  path: r\n eval: {fraction: 0.5}\n", 3, "`eval` starts after 1 space, `path` in line 2 after 2"),
        (" name: a\nd:\n  path: r\n", 2, "`d` starts after 0 spaces, `name` in line 1 after 1"),
        ("a:\n  b:\n    c: 1\n    # note\n\n   d: 2\n", 6, "`d` starts after 3 spaces, `c` in line 3 after 4"),
        ("a:\n  - b: 1\n     c: 2\n", 3, "`c` starts after 5 spaces, `b` in line 2 after 4"),
        ("a: x\n  Note: think\n", 2, "`Note` starts after 2 spaces, `a` in line 1 after 0"),
    ],
)
def test_wrong_indentation_is_reported_with_both_lines(text: str, line: int, message: str) -> None:
    _, problems = read_text(text, SOURCE)
    assert [problem.line for problem in problems] == [line]
    assert problems[0].message.startswith(message) and "same column" in problems[0].message, problems[0].message


def test_a_tab_before_a_key_is_named() -> None:
    _, problems = read_text("a:\n\tb: 1\n", SOURCE)
    assert [(problem.line, problem.column) for problem in problems] == [(2, 1)]
    assert problems[0].message == "a tab cannot indent YAML; use spaces"


def test_raw_keeps_text_and_place() -> None:
    root, problems = read_text("a: !raw '{{ x }}'\nb: !raw 12\n", SOURCE)
    assert isinstance(root, MappingNode) and not problems
    node = root.get("a")
    assert isinstance(node, ScalarNode)
    assert (node.raw, node.value, node.position.line, node.position.column) == (True, "{{ x }}", 1, 4)
    assert to_builtins(root) == {"a": "{{ x }}", "b": "12"}


def test_anchors_and_byte_order_mark() -> None:
    assert read("a: &x [1, 2]\nb: *x\n") == {"a": [1, 2], "b": [1, 2]}


def test_windows_line_ends(tmp_path: Path) -> None:
    from hermes_rl.spec.load import load_spec

    path = tmp_path / "a.yaml"
    path.write_bytes(
        b"\xef\xbb\xbfversion: 1\r\ndataset: {items: [{q: a}]}\r\nprompt:\r\n  user: |\r\n    a\r\n    b\r\n"
    )
    assert load_spec(path).prompt.user == "a\nb\n"


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Co", "Cn", "Zl", "Zp"]), max_size=20)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(VALUES)
def test_what_json_writes_is_read_back(value: Any) -> None:
    assert read(json.dumps({"v": value})) == {"v": value}


@settings(max_examples=examples(100), deadline=None)
@given(st.integers() | st.floats(allow_nan=False) | st.booleans())
def test_numbers_and_booleans_round_trip(value: object) -> None:
    text = {math.inf: ".inf", -math.inf: "-.inf"}.get(value, str(value))  # type: ignore[call-overload]
    assert read(f"a: {text}") == {"a": value}


@settings(max_examples=examples(150), deadline=None)
@given(st.text(max_size=60))
def test_any_text_as_a_quoted_scalar_is_that_text(text: str) -> None:
    dumped = yaml.safe_dump({"a": text}, default_style='"', allow_unicode=False)
    assert read(dumped) == {"a": text}


@settings(max_examples=examples(300), deadline=None)
@given(st.text(max_size=120))
def test_no_text_raises_anything_but_a_spec_error(text: str) -> None:
    with pytest.raises(SpecError):
        parse_spec(text, environ={})


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "version: 1\n", "dataset: {items: [{q: a}]}\n", "prompt: {user: '{{ q }}'}\n", "agent:\n",
            "  max_turns: 3\n",
            "rewards:\n", "  a: {fn: ../x.py:f, args: {b: [1, '{{ q }}']}}\n", "servers: {policy: []}\n",
            "tools: [{}]\n",
            "sandbox: {files: [{to: a, from: b}, 3], limits: {memory: 1GiB}}\n", "extends: x.yaml\n", "  - a\n",
            "score: {clamp: [1, a]}\n", "wandb: x\n", "toolsets: [a, 1]\n", "solution: {turns: [{say: '{{'}]}\n",
            "user: {server: x, tools: [{state: a}]}\n", "dataset: 3\n", "prompt: [a]\n", "atropos: {a: b}\n", "- x\n",
            "on_stop: {max_turns: 0, x: y}\n", "servers: {policy: {type: trl}, 'a b': 3}\n", "state: ${A}\n",
            "{", "]", "? ",
            "evaluate: {agent: {reasoning: {}}}\n", "artifacts: {a: {}, b: 3}\n", "name: ~\n",
            "dataset: {eval: only}\n",
        ]
    ),
    max_size=10,
)  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(FRAGMENTS)
def test_no_mixture_of_fragments_raises_anything_but_a_spec_error(fragments: list[str]) -> None:
    try:
        spec = parse_spec("".join(fragments), environ={})
    except SpecError as error:
        assert error.problems
    else:
        assert spec.prompt is not None
