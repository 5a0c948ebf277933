"""Define the commands of `hermes-rl` and their arguments.

Each command imports the module that implements it when it is called, so that `--help` starts fast. For the same reason
annotations are not postponed: Typer would evaluate the text of each one several times at every start. The docstrings of
commands are their help.
"""

import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from typer.core import TyperGroup

from hermes_rl import __version__
from hermes_rl.cli import INTERRUPTED
from hermes_rl.cli.echo import echo

Mode = Literal["serve", "process", "evaluate"]
Kind = Literal["specs", "toolsets", "tools", "distributions", "rewards", "parsers", "renderers", "sandboxes", "agents"]

Starter = Literal["tools", "swe", "game", "judge", "user", "mcp"]

RowOption = Annotated[str, typer.Option(help="A row's key, or its index in the dataset, from 0.")]
SplitOption = Annotated[
    Literal["train", "eval"] | None, typer.Option(help="Rows to use; default: train, if there are any.")
]
RayOption = Annotated[
    str | None,
    typer.Option(metavar="[HOST:PORT]", help="Run on a Ray cluster; without an address, start one here."),
]
EnvFileOption = Annotated[Path | None, typer.Option(metavar="FILE", help="KEY=VALUE lines, added to the environment.")]
TrustOption = Annotated[bool, typer.Option("--trust", help="Run the repository's code without asking.")]
DemoOption = Annotated[bool, typer.Option("--demo", help="Run without model, network and containers.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Print log messages: failed calls, retries.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
NoPagerOption = Annotated[bool, typer.Option("--no-pager", help="Print long output without a pager.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the spec: --set agent.max_turns=5.")
]
SetAsRunOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Same as for `run`.")]
TokenOption = Annotated[str | None, typer.Option(help="Variable that holds the token for requests.")]
ListenOption = Annotated[str, typer.Option(help="HOST:PORT; port 0 selects a free port.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
SPECS = "A spec's path or directory, a shipped spec's name, a repository: owner/name@REV, or tasks: harbor:DIRECTORY."


@contextmanager
def _interruptible() -> Iterator[None]:
    """Report Ctrl-C and end the command; Typer alone would end it silently."""
    try:
        yield
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


class Interruptible(TyperGroup):
    """Command group that reports Ctrl-C while it reads its arguments and while its command runs."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _interruptible():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _interruptible():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Interruptible,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Agentic reinforcement-learning environments from one YAML file.",
)


def _complete_spec(incomplete: str) -> list[str]:
    """Return a shell's completions of a spec: first matching local files, then shipped specs.

    Local files are included because a shell completes them itself only if this list is empty.
    """
    from hermes_rl.spec.load import shipped_specs

    escaped_prefix = glob.escape(incomplete)
    # A Path would drop a leading `./`.
    files, in_folders = glob.glob(f"{escaped_prefix}*.yaml"), glob.glob(f"{escaped_prefix}*/*.yaml")  # noqa: PTH207
    local_specs = {*files, *(os.path.dirname(spec) for spec in in_folders)}  # noqa: PTH120
    return [*sorted(local_specs), *(name for name in shipped_specs() if name.startswith(incomplete))]


SpecArgument = Annotated[str, typer.Argument(help=SPECS, autocompletion=_complete_spec)]


def _specs_and_modes(context: typer.Context, incomplete: str) -> list[str]:
    """Return a shell's completions of specs and, after the first spec, of the mode, which is the last argument."""
    arguments = context.params.get("arguments") or []
    modes = get_args(Mode)
    if any(word in modes for word in arguments):
        return []
    return [*_complete_spec(incomplete), *(mode for mode in modes if arguments and mode.startswith(incomplete))]


def _fetch_specs(specs: list[str], trust: bool) -> list[str]:
    """Return the specs with each repository replaced by a fetched and accepted commit of it.

    Raises:
        UserError: as for `hermes_rl.cli.repositories.at_hand`.
    """
    from hermes_rl.spec.load import repository_of

    if all(repository_of(spec) is None for spec in specs):
        return specs
    from hermes_rl.cli.repositories import at_hand

    return [at_hand(spec, trust=trust) for spec in specs]


_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
_EPILOG = "Flags of Atropos work too: --env.FIELD VALUE, --openai.FIELD VALUE."


@app.command(context_settings=_FLAGS, epilog=_EPILOG)
def run(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC… MODE",
            help=f"{SPECS} Or a set of specs. MODE: serve a trainer (several specs feed it together), process writes "
            "files, evaluate measures a model.",
            autocompletion=_specs_and_modes,
        ),
    ],
    sets: SetOption = None,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weight", metavar="NAME=NUMBER", help="Share of a spec, if several are served."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Run directory; with several specs, the parent of theirs.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run; keep an earlier one.")] = False,
    demo: DemoOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
    verbose: VerboseOption = False,
    env_file: EnvFileOption = None,
    trust: TrustOption = False,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes per spec; overrides `workers`.")
    ] = None,
    ray: RayOption = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print the plan; run and write nothing.")] = False,
    sample: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="With --dry-run: run N rows in a temporary directory, and measure."),
    ] = 0,
    prices: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --dry-run: JSON file of $ per million tokens by model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a set: print set.json instead of the table.")] = False,
) -> None:
    """Run rollouts: serve a trainer, write files or evaluate."""
    from hermes_rl.cli.options import Options, split_flags
    from hermes_rl.cli.run import RunRequest, run_spec, specs_and_mode
    from hermes_rl.errors import UserError
    from hermes_rl.rollouts.admission import raise_descriptor_limit
    from hermes_rl.spec.sets import is_set

    positionals, flags = split_flags([*arguments, *context.args])
    specs, mode = specs_and_mode(positionals)
    specs = _fetch_specs(specs, trust)
    options = Options((*(sets or ()), *([f"{mode}.workers={workers}"] if workers is not None else ())), flags, env_file)
    request = RunRequest(specs[0], mode, options, out, fresh, demo, quiet, verbose, ray, dry, sample, prices, as_json)
    if (sample or prices is not None) and not dry:
        raise UserError("--sample and --prices are about --dry-run; add it")
    raise_descriptor_limit()
    if len(specs) > 1 or weights:
        from hermes_rl.cli.multi_spec import run_together

        raise typer.Exit(run_together(specs, request, weights or []))
    if is_set(specs[0]):
        from hermes_rl.cli.sets import run_set

        raise typer.Exit(run_set(request))
    raise typer.Exit(run_spec(request))


