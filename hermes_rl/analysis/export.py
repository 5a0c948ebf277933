"""`hermes-rl export`: write the rollouts of a run in the formats of other tools; no model and no code of the spec runs.

A run of process mode gives the files that `process.format` gives, from the groups in its `groups.jsonl`; an evaluation
gives the rollouts that its metrics count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hermes_rl.analysis.record import RolloutSummary, RunRecord, bounded_line
from hermes_rl.analysis.settings import spec_of, success_of
from hermes_rl.analysis.tokens import tokenizer_of
from hermes_rl.errors import UserError
from hermes_rl.others_files import open_file
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.formats import (
    CONTRASTING,
    FILES,
    RecordedRollouts,
    RolloutChoice,
    group_of,
    is_trained,
    write_format,
)
from hermes_rl.runs.store import Line
from hermes_rl.spec.suggest import choices
from hermes_rl.values import read_own_json

GROUPS = "groups.jsonl"


def export_run(
    path: Path,
    kinds: Sequence[str],
    out: Path | None = None,
    min_score: float | None = None,
    keep_best: int | None = None,
    success: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Write a run in several formats and return a message about each file.

    Args:
        path: the run directory.
        kinds: names in `FILES`.
        out: directory of the files; None: the run directory. ATIF alone is written into it, else into `atif` in it.
        min_score: as `process.min_score`.
        keep_best: as `process.keep_best`.
        success: score from which a rollout is solved; None: as the spec says.
        say: called with the rollouts that cannot be read, which are omitted.

    Raises:
        UserError: there is no run, or the formats and the choice do not go together.
        RunError: a file cannot be written.
    """
    for kind in kinds:
        if kind not in FILES:
            raise UserError(f"--format: there is no format {kind!r}{choices(kind, FILES)}")
    record = RunRecord(path)
    spec = spec_of(record)
    choice = RolloutChoice(min_score, keep_best, success_of(spec) if success is None else success)
    if (min_score is not None or keep_best is not None) and set(kinds) <= set(CONTRASTING):
        raise UserError(
            f"--min-score and --keep-best choose rollouts to imitate, and {' and '.join(kinds)} contrasts good ones "
            "with bad ones: leave them out"
        )
    record.refresh()
    run = RunGroups(record, spec.get("on_stop") or {})
    if not run.groups:
        raise UserError(f"{record.path} has no rollout with a conversation")
    tokenizer = tokenizer_of(record.run_info)[0] if "dpo" in kinds else None
    recorded = RecordedRollouts(run.written, run.lines, list(spec.get("rewards") or {}), tokenizer, run.on_stop)
    notes: list[str] = []
    for kind in dict.fromkeys(kinds):
        folder = record.path if out is None else out
        alone = kind == "atif" and out is not None and set(kinds) == {kind}
        notes += write_format(kind, folder if alone else folder / FILES[kind], recorded, choice)
    if record.excluded:
        say(record.excluded)
    return notes


class RunGroups:
    """The rollouts of a run that count, by group, with the groups of the other seats of an episode after the first."""

    def __init__(self, record: RunRecord, on_stop: Mapping[str, Any]) -> None:
        self.record, self.on_stop = record, on_stop
        self.groups: dict[str, dict[str, list[RolloutSummary]]] = {}
        """Members by episode and group."""
        for rollout in record.counting(every_seat=True):
            seats = self.groups.setdefault(rollout.episode, {})
            seats.setdefault(rollout.group, []).append(rollout)

    def written(self) -> Iterator[Group]:
        """Yield the groups that are in `groups.jsonl`, or all if there is no such file."""
        for members in self._members(_written_groups(self.record.path, self.groups)):
            if is_trained(members):
                yield self.group(members)

    def group(self, members: Sequence[Line]) -> Group:
        """Return a group from the records of its members; unreadable records are omitted."""
        return group_of(members, self.on_stop, self.record.exclude)

    def lines(self) -> Iterator[list[Line]]:
        """Yield the records of each group."""
        return self._members(self.groups)

    def _members(self, episodes: Iterable[str]) -> Iterator[list[Line]]:
        for episode in episodes:
            seats = self.groups.get(episode, {})
            for group in sorted(seats, key=lambda name: name != episode):
                members = sorted(seats[group], key=lambda rollout: rollout.index)
                lines = [line for each in members if (line := self.record.readable(each.id)) is not None]
                if lines:
                    yield lines


def _written_groups(run: Path, groups: Iterable[str]) -> list[str]:
    """Return the ids of the groups in `groups.jsonl`, in file order; all of `groups` if the run has no such file."""
    names: dict[str, None] = {}
    try:
        with open_file(run / GROUPS) as file:
            while line := bounded_line(file):
                with suppress(ValueError, KeyError, TypeError):
                    names[read_own_json(line)["group"]] = None
    except FileNotFoundError:
        return list(groups)
    except OSError as error:
        raise UserError(f"{run / GROUPS} cannot be read: {error.strerror}") from error
    return list(names)
