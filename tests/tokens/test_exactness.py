"""Every template, every history, every event: what is trained is what was sampled, in the context it was sampled in."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine

from hermes_rl.tokens.load import make_renderer
from hermes_rl.tokens.rendering import RendererSettings, TemplateRenderer, for_template, require_tools
from hermes_rl.tokens.tokenizer import SmallTokenizer, _environment, small_tokenizer_path
from hermes_rl.tokens.transcript import MASKED, MASKED_LOGPROB, packed, unpacked
from tests.thorough import examples
from tests.tokens.conversations import Played, Turn, turns
from tests.tokens.families import FAMILIES, adder, tokenizer_of

RENDERERS = {
    name: make_renderer(tokenizer_of(name), RendererSettings("template", family.parser))
    for name, family in FAMILIES.items()
}
RENDERERS["qwen3 of renderers"] = make_renderer(tokenizer_of("qwen3"), RendererSettings("qwen3"))


def begun(name: str) -> Played:
    return Played(FAMILIES[name.partition(" ")[0]], RENDERERS[name])


def check(played: Played) -> None:
    """The invariants, against the log of the server."""
    sequences = played.transcript.sequences()
    spans = sorted(((span, line) for line in sequences for span in line.spans), key=lambda pair: pair[0].turn)
    assert [span.turn for span, _ in spans] == list(range(len(played.log))), "each turn is trained on once"
    for (span, line), (prompt, completion, _) in zip(spans, played.log, strict=True):
        assert line.tokens[: span.start] == prompt.tolist(), "the context is the one that was sampled in"
        assert line.tokens[span.start : span.stop] == completion
    for line in sequences:
        assert len(line.tokens) == len(line.masks) == len(line.logprobs or [])
        assert all(mask in (MASKED, token) for mask, token in zip(line.masks, line.tokens, strict=True))
        pairs = zip(line.masks, line.logprobs or [], strict=True)
        assert all((mask == MASKED) == (value == MASKED_LOGPROB) for mask, value in pairs)
        assert unpacked(packed(line)) == line
    trained = Counter(value for line in sequences for value in line.logprobs or [] if value != MASKED_LOGPROB)
    assert trained == Counter(value for _, _, logprobs in played.log for value in logprobs)


def check_prompt(played: Played) -> None:
    """The prompt of the last call: control tokens are the template's alone, no end is doubled."""
    prompt, _, _ = played.log[-1]
    stops = set(played.renderer.stop_ids)
    doubled = [a for a, b in pairwise(prompt) if a == b and a in stops]
    assert doubled == []
    if played.canonical_before:
        assert prompt.tolist() == played.renderer.first(played.messages_before, adder()).tolist()


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_trained_is_what_was_sampled(name: str, data: Any) -> None:
    played = begun(name)
    for turn in data.draw(turns(played.family)):
        played.play(turn)
        check_prompt(played)
    check(played)


def turn(**given: Any) -> Turn:
    defaults: dict[str, Any] = {"said": "ok", "reasoning": None, "calls": (), "spaces": False}
    return Turn(**{**defaults, "broken": False, "cut": False, "event": "go on", **given})


CALL = (("add", {"a": 1}),)


@pytest.mark.parametrize("name", RENDERERS)
@pytest.mark.parametrize("change", ["go on", "new ids", "other JSON"])
def test_tool_calls_stay_in_one_sequence(name: str, change: str) -> None:
    played = begun(name)
    for spaces in (False, True, False):
        played.play(turn(said="", calls=CALL, spaces=spaces, event=change))
    played.play(turn())
    check(played)
    assert len(played.transcript.branches) == 1
    assert [one.how for one in played.transcript.turns] == ["first", *["extended"] * 3]


SEQUENCES_OF_A_NEW_QUESTION = {"qwen3": 2, "qwen3 hybrid": 2, "qwen3 of renderers": 2, "mistral": 2, "gpt-oss": 2}
"""Templates that rewrite what was before: thinking is dropped, tools move, an end is written otherwise."""


@pytest.mark.parametrize("name", RENDERERS)
def test_new_question_starts_a_sequence_only_if_the_template_rewrites(name: str) -> None:
    played = begun(name)
    played.play(turn(reasoning="hm", event="user"))
    played.play(turn())
    check(played)
    assert len(played.transcript.branches) == SEQUENCES_OF_A_NEW_QUESTION.get(name, 1)


