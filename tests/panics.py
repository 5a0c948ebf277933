"""A tokenizer whose library panics at a short text, as tokenizers in use do at ten million blanks."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Engine

from hermes_rl.tokens.tokenizer import small_tokenizer_path

FATAL = "a" * 40 + "!"
"""The text at which the regular expression takes too many steps."""


def panicking_engine() -> Engine:
    """Return the engine of the small tokenizer with a regular expression that takes too many steps."""
    engine = Engine.from_file(str(small_tokenizer_path() / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(r"(?:a|aa|b)+c"), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return engine


def panic() -> BaseException:
    """Return the exception that the library raises."""
    try:
        panicking_engine().encode(FATAL)
    except BaseException as error:  # noqa: BLE001 - it is no Exception
        return error
    raise AssertionError("the library has not panicked")
