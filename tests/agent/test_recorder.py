"""The recorder below all drivers: whose doing a refusal is."""

from __future__ import annotations

import pytest

from hermes_rl.agent.recorder import BudgetExhausted, LoopOptions, PolicyRecorder
from hermes_rl.agent.result import AgentResult
from hermes_rl.errors import ServerFailure
from hermes_rl.servers.base import ChatReply, ChatRequest
from hermes_rl.stop_reasons import StopReason

ASKED = [{"role": "user", "content": "hi"}]
BROKEN = [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]


class Particular:
    """A policy whose template fails over some tools; `down`: it refuses everything."""

    def __init__(self) -> None:
        self.down = False

    async def chat(self, request: ChatRequest) -> ChatReply:
        if request.tools or self.down:
            failure = ServerFailure("the template refuses the conversation")
            failure.refused = True
            raise failure
        return ChatReply({"role": "assistant", "content": "So."}, "stop", {}, "m", "openai")


async def ask(recorder: PolicyRecorder, tools: list[dict[str, object]] | None = None) -> None:
    await recorder.ask(ASKED, tools, prompt=ASKED, rollout_id="r", resent=10)


async def test_unrenderable_tools_stop_with_refused_after_the_first_reply() -> None:
    policy = Particular()
    recorder = PolicyRecorder(AgentResult(), policy, LoopOptions())
    with pytest.raises(ServerFailure):  # nothing that the policy has written can be in its first request
        await ask(recorder, BROKEN)
    await ask(recorder)
    with pytest.raises(BudgetExhausted) as over:
        await ask(recorder, BROKEN)
    assert over.value.stop_reason is StopReason.REFUSED
    policy.down = True
    with pytest.raises(ServerFailure):
        await ask(recorder)
