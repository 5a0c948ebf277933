"""Separate text from template: encode the texts of a conversation without control tokens.

Only the template may produce control tokens in a prompt. `guarded` breaks every string in the texts that is a control
token, or a part that the template may complete to one, and verifies the encoded prompt: it must contain exactly the
control tokens of the template's text. The break is a random word that occurs in no input. The template must preserve
it: a prompt with another word must have the same tokens. It is also verified that the template writes each text, once
and in order. An unverifiable prompt is refused, so no rollout counts as exact because of a guess.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hermes_rl.spec.server_types import TEXT_PARTS, refused_part
from hermes_rl.tokens.tokenizer import TemplateRefused

if TYPE_CHECKING:
    from hermes_rl.tokens.tokenizer import Messages, Tokenizer, Tools

T = TypeVar("T")
Write = Callable[["Messages", "Tools | None"], str]
"""Messages and tools → the text of a prompt."""
DIGITS = (24, 31)
"""Number of digits of the two random words in a prompt. Some templates treat words of different lengths differently."""


def stand_in(*inputs: Any, digits: int = DIGITS[0]) -> str:
    """Return a random word that is in no string of the inputs.

    It consists of a letter and digits, which templates and JSON preserve. No suffix of it is a prefix of it, so it is
    found next to any text.
    """
    return _Strings.of(*inputs).new_word(digits)


def guarded(
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Tools | None,
    make: Callable[[Guard], T],
    write: Write | None = None,
    since: int = 0,
) -> T:
    """Return the tokens that `make` encodes with a `Guard`, after verification.

    Args:
        make: encodes the prompt; may be called several times.
        write: returns the text that is encoded, which must contain the texts from message `since` on, except the
            model's.

    Raises:
        TemplateRefused: a text would become a control token, the template changes texts, or a message has other parts
            than texts, which cannot be converted to tokens and never reach templates and renderers.
    """
    if (refused := refused_part(messages, TEXT_PARTS)) is not None:
        raise TemplateRefused(refused)
    messages = [_text_parts_only(message) for message in messages]
    strings = _Strings.of(messages, tools)
    for everywhere in (False, True):
        guard = Guard(tokenizer, messages, tools, strings, everywhere=everywhere)
        encoded_prompt = make(guard)
        if guard.forged:
            continue  # the tokenizer normalizes texts: the source of a control token does not look like one
        if guard.broken:
            other = Guard(tokenizer, messages, tools, strings, everywhere=everywhere, digits=DIGITS[1])
            other._encoded = guard._encoded  # the same pieces, unless the template changed the text
            if make(other) != encoded_prompt or other.forged:
                raise TemplateRefused(
                    "the chat template changes texts, so control tokens cannot be distinguished from text"
                )
        if write is not None:
            _require_texts(messages, tools, write, since, guard.prompt, strings.new_word())
        return encoded_prompt
    raise TemplateRefused("the tokenizer produces control tokens that the rendered prompt does not contain")


def _require_texts(messages: Messages, tools: Tools | None, write: Write, since: int, prompt: str, word: str) -> None:
    """Raise `TemplateRefused` unless each text from message `since` on is in the prompt complete, once and in order.

    `write` writes the prompt again with the word on both sides of each text, which marks its position. Templates move
    system texts to one place and read switches from them, and they omit parts of the model's turns.
    """
    order = list[str]()
    indexes = dict[tuple[str, str], str]()

    def marked(role: str, text: str) -> str:
        core = text.strip()
        if role == "assistant" or not core:
            return text
        # Equal messages stay equal, because some templates compare them.
        order.append(index := indexes.setdefault((role, core), str(len(indexes))))
        return text.replace(core, f"{word}{index}n{core}{word}{index}n", 1)

    marked_messages = list(messages[:since])
    for message in messages[since:]:
        role, content = str(message.get("role")), message.get("content")
        if isinstance(content, str):
            content = marked(role, content)
        elif content:
            content = [{**part, "text": marked(role, part["text"])} for part in content]
        marked_messages.append({**message, "content": content})
    before, *chunks = write(marked_messages, tools).split(word)
    split = [chunk.partition("n") for chunk in chunks]
    starts, ends = ([index for index, _, _ in marks] for marks in (split[::2], split[1::2]))
    others = {index: core for (role, core), index in indexes.items() if role != "system"}
    actual_order, expected = ([index for index in each if index in others] for each in (starts, order))
    if starts != ends or sorted(starts) != sorted(order) or actual_order != expected:
        raise TemplateRefused("the chat template changes texts: it does not write each message once and in order")
    is_complete = all(_writes(text, others[index]) for index, _, text in split[::2] if index in others)
    if not is_complete or before + "".join(text for _, _, text in split) != prompt:
        raise TemplateRefused("the chat template changes texts: it writes a message otherwise than it is")


def _writes(written: str, text: str) -> bool:
    """Return True if this is the text, unchanged or encoded in JSON."""
    return written == text or any(written == json.dumps(text, ensure_ascii=only)[1:-1] for only in (False, True))


def _text_parts_only(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message without empty keys of its parts, which templates mistake for images."""
    content = message.get("content")
    if isinstance(content, str) or not content:
        return message
    parts = [content] if isinstance(content, Mapping) else content
    return {**message, "content": [{"type": "text", "text": part["text"]} for part in parts]}


