"""Starts the program over and over in a process of its own, from one that has imported everything already.

Reads JSON lines: a list of arguments starts the program and prints its process id; a number waits for that process and
prints its status (negative: the signal that ended it). What the programs say goes to the file in argv[1].
"""

from __future__ import annotations

import importlib
import json
import os
import sys

PRELOADED = (
    "hermes_rl.cli.run",
    "hermes_rl.tokens.tokenizer",
    "tokenizers",
    "aiohttp",
    "hermes_rl.env.spec_env",
)


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    said = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                os.dup2(said, 1)
                os.dup2(said, 2)
                importlib.import_module("hermes_rl.cli.main").main(request)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
