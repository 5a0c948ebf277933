"""Read and write `label.json`: the name, the tags and the note that people give a run.

It is in the run directory and is copied with it. No part of a run depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hermes_rl.errors import UserError
from hermes_rl.others_files import read_file
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.values import read_json

FILE = "label.json"
LONGEST_NAME, LONGEST_TAG, LONGEST_NOTE, MOST_TAGS = 80, 40, 4_000, 20
"""Limits: characters of the name, of a tag and of the note; number of tags."""


@dataclass(frozen=True, slots=True)
class RunLabel:
    """Name, tags and note of a run; empty if the run has none."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def read(cls, run: Path) -> Self:
        """Return the label of a run directory; the empty one if there is none, or it cannot be read."""
        try:
            value: Any = read_json(read_file(run / FILE, run))
        except (OSError, ValueError, RecursionError, UserError):
            return cls()
        if not isinstance(value, dict):
            return cls()
        tags = value.get("tags")
        texts = [str(tag)[:LONGEST_TAG] for tag in tags[:MOST_TAGS]] if isinstance(tags, list) else []
        name, note = (value.get(key) if isinstance(value.get(key), str) else "" for key in ("name", "note"))
        return cls(str(name)[:LONGEST_NAME], tuple(texts), str(note)[:LONGEST_NOTE])

    def changed(self, name: str | None, add: Iterable[str], remove: Iterable[str], note: str | None) -> RunLabel:
        """Return the label with another name or note, if given, and with tags added and removed.

        Raises `UserError` if a part is too long, or spans several lines.
        """
        taken_away = set(remove)
        tags = tuple(tag for tag in dict.fromkeys([*self.tags, *add]) if tag not in taken_away)
        changed = RunLabel(self.name if name is None else name.strip(), tags, self.note if note is None else note)
        for option, text, limit in [
            ("--name", changed.name, LONGEST_NAME),
            ("--note", changed.note, LONGEST_NOTE),
            *(("--tag", tag, LONGEST_TAG) for tag in changed.tags),
        ]:
            if len(text) > limit:
                raise UserError(f"{option}: {len(text)} characters; expected {limit} at most")
            if option != "--note" and (len(text.splitlines()) > 1 or (option == "--tag" and not text.strip())):
                raise UserError(f"{option} {text!r}: expected one line of text")
        if len(changed.tags) > MOST_TAGS:
            raise UserError(f"--tag: {len(changed.tags)} tags; expected {MOST_TAGS} at most")
        return changed

    def write(self, run: Path) -> None:
        """Write it into a run directory."""
        RunDirectory(run).write_json(FILE, asdict(self))