class Guard:
    """The texts of one conversation for one tokenizer, with their control tokens broken.

    Args:
        strings: all strings of the messages and tools.
        everywhere: break texts at each character that is not part of a word, because the tokenizer creates control
            tokens from other strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        tools: Tools | None,
        strings: _Strings,
        *,
        everywhere: bool,
        digits: int = DIGITS[0],
    ) -> None:
        self._tokenizer = tokenizer
        self._break: str | None = None
        self._of_model, self._of_others = _risks(tokenizer)
        self._encoded: dict[tuple[str, bool], Sequence[int]] = {}
        """Tokens of the pieces between breaks, by text and by the presence of a preceding piece."""
        self.prompt = ""
        """The encoded text without breaks."""
        self.forged = False
        """True if an encoded text had other control tokens than the text contains."""
        self.messages: Messages = messages
        self.tools = tools or None
        if not everywhere and not self._of_others.touches(strings):
            return  # these include the strings of the model's texts
        risks = [self._of_model if message.get("role") == "assistant" else self._of_others for message in messages]
        if not everywhere and not any(map(_is_risky, (*risks, self._of_others), (*messages, tools))):
            return
        word = self._break = strings.new_word(digits)
        markup_pattern = re.compile(
            "|".join(map(re.escape, sorted(tokenizer.markup, key=len, reverse=True))) or r"(?!)"
        )

        def breaker(risk: _Risk) -> Callable[[str], str]:
            markup = markup_pattern if everywhere and risk is self._of_model else None
            return lambda text: risk.broken(_broken_everywhere(text, word, markup) if everywhere else text, word)

        self.messages = [_mapped(message, breaker(risk)) for message, risk in zip(messages, risks, strict=True)]
        self.tools = _mapped(tools, breaker(self._of_others)) or None

    @property
    def broken(self) -> bool:
        """True if there is a break in a text."""
        return self._break is not None

    def encode(self, rendered: str, encode: Callable[[str], Sequence[int]] | None = None) -> list[int]:
        """Encode a text rendered from the guarded messages, and detect control tokens that it does not contain."""
        encode = encode or self._tokenizer.encode
        tokens: list[int] = []
        chunks = [rendered] if self._break is None else rendered.split(self._break)
        self.prompt += "".join(chunks)
        for index, chunk in enumerate(chunks):
            if (encoded := self._encoded.get((chunk, index > 0))) is None:
                encoded = encode(chunk) if index == 0 else _encode_behind(self._tokenizer, chunk)
                self._encoded[chunk, index > 0] = encoded
                self.forged = self.forged or not self._of_others.explains(encoded, chunk)
            tokens += encoded
        return tokens


LEAD = "\n"
"""A text that is not part of a word."""


def _encode_behind(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """Return the tokens of a text that follows another one, without the blank that some tokenizers add at the start."""
    if _opens_with_nothing(tokenizer):
        return tokenizer.encode(text)
    lead, tokens = tokenizer.encode(LEAD), tokenizer.encode(LEAD + text)
    return tokens[len(lead) :] if tokens[: len(lead)] == lead else tokenizer.encode(text)


@functools.lru_cache(maxsize=16)
def _opens_with_nothing(tokenizer: Tokenizer) -> bool:
    return tokenizer.decode([*tokenizer.encode("a"), *tokenizer.encode("|")]) == "a|"


@dataclass(frozen=True)
class _Risk:
    """Strings that must not become tokens if they are text."""

    ids: Mapping[str, int]
    """Their tokens; a string that is not a single token of the tokenizer is not included."""
    pattern: re.Pattern[str]
    starts: re.Pattern[str]
    """Finds the start of each of them, including those inside another one."""
    heads: frozenset[str]
    """Proper prefixes of the strings."""
    tails: frozenset[str]
    first: frozenset[str]
    """First characters of all strings."""
    last: frozenset[str]
    edges: re.Pattern[str]
    """Any of these characters."""
    longest: int
    joined: str

    @classmethod
    def from_strings(cls, strings: Iterable[str], tokenizer: Tokenizer) -> _Risk:
        # Runs of blanks and single characters are tokens of some vocabularies, but not control tokens.
        risky = sorted((s for s in strings if len(s) > 1 and s.strip()), key=lambda s: (-len(s), s))
        encoded = {string: tokenizer.encode(string) for string in risky}
        any_of = "|".join(map(re.escape, risky)) or r"(?!)"
        return cls(
            {string: tokens[0] for string, tokens in encoded.items() if len(tokens) == 1},
            re.compile(any_of),
            re.compile(f"(?={any_of})"),
            frozenset(string[:size] for string in risky for size in range(1, len(string))),
            frozenset(string[-size:] for string in risky for size in range(1, len(string))),
            frozenset(string[0] for string in risky),
            frozenset(string[-1] for string in risky),
            re.compile("|".join(re.escape(c) for c in sorted({c for s in risky for c in (s[0], s[-1])})) or r"(?!)"),
            max(map(len, risky), default=0),
            "\n".join(risky),
        )

    @functools.cached_property
    def tokens(self) -> frozenset[int]:
        return frozenset(self.ids.values())

    def explains(self, encoded: Sequence[int], text: str) -> bool:
        """Return True if these tokens in `encoded` are exactly those contained in the text, in order."""
        written = [self.ids[match[0]] for match in self.pattern.finditer(text) if match[0] in self.ids]
        return written == list(filter(self.tokens.__contains__, encoded))

    def touches(self, strings: _Strings) -> bool:
        """Return False if none of these texts needs a break; all are checked at once."""
        return self.edges.search(strings.joined) is not None or any(
            self._is_inside_string(text.strip()) for text in strings.each
        )

    def _is_inside_string(self, core: str) -> bool:
        """Return True if a text is a part of a string, and not of a word."""
        return len(core) < self.longest and core in self.joined and _UNWORDED.search(core) is not None

    def breaks(self, text: str) -> list[int]:
        """Return the positions at which a text must be broken, in order.

        Templates concatenate texts and strip blanks around them.
        """
        core = text.strip()
        inside = self._is_inside_string(core)
        if not core or (self.edges.search(core) is None and not inside):
            return []
        positions = {match.start() + 1 for match in self.starts.finditer(text)}
        start = len(text) - len(text.lstrip())
        end = start + len(core)
        if not self.first.isdisjoint(core[-self.longest :]):
            sizes = range(1, min(self.longest, len(core) + 1))
            positions.update(end - size + 1 for size in sizes if core[-size:] in self.heads)
        if not self.last.isdisjoint(core[: self.longest]):
            sizes = range(1, min(self.longest, len(core) + 1))
            positions.update(start + size - 1 for size in sizes if core[:size] in self.tails)
        if inside:
            positions |= {start, end}
        return sorted(positions)

    def broken(self, text: str, word: str) -> str:
        """Return the text with the word at each of these positions."""
        positions = self.breaks(text)
        cuts = [0, *positions, len(text)]
        return word.join(text[cuts[i] : cuts[i + 1]] for i in range(len(positions) + 1))


_UNWORDED = re.compile(r"[^\w\s]")
_BESIDE_UNWORDED = re.compile(r"(?<=[^\w\s])(?=\S)|(?<=\w)(?=[^\w\s])")


def _broken_everywhere(text: str, word: str, markup: re.Pattern[str] | None) -> str:
    """Return the text with the word around each character that is not a letter, digit or blank, except in `markup`."""
    if not _UNWORDED.search(text):
        return text
    if markup is None:
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        return f"{text[:start]}{word}{_BESIDE_UNWORDED.sub(word, text[start:end])}{word}{text[end:]}"
    chunks, marks = markup.split(text), [*markup.findall(text), ""]
    return "".join(
        _broken_everywhere(chunk, word, None) + markup_text for chunk, markup_text in zip(chunks, marks, strict=True)
    )


@functools.lru_cache(maxsize=16)
def _risks(tokenizer: Tokenizer) -> tuple[_Risk, _Risk]:
    """Return the strings to break, in texts of the model and in all others."""
    return _Risk.from_strings(tokenizer.control, tokenizer), _Risk.from_strings(
        tokenizer.control | tokenizer.markup, tokenizer
    )


@dataclass(frozen=True)
class _Strings:
    """The strings of some inputs, and all of them joined, which is searched at once."""

    each: Collection[str]
    joined: str

    @classmethod
    def of(cls, *inputs: Any) -> _Strings:
        each = _strings(inputs)
        return cls(each, "\n".join(each))

    def new_word(self, digits: int = DIGITS[0]) -> str:
        """Return a word as `stand_in` does. Nothing depends on its being secret, since it is in no input."""
        while (word := f"q{_random.randrange(10**digits):0{digits}d}") in self.joined:
            pass
        return word


_random = random.Random()


def _is_risky(risk: _Risk, value: Any) -> bool:
    return any(map(risk.breaks, _strings(value)))


def _strings(value: Any) -> set[str]:
    """Return every string in a value, keys included."""
    strings, pending = set(), [value]
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind is str:
            strings.add(item)
        elif kind is dict or isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
        elif kind is list or kind is tuple or isinstance(item, list | tuple):
            pending += item
        elif isinstance(item, str):
            strings.add(item)
    return strings


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
