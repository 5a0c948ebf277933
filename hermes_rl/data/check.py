"""Check a spec together with its data: read local rows, and render every template with some of them.

Nothing is downloaded: for a dataset on a hub, the rows of the spec's fallback are checked, if it has one. A generator
is code, so it runs only if the caller requests a number of rows. `spec.check` owns the checks without data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any, get_args

from hermes_rl.data.harbor import tasks_of
from hermes_rl.data.load import NO_ORDER, RowCount, Split, counted_rows, load_rows, ordered
from hermes_rl.data.rows import Row, derive
from hermes_rl.data.sources import Opened, is_fetched, is_on_hub, open_source, taken_for_local
from hermes_rl.errors import Problem, SpecError, UserError
from hermes_rl.spec import check
from hermes_rl.spec.findings import Findings
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.sections.dataset import Source

SAMPLES = 100
"""Number of rows with which templates are rendered, and maximum rows read from a stream; other sources are read in
full.
"""


READING_SECONDS, ROW_SECONDS = 10.0, 0.01
"""Processor seconds for reading the rows of a split, and the additional seconds for each of them."""


def check_spec(
    spec: Spec,
    *,
    known_toolsets: Collection[str] | None = None,
    known_distributions: Collection[str] | None = None,
    has_rows: bool = True,
    count: RowCount | None = None,
    notify: Callable[[str], None] | None = None,
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems and the warnings of a spec, its code files and its local data.

    Args:
        spec: the spec.
        known_toolsets, known_distributions: as for `hermes_rl.spec.check.check_spec`.
        has_rows: False if the dataset is only a placeholder, so that no templates can be rendered.
        count: the number of rows with which templates are rendered, including rows of a generator; None: a sample, and
            no generator runs.
        notify: called with the number of rows read so far, if reading takes long.
    """
    findings = Findings(spec)
    rows = _checked_rows(spec, findings, count, notify) if has_rows else []
    if spec.dataset.order is not None:
        _check_order(spec, rows, findings)
    rows = rows[:SAMPLES] if count is None else rows
    samples = [row.columns for row in rows]
    problems, warnings = check.check_spec(
        spec,
        known_toolsets=known_toolsets,
        known_distributions=known_distributions,
        samples=samples,
        keys=[row.key for row in rows] if spec.dataset.key is not None else (),
    )
    findings.extend(problems, warnings)
    return findings.result()


def _checked_rows(
    spec: Spec, findings: Findings, count: RowCount | None, notify: Callable[[str], None] | None
) -> list[Row]:
    if (warning := taken_for_local(spec)) is not None:
        findings.warning(("dataset", "path"), warning)
    source, path = _local_source(spec, findings, run=count is not None)
    if source is None:
        return []
    if is_fetched(source):
        findings.warning((*path, "path"), "files at an address are not fetched; their rows were not checked")
        return []
    rows: list[Row] = []
    for split in _split_names(spec, source):
        try:
            opened = _open_source(spec, source, split, findings, notify)
            limited = count == "all" and not opened.finite and source is spec.dataset
            row_count = count or ("all" if opened.finite else SAMPLES)
            read = _rows_of_both_sides(spec) if limited else derive(spec, opened.read(), notify)
            bounded = read if count is not None else _limit_reading(read, path, findings)
            rows = ([] if limited else rows) + counted_rows(spec, bounded, row_count, finite=opened.finite)
        except SpecError as error:
            findings.extend(list(error.problems), [])
        except UserError as error:
            findings.problem(_key_at_fault(path, source, error), str(error))
        else:
            if not rows:
                findings.problem(path, "no row is left: the source is empty, or the filter takes them all", part="key")
            elif opened.finite and source is spec.dataset and _are_rows_equal(spec, rows):
                message = "a fraction of one row leaves none for evaluation: write `eval: only`, or add rows"
                findings.problem(("dataset", "eval", "fraction"), message)
    return rows


def _rows_of_both_sides(spec: Spec) -> Iterator[Row]:
    """Return the training and evaluation rows of a source that may be endless: the spec's limits may end them."""
    return chain.from_iterable(load_rows(spec, side, notify=lambda _: None) for side in get_args(Split))


def _check_order(spec: Spec, rows: list[Row], findings: Findings) -> None:
    try:
        if spec.dataset.streaming:
            raise UserError(NO_ORDER)
        ordered(rows, spec.dataset.order or "")
    except UserError as error:
        findings.problem(("dataset", "order"), str(error))


def _limit_reading(rows: Iterator[Row], path: NodePath, findings: Findings) -> Iterator[Row]:
    """Yield the rows of a split; warn and stop if reading them takes too much processor time."""
    cpu_start = time.process_time()
    for row_count, row in enumerate(rows, start=1):
        yield row
        if time.process_time() - cpu_start > READING_SECONDS + ROW_SECONDS * row_count:
            message = f"reading takes so long that only the first {row_count} were checked; see `columns` and `filter`"
            findings.warning(path, message, part="key")
            return


def _open_source(
    spec: Spec, source: Source, split: str, findings: Findings, notify: Callable[[str], None] | None
) -> Opened:
    if source.harbor is None:
        return open_source(source, split, spec.seed, notify)
    tasks = tasks_of(spec)
    # The notes concern the directory, not a line of the spec, of which only one note would be shown.
    findings.extend([], [Problem(source.harbor, None, None, note.removeprefix("WARNING: ")) for note in tasks.notes])
    return Opened(lambda: iter(tasks.rows), finite=True)


GENERATOR_UNCHECKED = "the rows of a generator were not checked"
"""Warning of a check without `--rows`."""


def _are_rows_equal(spec: Spec, rows: list[Row]) -> bool:
    """Return True if `eval.fraction` cannot split the rows, because all have the same content."""
    rule = spec.dataset.eval
    return rule is not None and rule.fraction is not None and len({row.digest for row in rows}) == 1


def _local_source(spec: Spec, findings: Findings, *, run: bool) -> tuple[Source | None, NodePath]:
    """Return the source whose rows can be read locally, or None, and its path in the spec; `run` allows a generator."""
    dataset = spec.dataset
    if dataset.generator is not None and not run:
        findings.warning(("dataset", "generator"), GENERATOR_UNCHECKED)
        return None, ()
    if not is_on_hub(dataset):
        return dataset, ("dataset",)
    fallback = dataset.fallback
    if fallback is None or is_on_hub(fallback):
        return None, ()
    return fallback, ("dataset", "fallback")


def _split_names(spec: Spec, source: Source) -> Iterator[str]:
    yield source.split
    rule = spec.dataset.eval
    has_splits = source is spec.dataset or isinstance(source.data_files, Mapping)
    if rule is not None and rule.split is not None and has_splits:
        yield rule.split


def _key_at_fault(path: NodePath, source: Source, error: UserError) -> NodePath:
    """Return the key that causes an error of the data."""
    if str(error).startswith("dataset.key"):
        return ("dataset", "key")
    keys = ("data_files", "items", "path", "harbor", "generator")
    settings: dict[str, Any] = {key: getattr(source, key) for key in keys}
    return next(((*path, name) for name, value in settings.items() if value is not None), path)