@app.command(context_settings=_FLAGS, epilog=_EPILOG)
def validate(
    specs: Annotated[list[str], typer.Argument(help=SPECS, autocompletion=_complete_spec)],
    deep: Annotated[bool, typer.Option("--deep", help="Also run the solution and check the rewards.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings are errors.")] = False,
    rows: Annotated[
        str | None,
        typer.Option(metavar="N|all", help="Rows to check, and with --deep to run; also runs a generator."),
    ] = None,
    as_json: JsonOption = False,
    sets: SetAsRunOption = None,
    env_file: EnvFileOption = None,
    trust: TrustOption = False,
) -> None:
    """Check specs with their code and data; no network."""
    from hermes_rl.cli.options import Options, split_flags
    from hermes_rl.cli.validate import row_count, validate_specs

    sources, flags = split_flags(specs)
    sources = _fetch_specs(sources, trust)
    options, count = Options(tuple(sets or ()), flags, env_file), row_count(rows)
    raise typer.Exit(validate_specs(sources, options, deep=deep, as_json=as_json, strict=strict, rows=count))


@app.command(name="list")
def list_things(
    kind: Annotated[Kind, typer.Argument(help="Kind of names.")],
    as_json: JsonOption = False,
) -> None:
    """List the names that a spec may use."""
    from hermes_rl.cli.listing import list_entries

    entries = list_entries(kind)
    if as_json:
        echo(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    width = max((len(entry["name"]) for entry in entries), default=0)
    for entry in entries:
        echo(f"{entry['name']:<{width}}  {entry['description']}".rstrip())


@app.command()
def explain(
    word: Annotated[
        str, typer.Argument(metavar="KEY", help="serve.max_staleness, a shipped reward, a stop reason, a toolset.")
    ],
) -> None:
    """Explain a key, reward, stop reason or toolset."""
    from hermes_rl.cli import explain as explaining

    for line in explaining.explain(word):
        echo(line)


@app.command()
def schema(
    of_set: Annotated[bool, typer.Option("--set", help="Print the schema of a set of specs.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown page of all keys.")] = False,
) -> None:
    """Print the JSON Schema of the spec, for editors."""
    if markdown:
        from hermes_rl.spec.reference import reference_page

        echo(reference_page().rstrip("\n"))
        return
    from hermes_rl.spec.schema import spec_json_schema
    from hermes_rl.spec.sets import set_json_schema

    echo(json.dumps(set_json_schema() if of_set else spec_json_schema(), indent=2, ensure_ascii=False))


@app.command(context_settings=_FLAGS, epilog=_EPILOG)
def doctor(
    spec: Annotated[
        list[str] | None, typer.Argument(metavar="[SPEC]", help="Spec whose servers and tokenizer are checked too.")
    ] = None,
    as_json: JsonOption = False,
    sampling: Annotated[
        bool, typer.Option("--sampling", help="Also sample 2,000 tokens or more from each token-level server.")
    ] = False,
    sets: SetAsRunOption = None,
    env_file: EnvFileOption = None,
    trust: TrustOption = False,
    security: Annotated[bool, typer.Option("--security", help="Also try attacks on the default sandbox.")] = False,
) -> None:
    """Check what works here: sandbox, tokenizer, servers."""
    from hermes_rl.cli.doctor import examine, examine_security, print_checks
    from hermes_rl.cli.options import Options, split_flags
    from hermes_rl.errors import UserError

    sources, flags = split_flags(spec or [])
    if len(sources) > 1 or (not sources and (flags or sets or sampling)):
        raise UserError(
            "doctor looks at one spec: hermes-rl doctor SPEC [--sampling] [--set KEY=VALUE] [--openai.<field> VALUE]"
        )
    sources = _fetch_specs(sources, trust)
    options = Options(tuple(sets or ()), flags, env_file)
    checks = examine(sources[0] if sources else None, options, sampling=sampling)
    if security:
        checks += examine_security()
    raise typer.Exit(print_checks(checks, as_json=as_json))


@app.command()
def init(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help="Name of the environment and its new directory; with --from, the Python file."
        ),
    ],
    kind: Annotated[Starter, typer.Option(help="Kind of the environment.")] = "tools",
    framework: Annotated[
        Literal["verifiers", "inspect"] | None,
        typer.Option("--from", help="Draft a spec from a Python file of this framework; the file is not executed."),
    ] = None,
) -> None:
    """Create an environment to start from, with rewards and rows."""
    from hermes_rl.cli import init as making

    lines = making.start(name, kind, Path()) if framework is None else making.draft(Path(name), framework, Path())
    for line in lines:
        echo(line)


