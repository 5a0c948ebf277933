"""Templates over a row: types, text, None, missing columns, and where in a text something is wrong."""

from __future__ import annotations

import math
import resource
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import SpecError
from hermes_rl.spec import patterns, template_limits
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.sections.sandbox import Limits, SandboxSection
from hermes_rl.spec.templates import (
    TemplateError,
    coerce,
    columns_used,
    evaluate,
    literal,
    render,
    render_section,
    render_text,
)

ROW: dict[str, Any] = {
    "n": 3,
    "xs": ["a", "b"],
    "d": {"items": 5, "k": "v"},
    "nil": None,
    "text": "{{ n }}",
    "Final Answer": 42,
    "json": '{"a": [1]}',
    "flag": False,
}


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ n }}", 3),
        ("{{ n + 0.5 }}", 3.5),
        ("{{ (n + 5000000) | string }}", "5000003"),
        ("{{ xs }}", ["a", "b"]),
        ("{{ flag }}", False),
        ("{{ d }}", {"items": 5, "k": "v"}),
        ("{{ nil }}", None),
        ("{{- n -}}", 3),
        (" {{ n }}", " 3"),
        ("{{ n }}\n", "3\n"),
        ("{{ n }}{{ n }}", "33"),
        ("{{ row['Final Answer'] }}", 42),
        ("{{ row.n }}", 3),
        ("{{ d.items }}", 5),
        ("{{ text }}", "{{ n }}"),
        ("{{ json | fromjson }}", {"a": [1]}),
        ("{{ (json | fromjson).a[0] }}", 1),
        ("{{ d | tojson }}", '{"items": 5, "k": "v"}'),
        ("{{ '<ü>' | tojson }}", '"<ü>"'),
        ("{{ 'x=12;' | regex_search('x=([0-9]+)') }}", "12"),
        ("{{ 'none' | regex_search('[0-9]+') }}", None),
        ("{{ 'a1b2' | regex_findall('[0-9]') }}", ["1", "2"]),
        ("{{ 'a1b2' | regex_replace('[0-9]', '') }}", "ab"),
        ("{{ nil | default('x') }}", "x"),
        ("{{ missing | default('x') }}", "x"),
        ("{{ xs | map('upper') }}", ["A", "B"]),
        ("{{ range(3) }}", [0, 1, 2]),
        ("{{ zip(xs, range(2)) }}", [["a", 0], ["b", 1]]),
        ('{{ "it\'s" | quote }}', "'it'\"'\"'s'"),
        ("{% if flag %}a{% else %}b{% endif %}", "b"),
        ("{% for x in xs %}{{ x }}{% endfor %}", "ab"),
        ("{{ '}}' }}", "}}"),
        ("{# nothing #}", ""),
        ("no template", "no template"),
        (12, 12),
        ({"{{ n }}": ["{{ n }}", {"a": "x{{ n }}"}]}, {"{{ n }}": [3, {"a": "x3"}]}),
    ],
)
def test_values(template: Any, value: Any) -> None:
    rendered = render(template, ROW)
    assert rendered == value
    assert type(rendered) is type(value)


@pytest.mark.parametrize(
    ("template", "message", "line"),
    [
        ("{{ xss }}", "there is no column `xss`; did you mean `xs`?", 1),
        ("ok\nok {{ xss }}", "there is no column `xss`", 2),
        ("{{ row['Final answer'] }}", "there is no column `Final answer`; did you mean `Final Answer`?", 1),
        ("{{ [n, xss] }}", "there is no column `xss`", 1),
        ("a\n\nb {{ nil }}", "column `nil` is None, which cannot be text", 3),
        ("a {{ nil | upper }} {{ 'x' | regex_search('y') }}", "is None", 1),
        ("a\n{{ 1 / 0 }}", "ZeroDivisionError", 2),
        ("{{ d.nothing }}", "no attribute 'nothing'", None),
        ("a {{ n", "template: ", 1),
        ("a\n{{ n | shout }}", "No filter named 'shout'", 2),
        ("{{ xs.append(1) }}", "unsafe", None),
        ("{{ ''.__class__.__mro__ }}", "unsafe", None),
        ("{{ json.format_map(d) }}", "", None),
        ("{{ 'x' | fromjson }}", "this is not JSON", None),
        ("{{ xs | random }}", "No filter named 'random'", 1),
        ("{{ range(10000000) }}", "Range too big", None),
    ],
)
def test_errors(template: str, message: str, line: int | None) -> None:
    with pytest.raises(TemplateError) as caught:
        value = render(template, ROW, location="prompt.user", key="k7")
        assert template == "{{ json.format_map(d) }}", value  # harmless without attribute access
        raise TemplateError("", location="prompt.user", row="k7")
    assert message in caught.value.message
    assert str(caught.value).startswith("prompt.user, row k7: ")
    assert caught.value.line == line


def test_rows_are_not_changed_by_templates() -> None:
    row: dict[str, Any] = {"xs": [3, 1]}
    assert render("{{ xs | sort }}", row) == [1, 3]
    assert row == {"xs": [3, 1]}


def test_text_is_text() -> None:
    assert render_text("{{ n }}", ROW) == "3"
    assert render_text("{{ text }}", ROW) == "{{ n }}"
    with pytest.raises(TemplateError, match=r"row k: column `nil` is None"):
        render_text("{{ nil }}", ROW, key="k")


def test_filter_expressions() -> None:
    assert evaluate("xs | length > 1 and n == 3", ROW) is True
    with pytest.raises(TemplateError, match="no column `m`"):
        evaluate("m > 1", ROW)


