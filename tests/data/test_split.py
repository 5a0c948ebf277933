"""The split between training and evaluation: stable, disjoint, of the right size, the same in every process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.data.load import eval_digests, is_eval, load_rows
from hermes_rl.data.rows import Row, digest
from hermes_rl.spec.load import parse_spec
from tests.thorough import examples


def rows_of(values: list[int]) -> list[Row]:
    made = [{"v": value} for value in values]
    return [Row(str(index), columns, index, digest(columns)) for index, columns in enumerate(made)]


VALUES = st.lists(st.integers(0, 40), max_size=60)
FRACTIONS = st.floats(0.01, 0.99)


@settings(deadline=None)
@given(VALUES, FRACTIONS, st.integers(0, 5))
def test_duplicates_stay_together_and_something_stays(values: list[int], fraction: float, seed: int) -> None:
    rows = rows_of(values)
    held = eval_digests(rows, fraction, seed)
    if values:
        assert {row.digest for row in rows} - held, "at least one row stays"
    if len(set(values)) > 1:
        assert held


@settings(deadline=None)
@given(st.lists(st.integers(), unique=True, min_size=2, max_size=60), FRACTIONS, st.integers(0, 5))
def test_the_size_is_the_rounded_share(values: list[int], fraction: float, seed: int) -> None:
    held = eval_digests(rows_of(values), fraction, seed)
    assert len(held) == min(max(1, round(fraction * len(values))), len(values) - 1)


@settings(deadline=None)
@given(VALUES, FRACTIONS, st.randoms())
def test_the_order_of_the_source_does_not_matter(values: list[int], fraction: float, random: st.DataObject) -> None:
    mixed = list(values)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert eval_digests(rows_of(values), fraction, 0) == eval_digests(rows_of(mixed), fraction, 0)


@settings(deadline=None)
@given(st.lists(st.integers(), unique=True, min_size=2, max_size=40), st.floats(0.05, 0.5), st.floats(1, 1.9))
def test_a_larger_share_only_adds_rows(values: list[int], fraction: float, more: float) -> None:
    rows = rows_of(values)
    assert eval_digests(rows, fraction, 0) <= eval_digests(rows, min(fraction * more, 0.99), 0)


@settings(max_examples=examples(50), deadline=None)
@given(VALUES, FRACTIONS, st.integers(0, 3), st.none() | st.integers(1, 5), st.none() | st.integers(1, 5))
def test_limits_and_shuffles_never_move_a_row_across(
    values: list[int], fraction: float, seed: int, limit: int | None, shuffle: int | None
) -> None:
    if not values:
        return
    items = json.dumps([{"v": value} for value in values])
    base = f"version: 1\nseed: {seed}\nprompt: {{user: x}}\ndataset:\n  items: {items}\n"
    whole = parse_spec(f"{base}  eval: {{fraction: {fraction!r}}}\n")
    extra = "".join(f"  {key}: {value}\n" for key, value in (("limit", limit), ("shuffle", shuffle)) if value)
    bound = f", limit: {limit}" if limit else ""
    part = parse_spec(f"{base}  eval: {{fraction: {fraction!r}{bound}}}\n{extra}")
    sides = {}
    for split in ("train", "eval"):
        everything = {row.digest for row in load_rows(whole, split, notify=print)}
        some = [row.digest for row in load_rows(part, split, notify=print)]
        assert set(some) <= everything
        assert limit is None or len(some) <= limit
        sides[split] = everything
    assert not sides["train"] & sides["eval"]
    assert sides["train"] | sides["eval"] == {digest({"v": value}) for value in values}


def test_a_stream_is_split_by_a_threshold_on_the_same_hash() -> None:
    rows = rows_of(list(range(4000)))
    held = [row for row in rows if is_eval(row, 0.25, 3)]
    assert 900 < len(held) < 1100
    ranked = eval_digests(rows, 0.25, 3)
    assert len({row.digest for row in held} ^ ranked) < 100


@pytest.mark.slow
def test_another_process_finds_the_same_split(tmp_path: Path) -> None:
    text = "version: 1\nprompt: {user: x}\ndataset: {items: [" + ", ".join(f"{{v: {n}}}" for n in range(30))
    text += "], shuffle: 4, eval: {fraction: 0.3}}\n"
    (tmp_path / "s.yaml").write_text(text)
    code = (
        "import sys; from hermes_rl.spec.load import load_spec; from hermes_rl.data.load import load_rows; "
        "spec = load_spec(sys.argv[1]); "
        "print([row.key for side in ('train', 'eval') for row in load_rows(spec, side, notify=print)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "s.yaml")],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = parse_spec(text)
    own = [row.key for row in (*load_rows(here, "train", notify=print), *load_rows(here, "eval", notify=print))]
    assert outputs == {f"{own}\n"}


def test_a_known_split() -> None:
    """If this changes, rows of earlier runs move between training and evaluation."""
    rows = rows_of(list(range(10)))
    held = eval_digests(rows, 0.3, 0)
    assert sorted(row.index for row in rows if row.digest in held) == [1, 5, 7]