@app.command()
def migrate(
    specs: Annotated[
        list[str], typer.Argument(metavar="SPEC...", help="Paths of specs, or of folders for all specs right in them.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if a file has old names.")
    ] = False,
) -> None:
    """Rewrite the keys of specs that have new names."""
    from hermes_rl.cli import migrating

    raise typer.Exit(migrating.migrate(specs, check=check))


@app.command()
def regrade(
    run_directory: RunArgument,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="Set a key of the spec: --set rewards.a.weight=2.")
    ] = None,
    env_file: EnvFileOption = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the code that the run's spec names without asking.")
    ] = False,
) -> None:
    """Score recorded rollouts again with changed rewards."""
    from hermes_rl.cli.options import Options
    from hermes_rl.cli.repositories import agree_to_grade
    from hermes_rl.cli.run import regrade_run

    agree_to_grade(run_directory, trust=trust)
    raise typer.Exit(regrade_run(run_directory, Options(tuple(sets or ()), (), env_file)))


@app.command(context_settings=_FLAGS, epilog=_EPILOG)
def grade(
    context: typer.Context,
    spec: SpecArgument,
    atif: Annotated[list[Path], typer.Option("--atif", metavar="FILE", help="Trajectories in ATIF.")],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More trajectories.")] = None,
    row: Annotated[str | None, typer.Option(help="Key of their row; default: the row with their prompt.")] = None,
    sets: SetOption = None,
    env_file: EnvFileOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Grade trajectories of other agents."""
    from hermes_rl.cli.grade import grade_files
    from hermes_rl.cli.options import Options

    [spec] = _fetch_specs([spec], trust)
    options = Options(tuple(sets or ()), tuple(context.args), env_file)
    raise typer.Exit(grade_files(spec, options, [*atif, *(more or ())], row, as_json=as_json))


@app.command()
def report(run_directory: RunArgument) -> None:
    """Write the report.html of a run again."""
    from hermes_rl.analysis.report import write_report

    echo(str(write_report(run_directory, partial(echo, err=True))))


@app.command()
def label(
    run_directory: RunArgument,
    name: Annotated[str | None, typer.Option(help="Name of the run in lists; '' removes it.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Add a tag; may be repeated.")] = None,
    remove_tag: Annotated[list[str] | None, typer.Option(help="Remove a tag; may be repeated.")] = None,
    note: Annotated[str | None, typer.Option(help="Note on the run; '' removes it.")] = None,
) -> None:
    """Name, tag or annotate a run, and print its label."""
    from hermes_rl.analysis.record import RunRecord
    from hermes_rl.runs.label import RunLabel

    run = RunRecord(run_directory).path
    before = RunLabel.read(run)
    after = before.changed(name, tag or (), remove_tag or (), note)
    if after != before:
        after.write(run)
    for key, text in (("name", after.name), ("tags", ", ".join(after.tags)), ("note", after.note)):
        echo(f"{key}: {text or '-'}")


@app.command()
def export(
    run_directory: RunArgument,
    forms: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="sft, dpo, kto, openai or sharegpt (training data), parquet or jsonl (tables), atif (trajectories; "
            "the default); several: sft,dpo.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Directory of the files; default: the run directory.")
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Omit rollouts with a lower score, except for dpo and kto.")
    ] = None,
    keep_best: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The N rollouts of each group with the highest scores, as --min-score."),
    ] = None,
    success: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="kto: score of a true label; default: evaluate.success_threshold."),
    ] = None,
) -> None:
    """Write a run's rollouts in formats of trainers and tools."""
    from hermes_rl.analysis.export import export_run

    kinds = [kind.strip() for text in forms or ["atif"] for kind in text.split(",")]
    if not forms:
        echo("no --format: writing atif, a trajectory per rollout; sft, dpo and others are training data", err=True)
    for text in export_run(run_directory, kinds, out, min_score, keep_best, success, partial(echo, err=True)):
        echo(text)


@app.command()
def push(
    run_directory: RunArgument,
    address: Annotated[
        str, typer.Argument(metavar="hf://datasets/OWNER/NAME", help="Dataset on the hub, or ./NAME for a folder.")
    ],
    public: Annotated[bool, typer.Option("--public/--private", help="Visibility of the dataset.")] = False,
    token_env: Annotated[str | None, typer.Option(help="Variable with the hub's token.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="URL of another hub of the same API.")] = None,
    env_file: EnvFileOption = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="List the files and print the card; call no hub.")] = False,
) -> None:
    """Publish a run's rollouts on the Hugging Face hub."""
    from hermes_rl.cli.push import push_run

    status = push_run(
        run_directory, address, public=public, token_env=token_env, endpoint=endpoint, env_file=env_file, dry=dry
    )
    raise typer.Exit(status)


@app.command()
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run directories, or folders of runs such as ./outputs."),
    ] = None,
    listen: ListenOption = "127.0.0.1:0",
) -> None:
    """View runs in a browser, also while they are running."""
    from hermes_rl.cli.run import run_interruptible
    from hermes_rl.errors import UserError
    from hermes_rl.view.server import view as serve_page

    outputs = Path("outputs")
    if not runs and not outputs.is_dir():
        raise UserError("there is no folder ./outputs here; name a run directory: hermes-rl view RUN")
    raise typer.Exit(run_interruptible(serve_page(runs or [outputs], listen, echo)))


