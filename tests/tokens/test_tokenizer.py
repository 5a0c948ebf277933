"""The small tokenizer: exact for any text, the same in transformers, and quick to load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine

from hermes_rl.errors import UserError
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer, TokenizerUnavailable, small_tokenizer_path

SMALL = load_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "add", "description": "größer <b>", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["ü", None]}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "assistant", "content": "It is\n 4. "},
    ],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Now:", "tool_calls": [CALL]}],
]


@pytest.fixture(scope="module")
def hub(monkeypatch_module: pytest.MonkeyPatch) -> Tokenizer:
    """The same files through transformers, without a network."""
    from hermes_rl.tokens.hub import HubTokenizer

    monkeypatch_module.setenv("HF_HUB_OFFLINE", "1")
    return HubTokenizer(str(small_tokenizer_path()))


@pytest.fixture(scope="module")
def transformers(hub: Tokenizer) -> Any:
    """The library's own object."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_tokenizer_path())


@pytest.fixture(scope="module")
def monkeypatch_module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text)) == text


@given(st.lists(st.sampled_from([*sorted(SMALL.control | SMALL.markup), "a", " ", "\n", "é", "<", "|>"])))
def test_control_tokens_come_back_too(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert SMALL.decode(SMALL.encode(text)) == text


def test_a_lone_surrogate_is_replaced() -> None:
    assert SMALL.decode(SMALL.encode("a\ud800b")) == "a\ufffdb"
    assert SMALL.decode(SMALL.encode("\ud83d\ude00")) == "😀"


def test_words_are_compact() -> None:
    text = "The server returned an error, so I will create the file again and check the result."
    assert len(SMALL.encode(text)) < len(text) / 4


@given(st.text())
def test_transformers_gives_the_same_ids(hub: Tokenizer, transformers: Any, text: str) -> None:
    ids = SMALL.encode(text)
    assert hub.encode(text) == transformers.encode(text, add_special_tokens=False) == ids
    assert hub.decode(ids) == SMALL.decode(ids)


def test_a_tokenizer_that_cuts_and_pads_does_neither_here(tmp_path: Path) -> None:
    for file in small_tokenizer_path().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    engine = Engine.from_file(str(tmp_path / "tokenizer.json"))
    engine.enable_truncation(3)
    engine.enable_padding(length=8)
    engine.save(str(tmp_path / "tokenizer.json"))
    cutting = load_tokenizer(str(tmp_path))
    for text in ("a", "one two three four five"):
        assert cutting.encode(text) == SMALL.encode(text)


def test_tokenizer_that_splits_special_tokens_keeps_this_setting(tmp_path: Path) -> None:
    for file in small_tokenizer_path().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "split_special_tokens": True}))
    splitting = load_tokenizer(str(tmp_path))
    assert SMALL.encode("<|im_end|>")[0] not in splitting.encode("<|im_end|>")


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("asking", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_transformers_renders_the_same_text(
    hub: Tokenizer, messages: list[dict[str, Any]], tools: Any, asking: bool
) -> None:
    ours = SMALL.render(messages, tools, add_generation_prompt=asking)
    assert hub.render(messages, tools, add_generation_prompt=asking) == ours
    assert hub.control == SMALL.control
    assert hub.markup == SMALL.markup


def test_the_template() -> None:
    rendered = SMALL.render(CONVERSATIONS[2], None, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": ["ü", null]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": ["ü", null]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is\n 4. <|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_images_are_refused(hub: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url"}]}]
    for tokenizer in (SMALL, hub):
        with pytest.raises(TemplateRefused, match="text only"):
            tokenizer.render(messages, None, add_generation_prompt=True)


def test_unavailable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnavailable, match="cannot be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert isinstance(caught.value, UserError)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((small_tokenizer_path() / name).read_bytes())
    with pytest.raises(TokenizerUnavailable, match="no chat template"):
        load_tokenizer(str(tmp_path))


def test_the_small_one_needs_no_transformers() -> None:
    code = (
        "import sys; from hermes_rl.tokens.load import load_tokenizer; import hermes_rl.tokens.chat;"
        "assert 'tokenizers' not in sys.modules; load_tokenizer().encode('hi');"
        "assert not {'transformers', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in small_tokenizer_path().iterdir()) < 300_000


@pytest.mark.slow
def test_committed_tokenizer_files_match_the_training_script(tmp_path: Path) -> None:
    from scripts.train_small_tokenizer import train

    train(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (small_tokenizer_path() / name).read_bytes()