def test_columns_used() -> None:
    assert columns_used(
        {"a": "x\n{{ n }}", "b": ["{{ row['Final Answer'] }}", "{% for i in xs %}{{ i }}{% endfor %}"]}
    ) == {
        "n": 2,
        "Final Answer": 1,
        "xs": 1,
    }
    assert columns_used("{{ range(n) }} {{ row }}") == {"n": 1}


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", int, 3),
        (3, str, "3"),
        (1, float, 1.0),
        ("true", bool, True),
        (["1"], list[int], [1]),
        ((1, 2), list[str], ["1", "2"]),
        ({"a": "1"}, dict[str, float], {"a": 1.0}),
        (None, int | None, None),
        ("a", Literal["a", "b"], "a"),
        (object, "NotAType", object),
    ],
)
def test_coerce(value: Any, kind: Any, expected: Any) -> None:
    assert coerce(value, kind) == expected


@pytest.mark.parametrize(("value", "kind"), [("x", int), (None, str), ("c", Literal["a"]), (["a"], str), (1.5, int)])
def test_coerce_refuses(value: Any, kind: Any) -> None:
    with pytest.raises(TemplateError, match="does not fit"):
        coerce(value, kind)


def test_sections_are_checked_after_rendering() -> None:
    sandbox = SandboxSection.model_validate(
        {
            "image": "{{ image }}",
            "env": {"N": "{{ n }}"},
            "limits": {"memory": "{{ memory }}", "processes": "{{ n }}"},
            "files": [{"to": "a-{{ n }}", "content": "{{ n }}"}],
        }
    )
    row = {"image": "debian:12", "n": 3, "memory": "1GiB"}
    made = render_section(sandbox, row, location="sandbox")
    assert (made.image, made.env, made.limits) == ("debian:12", {"N": "3"}, Limits(memory=2**30, processes=3))
    assert (made.files[0].to, made.files[0].content) == ("a-3", "3")
    with pytest.raises(TemplateError, match=r"sandbox\.limits\.processes, row k: the template gives"):
        render_section(sandbox, {**row, "n": "many"}, location="sandbox", key="k")


def test_files_may_come_from_the_row() -> None:
    sandbox = SandboxSection.model_validate({"files": "{{ files }}"})
    made = render_section(sandbox, {"files": [{"to": "a", "content": "{{ raw }}"}]})
    assert made.files[0].content == "{{ raw }}"


@given(st.text(max_size=40))
def test_a_literal_renders_to_itself(text: str) -> None:
    assert render(literal(text), {}) == text
    braced = "{{ " + text + " }} {% x %}"
    assert render(literal(braced), {}) == braced


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers() | st.none(), max_size=4))
def test_whole_rows_pass_through_unchanged(row: dict[str, Any]) -> None:
    assert render("{{ row }}", row) == row


def test_raw_text_is_preserved_unchanged() -> None:
    text = (
        'version: 1\ndataset: {items: [{q: a}]}\nprompt: {user: !raw "{{ q }} {% x", system: !raw plain}\n'
        'name: !raw "{{ n }}"\n'
    )
    spec = parse_spec(text)
    assert isinstance(spec.prompt.user, str)
    assert render_text(spec.prompt.user, {"q": 1}) == "{{ q }} {% x"
    assert (spec.prompt.system, spec.name) == ("plain", "{{ n }}")
    again = parse_spec(yaml.safe_dump(spec.resolved()).replace("name: '{{ n }}'", "name: n"))
    assert again.prompt == spec.prompt


# ------------------------------------------------------------------ what a stranger's template may cost


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ ([n] * 1000000000) | length }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ text | center(10000000000) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ (text * 100000).replace('n', text * 100000) }}",
        "{{ text | replace('', text * 100000000) }}",
        "{{ (text * 10000) | regex_replace('', text * 10000) }}",
        "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab' | regex_search('(a+)+$') }}",
        "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab' | regex_findall('(a|aa)+$') }}",
        "{{ ('a' * 9000) | regex_replace('a*a*a*b', '') }}",
    ],
)
def test_template_that_costs_too_much_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.05)
    monkeypatch.setattr(patterns, "SECONDS", 0.05)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError, match=r"TemplateTooLarge|SlowPatternError|RecursionError"):
        render(template, ROW)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kilobytes"


@pytest.mark.parametrize("source", ["{{ " + "n + " * 20_000 + "n }}", "{{ " + "(" * 5000 + "n" + ")" * 5000 + " }}"])
def test_template_that_is_nested_too_deeply_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match="nested too deeply or too long"):
        render(source, ROW)
    with pytest.raises(SpecError, match=r":2:\d+: template: it is nested too deeply or too long"):
        parse_spec(f"dataset: {{items: [{{n: 1}}]}}\nprompt: {{user: '{source}'}}\n")


def test_large_values_of_rows_are_rendered() -> None:
    text = "word, " * 200_000
    row = {"t": text, "rows": [{"a": text}] * 20}
    assert render("{{ t | replace('word', 'a longer text') }}", row) == text.replace("word", "a longer text")
    assert render("{{ t | regex_replace('o', '') }}{{ rows | length }}", row) == text.replace("o", "") + "20"
    assert render("{{ t | regex_findall('w[^d]*d, $') }}", row) == ["word, "]
    assert len(render("{{ rows | tojson }}", row)) > 20 * len(text)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"#### (.*)", 1),
        (r"answer is\s*(\d+)", 2),
        (r"\d{3}-\d{4}", 0),
        (r"(?:a|b)*c?", 1),
        (r"(?=a*)a*", 2),
        (r"(a+)+$", math.inf),
        (r"(a|aa)+$", math.inf),
        (r"(a?){30}a{30}", math.inf),
        (r"(?:(?:x+){2})*", math.inf),
        ("(", 0),
    ],
)
def test_degree_of_a_pattern_bounds_its_steps(pattern: str, expected: float) -> None:
    assert patterns.degree(pattern) == expected
