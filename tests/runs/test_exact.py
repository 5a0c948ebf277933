"""What is told of a spec's tokens before a run, without importing what would find it out where it is known already."""

from __future__ import annotations

import itertools

import pytest

from hermes_rl.runs.exact import OF_SMALL
from hermes_rl.tokens.forecast import forecast
from hermes_rl.tokens.load import load_renderer
from hermes_rl.tokens.rendering import RendererSettings


@pytest.mark.parametrize(("system", "tools", "user"), list(itertools.product((False, True), repeat=3)))
def test_what_is_said_of_the_small_tokenizer_is_what_a_played_rollout_shows(
    system: bool, tools: bool, user: bool
) -> None:
    renderer = load_renderer(None, RendererSettings())
    assert str(forecast(renderer, system=system, tools=tools, user=user)) == OF_SMALL
