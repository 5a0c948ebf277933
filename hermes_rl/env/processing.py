"""Process mode of hand-written environments: write their groups to a file.

`runs.process` runs the groups; this module configures it from the environment and calls the environment's hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hermes_rl.env.custom_collection import run_of
from hermes_rl.env.hooks import ConductedEnv, author_error, call
from hermes_rl.errors import RunError, UserError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.groups import GroupsFile
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.process import Processing
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.run import RunBudget


async def process_by_hand(env: ConductedEnv) -> int:
    """Write groups to `data_path_to_save_groups` until the file has `total_steps` groups.

    A group is everything that one item produced, which may take several records. An item is recognized by its `repr`.

    Returns:
        The number of groups that this call wrote.

    Raises:
        RunError: more groups failed than were requested (and more than 10), or items were quarantined.
        UserError: `total_steps` is less than 1, or `postprocess_histories` returned nothing for every group.
    """
    target = int(env.config.total_steps)
    if target < 1:
        raise UserError(f"--env.total_steps: expected at least 1 group for process to write, got {target}")
    path = Path(env.config.data_path_to_save_groups or f"data/{env.name or 'groups'}.jsonl")
    progress = Progress()
    with closing(GroupsFile(Journal(path), "")) as file:
        run = run_of(env, pauses=False, budget=RunBudget(max_failures=max(target, 10)), progress=progress)
        work = Processing(run, file, target, EnvLog(env))
        try:
            await work.play()
        except RunError:
            if run.budget.failures or run.quarantine.record():
                raise
        unmade = work.summary.unmade
        if unmade and not work.complete:
            raise author_error(env.postprocess_histories, f"returned nothing for all {unmade} groups")
        explanation = "" if work.complete >= target else "; there are no more items"
        if explanation and unmade:
            explanation += f", and postprocess_histories returned nothing for {unmade} groups"
        progress.note(f"{work.complete} of {target} groups are in {path}{explanation}")
        return work.summary.written


class EnvLog:
    """Listener that counts groups for an environment, and calls the environment's hooks for each written group."""

    def __init__(self, env: ConductedEnv) -> None:
        self._env = env

    async def group(self, group: Group, written: int | None, lines: Sequence[dict[str, Any]]) -> None:
        """Count a finished group; `written` is its number in the file, or None if it was dropped or excluded."""
        self._env._training_counts.add_group(group)
        await call(self._env.cleanup)
        if written is None:
            return
        self._env.curr_step = written
        await call(self._env.add_rollouts_for_wandb, lines[0], group.row.columns)
        await call(self._env.wandb_log)
