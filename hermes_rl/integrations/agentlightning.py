"""Door to agent-lightning: a spec as a `LitAgent`, whose model calls its proxy captures.

Owns which rows become tasks, and how a rollout ends for the runner: with its score, or with an error that fails the
attempt. Only a reward goes back, so what it cannot carry is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import agentlightning as agl

from hermes_rl.errors import UserError
from hermes_rl.integrations.opened import play_at_endpoint, tasks_of
from hermes_rl.integrations.pull import row_named

TRAINER = "agent-lightning"


class AttemptWithoutScore(RuntimeError):
    """A rollout has no score, or one that agent-lightning cannot carry; the attempt fails, and the store repeats it."""


class HermesAgent(agl.LitAgent):  # type: ignore[type-arg, unused-ignore]
    """Plays the rollouts of a spec: tools, sandboxes, endings and rewards are the spec's.

    Args:
        spec: a path, or the name of a shipped spec.
        llm: the name of the resource with the model.
        sampling: settings of the spec's `agent`, such as `{"max_turns": 4}`; those of the resource win.
    """

    def __init__(self, spec: str, *, llm: str = "main_llm", sampling: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._spec, self._llm, self._sampling = spec, llm, dict(sampling or {})

    def tasks(self, rows: int | None = None, split: str = "train") -> list[dict[str, str]]:
        """Return the dataset: a task for each row of a split. Raises what `tasks_of` does."""
        return [{"key": key, "split": split} for key, _ in tasks_of(self._spec, split, rows, TRAINER)]

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        """Play the rollout of a task at the endpoint that the resource has for this attempt, and return its score;
        raises `AttemptWithoutScore` where there is none."""
        if self._llm not in resources:
            raise UserError(f"there is no resource {self._llm!r} (there are {', '.join(resources)}): name it as `llm`")
        model = resources[self._llm]
        split, key = row_named({"split": "train", **task}, "a task has no `key` of a row", "agentlightning")
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
            raise AttemptWithoutScore(f"{played.ending}: {played.error}")
        if played.masked:
            raise AttemptWithoutScore(
                f"the spec masks the ending {played.ending}, and agent-lightning trains on all that it has captured: "
                "give it a score under `endings`"
            )
        return played.score
