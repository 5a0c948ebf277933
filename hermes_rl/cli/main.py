"""The command line: `hermes-rl run | validate | list | schema | doctor | regrade | report | view | rollouts`.

Owns the process and its exit status: 0 done, 1 the run failed, 2 the user's input is wrong, 130 after Ctrl-C. Progress
and messages go to stderr, results to stdout. Wrong input never shows a traceback; a bug always does. What a command
calls returns this status, or raises UserError for wrong input and RunError for what has failed.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hermes_rl.cli.streams import final_status, prepare
from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.version import __version__

STARTING = 100_000
"""New objects after which Python looks for garbage. Imports and validators are fewer, and all of them stay; looking at
them over and over, as Python's own 700 asks for, is a tenth of the time that a short command takes."""


def main(arguments: list[str] | None = None) -> None:
    """Run the program, and end the process with its exit status."""
    gc.set_threshold(STARTING)
    output, errors = prepare()
    words = sys.argv[1:] if arguments is None else arguments
    code = final_status(status(words), next(iter(words), ""), output)
    errors.flush()
    gc.freeze()  # at its end Python looks at everything once more, although all of it goes
    sys.exit(code)


def status(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit status; a bug travels with its traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    if words == ["--version"]:  # Typer would load pydantic for it, which takes as long as all else
        sys.stdout.write(f"{__version__}\n")
        return 0
    import typer

    from hermes_rl.cli.echo import echo

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
        return 130
    except HermesRLError as error:
        echo(f"error: {error}" if "\n" not in str(error) else str(error), err=True)
        return 2 if isinstance(error, UserError) else 1
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
    words = list(arguments)
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word == "--ray" and following != "auto" and re.fullmatch(r".+:\d+/?", following) is None:
            words[place] = "--ray=local"
    return words


if __name__ == "__main__":
    main()
