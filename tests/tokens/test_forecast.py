"""How many sequences a rollout will have, told before a run; and templates that are refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.tokens.forecast import forecast
from hermes_rl.tokens.load import load_tokenizer, make_renderer
from hermes_rl.tokens.rendering import RendererRefused, RendererSettings, require_tools
from tests.tokens.families import FAMILIES, FamilyTokenizer, tokenizer_of
from tests.tokens.test_exactness import RENDERERS


@pytest.mark.parametrize(
    ("name", "user", "plain", "thinking"),
    [
        ("hermes", True, 1, 1),
        ("qwen3", False, 1, 1),
        ("qwen3", True, 1, 2),
        ("qwen3 of renderers", True, 1, 2),
        ("glm", True, 1, 1),
        ("mistral", True, 2, 2),
        ("gpt-oss", True, 2, 2),
        ("kimi", True, 1, 1),
    ],
)
def test_forecast_gives_the_number_of_sequences(name: str, user: bool, plain: int, thinking: int) -> None:
    found = forecast(RENDERERS[name], system=True, tools=True, user=user)
    assert (found.turns, found.without_thinking, found.thinking) == (4 if user else 3, plain, thinking)


def test_what_to_do_about_it_is_said() -> None:
    assert str(forecast(RENDERERS["hermes"], system=False, tools=False, user=False)) == "a rollout has 1 sequence"
    assert "thinking_retention: all" in str(forecast(RENDERERS["qwen3"], system=True, tools=True, user=True))
    assert "rewrites earlier turns" in str(forecast(RENDERERS["mistral"], system=True, tools=True, user=True))


def changed(name: str, old: str, new: str) -> FamilyTokenizer:
    family = FAMILIES[name]
    assert old in family.template
    return FamilyTokenizer(name, replace(family, template=family.template.replace(old, new)))


def refuses_tools(tokenizer: Any) -> str:
    with pytest.raises(RendererRefused) as caught:
        require_tools(tokenizer)
    return str(caught.value)


def test_a_template_that_cannot_do_it_is_refused_with_the_reason() -> None:
    with pytest.raises(RendererRefused, match="ends a turn with no control token"):
        make_renderer(changed("kimi", FAMILIES["kimi"].template, "{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert "omits the tools" in refuses_tools(changed("hermes", "for t in tools", "for t in []"))
    assert "omits the results" in refuses_tools(changed("hermes", "<tool_response>\n{{ m.content }}", "<r>"))
    assert "omits the arguments" in refuses_tools(changed("hermes", "{{ c.function.arguments | tojson }}", "{}"))
    with pytest.raises(RendererRefused, match="does not fit the tokenizer"):
        make_renderer(load_tokenizer(), RendererSettings("kimi_k2"))


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match="did you mean"):
        make_renderer(load_tokenizer(), RendererSettings("qwen4"))
    with pytest.raises(UserError, match="there is no tool parser 'nothing'"):
        make_renderer(load_tokenizer(), RendererSettings(tool_parser="nothing"))
    with pytest.raises(UserError, match="in a form that no parser reads"):
        make_renderer(tokenizer_of("gpt-oss"))
    with pytest.raises(RendererRefused, match="is 3 tokens"):
        make_renderer(load_tokenizer(), RendererSettings(stop=("###!",)))


@pytest.mark.parametrize(("model", "shape"), [("Qwen/Qwen3-8B", "hermes"), ("moonshotai/Kimi-K2-Instruct", "qwen3")])
def test_a_family_that_is_guessed_by_name_has_to_agree_with_the_template(model: str, shape: str) -> None:
    tokenizer = FamilyTokenizer(shape, FAMILIES[shape])
    tokenizer.name = model
    assert make_renderer(tokenizer).name == "template"
