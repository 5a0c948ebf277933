"""`hermes-rl view`: from the command line to the page of runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from hermes_rl.cli.echo import echo
from hermes_rl.errors import UserError
from hermes_rl.view.server import view

OUTPUTS = Path("outputs")


def view_runs(runs: Sequence[Path], listen: str) -> int:
    """Serve the page until the process is told to end; returns the exit status.

    Raises:
        UserError: there are no runs, or the address is wrong.
    """
    if not runs and not OUTPUTS.is_dir():
        raise UserError("there is no folder ./outputs here; name a run directory: hermes-rl view RUN")
    return asyncio.run(view(runs or [OUTPUTS], listen, echo))
