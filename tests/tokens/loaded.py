"""Directories of tokenizers of the usual kinds, and the results of one, to compare loaders of tokenizers.

As a program, it prints the results of `HubTokenizer` for each directory in a directory.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from hermes_rl.tokens.hub import HubTokenizer
from hermes_rl.tokens.tokenizer import TemplateRefused, small_tokenizer_path
from hermes_rl.values import replace_surrogates

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FIELDS: dict[str, Any] = {
    "bos_token": "<|im_start|>",
    "eos_token": {
        "content": "<|im_end|>",
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    },
    "pad_token": "<|endoftext|>",
    "extra_special_tokens": {"image_token": "<image>"},
}
DECODER = {
    "added_tokens_decoder": {
        "9": {"content": "<tool_call>", "lstrip": False, "rstrip": True, "normalized": False, "special": False},
    }
}
PLAIN = """{{ bos_token }}{% for m in messages %}
  {%- if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
  {%- if m.role == 'tool' %}{% continue %}{% endif %}
  <{{ m.role }}>{% generation %}{{ m.content | trim }}{% endgeneration %}
  {%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ eos_token }}
  {%- endfor %}
  {% if documents is none %}no documents{% endif %}{{ unk_token }}{{ image_token }}{{ pad_token }}
  {%- if add_generation_prompt %}<assistant>{{ strftime_now('%%') }}{% endif %}"""
WITH_TOOLS = "{{ tools | tojson(indent=2) }}\n" + PLAIN
LISTED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]
BREAKS = "{{ messages[7].content }}"
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["ü<&'", None]}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "größer <b>", "parameters": {}}}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " hi <|im_end|>\n"}],
    [{"role": "system", "content": "Be 🙂."}, {"role": "user", "content": "a\u2028b\u00a0"}],
    [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}],
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ],
    [{"role": "user", "content": None}],
]
PIECES = (
    *(
        "hello",
        " world",
        "▁",
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "\u00a0",
        "\u3000",
        "é",
        "e\u0301",
        "ﬁ",
        "ß",
        "ÄÖ",
        "你好",
    ),
    *(
        "🙂",
        "👩\u200d👩\u200d👧",
        "\ud800",
        "\x00",
        "\ufffd",
        "0123456789",
        "don't",
        "I'LL",
        "-->",
        "<s>",
        "</s>",
        "<unk>",
    ),
    *(*SPECIAL, "<tool_call>", "</tool_call>", "<image>", "[CLS]", "[SEP]", "##ing", "<0x0A>", "Ġ", "<|im_end", "|>"),
)


def byte_level() -> Engine:
    return Engine.from_file(str(small_tokenizer_path() / "tokenizer.json"))


def byte_level_of_another_split() -> Engine:
    """A tokenizer whose split into words and whose normalizer are none of a class of the library."""
    engine = byte_level()
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    split = pre_tokenizers.Split(Regex(r"\d{2}|\s+|[^\s\d]+"), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return engine


def sentence_piece() -> Engine:
    """A tokenizer as Llama 2 and Gemma have it: spaces are ▁, bytes stand for unknown characters."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.,'", "he", "ll", "hell", "hello", "▁w", "or", "▁wor", "▁world", "ld"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "w"), ("o", "r"), ("▁w", "or"), ("l", "d")]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {word: place for place, word in enumerate(words)}
    model = models.BPE(vocabulary, [*merges, ("▁wor", "ld")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    engine = Engine(model)
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in words[:3]])
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return engine


