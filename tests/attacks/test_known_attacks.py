"""Attacks that once succeeded against the runner, and relatives of each, end to end in real runs (see `known`)."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.known import DEEDS, RIGHT_DEEDS, RIGHT_WORDS, WORDS, among
from tests.attacks.test_attacks import GUARD, ORDINARY, outside
from tests.attacks.test_attacks import folder as folder

pytestmark = pytest.mark.one_worker("attacks")
LATE = 50.0
"""Milliseconds that the event loop may be late at the 99th of 100 ticks, times what other tests take of the machine."""
SHARED = 4.0


def require_held(said: dict[str, Any]) -> None:
    """The runs were complete, everybody was graded as they deserve, nobody had to wait, and the loop was free."""
    assert set(said) == {"words", "deeds"}
    for run in said.values():
        assert run["wrong"] == {}
        assert run["slow"] == {}
        assert run["played"] == run["rows"]
        assert run["late"]["0.99"] <= LATE * SHARED, run["late"]


def test_each_kind_has_an_original_and_relatives() -> None:
    kinds = Counter(attack.kind for attack in (*WORDS, *DEEDS))
    assert min(kinds.values()) >= 4
    titles = [title for title, _ in (*among(WORDS, RIGHT_WORDS), *among(DEEDS, RIGHT_DEEDS))]
    assert len(titles) == len(set(titles))


@pytest.mark.slow
@pytest.mark.by_turns(3)
@pytest.mark.timeout(GUARD + 20)
@pytest.mark.parametrize(("mode", "user"), [("system", None), ("image", None), ("system", ORDINARY)])
def test_known_attacks_get_the_expected_grade_and_harm_no_other_rollout(
    folder: Path, mode: str, user: int | None, request: pytest.FixtureRequest
) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("who tests is an ordinary user already")
    image = mode if mode == "system" else str(request.getfixturevalue("packed_rootfs"))
    require_held(outside(folder, "known", image, timeout=GUARD, user=user))
