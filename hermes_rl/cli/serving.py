"""`hermes-rl serve-http` and `hermes-rl serve-openenv`: convert the command line to the service's options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hermes_rl import open_env
from hermes_rl.active_environment import with_environment
from hermes_rl.analysis.report import write_report_or_say
from hermes_rl.cli.echo import echo
from hermes_rl.cli.multi_spec import alike_names, load_each
from hermes_rl.cli.options import Options
from hermes_rl.cli.run import DEMO, logged, run_interruptible
from hermes_rl.errors import SpecError, UserError, install_command
from hermes_rl.rollouts.admission import raise_descriptor_limit
from hermes_rl.runs.directory import find_free_path
from hermes_rl.runs.setup import workers_of
from hermes_rl.service.serving import ServiceOptions, ToServe, serve, serve_app
from hermes_rl.threads import reduce_gc_pauses
from hermes_rl.tokens.hub import without_advice


def serve_rollouts(
    specs: Sequence[str],
    options: Options,
    service: ServiceOptions,
    *,
    out: Path | None,
    fresh: bool,
    demo: bool,
    verbose: bool,
) -> int:
    """Serve until a stop signal; return the exit status."""
    several = len(specs) > 1
    raise_descriptor_limit()
    without_advice()
    environ = options.environ()
    options.overrides()  # report errors in them once, not once per spec
    loaded_specs = load_each(specs, partial(options.load, demo=demo, mode="serve"))
    if problems := [*loaded_specs.problems, *alike_names(loaded_specs.specs)]:
        raise SpecError(problems)
    served = list[ToServe]()
    for _, spec in loaded_specs.specs:
        if spec.demo:
            echo(f"{spec.name}: {DEMO}" if several else DEMO, err=True)
        record = Path("outputs") / spec.name / "rollouts"
        if out is not None:
            record = out / spec.name if several else out
        record = find_free_path(record) if fresh else record
        served.append(ToServe(spec, record, workers_of(spec, "serve", service.ray)))
        echo(f"starting {spec.name}; its rollouts are recorded in {record}", err=True)

    def say(line: str) -> None:
        echo(with_environment(line), err=True)

    with reduce_gc_pauses(), logged(say, verbose=verbose):
        status = run_interruptible(serve(served, service, environ, echo))
    for _, record, _ in served:
        if (record / "run.json").is_file():  # a rollout was recorded
            write_report_or_say(record, say)
    return status


def serve_openenv(spec: str, options: Options, listen: str, token_env: str | None, max_sessions: int) -> int:
    """Serve a spec to OpenEnv's clients until a stop signal; return the exit status."""
    try:
        from hermes_rl.integrations.openenv import make_app
    except ImportError as error:
        raise UserError(f"OpenEnv 0.10 is needed ({error}): {install_command('openenv')}") from error
    raise_descriptor_limit()
    without_advice()
    environ, loaded = options.environ(), options.load(spec)

    async def main() -> int:
        async with open_env(loaded, environ=environ) as env:
            return await serve_app(make_app(env, max_sessions), listen, token_env, environ, echo)

    return run_interruptible(main())