@pytest.mark.parametrize("thoughts", [(None, None), ("hm", None), (None, "hm"), ("hm", "well")])
def test_a_block_of_thinking_that_only_the_last_turn_has_splits_nothing(thoughts: tuple[str | None, ...]) -> None:
    played = begun("qwen3 hybrid")
    for thought in thoughts:
        played.play(turn(said="", calls=CALL, reasoning=thought))
    played.play(turn())
    check(played)
    assert len(played.transcript.branches) == 1


@pytest.mark.parametrize("renderer", ["template", "qwen3"])
def test_retained_thinking_keeps_one_sequence(renderer: str) -> None:
    settings = RendererSettings(renderer, thinking_retention="all")
    played = Played(FAMILIES["qwen3"], make_renderer(tokenizer_of("qwen3"), settings))
    for _ in range(3):
        played.play(turn(reasoning="hm", event="user"))
    check(played)
    assert len(played.transcript.branches) == 1


@pytest.mark.parametrize("name", RENDERERS)
def test_a_cut_turn_is_closed_by_context(name: str) -> None:
    played = begun(name)
    played.play(turn(said="a long answer that is cut", cut=True, event="user"))
    played.play(turn())
    check(played)
    first = played.transcript.sequences()[0]
    assert not set(first.trained[: len(played.log[0][1])]) & set(played.renderer.stop_ids)


@pytest.mark.parametrize("event", ["compaction", "edit"])
@pytest.mark.parametrize("name", RENDERERS)
def test_changed_history_starts_a_new_sequence(name: str, event: str) -> None:
    played = begun(name)
    played.play(turn(event=event))
    played.play(turn())
    check(played)
    assert len(played.transcript.branches) == 2


def test_two_side_lines_and_the_main_line_are_three_sequences() -> None:
    played = begun("hermes")
    played.play(turn(said="", calls=CALL))
    main = played.messages
    for question in ("one", "two"):
        played.messages = [{"role": "user", "content": question}]
        played.play(turn())
    played.messages = main
    played.play(turn())
    check(played)
    assert [[span.turn for span in line.spans] for line in played.transcript.sequences()] == [[0, 3], [1], [2]]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_templates_of_these_tests_show_tools(name: str) -> None:
    require_tools(tokenizer_of(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_prompt_is_what_the_template_gives(name: str) -> None:
    tokenizer = tokenizer_of(name)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "größer, 日本?"}]
    for tools in (None, adder()):
        text = tokenizer.render(messages, tools, add_generation_prompt=True)
        assert RENDERERS[name].first(messages, tools).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_full_rendering_equals_the_tokens_of_the_template(name: str) -> None:
    """Its pieces are tokenized once; together they are the tokens of the whole, blanks at their ends included."""
    tokenizer, renderer = tokenizer_of(name), RENDERERS[name]
    begun: list[dict[str, Any]] = [{"role": "user", "content": "größer, 日本? \n"}]
    for said in (" first \n\n", "second", "  ", "é"):
        begun = [*begun, {"role": "assistant", "content": said}, {"role": "user", "content": f"\n {said}go on \t"}]
        text = tokenizer.render([for_template(message) for message in begun], None, add_generation_prompt=True)
        for _ in range(2):
            assert renderer.first(begun, None).tolist() == tokenizer.encode(text)


def test_stop_token_that_strips_spaces_is_tokenized_with_them() -> None:
    """As the end of a piece they would stay: there are two tokens for what is one in the whole."""
    engine = Engine.from_file(str(small_tokenizer_path() / "tokenizer.json"))
    engine.add_special_tokens([AddedToken("<|ends|>", lstrip=True, special=True)])
    template = "{% for m in messages %}{{ m.content }}<|ends|>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"

    class Own(SmallTokenizer):
        control = SmallTokenizer.control | {"<|ends|>"}

    tokenizer = Own(engine, _environment().from_string(template))
    renderer = TemplateRenderer(tokenizer)
    messages = [{"role": "user", "content": "Blanks follow.   "}]
    text = tokenizer.render(messages, None, add_generation_prompt=True)
    before, _, after = text.partition("<|ends|>")
    assert tokenizer.encode(before) + tokenizer.encode(f"<|ends|>{after}") != tokenizer.encode(text)
    assert renderer.first(messages, None).tolist() == tokenizer.encode(text)
