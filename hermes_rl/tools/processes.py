"""The background processes of one rollout, by the ids that its model knows."""

from __future__ import annotations

from hermes_rl.sandbox.base import BackgroundProcess


class ProcessTable:
    """Each rollout has its own, so that an id of another rollout means nothing here."""

    def __init__(self) -> None:
        self.entries: dict[str, BackgroundProcess] = {}
