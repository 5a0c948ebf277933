"""Weights & Biases, where it was asked for: the only importer of wandb.

Nothing is set through the environment, and a run without `wandb:` never imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal


class Tracker:
    """One wandb run."""

    def __init__(
        self,
        project: str,
        name: str,
        *,
        mode: Literal["online", "offline", "disabled"] = "online",
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        import wandb

        self._wandb = wandb
        self.run = wandb.init(
            project=project,
            name=name,
            group=group,
            mode=mode,
            config=dict(config or {}),
            dir=str(folder) if folder is not None else None,
        )

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers and texts under their names."""
        self.run.log(dict(metrics), step=step)

    def table(self, rows: Sequence[tuple[str, float]]) -> Any:
        """(text, score) pairs as a table that `log` takes."""
        return self._wandb.Table(columns=["text", "score"], data=[list(row) for row in rows])

    def close(self) -> None:
        """Finish the run, so that its files are complete."""
        self.run.finish()