@app.command(context_settings=_FLAGS, epilog=_EPILOG)
def render(
    context: typer.Context,
    spec: SpecArgument,
    row: RowOption = "0",
    split: SplitOption = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print each token with its id.")] = False,
    as_json: JsonOption = False,
    sets: SetAsRunOption = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Use sample rows and the small template, as `run --demo`.")
    ] = False,
    env_file: EnvFileOption = None,
    trust: TrustOption = False,
    no_pager: NoPagerOption = False,
) -> None:
    """Print exactly what a model receives for a row."""
    from hermes_rl.cli.options import Options
    from hermes_rl.cli.render import RenderRequest, render_spec

    [spec] = _fetch_specs([spec], trust)
    options = Options(tuple(sets or ()), tuple(context.args), env_file)
    raise typer.Exit(render_spec(RenderRequest(spec, options, row, split, tokens, demo, as_json, not no_pager)))


@app.command(context_settings=_FLAGS, epilog=_EPILOG)
def play(
    context: typer.Context,
    spec: SpecArgument,
    row: RowOption = "0",
    split: SplitOption = None,
    person: Annotated[bool, typer.Option("--person", help="Reply yourself, as the model.")] = False,
    shell: Annotated[bool, typer.Option("--shell", help="Open the sandbox for you when the agent has ended.")] = False,
    sets: SetAsRunOption = None,
    demo: DemoOption = False,
    env_file: EnvFileOption = None,
    trust: TrustOption = False,
) -> None:
    """Run one rollout and watch it; nothing is recorded."""
    from hermes_rl.cli.options import Options
    from hermes_rl.cli.play import PlayRequest, play_spec

    [spec] = _fetch_specs([spec], trust)
    options = Options(tuple(sets or ()), tuple(context.args), env_file)
    raise typer.Exit(play_spec(PlayRequest(spec, options, row, split, person, shell, demo)))


