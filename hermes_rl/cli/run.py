"""`hermes-rl run` and `regrade`: convert the command line to the options of a run, and the result to text."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, current_thread, get_ident, main_thread
from types import FrameType
from typing import Any, TypeVar, get_args

from hermes_rl.analysis.report import write_report_or_say
from hermes_rl.cli import INTERRUPTED
from hermes_rl.cli.echo import echo
from hermes_rl.cli.live import progress_of, restore_terminal
from hermes_rl.cli.options import Options, with_policy
from hermes_rl.cli.screen import cost_lines
from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.evaluate import Evaluation, run_evaluate
from hermes_rl.runs.metrics import BY, BY_SEAT, COUNT
from hermes_rl.runs.process import ProcessSummary, run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.regrade import regrade
from hermes_rl.runs.setup import RunOptions, require_effect
from hermes_rl.servers.usage import Usage
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.stop_reasons import StopReason
from hermes_rl.terminal_text import pluralize
from hermes_rl.threads import LEAVING, reduce_gc_pauses, run_detached, run_loop
from hermes_rl.tokens.hub import without_advice

# ----------------- `hermes-rl regrade`: from the command line to the run directory, and its result as text


def regrade_run(path: Path, options: Options) -> int:
    """Grade a run again; return the exit status."""
    progress = Progress()
    done = run_interruptible(regrade(path, options.overrides(), options.environ(), progress=progress))
    write_report_or_say(path, progress.note)
    if done.evaluation is not None:
        for line in evaluation_lines(done.evaluation):
            echo(line)
    else:
        echo(f"in groups.jsonl: {pluralize(done.groups or 0, 'group')}")
        if done.without_score:
            echo(f"without a score: {pluralize(done.without_score, 'rollout')}")
    say_where(done.directory, progress)
    return 0


# -------------------------------------------------------------------------------- running

T = TypeVar("T")
DEMO = "demo: a scripted policy runs; no model, network or container is used"


@dataclass(frozen=True)
class RunRequest:
    """Arguments of `hermes-rl run`."""

    spec: str
    mode: Mode
    options: Options
    out: Path | None = None
    fresh: bool = False
    demo: bool = False
    quiet: bool = False
    verbose: bool = False
    ray: str | None = None
    dry: bool = False
    sample: int = 0
    prices: Path | None = None
    as_json: bool = False


def specs_and_mode(arguments: Sequence[str]) -> tuple[list[str], Mode]:
    """Return the specs of `hermes-rl run` and the mode, its last argument; raise UserError if one is missing."""
    *specs, last = arguments or [""]
    modes: tuple[Mode, ...] = get_args(Mode)
    mode_arguments: list[Mode] = [mode for word in arguments for mode in modes if word == mode]
    usage = f"hermes-rl run SPEC {mode_arguments[0] if mode_arguments else '|'.join(modes)}"
    if len(mode_arguments) > 1:
        raise UserError(f"one mode is expected, and there are {len(mode_arguments)}: {', '.join(mode_arguments)}")
    if mode_arguments and last != mode_arguments[0]:
        others = " ".join(shlex.quote(word) for word in arguments if word != mode_arguments[0])
        raise UserError(f"{mode_arguments[0]} must follow all specs: hermes-rl run {others} {mode_arguments[0]}")
    if mode_arguments and specs:
        return specs, mode_arguments[0]
    if mode_arguments:
        raise UserError(f"no spec is named: {usage}")
    if close := did_you_mean(last, modes):
        raise UserError(f"{last!r} is not a mode{close} {usage}")
    raise UserError(f"the last argument must be the mode: {usage}")


def run_spec(request: RunRequest) -> int:
    """Load the spec, run it and print a summary; return the exit status."""
    if request.as_json:
        raise UserError("--json is about sets; the numbers of a run are in its metrics.json")
    environ = request.options.environ()
    progress = progress_of(f"{Path(request.spec).stem} · {request.mode}", quiet=request.quiet)
    spec = load_for(request)
    if spec.demo:
        progress.note(DEMO)
    launch = RunOptions(request.mode, request.out, request.fresh, environ, progress, request.ray, write_report_or_say)
    if request.dry:
        return say_plan(spec, launch, request)
    try:
        with reduce_gc_pauses(), logged(progress.say, verbose=request.verbose):
            return _MODES[request.mode](spec, launch)
    except KeyboardInterrupt:
        progress.note(f"interrupted; {AFTERWARDS[request.mode]}")
        return INTERRUPTED
    finally:
        progress.end()


def say_plan(spec: Spec, launch: RunOptions, request: RunRequest) -> int:
    """Print the plan of a run; return the exit status."""
    from hermes_rl.analysis.dry_run import dry_run, prices_of
    from hermes_rl.cli.dry_run import plan_lines

    prices = prices_of(spec, request.prices)
    plan = run_interruptible(dry_run(spec, launch, request.sample, prices))
    launch.progress.end()
    for line in plan_lines(plan):
        echo(line)
    return 0


@contextmanager
def logged(say: Callable[[str], None], *, verbose: bool) -> Iterator[None]:
    """Show log records of hermes_rl within the block: warnings, and with `verbose` everything from INFO on."""
    handler = _RunOutput(say, logging.INFO if verbose else logging.WARNING)
    if verbose:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("hermes_rl")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _RunOutput(logging.Handler):
    def __init__(self, say: Callable[[str], None], level: int) -> None:
        super().__init__(level)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))


def load_for(request: RunRequest) -> Spec:
    """Load the spec of a request, with a policy.

    Raises:
        SpecError: the spec is wrong.
        UserError: there is no policy, or an option is wrong.
    """
    require_effect(request.options.flags, request.mode)
    load = partial(request.options.load, request.spec, demo=request.demo, mode=request.mode)
    return with_policy(load, request.options.environ())


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `run_loop` does, and return its result; on Ctrl-C or SIGTERM release its work before exiting.

    Code that blocks the event loop then is interrupted after `LEAVING` seconds. A second signal ends the process
    immediately. That loses no more data: every record of a file is written completely or removed later, and sandboxes
    end with their parent process.
    """

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stopped, heard, blocked, thread = Event(), Event(), Event(), get_ident()

        def watch() -> None:
            if not heard.wait(LEAVING):
                blocked.set()
                signal.pthread_kill(thread, signal.SIGTERM)

        def end(signal_number: int, frame: FrameType | None) -> None:
            if loop.is_closed() or blocked.is_set():
                blocked.clear()
                raise KeyboardInterrupt
            if stopped.is_set():
                _end_at_once()
            stopped.set()
            loop.call_soon_threadsafe(heard.set)
            loop.call_soon_threadsafe(task.cancel)
            run_detached(watch)

        with _hearing_signals(loop, end):
            return await work

    try:
        return run_loop(guarded())
    except asyncio.CancelledError:
        for ignored_signal in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ignored_signal, signal.SIG_IGN)  # only the final messages remain
        raise KeyboardInterrupt from None


