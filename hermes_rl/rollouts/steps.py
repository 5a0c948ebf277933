"""Grade the steps of a rollout, each of which starts with a fixed user message, and prepare the next step.

A step ends when the agent replies without tool calls. Before the next message, the rewards for steps are called, the
message's `min_reward` is compared with them, and the files of the message are written. The step in which a rollout
stops is graded with the rollout. Rewards of earlier steps use a copy of the sandbox, because the agent continues in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hermes_rl.agent.result import AgentResult, GradedStep
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.sandboxes import copied, laid_files, require_copies
from hermes_rl.scoring.grader import Grader, Machines
from hermes_rl.scoring.reward_value import RewardValue, is_below, of_steps, reward_of
from hermes_rl.spec.model import Spec
from hermes_rl.spec.sections.prompt import UserWords
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools.base import ToolFailedError, ToolRuntime
from hermes_rl.tools.staging import Staging

SHOWN = 400
"""Characters of a failed command's output that are reported."""


class BeforeWords:
    """Grade and prepare a step before a user message is sent.

    Args:
        user_turns: all messages, rendered for the row.

    Raises:
        UserError: a reward needs a copy of a sandbox that cannot be copied.
    """

    def __init__(
        self, spec: Spec, grader: Grader, row: Row, runtime: ToolRuntime, user_turns: Sequence[UserWords]
    ) -> None:
        self._spec, self._grader, self._row, self._runtime, self._user_turns = spec, grader, row, runtime, user_turns
        if user_turns:
            require_copies(runtime.config, grader.of_steps)

    async def __call__(self, result: AgentResult, turn_index: int) -> StopReason | None:
        """Grade the previous step and write the files of the message; return the stop reason if the reward was too low.

        Raises:
            ToolFailedError: a file cannot be written or a command failed; the agent's files may be the cause.
            Failure: a reward or the sandbox failed.
        """
        user_turn = self._user_turns[turn_index]
        if result.turns_used and self._grader.of_steps:
            values = await self._grade_step(result)
            result.steps.append(GradedStep(result.turns_used, {name: value.record() for name, value in values.items()}))
            if user_turn.min_reward is not None and is_below(user_turn.min_reward, values):
                return StopReason.STEP_FAILED
        if user_turn.files or user_turn.setup:
            await self._prepare_turn(user_turn)
        return None

    async def _grade_step(self, result: AgentResult) -> dict[str, RewardValue]:
        values: dict[str, RewardValue] = {}
        runtime, names, step = self._runtime, [each.name for each in self._grader.of_steps], len(result.steps)
        runtime.phase, remaining, worked = "rewards", runtime.time_left, result.timings.working
        if remaining is not None:
            remaining.seconds -= worked
        await self._grader.grade_rollout(
            dict(self._row.columns), result.for_rewards(), partial(copied, runtime), runtime.state, values, names, step
        )
        runtime.phase = "model"
        if remaining is not None:  # the agent's working time is subtracted when the agent has stopped
            remaining.seconds += worked
        return values

    async def _prepare_turn(self, user_turn: UserWords) -> None:
        sandbox, staging = await self._runtime.sandbox(), Staging()
        for file in laid_files(user_turn.files, self._spec.folder, "user.turns"):
            try:
                await staging.write(sandbox, file.to, file.data, file.mode)
            except OSError as error:
                problem = f"the file {file.to} cannot be written: {error.strerror}"
                raise ToolFailedError("", problem) from error
        await staging.keep(sandbox)
        for command in user_turn.setup:
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
    """Call the rewards of a finished rollout, and combine the step values of each reward into one.

    Raises:
        Failure: a reward failed; `values` keeps the earlier ones.
    """
    is_last_step_graded = (
        result.stop_reason is StopReason.STEP_FAILED
    )  # the last step was graded before its stop reason was known
    names = [each.name for each in grader.rewards if each.steps is None or not is_last_step_graded]
    await grader.grade_rollout(item, result, machines, state, values, names, len(result.steps))
    for reward in grader.of_steps:
        before = [reward_of(step.rewards[reward.name]) for step in result.steps]
        values[reward.name] = of_steps(
            str(reward.steps), [*before, *([values[reward.name]] if not is_last_step_graded else [])]
        )
