"""`hermes-rl migrate`: replace old names of keys in specs, and leave the rest of the files unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hermes_rl.cli.echo import echo
from hermes_rl.errors import SpecError, UserError
from hermes_rl.others_files import read_regular
from hermes_rl.spec.load import specs_in
from hermes_rl.spec.nodes import MappingNode, Mark, SourceText
from hermes_rl.spec.reader import MAX_SPEC_BYTES, read_text
from hermes_rl.spec.renamed import OldName, renamed, renamed_in_set

_LINES = re.compile("(\r\n|[\r\n\x85\u2028\u2029])")
"""What YAML takes for the end of a line."""


def migrate(specs: Iterable[str], *, check: bool) -> int:
    """Rewrite specs, or only print what would change; return the exit status, 1 if a checked spec has old names."""
    has_changes = False
    paths = [path for name in map(Path, specs) for path in (specs_in(name) if name.is_dir() else [name])]
    for path in paths:
        try:
            data = read_regular(path, MAX_SPEC_BYTES)
            text, changes = migrated(data.decode("utf-8"), SourceText(str(path), path.resolve().parent))
            if changes and not check:
                path.write_bytes(text.encode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be rewritten: {error}") from None
        for change in changes:
            echo(f"{path}:{change.key.line}:{change.key.column}: {change.message}")
        if not changes:
            echo(f"{path}: all names are current")
        has_changes = has_changes or bool(changes)
    return int(has_changes and check)


def migrated(text: str, source: SourceText) -> tuple[str, list[OldName]]:
    """Return the text of a spec with the new names, and the changes; raises SpecError if it cannot be changed."""
    start = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(start)
    root, problems = read_text(text, source)
    if root is None or problems:
        raise SpecError(problems or [Mark(source, 1, 1).problem("the file is empty")])
    is_set = isinstance(root, MappingNode) and "set" in root.entries
    changes = renamed_in_set(root) if is_set else renamed(root)[1]
    problems = [change.problem for change in changes if change.is_double]
    lines = _LINES.split(text)[::2]
    ends = [*_LINES.findall(text), ""]
    # An alias is at several paths of the tree and once in the text. From the end, so that columns stay.
    edits = {
        (position.line, position.column): (position, old, new)
        for change in changes
        for position, old, new in change.edits
    }
    for (line_number, column), (position, old, new) in sorted(edits.items(), reverse=True):
        line = lines[line_number - 1]
        written = re.compile(rf"([\"']?){re.escape(old)}\1").match(line, column - 1)
        if written is None:
            problems.append(position.problem(f"write `{new}` here by hand: `{old}` is not written as one plain word"))
            continue
        lines[line_number - 1] = f"{line[: column - 1]}{written[1]}{new}{written[1]}{line[written.end() :]}"
    if problems:
        raise SpecError(problems)
    return start + "".join(map("".join, zip(lines, ends, strict=True))), changes
