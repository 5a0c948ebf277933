"""Predict the number of sequences of a rollout with a template.

A small rollout (two calls, a reply, a further question if a user is simulated) is rendered once with thinking and once
without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hermes_rl.tokens.chat import turn_ids
from hermes_rl.tokens.probes import QUESTION, TOOL, TOOL_NAME, call, make_reply, thinking
from hermes_rl.tokens.rendering import Renderer, next_prompt
from hermes_rl.tokens.tokenizer import TemplateRefused
from hermes_rl.tokens.transcript import Step, Transcript, numbers


@dataclass(frozen=True)
class Forecast:
    """Number of sequences of a rollout of `turns` turns, without and with reasoning."""

    turns: int
    without_thinking: int
    thinking: int

    def __str__(self) -> str:
        if self.without_thinking == self.thinking == 1:
            return "a rollout has 1 sequence"
        sequence_count = f"{self.without_thinking} sequence{'s' if self.without_thinking > 1 else ''}"
        if self.without_thinking == self.thinking:
            return f"a rollout of {self.turns} turns has {sequence_count}: the template rewrites earlier turns"
        return (
            f"a rollout of {self.turns} turns has {sequence_count}, and {self.thinking} where the policy thinks: "
            "the template "
            "drops earlier reasoning (renderer.thinking_retention: all keeps it, and with it 1 sequence)"
        )


def forecast(renderer: Renderer, *, system: bool, tools: bool, user: bool) -> Forecast:
    """Return the forecast for a rollout of this kind; raise `TemplateRefused` if the template refuses it."""
    without_thoughts = _sample_transcript(renderer, system, tools, user, thought=False)
    thoughtful = _sample_transcript(renderer, system, tools, user, thought=True)
    return Forecast(len(without_thoughts.turns), len(without_thoughts.branches), len(thoughtful.branches))


def _sample_transcript(renderer: Renderer, system: bool, tools: bool, user: bool, *, thought: bool) -> Transcript:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}] if system else []
    messages.append(QUESTION)
    transcript = Transcript()
    for index in range(2 if tools else 0):
        calling = {**make_reply(""), "tool_calls": [call(TOOL_NAME, {"x": "v"}, f"c{index:08d}")]}
        _add_turn(renderer, transcript, messages, tools, thinking(calling, thought))
        messages.append({"role": "tool", "tool_call_id": f"c{index:08d}", "name": TOOL_NAME, "content": "r"})
    for index in range(2 if user else 1):
        _add_turn(renderer, transcript, messages, tools, thinking(make_reply("said"), thought))
        if user and index == 0:
            messages.append({"role": "user", "content": "and?"})
    return transcript


def _add_turn(
    renderer: Renderer, transcript: Transcript, messages: list[dict[str, Any]], tools: bool, answer: dict[str, Any]
) -> None:
    offered = [TOOL] if tools else None
    prompt = next_prompt(renderer, transcript, messages, offered)
    try:
        ids = turn_ids(renderer.tokenizer, [QUESTION], offered, answer)[1]
    except TemplateRefused:
        # The text of a model is unknown here; only the token that ends its turn matters.
        ids = [*renderer.tokenizer.encode("said"), renderer.stop_ids[-1 if answer.get("tool_calls") else 0]]
    messages.append(answer)
    transcript.add(Step.from_lists(prompt.ids, ids, numbers([0.0] * len(ids))), messages, prompt)
