"""Weights & Biases, where it was asked for: the only importer of wandb.

Nothing is set through the environment, and a run without `wandb:` never imports it. wandb is kept from writing down
the command line, the console and the working tree: a key may be in any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hermes_rl.errors import UserError

_PRIVATE = {"console": "off", "save_code": False, "disable_git": True, "x_disable_meta": True}


class Tracker:
    """One wandb run.

    Raises:
        UserError: wandb cannot begin a run: no account on this machine, a project that cannot be written to.
    """

    def __init__(
        self,
        project: str,
        name: str,
        *,
        mode: Literal["online", "offline", "disabled"] | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        import wandb

        self._wandb = wandb
        try:
            self.run = wandb.init(
                project=project,
                name=name,
                group=group,
                mode=mode,
                config=dict(config or {}),
                dir=str(folder.resolve()) if folder is not None else None,
                # Two environments in one process have a run each.
                reinit="create_new" if wandb.run is not None else None,
                settings=wandb.Settings(**_PRIVATE),
            )
        except wandb.Error as error:
            reason = str(error).rstrip(".")
            raise UserError(f"wandb: {reason}. Run `wandb login`, or set wandb.mode to offline") from error

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers and texts under their names."""
        self.run.log(dict(metrics), step=step)

    def table(self, rows: Sequence[tuple[str, float]]) -> Any:
        """(text, score) pairs as a table that `log` takes."""
        return self._wandb.Table(columns=["text", "score"], data=[list(row) for row in rows])

    def close(self) -> None:
        """Finish the run, so that its files are complete."""
        self.run.finish()
