"""Door to verifiers and prime-rl: a spec as a `Taskset` and the `Harness` that plays it.

verifiers captures the tokens at the endpoint that it opens for each rollout. Owns how rows become tasks, and how a
rollout is told to a trace: a rollout without a score is an error there, and never the reward 0. The module
`hermes_rl_verifiers` exports the same under a name that verifiers finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf

from hermes_rl.errors import UserError
from hermes_rl.integrations.opened import play_at_endpoint, tasks_of, values_of

TRAINER = "verifiers"
REWARD = "score"
"""The name of the one reward; what it is made of are metrics."""


class HermesTasksetConfig(vf.TasksetConfig):
    """Options below `--env.taskset`."""

    spec: str = ""
    """A path, or the name of a shipped spec."""
    split: Literal["train", "eval"] = "train"
    """`eval` are the rows that the spec keeps for evaluation."""
    rows: int | None = None
    """How many rows; by default all."""


class HermesTaskData(vf.TaskData):
    """A row: its key is the `id`. The prompt is for those who read the trace, as the rollout makes its own."""

    spec: str
    split: Literal["train", "eval"] = "train"


class HermesTask(vf.Task[HermesTaskData]):
    """A row of a spec."""

    @property
    def key(self) -> str:
        """The row's key, which is the same in every run."""
        return str(self.data.id)


class HermesTaskset(vf.Taskset[HermesTask, HermesTasksetConfig]):
    """The rows of a spec."""

    def load(self) -> Iterator[HermesTask]:
        """Yield a task for each row; raises `UserError` where the spec is missing or wrong, or something is asked for
        that rollouts here do not have."""
        spec, split = self.config.spec, self.config.split
        if not spec:
            raise UserError("name the spec: --env.taskset.spec SPEC")
        if self.system_prompt is not None:
            raise UserError("the prompts are the spec's: leave `system_prompt` out, and change the spec's `prompt`")
        for key, messages in tasks_of(spec, split, self.config.rows, TRAINER):
            prompt = [_message(message) for message in messages]
            yield HermesTask(HermesTaskData(id=key, spec=spec, split=split, prompt=prompt), self.config.task)


class HermesHarnessConfig(vf.HarnessConfig):
    """Options below `--env.agent.harness`."""

    sampling: dict[str, Any] | None = None
    """Settings of the spec's `agent`, such as `{"max_turns": 4}`; what verifiers samples with wins over them."""


class HermesHarness(vf.Harness[HermesHarnessConfig]):
    """Plays the rollouts of a spec: tools, sandboxes, endings and rewards are the spec's."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False  # what the model asks for runs in the sandbox of the spec

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        """Play a rollout at the endpoint of the trace; raises `HarnessError` where it has no score. Where a model call
        failed, verifiers reports that failure instead."""
        if not isinstance(data, HermesTaskData):
            raise vf.HarnessError(f"this harness plays the tasks of HermesTaskset, not {type(data).__name__}")
        rollout = await play_at_endpoint(
            data.spec,
            data.id or "",
            base_url=endpoint,
            model=ctx.model,
            api_key=secret,
            trainer=TRAINER,
            split=data.split,
            sampling=self.config.sampling,
        )
        trace.info["hermes_rl"] = {"ending": str(rollout.ending), "masked": rollout.masked}
        if rollout.score is None:
            raise vf.HarnessError(f"{rollout.ending}: {rollout.error}")
        trace.record_reward(REWARD, rollout.score)
        trace.record_metrics(values_of(rollout))
        if rollout.masked:
            trace.agent.trainable = False
        return vf.ProgramResult(0, "", "")

    async def score(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Make a rollout that verifiers has stopped, by its own limit or time, an error: nothing has scored it."""
        await super().score(trace, runtime)
        if REWARD not in trace.rewards:
            raise vf.HarnessError(f"verifiers ended the rollout ({trace.stop_condition}) before it was scored")


def _message(message: dict[str, Any]) -> Any:
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    return kinds[message["role"]].model_validate(message)


__all__ = ["HermesHarness", "HermesTaskset"]
