"""The index of a run's groups: an entry comes back as it was put, settled or not, and settled ones take no memory."""

from __future__ import annotations

import sqlite3
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import RunError
from hermes_rl.rollouts.rollout import RolloutState
from hermes_rl.runs.group_index import GroupEntry, GroupIndex, PlayedEntry

TEXTS = st.text(st.characters(), max_size=8)
PLAYED = st.builds(
    PlayedEntry,
    st.integers(0, 1 << 50),
    st.integers(0, 100),
    st.sampled_from(RolloutState),
    st.none() | st.floats(allow_nan=False),
)
MEMBERS = st.dictionaries(st.integers(0, 64), PLAYED, max_size=4)
ENTRIES = st.builds(GroupEntry, TEXTS, st.integers(0, 1 << 40), TEXTS, MEMBERS, MEMBERS)


@given(puts=st.lists(st.tuples(TEXTS, ENTRIES, st.booleans()), max_size=12))
def test_the_last_entry_that_was_put_is_found(puts: list[tuple[str, GroupEntry, bool]]) -> None:
    index, expected = GroupIndex(), dict[str, GroupEntry]()
    settled = set[str]()
    for group, entry, over in puts:
        over = over or group in settled  # nothing that was settled opens again
        index.put(group, entry, settled=over)
        expected[group] = entry
        settled |= {group} if over else set()
    assert dict(index) == expected
    assert len(index) == len(expected)
    assert set(index.open) == set(expected) - settled
    assert "another group" not in index


def test_settled_groups_take_no_memory() -> None:
    index = GroupIndex()
    played = {member: PlayedEntry(1_000 * member, 0, RolloutState.SCORED, 0.5) for member in range(4)}
    tracemalloc.start()
    try:
        for number in range(5_000):
            index.put(f"row-{number}", GroupEntry("row", number, "digest", dict(played)), settled=True)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(index) == 5_000
    assert index["row-4999"].ended == played
    assert grown < 100_000


def test_full_temporary_directory_is_reported_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.execute("PRAGMA max_page_count = 3")

    monkeypatch.setattr(sqlite3, "connect", Small)
    index = GroupIndex()
    with pytest.raises(RunError, match=r"temporary file of this run's index cannot be written.*TMPDIR"):
        for number in range(1_000):
            index.put(f"row-{number}", GroupEntry("row", number, "digest"), settled=True)
