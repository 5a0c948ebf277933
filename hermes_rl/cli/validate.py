"""`hermes-rl validate`: check everything about a spec that needs neither a model nor a network."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import Options
from hermes_rl.data.check import GENERATOR_UNCHECKED, check_spec
from hermes_rl.data.load import RowCount
from hermes_rl.errors import HermesRLError, Problem, SpecError, UserError
from hermes_rl.runs.at_start import refusals, unset_variables
from hermes_rl.runs.renderer_check import estimate_sequences, foreign_teachers, unknown_renderers
from hermes_rl.spec.load import load_draft, load_spec
from hermes_rl.spec.model import Spec
from hermes_rl.spec.overrides import Overrides
from hermes_rl.spec.sets import is_set, load_set
from hermes_rl.spec.validate import in_order

if TYPE_CHECKING:  # this module imports everything that runs rollouts
    from hermes_rl.runs.deep_checks import DeepFinding


@dataclass
class Verdict:
    """Result for one spec."""

    spec: str
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    tokens: str | None = None
    """Expected number of sequences of a rollout, as text, if the tokenizer is available locally."""
    programs: Sequence[str] = ()
    """Agent programs that run, their files, and the packages installed for them."""
    memory: str | None = None
    """Memory of the processes that rollouts have, if they have any."""
    scores: dict[str, float | None] | None = None
    """Mean score of each kind of answer, if `--deep` ran answers."""
    rows: Mapping[str, Any] | None = None
    """Number of rows that were run or rendered with `--rows`, and the findings of `--deep` about them."""
    findings: list[DeepFinding] = field(default_factory=list)
    """Findings of `--deep`: check, severity, message."""
    kept: str | None = None
    """Directory with the recorded rollouts, if something is wrong with them."""


def validate_specs(
    specs: Sequence[str],
    options: Options,
    *,
    deep: bool,
    as_json: bool,
    strict: bool = False,
    rows: RowCount | None = None,
) -> int:
    """Check each spec and print the problems; return the exit status, which is 2 if there are any.

    Args:
        deep: also run right and wrong answers.
        strict: treat warnings as errors.
        rows: the number of rows that are rendered and, if `deep`, run; None: a sample.

    Raises:
        UserError: an option is wrong.
    """
    overrides, environ = options.overrides(), options.environ()
    sets = [spec for spec in specs if is_set(spec)]
    if sets and (deep or rows is not None):
        option = "--deep" if deep else "--rows"
        raise UserError(f"{option} needs specs; {sets[0]} is a set: name its specs")
    with redirect_stdout(sys.stderr):  # user code may print, and the output has the verdicts alone
        verdicts = [
            _validate_set(spec, overrides, environ) if spec in sets else validate_one(spec, overrides, environ, rows)
            for spec in specs
        ]
        if deep:
            for verdict in verdicts:
                if not verdict.problems:
                    _run_answers(verdict, overrides, environ, rows)
    if strict:
        for verdict in verdicts:
            verdict.problems, verdict.warnings = [*verdict.problems, *verdict.warnings], []
    if as_json:
        echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=2, ensure_ascii=False))
    else:
        for verdict in verdicts:
            _print_verdict(verdict)
    return 2 if any(verdict.problems for verdict in verdicts) else 0


def row_count(text: str | None) -> RowCount | None:
    """Return the value of `--rows`; raise UserError if it is neither a number above 0 nor `all`."""
    if text is None or text == "all":
        return "all" if text else None
    if not text.isdecimal() or not text.isascii() or int(text) == 0:
        raise UserError(f"--rows {text}: expected a number of rows, such as 100, or `all`")
    return int(text)


def validate_one(
    source: str,
    overrides: Overrides | None = None,
    environ: Mapping[str, str] | None = None,
    rows: RowCount | None = None,
) -> Verdict:
    """Load and check one spec; return the verdict, in which errors are problems."""
    verdict = Verdict(source)
    try:
        draft, wrong = load_draft(source, overrides=overrides, environ=environ)
        if draft is None:
            verdict.problems = wrong
            return verdict
        toolsets, distributions = _known_tools(draft.spec)
        problems, warnings = check_spec(
            draft.spec,
            known_toolsets=toolsets,
            known_distributions=distributions,
            has_rows=draft.has_rows,
            count=rows,
            notify=partial(echo, err=True),
        )
    except UserError as error:
        verdict.problems = [Problem(source, None, None, str(error))]
        return verdict
    problems += [*unknown_renderers(draft.spec), *foreign_teachers(draft.spec, at_hand=True)]
    variables = os.environ if environ is None else environ
    unsendable, unset = unset_variables(draft.spec, variables)
    problems += [*_isolation_problems(draft.spec), *refusals(draft.spec), *unsendable]
    verdict.problems = in_order([*wrong, *problems])
    if not wrong:  # with errors, parts are omitted, about which warnings would be misleading
        try:
            verdict.tokens = estimate_sequences(draft.spec) if not problems else None
        except UserError as error:
            verdict.problems = [draft.spec.problem(("servers", "policy"), f"its tokens cannot be exact: {error}")]
        verdict.memory = draft.spec.describe_processes("process", "evaluate", "serve")
        verdict.programs = [_describe_program(draft.spec, path) for path in draft.spec.programs]
        verdict.warnings = in_order([*warnings, *unset, *_missing_requirements(draft.spec, variables)])
    return verdict


def _isolation_problems(spec: Spec) -> list[Problem]:
    """Return the parts of a spec that would run without the isolation that they need."""
    if not spec.in_sandboxes and spec.sandbox.backend == "bubblewrap":
        return []  # most specs need no import of the sandbox modules
    from hermes_rl.sandbox.isolation import grading_problems, isolation_problems, training_problems
    from hermes_rl.spec.check_code import looking

    findings = [*isolation_problems(spec), *grading_problems(spec, looking(spec)), *training_problems(spec)]
    return [spec.problem(path, problem, part="key" if len(path) < 3 else "value") for path, problem in findings]


def _describe_program(spec: Spec, path: tuple[str, ...]) -> str:
    program, seat = spec.programs[path], f" {path[1]}" if path[0] == "agents" else ""
    name = program.name or program.python or program.command[0]
    file = spec.problem((*path, "command"), "").file
    packages = ", ".join((*spec.sandbox.npm, *spec.sandbox.python))
    return f"{name} plays{seat}, as {file} says{packages and f', with {packages}'}"


def _validate_set(source: str, overrides: Overrides, environ: Mapping[str, str]) -> Verdict:
    """Check each combination of a set; report an error of several combinations once."""
    from hermes_rl.cli.sets import missing_of

    verdict = Verdict(source)
    try:
        spec_set = load_set(source)
    except UserError as error:
        verdict.problems = list(error.problems) if isinstance(error, SpecError) else [Problem(source, 1, 1, str(error))]
        return verdict
    for combination in spec_set.combinations:
        changes = overrides.stack_on(combination.overrides)
        combination_verdict = validate_one(combination.source, changes, environ)
        if not combination_verdict.problems:
            combination_verdict.problems = missing_of(
                combination, load_spec(combination.source, overrides=changes, environ=environ), environ
            )
        verdict.problems += combination_verdict.problems
        verdict.warnings += combination_verdict.warnings
    verdict.problems, verdict.warnings = in_order(verdict.problems), in_order(verdict.warnings)
    return verdict


def _names_toolsets(spec: Spec) -> bool:
    return bool(spec.toolsets.enabled or spec.toolsets.disabled or spec.toolsets.distribution)


def _known_tools(spec: Spec) -> tuple[Collection[str], Collection[str]]:
    """Return the names of existing toolsets and distributions; empty if the spec names none, to save imports."""
    if not _names_toolsets(spec):
        return (), ()
    from hermes_rl.tools.catalogue import DISTRIBUTIONS, known_toolsets

    return known_toolsets(), DISTRIBUTIONS


def _missing_requirements(spec: Spec, environ: Mapping[str, str]) -> list[Problem]:
    """Return the missing requirements of the spec's toolsets on this machine."""
    if spec.toolsets.replay or not _names_toolsets(spec):
        return []
    from hermes_rl.rollouts.sandboxes import toolset_problems
    from hermes_rl.tools.hermes_toolsets import HermesToolsets

    return toolset_problems(spec, HermesToolsets(environ))


