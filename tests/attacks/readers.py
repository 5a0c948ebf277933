"""Hostile texts for whatever reads what an agent writes, made of the words that the readers know.

A text is a repetition, a nesting, or a mixture of tokens, of any size up to a bound; most of them come near to what a
pattern looks for. What is drawn depends on the seed alone.
"""

from __future__ import annotations

import json
import random
from typing import Any

LARGEST = 1 << 20
"""Characters of the longest texts."""
WORDS = (
    *(" ", "  ", "\t", "\n", "\r\n", "\x0b", "\u00a0", "\u2028", "\x00", "\x1b[", "\x1b]", "\ufdd0", "\ud800", "ß"),
    *("a", "x", "word", "1", "0", "-", "−", ".", ",", ",111", "1e999", "NaN", "Infinity", "1" * 400, "9" * 5000, "٣"),
    *("{", "}", "[", "]", "[]", "{}", '"', '\\"', "\\", "\\u", ":", ",", ";", "'", "`", "```", "```json\n", "(", ")"),
    *('{"a": ', '{"a":[', '["', '"}', "}, {", "};{", '{"name": "f", "arguments": {}}', '{"score": 1', "null", "true"),
    *("<tool_call>", "</tool_call>", "<longcat_tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[{"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", ":0"),
    *("<|python_tag|>", "<think>", "</think>", "[THINK]", "[/THINK]", "<|im_end|>", ">", "<t>", "</t>", "functions."),
    *("*** Begin Patch\n", "*** Update File: f\n", "*** Add File: ", "*** Move to: ", "*** Delete File: f\n", "***"),
    *("@@", "@@ ", "\n@@", "\n-a", "\n+b", "\n a", "-> ", "--- a/f\n+++ b/f\n", "diff --git a/f b/f\n", "a/ b/"),
    *('<｜DSML｜invoke name="f">\n', '<｜DSML｜parameter name="a" string="true">', "｜DSML｜", '<invoke name="a">'),
    *("answer", "answer is ", "\\boxed{", "\\text{", "(A", "http://a", "https://", "$", "^{", "/", "/-", "/a/"),
)  # fmt: skip


def text(rng: random.Random, most: int = LARGEST) -> str:
    """Draw a text of 0 to `most` characters."""
    size = int(most ** rng.random()) if rng.random() < 0.97 else rng.choice((0, 1, most))
    if size <= 1:
        return rng.choice(WORDS)[:size]
    words = rng.sample(WORDS, rng.randint(1, 5))
    shape = rng.randrange(5)
    if shape == 0:  # a few words, over and over
        unit = "".join(rng.choice(words) for _ in range(rng.randint(1, 6)))
        return (unit * (size // len(unit) + 1))[:size]
    if shape == 1:  # something, much of one thing, and something else
        much = words[0] * (size // len(words[0]) + 1)
        return "".join((*words[1:3], much[:size], *words[3:]))[:most]
    if shape == 2:  # nested
        depth = min(size // 12 + 1, 100_000)
        opened, closed = (word * min(depth, size // len(word) + 1) for word in (words[0], words[-1]))
        return (opened + closed)[:size]
    if shape == 3:  # numbered, so that nothing is equal to anything else
        return "".join(f"{rng.choice(words)}{number}" for number in range(min(size // 4, 10_000)))[:size]
    return "".join(rng.choice(words) for _ in range(min(size // 2 + 1, 10_000)))[:size]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Draw a value of JSON, deep or broad."""
    kind = rng.randrange(9)
    if kind == 0 and depth < 3:
        return {text(rng, 100): value(rng, depth + 1) for _ in range(int((1000, 30, 5)[depth] ** rng.random()))}
    if kind == 1 and depth < 3:
        return [value(rng, depth + 1) for _ in range(int((1000, 30, 5)[depth] ** rng.random()))]
    if kind == 2:
        return [value(rng, 3)] * int(20_000 ** (rng.random() / (depth + 1)))
    if kind == 3:
        nested: Any = 1
        for _ in range(rng.choice((10, 190, 210, 400))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    return rng.choice(
        (None, True, 1, -1, 10**400, 1e308, float("inf"), float("nan"), "", "1", "[1]", "true", text(rng, 300))
    )


def arguments(rng: random.Random, names: list[str]) -> str:
    """Draw the arguments of a tool that has these parameters: JSON, nearly JSON, or any text."""
    if rng.random() < 0.25:
        return text(rng)
    given = {name: text(rng, 100_000) if rng.random() < 0.6 else value(rng) for name in names if rng.random() < 0.8}
    if rng.random() < 0.2:
        unknown = text(rng, 50)
        given |= {f"{unknown}{number}": 1 for number in range(int(50_000 ** rng.random()))}
    written = json.dumps(given)
    return written if rng.random() < 0.9 else written[: rng.randrange(len(written))] + text(rng, 100)


def patch(rng: random.Random) -> str:
    """Draw a patch of several files whose hunks fit, nearly fit, or do not."""
    lines = ["*** Update File: f"]
    for _ in range(int(300 ** rng.random())):
        lines += [
            f"@@{text(rng, 300)}",
            *(f"{rng.choice(' -+')}{rng.choice(('a', 'b  ', text(rng, 50)))}" for _ in range(3)),
        ]
    return "\n".join(lines) if rng.random() < 0.7 else text(rng)
