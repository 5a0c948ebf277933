"""The program that compares expressions for `hermes_rl.scoring.mathematics`.

Reads one JSON object a line, ``{"answer", "target", "timeout"}``, and answers each with true, false, or null where
the target is no expression. It is run by its path and imports nothing of this package.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

MEMORY = 4 << 30
"""Bytes of address space: a tower of powers must not take the machine's memory."""

GRACE_SECONDS = 5.0
"""How much longer than a comparison's timeout this process lives when nobody is left to kill it."""


def main() -> None:
    from math_verify import parse, verify

    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _tell("ready")
    for line in sys.stdin:
        task = json.loads(line)
        # The parent kills this process after the timeout. Where the parent is gone, the alarm does.
        signal.setitimer(signal.ITIMER_REAL, task["timeout"] + GRACE_SECONDS)
        # The library's own timeouts use signals with a handler, which cannot run inside one long operation.
        gold = parse(f"${task['target']}$", parsing_timeout=None)
        answer = parse(task["answer"], parsing_timeout=None)
        verdict = bool(verify(gold, answer, timeout_seconds=None)) if gold else None
        signal.setitimer(signal.ITIMER_REAL, 0)
        _tell(json.dumps(verdict))


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
