"""Where the command line prints."""

from __future__ import annotations

import typer

from hermes_rl.visible import visible


def echo(text: str, *, err: bool = False) -> None:
    """Print a line, whatever is in it, so that a terminal only shows it."""
    typer.echo(visible(text), err=err)
