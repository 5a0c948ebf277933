"""`hermes-rl run SET evaluate`: evaluate every combination of a set as a separate run, and print a table of all.

`hermes_rl.spec.sets` defines sets, and `hermes_rl.analysis.sets` computes the table.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hermes_rl.analysis.dry_run import nothing_left
from hermes_rl.analysis.report import write_report_or_say
from hermes_rl.analysis.sets import NOT_PLAYED, Breakdown, Cell, Estimate, SetRun, SetTable, Standing, set_table
from hermes_rl.cli import INTERRUPTED
from hermes_rl.cli.echo import echo
from hermes_rl.cli.live import progress_of
from hermes_rl.cli.multi_spec import noted
from hermes_rl.cli.options import policy_of
from hermes_rl.cli.run import RunRequest, logged, run_interruptible, say_plan
from hermes_rl.cli.screen import BAD, DIM, HEAD, WIDE, heading, safe, short, show, table
from hermes_rl.errors import HermesRLError, Problem, SpecError, UserError
from hermes_rl.runs.directory import RunDirectory, find_free_path
from hermes_rl.runs.evaluate import Evaluation, run_evaluate
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions, require_effect, require_runnable
from hermes_rl.runs.statistics import mean
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Spec
from hermes_rl.spec.overrides import Overrides, parse_extra_args
from hermes_rl.spec.sets import Combination, SpecSet, load_set
from hermes_rl.spec.validate import in_order
from hermes_rl.terminal_text import pluralize
from hermes_rl.threads import reduce_gc_pauses

MAX_VALUES_LISTED = 30
"""Maximum number of values of a column that its table lists; set.json has all."""

# ------------------------------------------------------------------------------------- Running the combinations


@dataclass
class _Run:
    """A combination with its spec; `problem` is the reason why it is not complete, or None if it is."""

    combination: Combination
    spec: Spec
    path: Path
    problem: str | None = NOT_PLAYED


def run_set(request: RunRequest) -> int:
    """Evaluate every combination of a set, one after the other, and print the table; return the exit status."""
    if request.mode != "evaluate":
        raise UserError(
            f"{request.spec} is a set, which is evaluated: hermes-rl run {shlex.quote(request.spec)} evaluate. To "
            f"{request.mode}, name one of its specs"
        )
    environ = request.options.environ()
    require_effect(request.options.flags, request.mode)
    spec_set = load_set(request.spec)
    folder = request.out or Path("outputs") / spec_set.name
    if request.fresh:
        folder = find_free_path(folder)
    runs = _load_runs(spec_set, folder, request, environ)
    if request.dry:
        for run in runs:
            show([heading(run.combination.label)])
            say_plan(run.spec, _run_options(run, request, environ, Progress(quiet=True)), request)
        return 0
    with RunDirectory(folder):  # a second process would run the same combinations
        try:
            with reduce_gc_pauses():
                for position, run in enumerate(runs, 1):
                    _run_one(run, f"run {position} of {len(runs)}: {run.combination.label}", request, environ)
        except KeyboardInterrupt:
            _write_table(spec_set, folder, runs)
            echo("interrupted; complete results are saved, and the same command resumes the set", err=True)
            return INTERRUPTED
        result = _write_table(spec_set, folder, runs)
    if request.as_json:
        echo(json.dumps(asdict(result), indent=2, ensure_ascii=False))
    else:
        show(_table_parts(result))
        echo(f"set directory: {folder}")
    failed = [run for run in runs if run.problem is not None]
    if failed:
        echo(f"error: {len(failed)} of {pluralize(len(runs), 'run')} failed; the same command retries them", err=True)
    for run in failed:
        echo(f"  {run.combination.label}: {run.problem}", err=True)
    return 1 if failed else 0


def _load_runs(spec_set: SpecSet, folder: Path, request: RunRequest, environ: Mapping[str, str]) -> list[_Run]:
    """Return the runs of all combinations with their specs; raise SpecError with all errors of the specs."""
    changes = request.options.overrides()
    runs: list[_Run] = []
    problems: list[Problem] = []
    for combination in spec_set.combinations:
        with noted(problems, f"{spec_set.file}: {combination.label}"):
            spec = _load_combination(combination, changes, environ, demo=request.demo)
            if missing := missing_of(combination, spec, environ):
                raise SpecError(missing)
            run = _Run(combination, spec, folder / combination.folder)
            require_runnable(spec, _run_options(run, request, environ, Progress(StringIO())))
            RunDirectory.choose(spec, "evaluate", run.path)
            runs.append(run)
    if problems:
        raise SpecError(in_order(problems))
    return runs


def _load_combination(combination: Combination, changes: Overrides, environ: Mapping[str, str], *, demo: bool) -> Spec:
    """Return the spec of a combination, with the policy of the environment if it names none."""

    def load(overrides: Overrides) -> Spec:
        overrides = changes.stack_on(overrides)
        return load_spec(combination.source, overrides=overrides, demo=demo, environ=environ, mode="evaluate")

    spec, policy_override = load(combination.overrides), policy_of(environ)
    if policy_override is None or "policy" in spec.servers:
        return spec
    return load(parse_extra_args((), [policy_override]).stack_on(combination.overrides))


def missing_of(combination: Combination, spec: Spec, environ: Mapping[str, str]) -> list[Problem]:
    """Return the missing requirements for running a valid spec in a set."""
    problems, label = [], combination.label
    if "policy" not in spec.servers and policy_of(environ) is None:
        text = (
            f"{label} has no policy: the model's `set` names no servers.policy, such as "
            "`set: {servers.policy: {type: openai, base_url: URL, model: MODEL}}`, and neither does the spec"
        )
        problems.append(combination.position.problem(text))
    if spec.dataset.eval is None:
        text = (
            "dataset.eval is missing: select the rows for evaluation, such as {fraction: 0.1} or `only`; a set may "
            "do so too, with `set: {dataset.eval: only}`"
        )
        problems.append(Problem(combination.source, None, None, text))
    if spec.atropos.get("data_dir_to_save_evals"):
        text = (
            f"{label}: atropos.data_dir_to_save_evals would have all runs of the set write the same files; leave it "
            "out, each has its own folder"
        )
        problems.append(combination.position.problem(text))
    return problems


def _run_options(run: _Run, request: RunRequest, environ: Mapping[str, str], progress: Progress) -> RunOptions:
    return RunOptions("evaluate", run.path, False, environ, progress, request.ray, write_report_or_say)


def _run_one(run: _Run, title: str, request: RunRequest, environ: Mapping[str, str]) -> None:
    """Run the remaining rollouts of a run and set its `problem`; an error of one run does not affect the others."""
    label = run.combination.label
    progress = progress_of(f"{label} · evaluate", quiet=request.quiet)
    launch = _run_options(run, request, environ, progress)

    async def evaluated() -> Evaluation | None:
        # A complete run needs no server, which may have stopped by now. The run itself repeats its notes.
        unheard = replace(launch, progress=Progress(StringIO()))
        if (run.path / "metrics.json").is_file() and await nothing_left(run.spec, unheard):
            return None
        progress.note(f"{title}, in {run.path}")
        return (await run_evaluate(run.spec, launch))[0]

    try:
        with logged(progress.say, verbose=request.verbose):
            evaluation = run_interruptible(evaluated())
    except HermesRLError as error:
        progress.end()
        run.problem = str(error)
        progress.say(f"error: {label}: {error}")
        return
    finally:
        progress.end()
    if evaluation is None:
        progress.note(f"{title}: complete, no rollouts are left to run")
        run.problem = None
        return
    early = None if evaluation.stopped is None else f"ended early: {evaluation.stopped}"
    run.problem = evaluation.problem or early
    progress.note(f"{label}: mean reward {evaluation.metrics['eval/mean_reward']:.4f}")


def _write_table(spec_set: SpecSet, folder: Path, runs: list[_Run]) -> SetTable:
    set_runs = [SetRun(*run.combination.names, run.path, run.problem) for run in runs]
    result = set_table(spec_set.name, set_runs, spec_set.by)
    RunDirectory(folder).write_json("set.json", asdict(result))
    return result


# ------------------------------------------------------------------------------------------------- The table


def _table_parts(result: SetTable) -> Iterator[RenderableType]:
    yield from _standing_tables(result)
    for column, parts in result.by.items():
        if parts:
            yield Text()
            yield from _breakdown_parts(column, parts, result)
    for note in result.notes:
        yield safe(f"warning: {note}", "yellow")
    yield safe("below a mean: its 95 % interval, and pass@1", DIM)
    if any(player.rank is not None for player in result.players) and len(result.players) > 1:
        yield safe("rank: in brackets the ranks that it may have, beyond chance (95 %, rows paired)", DIM)
        yield safe("last column: mean difference to the first; * significant: its interval does not contain 0", DIM)


def _standing_tables(result: SetTable) -> Iterator[Table]:
    players, cells = result.players, [cell for player in result.players for cell in player.cells]
    lead = [
        _Column("rank", map(_format_rank, players)),
        _Column("model", (short(player.model) for player in players), align_left=True),
    ]
    if any(player.setting for player in players):
        lead.append(_Column("setting", (short(player.setting) for player in players), align_left=True))
    rest = [_Column("behind", (_format_gap(player.behind) for player in players))]
    if len(result.specs) > 1:
        rest.insert(0, _Column("mean", (_format_figures(player.score, player.pass_at_1) for player in players)))
    for index, spec in enumerate(result.specs):
        rest.append(_Column(spec, (_format_cell(player.cells[index]) for player in players)))

    def add(name: str, form: str, value: Callable[[Cell], float | None], total: Callable[[list[float]], float]) -> None:
        """Add a column with one number for all runs of a player; a sum of which a part is unknown is marked."""
        texts = []
        for player in players:
            known_values = [cell_value for cell in player.cells if (cell_value := value(cell)) is not None]
            at_least = "over " if total is sum and len(known_values) < len(player.cells) else ""
            texts.append(safe(at_least + form.format(total(known_values)) if known_values else "-"))
        rest.append(_Column(name, texts))

    add("tokens", "{:,}", lambda cell: cell.prompt_tokens + cell.completion_tokens, sum)
    add("s/rollout", "{:.2f}", lambda cell: cell.seconds, mean)
    if any(cell.cost is not None for cell in cells):
        add("cost", "{:,.2f} $", lambda cell: cell.cost, sum)
    if any(cell.ungraded for cell in cells):
        add("ungraded", "{}", lambda cell: cell.ungraded, sum)
    yield from _fit_tables(lead, rest)


class _Column:
    def __init__(self, name: str, cells: Iterable[Text], *, align_left: bool = False) -> None:
        self.name, self.cells, self.align_left = name, list(cells), align_left

    @property
    def width(self) -> int:
        return 2 + max(cell_len(line) for text in (self.name, *map(str, self.cells)) for line in text.split("\n"))


def _fit_tables(lead: Sequence[_Column], rest: Sequence[_Column]) -> Iterator[Table]:
    """Yield a table of the columns, or several that are at most as wide as the terminal; each starts with `lead`."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    waiting = list(rest)
    while waiting:
        columns = [*lead, waiting.pop(0)]
        while waiting and sum(column.width for column in (*columns, waiting[0])) <= width:
            columns.append(waiting.pop(0))
        part = table(
            *(column.name for column in columns), right=[column.name for column in columns if not column.align_left]
        )
        for cells in zip(*(column.cells for column in columns), strict=True):
            part.add_row(*cells)
        yield part


