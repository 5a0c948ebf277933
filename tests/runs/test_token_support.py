"""`validate` and runs report token exactness without imports where the answer is already known."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hermes_rl.runs.renderer_check import OF_SMALL, describe_forecast
from hermes_rl.spec.load import parse_spec
from hermes_rl.tokens.forecast import forecast
from hermes_rl.tokens.load import load_renderer
from hermes_rl.tokens.rendering import RendererSettings


@pytest.mark.parametrize(("system", "tools", "user"), list(itertools.product((False, True), repeat=3)))
def test_forecast_of_the_small_tokenizer_matches_a_real_rollout(system: bool, tools: bool, user: bool) -> None:
    renderer = load_renderer(None, RendererSettings())
    assert str(forecast(renderer, system=system, tools=tools, user=user)) == OF_SMALL


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "a rollout has 1 sequence"),
        ("agent: {program: {command: mine}}", "each conversation has 1 sequence"),
        ("agents: {a: {}, b: {}}\nschedule: call", "each seat has 1 sequence"),
    ],
)
def test_what_is_said_of_programs_and_seats_is_of_a_conversation(tmp_path: Path, more: str, said: str) -> None:
    spec = parse_spec(f"name: told\ndataset: {{items: [{{}}]}}\nprompt: {{user: Go.}}\n{more}", folder=tmp_path)
    assert describe_forecast(OF_SMALL, spec) == said
