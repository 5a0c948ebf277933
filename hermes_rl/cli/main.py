"""The command line: `hermes-rl run | validate | list | schema | doctor | regrade | report | view | rollouts`.

Owns the process and its exit status: 0 done, 1 the run failed, 2 the user's input is wrong, 130 after Ctrl-C. Progress
and messages go to stderr, results to stdout. Wrong input never shows a traceback; a bug always does. What a command
calls returns this status, or raises UserError for wrong input and RunError for what has failed.
"""

from __future__ import annotations

import gc
import sys
from functools import cache

from hermes_rl.cli import INTERRUPTED

TYPE_CHECKING = False
if TYPE_CHECKING:  # Ctrl-C ends a program without a traceback from `main` on, so little is imported before
    from collections.abc import Callable, Sequence
    from typing import Any

STARTING = 100_000
"""New objects after which Python looks for garbage. Imports and validators are fewer, and all of them stay; looking at
them over and over, as Python's own 700 asks for, is a tenth of the time that a short command takes."""
NO_TEMPORARY = "No usable temporary directory"
"""What `tempfile` says, wherever it is asked first."""


def main(arguments: list[str] | None = None) -> None:
    """Run the program, and end the process with its exit status."""
    try:
        gc.set_threshold(STARTING)
        import signal

        from hermes_rl.cli.streams import final_status, prepare

        sys.unraisablehook = _interrupt_again
        output, errors = prepare()
        words = sys.argv[1:] if arguments is None else arguments
        code = final_status(status(words), next(iter(words), ""), output)
        errors.flush()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: a further one has nothing to interrupt
        gc.freeze()  # at its end Python looks at everything once more, although all of it goes
    except (KeyboardInterrupt, Exception) as error:
        # Libraries in Rust make it an error of theirs, in whose text it is named.
        if isinstance(error, Exception) and "KeyboardInterrupt" not in str(error):
            raise
        sys.stderr.write("interrupted\n")
        code = INTERRUPTED
    sys.exit(code)


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Interrupt the program once more if a finalizer has swallowed Ctrl-C, which Python would only print."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    import signal
    from threading import Lock, Thread, get_ident

    main_thread, left = get_ident(), Lock()

    def interrupt() -> None:
        left.acquire()  # what is raised within this hook would be swallowed too
        signal.pthread_kill(main_thread, signal.SIGINT)

    left.acquire()
    Thread(target=interrupt, daemon=True).start()
    left.release()


def status(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit status; a bug travels with its traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    if words == ["--version"]:  # Typer would load pydantic for it, which takes as long as all else
        from hermes_rl.version import __version__

        sys.stdout.write(f"{__version__}\n")
        return 0
    import typer

    from hermes_rl.cli.echo import echo
    from hermes_rl.errors import HermesRLError, UserError

    # Typer brings a click of its own in some versions, so the class is found through Typer.
    click_exception: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    try:
        result: Any = program()(with_address(words), standalone_mode=False)
    except click_exception as error:
        error.message = error.message.replace("Value error, ", "")  # which says how Typer checks, and nothing else
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


@cache
def program() -> Callable[..., Any]:
    """Return the program with all of its commands and options."""
    import typer

    from hermes_rl.cli.commands import app

    return typer.main.get_command(app)


def with_address(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line with `--ray` as `--ray=local` where no address follows it.

    Typer knows no option whose value may be left out.
    """
    import re

    words = list(arguments)
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word == "--ray" and following != "auto" and re.fullmatch(r".+:\d+/?", following) is None:
            words[place] = "--ray=local"
    return words


if __name__ == "__main__":
    main()
