"""Chat templates of strangers: what computes without end or multiplies texts ends soon, and others are as ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, decoders, normalizers
from tokenizers import Tokenizer as Engine
from transformers import PreTrainedTokenizerFast

from hermes_rl.spec import template_limits as limits
from hermes_rl.spec.template_limits import LimitedEnvironment
from hermes_rl.tokens.hub import MOST_GROWTH, HubTokenizer, wrapped
from hermes_rl.tokens.tokenizer import TemplateRefused, TokenizerUnavailable, small_tokenizer_path
from tests.tokens.families import FAMILIES

HI = [{"role": "user", "content": "hi"}]
DOUBLED = "{% set ns = namespace(x='ab', l=[1]) %}{% for i in range(90) %}{% set ns.x = GROWN %}{% endfor %}{{ ns.x }}"
SHARED = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
"""Two equal values of few lists that have 2 ** 60 elements."""
HASHED = SHARED.replace("[ns.a, ns.a]", "(ns.a, ns.a)").replace("a=[1]", "a=(1,)")


def hub_tokenizer(template: str) -> HubTokenizer:
    engine = Engine.from_file(str(small_tokenizer_path() / "tokenizer.json"))
    return wrapped(PreTrainedTokenizerFast(tokenizer_object=engine, chat_template=template))


@pytest.mark.parametrize(
    "code",
    [
        "{{ 'a' * 3000000000 }}",
        "{{ 3000000000 * [1] }}",
        "{{ 9 ** (9 ** 9) % 7 }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '%*d' % (3000000000, 1) }}",
        "{{ '%3000000000d' | format(1) }}",
        "{{ '{:3000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, '3000000000') }}",
        "{{ 'a'.ljust(3000000000) }}",
        "{{ 'a' | center(3000000000) }}",
        "{{ [1] | tojson(indent=3000000000) }}",
        "{{ lipsum(n=100000) }}",
        "{{ ('\t' * 4000).expandtabs(1000000) }}",
        "{{ ('a' * 4000).translate({97: 'b' * 1000000}) }}",
        *(
            "{{ ('FIELD' * 4000)FORMATTED }}".replace("FIELD", field).replace("FORMATTED", formatted)
            for field, formatted in {
                "%(a)s": " % {'a': 'x' * 1000000}",
                "%s": " % ((('x' * 1000000),) * 4000)",
                "{0}": ".format('x' * 1000000)",
                "{a}": ".format_map({'a': 'x' * 1000000})",
                "%(b)s": " | format(b='x' * 1000000)",
                "%999999d": " % ((1,) * 4000)",
                "{0:999999}": ".format(1)",
            }.items()
        ),
        "{{ ('a\n' * 4000) | indent(1000000) }}",
        "{{ ([1] * 4000) | tojson(indent=1000000) }}",
        "{{ ('a' * 4000000) | wordwrap(1) }}",
        *("{{ ('ab ' * 1000000) | title }}", "{{ ('ab ' * 1000000).split() }}"),
        *(SHARED + each for each in ("{{ ns.a == ns.b }}", "{{ ns.a in [ns.b] }}", "{{ 1 != ns.a == ns.b }}")),
        *(SHARED + each for each in ("{{ ns.a is eq(ns.b) }}", "{{ [ns.a] | select('equalto', ns.b) | list }}")),
        *(HASHED + each for each in ("{{ {ns.a: 1} }}", "{{ {}.get(ns.a) }}", "{{ {}[ns.a] }}")),
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) recursive %}{{ loop([1]) }}{% endfor %}",
        *(
            DOUBLED.replace("GROWN", grown)
            for grown in (
                *("ns.x + ns.x", "ns.x ~ ns.x", "ns.x.replace('a', ns.x)", "ns.x | replace('a', ns.x)"),
                *(
                    "[ns.x, ns.x] | join",
                    "ns.x.join([ns.x, ns.x, ns.x])",
                    "('\\n' ~ ns.x) | indent(ns.x)",
                    "[ns.x] + [ns.x, ns.x]",
                ),
                *("ns.x | wordwrap(1, wrapstring=ns.x)", "[[ns.x, 1], [ns.x, 2]] | tojson", "ns.x * 9"),
            )
        ),
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = t %}{% endfor %}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='ab') %}"
        "{% for i in range(90) %}{% set ns.x = m(ns.x) %}{% endfor %}",
        "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_or_multiplies_text_is_refused(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    monkeypatch.setattr(limits, "MAX_ELEMENTS", 1 << 22)
    before = time.process_time()
    with pytest.raises(TemplateRefused, match=r"the template|undefined|RecursionError"):
        hub_tokenizer(code).render(HI, None, add_generation_prompt=True)
    assert time.process_time() - before < 5


STEPS: dict[str, Any] = {"normalizer": normalizers, "decoder": decoders}


@pytest.mark.parametrize("part", STEPS)
@pytest.mark.parametrize(
    "steps",
    [
        [("a", "b" * 100)],
        [("a", "a" * 10)] * 4,
        [(Regex(""), "ab")] * 5,
        [(Regex("a|b"), "a" * 100)],
        [("", "a" * 100)],
    ],
)
def test_tokenizer_that_multiplies_text_is_refused(tmp_path: Path, part: str, steps: list[tuple[Any, str]]) -> None:
    engine, kinds = Engine.from_file(str(small_tokenizer_path() / "tokenizer.json")), STEPS[part]
    each = [kinds.Replace(pattern, content) for pattern, content in steps]
    setattr(engine, part, kinds.Sequence([*each[:1], kinds.Sequence(each[1:])]))
    PreTrainedTokenizerFast(tokenizer_object=engine, chat_template="{{ messages }}").save_pretrained(tmp_path)
    with pytest.raises(TokenizerUnavailable, match=f"its {part} may write .* at most {MOST_GROWTH}"):
        HubTokenizer(str(tmp_path), local=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_render_as_without_limits(name: str) -> None:
    template = FAMILIES[name].template.strip("\n")
    call = {"id": "c00000001", "type": "function", "function": {"name": "t", "arguments": {"x": "1 < 2 & ü"}}}
    messages: list[dict[str, Any]] = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c00000001", "name": "t", "content": "a\nb"},
    ]
    tools = [{"type": "function", "function": {"name": "t", "description": "d", "parameters": {"type": "object"}}}]
    values = {"messages": messages, "tools": tools, "add_generation_prompt": True}
    kinds = (ImmutableSandboxedEnvironment, LimitedEnvironment)
    one, other = (kind(trim_blocks=True, lstrip_blocks=True).from_string(template).render(values) for kind in kinds)
    assert one == other
