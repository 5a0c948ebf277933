"""Run the command line and end the process with its exit status; `commands` defines the commands.

The status is 0 on success, 1 if the run failed, 2 for wrong input, and 130 after Ctrl-C or SIGTERM. Progress and
messages go to stderr, results to stdout. Wrong input never shows a traceback; a bug always does. Functions called by
commands return this status, or raise UserError for wrong input and RunError for failures.
"""

from __future__ import annotations

import gc
import sys
from functools import cache, partial

from hermes_rl.cli import INTERRUPTED

TYPE_CHECKING = False
if TYPE_CHECKING:  # Ctrl-C ends a program without a traceback from `main` on, so little is imported before
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType
    from typing import Any

STARTING = 100_000
"""Number of new objects after which Python collects garbage.

Imports and validators create fewer objects, which all stay alive. Checking them repeatedly, as with Python's default of
700, would take a tenth of the time of a short command.
"""
ENDED_BY_SIGNALS = frozenset({"serve-http", "serve-openenv", "view"})
"""Commands that serve until a signal, so that their status after SIGTERM is 0."""
NO_TEMPORARY = "No usable temporary directory"
"""Start of the message of `tempfile` if it finds no directory, whichever code called it."""


def main(arguments: list[str] | None = None) -> None:
    """Run the program, and end the process with its exit status."""
    command = ""
    try:
        gc.set_threshold(STARTING)
        import os
        import signal

        signal.signal(signal.SIGTERM, _interrupt)
        os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
        from hermes_rl.cli.streams import final_status, prepare

        sys.unraisablehook = _interrupt_again
        output, errors = prepare()
        argv = sys.argv[1:] if arguments is None else arguments
        command = next(iter(argv), "")
        code = status(argv)
        if code != INTERRUPTED:
            code = final_status(code, command, output)
        errors.flush()
        for each in (signal.SIGINT, signal.SIGTERM):  # all work is done, so nothing is left to interrupt
            signal.signal(each, lambda *_: os._exit(code))
        gc.freeze()  # at exit Python would check all objects once more, although the process frees them anyway
    except (KeyboardInterrupt, Exception) as error:
        # Libraries in Rust convert a KeyboardInterrupt to their own error, whose text contains its name.
        if isinstance(error, Exception) and "KeyboardInterrupt" not in str(error):
            raise
        sys.stderr.write("interrupted\n")
        code = INTERRUPTED
    threads = sys.modules.get("hermes_rl.threads")  # without it none was started
    if threads is not None and (code == INTERRUPTED or command in ENDED_BY_SIGNALS):
        threads.end_process(code)
    sys.exit(code)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does; the next SIGTERM ends the process at once."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Interrupt the program again if a finalizer has swallowed Ctrl-C, which Python would only print."""
    import signal
    from threading import Event, Thread, current_thread, get_ident, main_thread

    handler = signal.getsignal(signal.SIGINT)
    swallowed = issubclass(unraisable.exc_type, KeyboardInterrupt) and current_thread() is main_thread()
    if not (swallowed and callable(handler)):
        sys.__unraisablehook__(unraisable)
        return
    main, hook, handled_event = get_ident(), sys._getframe(), Event()

    def hear(signal_number: int, frame: FrameType | None) -> None:
        if hook not in _frames(frame):  # an exception inside this hook would be swallowed too
            handled_event.set()
            signal.signal(signal.SIGINT, handler)
            handler(signal_number, frame)

    def interrupt() -> None:
        # Repeat it, since a signal that arrives just before the main thread starts to wait does not end the wait.
        while not handled_event.wait(0.05):
            signal.pthread_kill(main, signal.SIGINT)

    signal.signal(signal.SIGINT, hear)
    Thread(target=interrupt, daemon=True).start()


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def status(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit status; a bug is raised with its traceback."""
    argv = sys.argv[1:] if arguments is None else arguments
    if argv == ["--version"]:  # Typer would load pydantic for it, which takes as long as everything else
        from hermes_rl import __version__

        sys.stdout.write(f"{__version__}\n")
        return 0
    import typer

    from hermes_rl.cli.echo import echo
    from hermes_rl.errors import HermesRLError, UserError

    # Some versions of Typer bundle click, so get the exception class from Typer.
    click_exception: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    try:
        _refuse_old_names(argv)
        result: Any = program()(with_address(argv), standalone_mode=False)
    except click_exception as error:
        error.message = error.message.replace("Value error, ", "")  # this prefix only concerns Typer's validation
        error.show()
        return 2
    except (KeyboardInterrupt, typer.Abort):
        echo("interrupted", err=True)
        return INTERRUPTED
    except HermesRLError as error:
        echo(f"error: {error}" if "\n" not in str(error) else str(error), err=True)
        return 2 if isinstance(error, UserError) else 1
    except FileNotFoundError as error:
        if NO_TEMPORARY not in str(error):
            raise
        echo(
            f"error: {str(error.strerror)[:1].lower()}{str(error.strerror)[1:]}: set TMPDIR to one that can be written",
            err=True,
        )
        return 2
    return result if isinstance(result, int) else 0


def _refuse_old_names(argv: Sequence[str]) -> None:
    """Raise UserError for a command or an option that has a new name."""
    from hermes_rl.errors import UserError
    from hermes_rl.spec.new_names import COMMANDS, OPTIONS

    command = argv[0] if argv else ""
    if command in COMMANDS:
        raise UserError(f"`hermes-rl {command}` is now `hermes-rl {COMMANDS[command]}`")
    for option in (word.partition("=")[0] for word in argv[1:]):
        if new := OPTIONS.get(command, {}).get(option):
            raise UserError(f"`{option}` is now `{new}`")


@cache
def program() -> Callable[..., Any]:
    """Return the program with all of its commands and options."""
    import typer

    from hermes_rl.cli.commands import app

    return typer.main.get_command(app)


def with_address(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with `--ray` as `--ray=local` if no address follows it.

    Typer does not support options whose value may be omitted.
    """
    import re

    argv = list(arguments)
    for index, word in enumerate(argv):
        following = argv[index + 1] if index + 1 < len(argv) else ""
        if word == "--ray" and following != "auto" and re.fullmatch(r".+:\d+/?", following) is None:
            argv[index] = "--ray=local"
    return argv


if __name__ == "__main__":
    main()
