"""`hermes-rl run A B serve`: serve several specs to one trainer, each as a separate run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from hermes_rl.active_environment import with_environment
from hermes_rl.analysis.report import write_report_or_say
from hermes_rl.cli import INTERRUPTED
from hermes_rl.cli.echo import echo
from hermes_rl.cli.live import progress_of
from hermes_rl.cli.run import (
    AFTERWARDS,
    DEMO,
    RunRequest,
    load_for,
    logged,
    run_interruptible,
    say_plan,
    say_where,
)
from hermes_rl.cli.screen import heading, show
from hermes_rl.errors import Problem, SpecError, UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.runs.directory import RunDirectory, find_free_path
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions, require_runnable
from hermes_rl.spec.model import Spec
from hermes_rl.spec.sets import is_set
from hermes_rl.threads import reduce_gc_pauses
from hermes_rl.tokens.hub import without_advice


class NamedSpec(NamedTuple):
    """A spec with its name on the command line."""

    source: str
    spec: Spec


class LoadedSpecs(NamedTuple):
    """Specs that can be loaded, and the errors of the others."""

    specs: list[NamedSpec]
    problems: list[Problem]


def load_each(sources: Sequence[str], load: Callable[[str], Spec]) -> LoadedSpecs:
    """Load several specs, so that the errors of all of them are known together."""
    loaded = LoadedSpecs([], [])
    for source in sources:
        with noted(loaded.problems, source):
            loaded.specs.append(NamedSpec(source, load(source)))
    return loaded


@contextmanager
def noted(problems: list[Problem], location: str) -> Iterator[None]:
    """Add errors to the problems: errors of a spec at their locations, any other at this one."""
    try:
        yield
    except SpecError as error:
        problems += error.problems
    except UserError as error:
        problems.append(Problem(location, None, None, str(error)))


def alike_names(served: Sequence[NamedSpec]) -> list[Problem]:
    """Return a problem for each spec that has the name of an earlier one."""
    return [
        Problem(
            sources[-1],
            None,
            None,
            f"this spec and {', '.join(sources[:-1])} have the same name, {name}, by which the trainer knows them: "
            "write another `name:` in one of them",
        )
        for name, sources in _group_specs(served, lambda spec: spec.name).items()
        if len(sources) > 1
    ]


def run_together(specs: Sequence[str], request: RunRequest, weights: Sequence[str]) -> int:
    """Serve several specs to one trainer; return the exit status."""
    _require_several(specs, request)
    environ = request.options.environ()
    served, problems = _load_specs(specs, request, _parse_weights(weights))
    out = request.out
    if out is not None and request.fresh:
        out, request = find_free_path(out), replace(request, fresh=False)

    def launch(entry: NamedSpec, progress: Progress) -> RunOptions:
        folder = out / entry.spec.name if out is not None else None
        return RunOptions("serve", folder, request.fresh, environ, progress, request.ray, write_report_or_say)

    problems += _serving_problems(served, [launch(named_spec, Progress(StringIO())) for named_spec in served], out)
    if problems:
        raise SpecError(dict.fromkeys(problems))  # without duplicates: each spec repeats errors of the command line
    if request.dry:
        for named_spec in served:
            show([heading(named_spec.spec.name)])
            say_plan(named_spec.spec, launch(named_spec, Progress(quiet=True)), request)
        return 0
    return _serve_all(served, launch, request)


def _serve_all(
    served: Sequence[NamedSpec], launch: Callable[[NamedSpec, Progress], RunOptions], request: RunRequest
) -> int:
    without_advice()
    from hermes_rl.env.multi_env import serve_together

    progress = progress_of(f"{' + '.join(named_spec.spec.name for named_spec in served)} · serve", quiet=request.quiet)
    launches = [launch(named_spec, progress.for_environment(named_spec.spec.name)) for named_spec in served]

    def say(line: str) -> None:
        progress.say(with_environment(line))

    try:
        for named_spec in served:
            if named_spec.spec.demo:
                progress.note(f"{named_spec.spec.name}: {DEMO}")
        with reduce_gc_pauses(), logged(say, verbose=request.verbose):
            pairs = [(named_spec.spec, launched) for named_spec, launched in zip(served, launches, strict=True)]
            ended = run_interruptible(serve_together(pairs, progress.note))
    except KeyboardInterrupt:
        progress.note(f"interrupted; {AFTERWARDS['serve']}")
        return INTERRUPTED
    finally:
        progress.end()
    early = {
        named_spec.spec.name: how.stopped
        for named_spec, how in zip(served, ended, strict=True)
        if how.stopped is not None
    }
    if len(early) < len(served):
        echo(f"the trainer has had its {served[0].spec.serve.total_steps} steps")
    for name, stopped in early.items():
        echo(f"{name}: ended early: {stopped}")
    for (directory, _), launched in zip(ended, launches, strict=True):
        say_where(directory, launched.progress)
    return 1 if early else 0


# ---------------------------------------------------------------------------------- Checks before the start


def _require_several(specs: Sequence[str], request: RunRequest) -> None:
    """Raise `UserError` if the request does not serve several specs, or has options for a single spec."""
    if len(specs) == 1:
        raise UserError("--weight is about several specs that feed one trainer: name them, hermes-rl run A B serve")
    if request.mode != "serve":
        raise UserError(
            f"{request.mode} takes one spec, and only serve several. To evaluate several, write a set: hermes-rl run "
            "set.yaml evaluate (docs/sets.md)"
        )
    if sets := [spec for spec in specs if is_set(spec)]:
        raise UserError(f"{sets[0]} is a set, which is evaluated: hermes-rl run {sets[0]} evaluate")
    if request.as_json:
        raise UserError("--json is about sets")


def _parse_weights(entries: Sequence[str]) -> dict[str, str]:
    """Return the values of `--weight`, by the name of the environment."""
    weights: dict[str, str] = {}
    for word in entries:
        name, equals, weight = word.partition("=")
        try:
            right = bool(equals) and 0 < float(weight) < inf
        except ValueError:
            right = False
        if not right:
            raise UserError(f"--weight {word}: it is NAME=NUMBER with a number above 0, as in --weight math=3")
        if name in weights:
            raise UserError(f"--weight {name} is given twice")
        weights[name] = weight
    return weights


def _load_specs(specs: Sequence[str], request: RunRequest, weights: Mapping[str, str]) -> LoadedSpecs:
    """Return the specs that can be loaded, with their weights, and the errors of the others."""

    def load(source: str) -> Spec:
        own_request = replace(request, spec=source)
        spec = load_for(own_request)
        if (weight := weights.get(spec.name)) is None:
            return spec
        sets = (*request.options.sets, f"atropos.inference_weight={weight}")
        return load_for(replace(own_request, options=request.options._replace(sets=sets)))

    served, problems = load_each(specs, load)
    names = [named_spec.spec.name for named_spec in served]
    if len(served) == len(specs):
        for name in weights.keys() - set(names):
            close = did_you_mean(name, names) or f": there are {', '.join(names)}"
            problems.append(Problem(f"--weight {name}", None, None, f"no spec has this name{close}"))
    return LoadedSpecs(served, problems)


def _serving_problems(served: Sequence[NamedSpec], launches: Sequence[RunOptions], out: Path | None) -> list[Problem]:
    """Return the problems that prevent serving the specs, individually or together."""
    from hermes_rl.env.serve import require_exact

    problems = list[Problem]()
    for named_spec, launch in zip(served, launches, strict=True):
        with noted(problems, named_spec.source):
            require_exact(require_runnable(named_spec.spec, launch).spec)
            RunDirectory.choose(named_spec.spec, "serve", launch.out, fresh=launch.fresh)
    if out is not None and RunDirectory(out).has_rollouts:
        text = (
            "this is a run directory; with several specs, --out is the parent of their run directories: choose another"
        )
        problems.append(Problem(f"--out {out}", None, None, text))
    return problems + _conflicts(served)


def _conflicts(served: Sequence[NamedSpec]) -> list[Problem]:
    """Return the conflicts that prevent serving the specs together."""
    problems = alike_names(served)
    for key in ("trainer", "api_url", "total_steps"):
        values = _group_specs(served, lambda spec, key=key: getattr(spec.serve, key))  # type: ignore[misc]
        if len(values) > 1:
            text = ", ".join(f"{value} in {' and '.join(sources)}" for value, sources in values.items())
            text += f"; specs that are served together have one: --set serve.{key}=… says it for all"
            problems.append(Problem(f"serve.{key}", None, None, text))
    for key in ("data_path_to_save_groups", "data_dir_to_save_evals"):
        for value, sources in _group_specs(served, lambda spec, key=key: spec.atropos.get(key)).items():  # type: ignore[misc]
            if value is not None and len(sources) > 1:
                both = " and ".join(sources)
                text = f"{value} is where {both} would both write: leave it out, each has its own folder"
                problems.append(Problem(f"atropos.{key}", None, None, text))
    return problems


def _group_specs(served: Sequence[NamedSpec], key_of: Callable[[Spec], Any]) -> dict[Any, list[str]]:
    """Return the specs grouped by the result of `key_of`."""
    names_by_value = defaultdict[Any, list[str]](list)
    for named_spec in served:
        names_by_value[key_of(named_spec.spec)].append(named_spec.source)
    return names_by_value
