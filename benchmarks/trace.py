"""The way of a row: which files and functions of the package it passes until its line is in groups.jsonl.

    python benchmarks/trace.py [--list]

One group of one rollout with one terminal call, played by the scripted policy in a sandbox. Everything that Python
calls in any thread of this process is noted from the moment in which the run is open; what has happened before
(reading the spec, compiling it, opening the directory) is not the row's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from playing import play
from report import say

import hermes_rl
from hermes_rl.data.load import load_rows
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Encoder
from hermes_rl.runs.process import Processing
from hermes_rl.runs.progress import Progress
from hermes_rl.spec.load import parse_spec

PACKAGE = str(Path(hermes_rl.__file__).parent) + "/"
SPEC = """
dataset: {items: [{word: one}]}
prompt: {user: "write {{ word }}"}
toolsets: [terminal]
rewards: {file_matches: {args: {path: f, content: "{{ word }}"}}}
solution: {turns: [{tools: [{name: terminal, args: {command: "printf {{ word }} > f"}}]}, {say: done}]}
servers: {policy: {type: scripted, error_rate: 0}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files, with their functions and calls")
    options = parser.parse_args()
    calls = asyncio.run(traced())
    files: dict[str, Counter[str]] = {}
    for (file, function), count in calls.items():
        files.setdefault(file, Counter())[function] += count
    for file in sorted(files) if options.list else ():
        say(f"{file}: {', '.join(f'{name} {count}' for name, count in files[file].most_common())}")
    say(f"{len(files)} files and {len(calls)} functions of the package, {calls.total()} calls")


async def traced() -> Counter[tuple[str, str]]:
    """Calls by file and function."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            calls[file.removeprefix(PACKAGE), frame.f_code.co_qualname] += 1

    original_play = Processing.play

    async def from_here(self: Processing, *args: Any) -> Any:
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return await original_play(self, *args)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    Processing.play = from_here  # type: ignore[method-assign]
    spec = parse_spec(SPEC)
    compiled = CompiledSpec(spec)
    with tempfile.TemporaryDirectory() as folder:
        rows = load_rows(spec, "train", notify=say)
        encoder = Encoder.load(None)
        quiet = Progress(quiet=True)
        await play(compiled, rows, Path(folder) / "run", quiet, encoder, size=1, groups=1, concurrency=1)
    return calls


if __name__ == "__main__":
    main()
