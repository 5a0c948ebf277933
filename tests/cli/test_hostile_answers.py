"""Answers that are made to break or to deceive a shipped spec cost nobody else anything, and score as blind ones do."""

from __future__ import annotations

import pytest

from tests.cli.hostile_answers import played, wrong
from tests.cli.test_shipped_specs import PLAYED

pytestmark = [pytest.mark.slow, pytest.mark.by_turns(3), pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", PLAYED)
async def test_hostile_answers_to_a_shipped_spec_score_as_blind_ones(name: str) -> None:
    found = await played(name)
    assert len(found) > 20 and all(found.values()), "each answer was played"
    assert wrong(found) == []
