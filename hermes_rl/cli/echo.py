"""Print output of the command line."""

from __future__ import annotations

import typer

from hermes_rl.terminal_text import escape_controls


def echo(text: str, *, err: bool = False) -> None:
    """Print a line, escaped so that a terminal only displays it."""
    typer.echo(escape_controls(text), err=err)