def unigram() -> Engine:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁hello", -3.0), ("▁world", -3.0)]
    engine = Engine(models.Unigram([*pieces, *((letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz")], 2))
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    return engine


def word_piece() -> Engine:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "hello",
        "world",
        "##ing",
        "don",
        "'",
        "t",
        "-",
        ">",
        "<",
        "s",
    ]
    engine = Engine(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    return engine


KINDS: dict[str, tuple[Callable[[], Engine], str | None, dict[str, Any] | None]] = {
    "plain": (byte_level, "PreTrainedTokenizerFast", None),
    "no_class": (byte_level, None, {"model_type": "qwen2", "dtype": "bfloat16"}),
    "qwen": (byte_level, "Qwen2Tokenizer", {"model_type": "qwen3", "torch_dtype": "bfloat16"}),
    "qwen_split": (byte_level_of_another_split, "Qwen2TokenizerFast", {"model_type": "qwen2", "dtype": "float16"}),
    "qwen_parts": (
        byte_level,
        "Qwen2Tokenizer",
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "dtype": "bfloat16"}},
    ),
    "gpt": (byte_level, "GPT2Tokenizer", {"model_type": "gpt2", "dtype": "float32"}),
    "llama3": (byte_level, "LlamaTokenizerFast", {"model_type": "llama", "torch_dtype": "bfloat16"}),
    "split": (byte_level_of_another_split, "PreTrainedTokenizerFast", {"model_type": "acme", "dtype": "bfloat16"}),
    "llama2": (sentence_piece, "LlamaTokenizer", {"model_type": "llama", "dtype": "bfloat16"}),
    "gemma": (sentence_piece, "GemmaTokenizer", {"model_type": "gemma3", "text_config": {"dtype": "bfloat16"}}),
    "mistral": (sentence_piece, "LlamaTokenizerFast", {"model_type": "mistral", "dtype": "bfloat16"}),
    "config_class": (byte_level, None, {"model_type": "llama", "tokenizer_class": "Qwen2Tokenizer", "dtype": "half"}),
    "t5": (unigram, "T5Tokenizer", {"model_type": "t5", "dtype": "float32"}),
    "bert": (word_piece, "BertTokenizer", {"model_type": "bert", "dtype": "float32"}),
}
"""The tokenizer, the class that its directory names, and the configuration of its model, by a name."""


def write_kinds(folder: Path) -> list[Path]:
    """Write a directory for each kind; templates and the files of special tokens take turns."""
    written = []
    for place, (name, (make, kind, config)) in enumerate(KINDS.items()):
        here = folder / name
        here.mkdir()
        make().save(str(here / "tokenizer.json"))
        fields: dict[str, Any] = {"tokenizer_class": kind} if kind else {}
        if place % 2:
            fields |= {**FIELDS, "eos_token": {"__type": "AddedToken", **FIELDS["eos_token"]}}
        fields |= DECODER if place % 3 == 1 else {}
        fields |= {"legacy": bool(place % 4), "add_prefix_space": True} if place % 4 < 2 else {}
        if place % 3 == 0:
            (here / "chat_template.jinja").write_text(WITH_TOOLS, encoding="utf-8")
            (here / "additional_chat_templates").mkdir()
            (here / "additional_chat_templates" / "tool_use.jinja").write_text(PLAIN, encoding="utf-8")
        else:
            fields["chat_template"] = LISTED if place % 3 == 1 else BREAKS if place == 5 else PLAIN
        if not place % 2:
            (here / "special_tokens_map.json").write_text(json.dumps(FIELDS), encoding="utf-8")
        (here / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
        if config is not None:
            (here / "config.json").write_text(json.dumps(config), encoding="utf-8")
        written.append(here)
    return written


def texts() -> Iterator[str]:
    """Yield texts of pieces that tokenizers treat in different ways; always the same ones."""
    yield from PIECES
    chosen = random.Random(0)
    for _ in range(60):
        yield "".join(chosen.choices(PIECES, k=chosen.randint(2, 9)))


def results(
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    render: Callable[[Any, Any, bool], str],
    vocabulary: Callable[[], Any],
    added: tuple[set[str], set[str]],
) -> dict[str, Any]:
    """Return all that a tokenizer makes of the texts and conversations, as JSON has it."""
    ids = [encode(text) for text in texts()]
    cases = [(c, tools, prompt) for c in CONVERSATIONS for tools in (None, TOOLS) for prompt in (False, True)]
    return {
        "ids": ids,
        "texts": [decode(found) for found in ids],
        "reversed": [decode(found[::-1]) for found in ids],
        "rendered": [render(*case) for case in cases],
        "vocabulary": vocabulary(),
        "added": [sorted(tokens) for tokens in added],
    }


def results_of_ours(folder: Path) -> dict[str, Any]:
    tokenizer = HubTokenizer(str(folder))

    def render(messages: Any, tools: Any, prompt: bool) -> str:
        try:
            return tokenizer.render(messages, tools, add_generation_prompt=prompt)
        except TemplateRefused as error:
            return str(error).replace(f"{folder}:", "refused:")

    return results(
        tokenizer.encode,
        tokenizer.decode,
        render,
        lambda: dict(tokenizer.vocabulary),
        (set(tokenizer.control), set(tokenizer.markup)),
    )


def results_of_library(folder: Path) -> dict[str, Any]:
    """Return the results of AutoTokenizer, called as the library's documentation does."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def render(messages: Any, tools: Any, prompt: bool) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
            )
        except Exception as error:  # noqa: BLE001 - the same one must come from the other loader
            return f"refused: {type(error).__name__}: {error}"

    added = tokenizer.added_tokens_decoder.values()
    return results(
        lambda text: list(tokenizer(replace_surrogates(text), add_special_tokens=False)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)),
        render,
        tokenizer.get_vocab,
        ({token.content for token in added if token.special}, {token.content for token in added if not token.special}),
    )


if __name__ == "__main__":
    found = {folder.name: results_of_ours(folder) for folder in sorted(Path(sys.argv[1]).iterdir())}
    assert "torch" not in sys.modules
    sys.stdout.write(json.dumps(found))
