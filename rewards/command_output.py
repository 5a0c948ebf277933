"""A command in the sandbox prints what it should."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hermes_rl import Score
from hermes_rl.terminal_text import end_of

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import SystemText


def command_output(ctx: Any, *, command: SystemText, expected: str, exact: bool = False, timeout: float = 60) -> Score:
    """Return 1 if `command` ends with exit code 0 and prints `expected`, else 0. A timeout is 0 too.

    Standard output and standard error are combined.

    Args:
        command: run by the sandbox's shell in its working directory.
        expected: the expected output.
        exact: white space at both ends counts too.
        timeout: seconds.
    """
    answer = ctx.terminal(command, timeout=timeout)
    if answer.get("timed_out"):
        return Score(0.0, reason=f"no end within {timeout:g} s")
    output, expected_output = answer["output"], expected
    if not exact:
        output, expected_output = output.strip(), expected_output.strip()
    if answer["exit_code"] != 0:
        return Score(0.0, reason=f"exit code {answer['exit_code']}: {end_of(output, 200)}")
    return Score(
        output == expected_output, reason=None if output == expected_output else f"it printed {output[:200]!r}"
    )