def _run_answers(verdict: Verdict, overrides: Overrides, environ: Mapping[str, str], rows: RowCount | None) -> None:
    """Run right and wrong answers of a spec, and add the findings to the verdict; see `hermes_rl.runs.reward_check`."""
    from hermes_rl.cli.run import run_interruptible
    from hermes_rl.runs.reward_check import check_rewards

    try:
        real = load_spec(verdict.spec, overrides=overrides, environ=environ).sandbox
        spec = load_spec(verdict.spec, overrides=overrides, demo=True, environ=environ)
        is_replaced = (real.image, real.backend) != (spec.sandbox.image, spec.sandbox.backend)
        keep = Path("outputs") / spec.name / "deep"
        replaced = (real.image or real.backend) if is_replaced else None
        report = run_interruptible(check_rewards(spec, keep, rows=rows, replaced=replaced))
    except HermesRLError as error:
        problems = error.problems if isinstance(error, SpecError) else [Problem(verdict.spec, None, None, str(error))]
        verdict.problems = list(problems)
        return
    verdict.scores, verdict.findings = report.scores, report.findings
    # Its first rows have just run.
    verdict.warnings = [warning for warning in verdict.warnings if warning.message != GENERATOR_UNCHECKED]
    verdict.rows = report.summary if rows is not None else None
    verdict.kept = str(report.rollouts_directory) if report.rollouts_directory is not None else None
    for finding in report.findings:
        problem = Problem(verdict.spec, None, None, f"{finding.message} [{finding.check}]")
        (verdict.problems if finding.severity == "error" else verdict.warnings).append(problem)


def _print_verdict(verdict: Verdict) -> None:
    for kind, score in (verdict.scores or {}).items():
        echo(f"  {kind:<12} {'not scored' if score is None else f'{score:.3f}'}")
    for problem in verdict.problems:
        echo(str(problem), err=True)
    for warning in verdict.warnings:
        echo(f"warning: {warning}", err=True)
    if verdict.rows is not None:
        echo(json.dumps(verdict.rows, ensure_ascii=False))
    if verdict.kept is not None:
        echo(f"note: the rollouts are saved in {verdict.kept}", err=True)
    for program in verdict.programs:
        echo(f"note: {program}", err=True)
    for note in (verdict.tokens, verdict.memory):
        if note is not None:
            echo(f"note: {note}", err=True)
    if not verdict.problems:
        echo(f"{verdict.spec}: valid")
