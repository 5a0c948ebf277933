"""Match paths against a `.dockerignore`, in bounded time for any of its lines.

All lines together are one automaton whose states are the bits of a number: each character of a path takes a few
operations on that number. A regular expression for each line would backtrack, and block the interpreter meanwhile.
"""

from __future__ import annotations

import posixpath
import re

_TOKEN = re.compile(r"\*\*/|\*\*|.", re.DOTALL)


class DockerIgnore:
    """The lines of a `.dockerignore`: the last one that matches a path, or a directory above it, decides.

    There is a bit before each step of a line and another one after its last step.
    """

    def __init__(self, text: str) -> None:
        self._start = self._end = self._excluding = 0
        """Bits at the start and the end of lines, and at the end of lines without an exclamation mark."""
        self._characters: dict[str, int] = {}
        """Bits before a certain character."""
        self._one = self._stay = self._stay_in_name = 0
        """Bits before `?`; bits that any character leaves unchanged, and any but a slash."""
        self._skip, self._skip_directories = 0, 0
        """Bits that the next bit follows without a character, and the next but two."""
        self._bit = 1
        for line in map(str.strip, text.splitlines()):
            if line and not line.startswith("#"):
                pattern = posixpath.normpath(line.removeprefix("!").strip().lstrip("/"))
                self._start |= self._bit
                for token in _pattern_steps(pattern):
                    self._add(token)
                self._end |= self._bit
                self._excluding |= 0 if line.startswith("!") else self._bit
                self._bit <<= 1
        self._start = self._skipped(self._start)

    def _add(self, token: str) -> None:
        if token == "**/":  # nothing at all, or anything up to a slash
            self._skip_directories |= self._bit
            self._skip |= self._bit
            self._bit <<= 1
        if token.startswith("*"):
            self._skip |= self._bit
            if token == "*":
                self._stay_in_name |= self._bit
            else:
                self._stay |= self._bit
        elif token == "?":
            self._one |= self._bit
        else:
            self._characters[token] = self._characters.get(token, 0) | self._bit
        self._bit <<= 1
        if token == "**/":
            self._add("/")

    def _skipped(self, state: int) -> int:
        while (more := state | (state & self._skip) << 1 | (state & self._skip_directories) << 3) != state:
            state = more
        return state

    def leaves_out(self, path: str) -> bool:
        """Return True if a path of the build context, relative and with slashes, is excluded."""
        state, fitting = self._start, 0
        for character in path:
            after = (state & self._characters.get(character, 0)) << 1 | state & self._stay
            if character == "/":
                fitting |= state & self._end
            else:
                after |= state & self._stay_in_name | (state & self._one) << 1
            state = self._skipped(after)
        fitting |= state & self._end
        return bool(fitting and self._excluding >> (fitting.bit_length() - 1) & 1)


def _pattern_steps(pattern: str) -> list[str]:
    """Return the steps of a pattern, without steps that are redundant next to `**` or to an equal one."""
    tokens: list[str] = []
    for token in _TOKEN.findall(pattern):
        before = tokens[-1] if tokens else ""
        if token.startswith("*") and before.startswith("*") and "**" in (token, before):
            tokens[-1] = "**"
        elif token != "**/" or before != token:
            tokens.append(token)
    return tokens
