"""`validate --deep`: test rewards before a model does, with right and wrong answers in real sandboxes.

Owns the order: answers of each kind on a few rows, then blind answers on more. `deep_answers` runs them, `deep_checks`
judges their scores.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.data.load import RowCount, Split, counted_rows, load_rows
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import Group
from hermes_rl.rollouts.sandboxes import keep_artifacts
from hermes_rl.rollouts.solutions import has_solution
from hermes_rl.runs.deep_answers import BLIND_SECONDS, KINDS, Probe, play
from hermes_rl.runs.deep_checks import DeepFinding, DeepFindings, fails, judge, judge_blind, judge_constant
from hermes_rl.runs.run import Plan, Run
from hermes_rl.runs.setup import require_machine
from hermes_rl.runs.store import rollout_record
from hermes_rl.spec.model import Spec
from hermes_rl.values import write_json

ROWS = 3
LOOKED_AT = 50
"""Rows that get blind answers, and rows that are searched for another row's solution."""
ROWS_IN_MEMORY = 50
"""Rows whose conversations stay in memory until the end; of other rows only scores and values stay."""


@dataclass
class DeepReport:
    """Result of `validate --deep`.

    Attributes:
        scores: mean scores by kind of answer; None if none could be scored.
        findings: findings of the checks.
        rows: number of rows that were run.
        failing: keys of the rows whose solution does not succeed.
        blind: for each blind answer the number of rows, the mean score, and the share of rows on which it passes.
        rollouts_directory: directory with the recorded rollouts, if something is wrong.
    """

    scores: dict[str, float | None] = field(default_factory=dict)
    findings: list[DeepFinding] = field(default_factory=list)
    rows: int = 0
    failing: list[str] = field(default_factory=list)
    blind: dict[str, dict[str, float]] = field(default_factory=dict)
    rollouts_directory: Path | None = None

    @property
    def problems(self) -> list[str]:
        """Messages of the errors."""
        return [finding.message for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[str]:
        """Messages of the warnings."""
        return [finding.message for finding in self.findings if finding.severity == "warning"]

    @property
    def summary(self) -> Mapping[str, Any]:
        """Rows, scores and blind answers as JSON."""
        return {"rows": self.rows, "scores": self.scores, "failing": self.failing, "blind": self.blind}


async def check_rewards(
    spec: Spec, keep: Path | None = None, *, rows: RowCount | None = None, replaced: str | None = None
) -> DeepReport:
    """Run and judge a spec that was loaded for a demo.

    Args:
        keep: directory for the rollouts if something is wrong; its content is replaced.
        rows: how many rows get all answers, however long it takes; None: a few, within half a minute.
        replaced: the image or backend that the demo replaces with the default sandbox.

    Raises `UserError` if the rows are not available or are infinite, or if the environment cannot be started.
    """
    split: Split = "eval" if spec.dataset.eval is not None and spec.dataset.eval.only else "train"
    sample = await asyncio.to_thread(_rows_to_run, spec, split, rows)
    findings, report = DeepFindings(spec), DeepReport(rows=len(sample))
    if not sample:
        findings.add("no_rows", "no rows are left to run: does dataset.filter drop them all?")
        report.findings = findings.entries
        return report
    with tempfile.TemporaryDirectory(prefix="hermes-rl-deep-") as folder:
        async with Probe(spec, sample[:LOOKED_AT]) as probe:
            findings.question = probe.question_text
            require_machine(probe, lambda _: None, None)
            probe.keep = partial(keep_artifacts, Path(folder) / "artifacts")
            await probe.open(sample[0])
            first = sample if rows is not None else sample[:ROWS]
            run = Run(probe, first, Plan(size=len(KINDS), split=split, repeat=False, require_complete=False, retries=0))
            groups: list[Group] = []
            async for group in run.groups():
                groups.append(_shrink(group, len(groups)))
            report.scores = judge(findings, probe, groups, replaced)
            if rows is not None or not findings.errors:  # blind answers cost time, and errors are enough to look at
                answers = probe.blind_answers()
                seconds = BLIND_SECONDS if rows is None else None
                blind: list[Group] = []
                if answers:
                    blind = [
                        _shrink(group, ROWS_IN_MEMORY) async for group in play(probe, sample, split, answers, seconds)
                    ]
                if blind:
                    report.blind = judge_blind(findings, probe, answers, blind)
                if not any(each.check == "constant_score" for each in findings.entries):
                    judge_constant(findings, probe, [*groups, *blind])
        report.findings = findings.entries
        gold = [group.rollouts[KINDS.index("gold")] for group in groups] if has_solution(spec) else []
        report.failing = [rollout.key.row.key for rollout in gold if fails(probe, rollout)]
        if keep is not None and (findings.errors or report.failing):
            report.rollouts_directory = await asyncio.to_thread(_keep_rollouts, groups, Path(folder), keep)
    return report


def _rows_to_run(spec: Spec, split: Split, count: RowCount | None) -> list[Row]:
    """Return the rows to run; blocks."""
    rows = load_rows(spec, split, notify=lambda _: None)
    return counted_rows(spec, rows, LOOKED_AT if count is None else count, finite=rows.length is not None)


def _shrink(group: Group, index: int) -> Group:
    """Drop the conversations of a group that no check reads: all rows of a dataset would fill the memory."""
    for rollout in group.rollouts if index >= ROWS_IN_MEMORY else ():
        for seat in rollout.seats:
            seat.result, seat.sequences = None, None
    return group


def _keep_rollouts(groups: Sequence[Group], played: Path, keep: Path) -> Path:
    """Write the rollouts and their artifacts into a directory; blocks."""
    shutil.rmtree(keep, ignore_errors=True)
    keep.mkdir(parents=True)
    if (played / "artifacts").is_dir():
        shutil.copytree(played / "artifacts", keep / "artifacts")
    with (keep / "rollouts.jsonl").open("wb") as file:
        for group in groups[:ROWS_IN_MEMORY]:
            for kind, rollout in zip(KINDS, group.rollouts, strict=True):
                file.write(write_json({"kind": kind, **rollout_record(rollout)}, default=str) + b"\n")
    return keep