@contextmanager
def _hearing_signals(loop: asyncio.AbstractEventLoop, end: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `end` handle SIGTERM and SIGINT, from now on, in the main thread alone.

    The loop is woken when one arrives: a signal that came just before the loop began to wait would be heard after it.
    Its own handlers would be removed when it closes, before the final messages are printed.
    """
    if current_thread() is not main_thread():
        yield
        return
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop_signal, end)
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        loop.add_reader(reader, reader.recv, 4096)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(reader)


def _end_at_once() -> None:
    restore_terminal()
    sys.stderr.write("interrupted again; complete results are saved\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def _process(spec: Spec, launch: RunOptions) -> int:
    summary, directory = run_interruptible(run_process(spec, launch))
    launch.progress.end()
    echo(_process_words(spec, summary))
    say_where(directory, launch.progress)
    return 0 if summary.stopped is None else 1


def _process_words(spec: Spec, summary: ProcessSummary) -> str:
    complete, section = summary.existing + summary.written, spec.process
    summary_text = f"{complete} of {section.groups} groups of {section.group_size} in {summary.seconds:.1f} s"
    parts = [
        summary_text + (f" ({summary.existing} were there already)" if summary.existing else ""),
        f"token-exact: {pluralize(summary.exact, 'group')} of {summary.written}; trained on: {summary.trained:,} of "
        f"{summary.sampled:,} sampled tokens"
        if summary.sampled
        else "",
        f"judge unavailable: a fallback graded {pluralize(summary.fallbacks, 'group')}" if summary.fallbacks else "",
        f"{summary.uniform} uniform groups dropped" if summary.uniform else "",
        summary.retried,
        f"groups dropped: {_format_counts(summary.failed)}" if summary.failed else "",
        f"groups excluded by `on_stop`: {_format_counts(summary.dropped)}" if summary.dropped else "",
        f"quarantined: {pluralize(len(summary.quarantined), 'row')}, see `quarantined` in run.json"
        if summary.quarantined
        else "",
        summary.failure_summary,
        f"ended early: {summary.stopped}" if summary.stopped is not None else "",
    ]
    return "; ".join(filter(None, parts))


def _evaluate(spec: Spec, launch: RunOptions) -> int:
    evaluation, directory = run_interruptible(run_evaluate(spec, launch))
    launch.progress.end()
    for line in evaluation_lines(evaluation):
        echo(line)
    say_where(directory, launch.progress)
    evaluation.require_reliable()
    return 0 if evaluation.stopped is None else 1


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """Return the lines that show the result: the mean with its interval, then the other metrics."""
    metrics = evaluation.metrics
    between = "" if evaluation.interval is None else ", 95 % interval {:.4f} to {:.4f}".format(*evaluation.interval)
    lines = [f"mean reward {metrics['eval/mean_reward']:.4f}{between}"]
    if evaluation.ungraded:
        low, high = metrics["eval/mean_reward_lower"], metrics["eval/mean_reward_upper"]
        lines.append(
            f"{evaluation.ungraded} rollouts could not be graded ({_format_counts(evaluation.causes)}): "
            f"mean in [{low:.4f}, {high:.4f}]"
        )
    if evaluation.stopped is not None:
        lines.append(f"ended early: {evaluation.stopped}")
    prefixes = ("eval/pass", "eval/reward/", "eval/stop_reason/")
    for name, value in metrics.items():
        if name.startswith(prefixes) or (name.startswith((BY, BY_SEAT)) and name.endswith("/mean_reward")):
            count = metrics.get(name.replace("eval/reward/", COUNT, 1)) if name.startswith("eval/reward/") else None
            graded = metrics["eval/rollouts"] - evaluation.ungraded
            sample_size = "" if count is None else f" (n = {count:.0f} of {graded:.0f})"
            lines.append(f"{name.removeprefix('eval/')} {value:.4f}{sample_size}")
    return [*lines, evaluation.retried] if evaluation.retried else lines


def _serve(spec: Spec, launch: RunOptions) -> int:
    without_advice()
    from hermes_rl.env.spec_env import run_serve

    directory, stopped = run_interruptible(run_serve(spec, launch))
    launch.progress.end()
    echo(f"the trainer has had its {spec.serve.total_steps} steps" if stopped is None else f"ended early: {stopped}")
    say_where(directory, launch.progress)
    return 0 if stopped is None else 1


def say_where(directory: RunDirectory, progress: Progress) -> None:
    """Print the run's known cost, advice if most rollouts stopped early, the run directory, and the next command."""
    used = directory.read_run_info().get("usage") or {}
    for text in cost_lines({role: Usage.from_record(counts) for role, counts in used.items()}):
        echo(text)
    if advice := most_ended_with(directory.read_run_info().get("stop_reasons", {})):
        echo(advice)
    echo(f"run directory: {directory.path}")
    progress.note(f"next: hermes-rl show {shlex.quote(str(directory.path))}")


def most_ended_with(stop_reasons: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a message with the stop reason of most rollouts and advice, or "" if that stop reason is not a problem.

    Args:
        stop_reasons: the entry of run.json.
    """
    counts = Counter(
        {StopReason(name): entry["count"] for name, entry in stop_reasons.items() if name in set(StopReason)}
    )
    if not counts:
        return ""
    (stop_reason, count), *_ = counts.most_common(1)
    if 2 * count <= counts.total() or stop_reason.finished_naturally or not stop_reason.rule.advice:
        return ""
    detail = stop_reasons[stop_reason].get("first")
    reason = f"{stop_reason.rule.description}{f' ({detail})' if detail else ''}"
    ended = f"{count} of {pluralize(counts.total(), 'rollout')} ended with {stop_reason}"
    return f"{ended}: {reason}; {stop_reason.rule.advice}"


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{cause} {count}" for cause, count in counts.items())


AFTERWARDS = {
    "process": "complete results are saved; the same command resumes the run",
    "serve": "the trainer keeps all groups that it received; the same command serves again",
    "evaluate": "complete results are saved; the same command resumes the run",
}
_MODES: dict[str, Callable[[Spec, RunOptions], int]] = {"process": _process, "evaluate": _evaluate, "serve": _serve}