@app.command()
def show(
    run_directory: RunArgument,
    rollout: Annotated[
        str | None, typer.Argument(metavar="ID", help="A rollout: its id, a prefix of it, or its index.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="List only rollouts that do not pass, worst first.")] = False,
    stop_reason: Annotated[str | None, typer.Option(help="List only rollouts with this stop reason.")] = None,
    tool: Annotated[
        str | None, typer.Option(help="List only rollouts that called it; with ID, only its calls.")
    ] = None,
    prompt: Annotated[bool, typer.Option("--prompt", help="With ID: the exact prompt of the model.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="With ID: the tokens to train on.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Long texts too.")] = False,
    sort: Annotated[str, typer.Option(help="number, score, turns, tokens, seconds or errors.")] = "number",
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="Rollouts that are listed; 0: all.")] = 20,
    as_json: JsonOption = False,
    no_pager: NoPagerOption = False,
) -> None:
    """Show a run, or why one of its rollouts failed."""
    from hermes_rl.cli.show import ShowRequest, show_run

    request = ShowRequest(
        run_directory, rollout, failed, stop_reason, tool, prompt, tokens, full, sort, limit, as_json, not no_pager
    )
    raise typer.Exit(show_run(request))


@app.command()
def audit(
    run_directory: RunArgument,
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="Maximum number of rollouts to list; 0: all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all rollouts.")] = False,
    no_pager: NoPagerOption = False,
) -> None:
    """List rollouts that may have cheated."""
    from hermes_rl.cli.audit import audit_run

    raise typer.Exit(audit_run(run_directory, as_json=as_json, limit=limit, pager=not no_pager))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="A B [C…]", help="Run directories; each is compared with A.")],
    success: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", help="Score from which a rollout passes; default: A's evaluate.success_threshold."
        ),
    ] = None,
    cluster_by: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column that groups similar rows.")] = None,
    seat: Annotated[
        str | None, typer.Option(metavar="NAME", help="Seat to compare, with several agents; default: the first.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare even if the runs are graded differently.")] = False,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="Exit with 1 if the 95 % interval of B - A is below 0.")
    ] = False,
    margin: Annotated[
        float,
        typer.Option(metavar="NUMBER", help="With --fail-if-worse: exit with 1 if the interval lies below -MARGIN."),
    ] = 0.0,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Maximum number of fixed and broken rows to list.")
    ] = 10,
    as_json: JsonOption = False,
    no_pager: NoPagerOption = False,
) -> None:
    """Compare runs row by row, and test the differences."""
    from hermes_rl.cli.compare import CompareRequest, compare_paths

    request = CompareRequest(
        runs, success, cluster_by, seat, force, fail_if_worse, margin, limit, as_json, not no_pager
    )
    raise typer.Exit(compare_paths(request))


