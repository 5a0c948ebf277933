"""`hermes-rl regrade`: from the command line to the run directory, and what came of it in words."""

from __future__ import annotations

from pathlib import Path

from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import environment
from hermes_rl.cli.running import evaluation_lines, run_interruptible
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.regrade import Regraded, RegradeRequest, regrade
from hermes_rl.spec.overrides import parse_extra_args


def regrade_run(path: Path, sets: tuple[str, ...], env_file: Path | None) -> int:
    """Grade a run anew; returns the exit status.

    Raises:
        UserError: the command line or the run is wrong.
        RunError: a judge could not be asked.
    """
    overrides = parse_extra_args((), sets)
    done = run_interruptible(regrade(RegradeRequest(path, overrides, environment(env_file), Progress())))
    for line in _words(done):
        echo(line)
    return 0


def _words(done: Regraded) -> list[str]:
    if done.evaluation is not None:
        lines = evaluation_lines(done.evaluation)
    else:
        lines = [f"{done.groups} groups are in groups.jsonl"]
        if done.without_score:
            lines.append(f"{done.without_score} rollouts have no score")
    return [*lines, f"run directory: {done.directory.path}"]
