"""`hermes-rl grade SPEC --atif FILES`: grade external trajectories with the rewards of a spec."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hermes_rl.analysis.external_trajectories import GradedTrajectory, grade_atif
from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import Options
from hermes_rl.cli.run import run_interruptible
from hermes_rl.runs.regrade import compiled_to_grade
from hermes_rl.spec.model import Spec
from hermes_rl.terminal_text import escape_controls


def grade_files(source: str, options: Options, files: Sequence[Path], row: str | None, *, as_json: bool) -> int:
    """Grade trajectories and print the result of each reward; return status 1 if one could not be graded."""
    spec = options.load(source)
    graded = run_interruptible(_grade_files(spec, options, files, row))
    for each in graded:
        if as_json:
            echo(json.dumps(each.record(), ensure_ascii=False))
            continue
        score = "no score" if each.score is None else f"{each.score:g}"
        parts = [
            f"{name} {'none' if value.value is None else f'{value.value:g}'}" for name, value in each.rewards.items()
        ]
        text = each.error or ", ".join(parts)
        echo(escape_controls(f"{score}  {each.file} (row {each.row}): {text}"))
    return 0 if all(each.score is not None for each in graded) else 1


async def _grade_files(spec: Spec, options: Options, files: Sequence[Path], row: str | None) -> list[GradedTrajectory]:
    async with compiled_to_grade(spec, options.environ()) as compiled:
        return await grade_atif(compiled, files, row)