@app.command(context_settings=_FLAGS, epilog=_EPILOG)
def serve_http(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC",
            help=f"{SPECS} Several specs are served under http://HOST:PORT/NAME.",
            autocompletion=_complete_spec,
        ),
    ],
    listen: ListenOption = "127.0.0.1:8600",
    token_env: TokenOption = None,
    max_requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum concurrent rollouts of a spec.")
    ] = 16_384,
    key_env: Annotated[
        list[str] | None, typer.Option(help="Variable that requests may name as a server's key; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Record directory; with several specs, the parent of theirs."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new record; keep an earlier one.")] = False,
    idle: Annotated[
        float, typer.Option(metavar="NUMBER", min=0.1, help="Seconds without a step until a session ends.")
    ] = 900.0,
    drain: Annotated[
        float, typer.Option(metavar="NUMBER", min=0.0, help="Seconds to finish started rollouts after SIGTERM.")
    ] = 30.0,
    sets: SetOption = None,
    demo: DemoOption = False,
    verbose: VerboseOption = False,
    env_file: EnvFileOption = None,
    trust: TrustOption = False,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes per spec; overrides `serve.workers`.")
    ] = None,
    ray: RayOption = None,
) -> None:
    """Serve rollouts over HTTP, for trainers in other processes."""
    from hermes_rl.cli.options import Options, split_flags
    from hermes_rl.cli.serving import serve_rollouts
    from hermes_rl.service.serving import ServiceOptions

    sources, flags = split_flags([*arguments, *context.args])
    specs = _fetch_specs(sources, trust)
    options = Options(tuple(sets or ()), flags, env_file)
    if workers is not None:
        options = options._replace(sets=(*options.sets, f"serve.workers={workers}"))
    service = ServiceOptions(
        listen=listen,
        token_env=token_env,
        keys=tuple(key_env or ()),
        max_requests=max_requests,
        idle=idle,
        drain=drain,
        ray=ray,
    )
    raise typer.Exit(serve_rollouts(specs, options, service, out=out, fresh=fresh, demo=demo, verbose=verbose))


@app.command(context_settings=_FLAGS, epilog=_EPILOG)
def serve_openenv(
    context: typer.Context,
    spec: SpecArgument,
    listen: ListenOption = "127.0.0.1:8000",
    token_env: TokenOption = None,
    most: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum concurrent sessions.")] = 64,
    sets: SetOption = None,
    env_file: EnvFileOption = None,
    trust: TrustOption = False,
) -> None:
    """Serve a spec to OpenEnv's clients, to reset and step."""
    from hermes_rl.cli import serving
    from hermes_rl.cli.options import Options

    [spec] = _fetch_specs([spec], trust)
    options = Options(tuple(sets or ()), tuple(context.args), env_file)
    raise typer.Exit(serving.serve_openenv(spec, options, listen, token_env, most))


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Print the version if `--version` is given."""
    if show:
        echo(__version__)
        raise typer.Exit