def _format_rank(player: Standing) -> Text:
    if player.rank is None or player.ranks is None:
        return safe("-", DIM)
    first, last = player.ranks
    return safe(f"{player.rank}" if first == last == player.rank else f"{player.rank} ({first}–{last})", HEAD)


def _format_cell(cell: Cell) -> Text:
    if cell.problem is not None:
        return safe(NOT_PLAYED if cell.problem == NOT_PLAYED else "failed", BAD)
    return _format_figures(cell.score, cell.pass_at_1)


def _format_figures(score: Estimate | None, passed: float | None) -> Text:
    """Return the mean, its interval and pass@1, one below the other."""
    if score is None:
        return safe("-", DIM)
    lines = [f"{score.value:.3f}"]
    lines += [f"{score.low:.3f} to {score.high:.3f}"] if score.low is not None else []
    lines += [f"pass@1 {passed:.3f}"] if passed is not None else []
    return safe("\n".join(lines))


def _format_gap(gap: Estimate | None) -> Text:
    if gap is None:
        return Text()
    if gap.low is None or gap.high is None:
        return safe(f"{gap.value:+.3f}")
    marker = "  " if gap.low <= 0 <= gap.high else " *"
    return safe(f"{gap.value:+.3f}{marker}\n{gap.low:+.3f} to {gap.high:+.3f}")


def _breakdown_parts(column: str, parts: Sequence[Breakdown], result: SetTable) -> Iterator[RenderableType]:
    visible_parts = parts[:MAX_VALUES_LISTED]
    lead = (
        [_Column("spec", (short(part.spec) for part in visible_parts), align_left=True)]
        if len(result.specs) > 1
        else []
    )
    lead.append(_Column(column, (short(part.value) for part in visible_parts), align_left=True))
    lead.append(_Column("rows", (safe(part.rows) for part in visible_parts)))
    scores = [
        [_format_figures(part.scores[index], None) for part in visible_parts] for index in range(len(result.players))
    ]
    yield from _fit_tables(
        lead,
        [_Column(player.label, player_scores) for player, player_scores in zip(result.players, scores, strict=True)],
    )
    if len(parts) > MAX_VALUES_LISTED:
        yield safe(f"… and {len(parts) - MAX_VALUES_LISTED} more, in set.json", DIM)
