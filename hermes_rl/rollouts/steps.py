"""The steps of a rollout, which fixed words of its user begin: what comes before each, and what its rewards become.

A step ends when the agent answers. Before the next words the rewards that look at steps are called, the words'
`min_reward` is compared with them, and what comes with the words is laid down. The step in which a rollout ends is
graded with the rollout. Rewards of the steps before it look at a copy of the sandbox, since the agent goes on in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hermes_rl.agent.result import AgentResult, GradedStep
from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.rollouts.sandboxes import copied, laid_files, require_copies
from hermes_rl.scoring.grader import Grader, Machines
from hermes_rl.scoring.value import RewardValue, is_below, of_steps, reward_of
from hermes_rl.spec.model import Spec, UserWords
from hermes_rl.tools.base import ToolFailedError, ToolRuntime
from hermes_rl.tools.staging import Staging

SHOWN = 400
"""Characters of a failed command's output that are told."""


class BeforeWords:
    """What happens before a user says the words of a number.

    Args:
        words: all of them, rendered for the row.

    Raises:
        UserError: a reward needs a copy of a sandbox that cannot be copied.
    """

    def __init__(self, spec: Spec, grader: Grader, row: Row, runtime: ToolRuntime, words: Sequence[UserWords]) -> None:
        self._spec, self._grader, self._row, self._runtime, self._words = spec, grader, row, runtime, words
        if words:
            require_copies(runtime.config, grader.of_steps)

    async def __call__(self, result: AgentResult, number: int) -> Ending | None:
        """Grade the step before and lay down what comes with the words; returns the ending where it was too bad. Raises
        `ToolFailedError` where a file cannot be laid down, or a command fails; in the sandbox is what the agent has
        left. Raises `Failure` where a reward, or the sandbox, failed."""
        words = self._words[number]
        if result.turns_used and self._grader.of_steps:
            values = await self._graded(result)
            result.steps.append(GradedStep(result.turns_used, {name: value.record() for name, value in values.items()}))
            if words.min_reward is not None and is_below(words.min_reward, values):
                return Ending.STEP_FAILED
        if words.files or words.setup:
            await self._lay(words)
        return None

    async def _graded(self, result: AgentResult) -> dict[str, RewardValue]:
        values: dict[str, RewardValue] = {}
        runtime, names, step = self._runtime, [each.name for each in self._grader.of_steps], len(result.steps)
        runtime.phase, remaining, worked = "rewards", runtime.time_left, result.timings.working
        if remaining is not None:
            remaining.seconds -= worked
        await self._grader.grade_rollout(
            dict(self._row.columns), result.for_rewards(), partial(copied, runtime), runtime.state, values, names, step
        )
        runtime.phase = "model"
        if remaining is not None:  # what the agent has worked is taken from it when the agent has ended
            remaining.seconds += worked
        return values

    async def _lay(self, words: UserWords) -> None:
        sandbox, staging = await self._runtime.sandbox(), Staging()
        for file in laid_files(words.files, self._spec.folder, "user.says"):
            try:
                await staging.write(sandbox, file.to, file.data, file.mode)
            except OSError as error:
                problem = f"the file {file.to} cannot be laid down: {error.strerror}"
                raise ToolFailedError("", problem) from error
        await staging.keep(sandbox)
        for command in words.setup:
            done = await sandbox.run(command, timeout=self._spec.command_timeout)
            if done.exit_code != 0:
                problem = f"the command {command!r} failed ({done.exit_code}): {done.output[-SHOWN:]}"
                raise ToolFailedError("", problem)


async def grade(
    grader: Grader,
    item: Mapping[str, Any],
    result: AgentResult,
    machines: Machines,
    state: Any,
    values: dict[str, RewardValue],
) -> None:
    """Call the rewards of a rollout that has ended, and make one value of those that each has for the steps. Raises
    `Failure` where a reward failed; `values` keeps those before it."""
    over = result.ending is Ending.STEP_FAILED  # the last step was graded before its ending was known
    names = [each.name for each in grader.rewards if each.steps is None or not over]
    await grader.grade_rollout(item, result, machines, state, values, names, len(result.steps))
    for reward in grader.of_steps:
        before = [reward_of(step.rewards[reward.name]) for step in result.steps]
        values[reward.name] = of_steps(str(reward.steps), [*before, *([values[reward.name]] if not over else [])])
