"""Integrate with agent-lightning: offer a spec as a `LitAgent`, whose model calls agent-lightning's proxy captures.

This module selects the rows that become tasks and returns each rollout to the runner as its score, or as an error that
fails the attempt. agent-lightning takes only a reward, so a spec that needs more than one score is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import agentlightning as agl

from hermes_rl.errors import UserError
from hermes_rl.integrations.base import row_named
from hermes_rl.integrations.common import play_at_endpoint, tasks_of

TRAINER = "agent-lightning"


class AttemptWithoutScore(RuntimeError):
    """The rollout has no score, or a masked one; the attempt fails and agent-lightning's store retries it."""


class HermesAgent(agl.LitAgent):  # type: ignore[type-arg, unused-ignore]
    """Agent that runs the rollouts of a spec with the spec's tools, sandboxes, stop reasons and rewards.

    Args:
        spec: a path, or the name of a shipped spec.
        llm: the name of the resource that contains the model.
        sampling: settings of the spec's `agent`, such as `{"max_turns": 4}`; the resource's settings override them.
    """

    def __init__(self, spec: str, *, llm: str = "main_llm", sampling: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._spec, self._llm, self._sampling = spec, llm, dict(sampling or {})

    def tasks(self, rows: int | None = None, split: str = "train") -> list[dict[str, str]]:
        """Return the dataset: one task per row of a split.

        Args:
            rows: the number of rows; None: all.
            split: "train" or "eval".

        Raises:
            UserError: as for `tasks_of`.
        """
        return [{"key": key, "split": split} for key, _ in tasks_of(self._spec, split, rows, TRAINER)]

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        """Run a task's rollout at the endpoint that the resource provides for this attempt, and return its score.

        Raises:
            AttemptWithoutScore: the rollout has no score, or the spec masks its stop reason.
            UserError: the resource or the row does not exist, or agent-lightning cannot run the spec.
        """
        if self._llm not in resources:
            raise UserError(f"there is no resource {self._llm!r} (there are {', '.join(resources)}): name it as `llm`")
        model = resources[self._llm]
        split, key = row_named(task, "a task has no `key` of a row", "agentlightning", "train")
        played = await play_at_endpoint(
            self._spec,
            key,
            base_url=model.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=model.model,
            api_key=model.api_key,
            trainer=TRAINER,
            split=split,
            sampling={**self._sampling, **(model.sampling_parameters or {})},
        )
        if played.score is None:
            raise AttemptWithoutScore(f"{played.stop_reason}: {played.error}")
        if played.masked:
            raise AttemptWithoutScore(
                f"the spec masks {played.stop_reason}, and agent-lightning trains on all that it has captured: "
                "give it a score under `on_stop`"
            )
        return played.score
