"""Integrate with verifiers and prime-rl: offer a spec as a `Taskset` and a `Harness` that runs it.

verifiers captures the tokens at the endpoint that it opens for each rollout. This module turns rows into tasks and
records rollouts in traces. A rollout without a score is recorded as an error, never as the reward 0. The module
`hermes_rl_verifiers` exports the same classes under a name that verifiers finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf

from hermes_rl.errors import UserError
from hermes_rl.integrations.common import play_at_endpoint, tasks_of, values_of

TRAINER = "verifiers"
REWARD = "score"
"""Name of the only reward, the rollout's score; the spec's rewards are recorded as metrics."""


class HermesTasksetConfig(vf.TasksetConfig):
    """Options under `--env.taskset`."""

    spec: str = ""
    """A path, or the name of a shipped spec."""
    split: Literal["train", "eval"] = "train"
    """The split: `eval` selects the rows that the spec reserves for evaluation."""
    rows: int | None = None
    """The number of rows; by default all."""


class HermesTaskData(vf.TaskData):
    """Data of a row, with its key as `id`. The prompt is only shown in the trace: the rollout renders its own."""

    spec: str
    split: Literal["train", "eval"] = "train"


class HermesTask(vf.Task[HermesTaskData]):
    """Task made from a row of a spec."""

    @property
    def key(self) -> str:
        """Key of the row, the same in every run."""
        return str(self.data.id)


class HermesTaskset(vf.Taskset[HermesTask, HermesTasksetConfig]):
    """Taskset with the rows of a spec."""

    def load(self) -> Iterator[HermesTask]:
        """Yield one task per row.

        Raises:
            UserError: the spec is missing or wrong, verifiers cannot run it, or `system_prompt` is set.
        """
        spec, split = self.config.spec, self.config.split
        if not spec:
            raise UserError("name the spec: --env.taskset.spec SPEC")
        if self.system_prompt is not None:
            raise UserError("the prompts are the spec's: leave `system_prompt` out, and change the spec's `prompt`")
        for key, messages in tasks_of(spec, split, self.config.rows, TRAINER):
            prompt = [_typed_message(message) for message in messages]
            yield HermesTask(HermesTaskData(id=key, spec=spec, split=split, prompt=prompt), self.config.task)


class HermesHarnessConfig(vf.HarnessConfig):
    """Options under `--env.agent.harness`."""

    sampling: dict[str, Any] | None = None
    """Settings of the spec's `agent`, such as `{"max_turns": 4}`; verifiers' sampling settings override them."""


class HermesHarness(vf.Harness[HermesHarnessConfig]):
    """Harness that runs the rollouts of a spec with the spec's tools, sandboxes, stop reasons and rewards."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False  # the model's code runs in the spec's sandbox

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
        """Run a rollout at the trace's endpoint and record its score.

        Raises:
            HarnessError: the rollout has no score. If a model call failed, verifiers reports that failure instead.
        """
        if not isinstance(data, HermesTaskData):
            raise vf.HarnessError(f"this harness runs the tasks of HermesTaskset, not {type(data).__name__}")
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
        trace.info["hermes_rl"] = {"stop_reason": str(rollout.stop_reason), "masked": rollout.masked}
        if rollout.score is None:
            raise vf.HarnessError(f"{rollout.stop_reason}: {rollout.error}")
        trace.record_reward(REWARD, rollout.score)
        trace.record_metrics(values_of(rollout))
        if rollout.masked:
            trace.agent.trainable = False
        return vf.ProgramResult(0, "", "")

    async def score(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Raise `HarnessError` if the rollout has no score because verifiers stopped it at a limit or a timeout."""
        await super().score(trace, runtime)
        if REWARD not in trace.rewards:
            raise vf.HarnessError(f"verifiers ended the rollout ({trace.stop_condition}) before it was scored")


def _typed_message(message: dict[str, Any]) -> Any:
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    return kinds[message["role"]].model_validate(message)


__all__ = ["HermesHarness", "HermesTaskset"]
