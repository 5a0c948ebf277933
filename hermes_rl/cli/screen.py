"""Print tables and colours, and use a pager, for commands whose results people read.

Colours and the pager are for terminals: output to a file or a pipe is plain text of any width. `NO_COLOR` and
`TERM=dumb` are honoured. External texts pass through `safe` first: rich would interpret markup in them.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hermes_rl.cli.echo import echo
from hermes_rl.servers.usage import Usage
from hermes_rl.terminal_text import escape_controls, pluralize
from hermes_rl.values import read_json

WIDE = 1_000
"""Width in columns of output that has no edge: a pipe or a file."""
GOOD, BAD, DIM, HEAD, TOOL = "green", "red", "dim", "bold", "cyan"
"""Styles."""


def safe(text: object, style: str = "") -> Text:
    """Return any text in a form that a terminal only displays, with tabs as spaces."""
    return Text(escape_controls(str(text)).expandtabs(4), style=style)


def short(text: object) -> Text:
    """Return any text as `safe` does, on one line that is cut at the end of its column."""
    cell = safe(text)
    cell.no_wrap, cell.overflow = True, "ellipsis"
    return cell


def table(*columns: str, right: Iterable[str] = (), uncut: Iterable[str] = ()) -> Table:
    """Return an empty table without frames.

    Args:
        columns: the headings.
        right: columns of numbers, which are aligned to the right and never cut.
        uncut: other columns that are never cut.
    """
    numbers, unbroken = set(right), {*right, *uncut}
    new = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=HEAD)
    for name in columns:
        new.add_column(name, justify="right" if name in numbers else "left", no_wrap=name in unbroken)
    return new


def show(parts: Iterable[RenderableType], *, pager: bool = False) -> None:
    """Print texts and tables to stdout; with `pager`, show output longer than the terminal in the user's pager."""
    terminal = sys.stdout.isatty()
    console = Console(
        width=None if terminal else WIDE, highlight=False, markup=False, emoji=False, soft_wrap=not terminal
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    text = captured.get()
    if not terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.split("\n")[:-1])
    paged = pager and terminal and sys.stdin.isatty() and text.count("\n") >= console.height
    if not (paged and _show_in_pager(text)):
        sys.stdout.write(text)
        sys.stdout.flush()


def show_exactly(text: str, *, pager: bool = False) -> None:
    """Print a text; characters that a terminal would interpret are escaped as in `escape_controls`.

    A pipe or a file gets all other characters unchanged.
    """
    if sys.stdout.isatty():
        show([safe(text)], pager=pager)
    else:
        echo(text)


def heading(title: str) -> Text:
    """Return the heading of a part of the output."""
    return Text.assemble(safe("── ", DIM), safe(title, HEAD), safe(" ──", DIM))


def indented(text: Text) -> Padding:
    """Return a text indented by two columns."""
    return Padding(text, (0, 0, 0, 2), expand=False)


def call_parts(name: str, arguments: str) -> Iterator[RenderableType]:
    """Yield a tool call, as every command shows it."""
    yield safe(f"→ {name}", TOOL)
    yield indented(safe(arguments))


def result_parts(
    name: str, result: str, *, seconds: float | None = None, failed: bool = False
) -> Iterator[RenderableType]:
    """Yield the result of a tool call, as every command shows it; `seconds` is None if its duration is unknown."""
    took = "" if seconds is None else f" {seconds:.2f} s"
    yield safe(f"← {name}{took}{' (failed)' if failed else ''}", BAD if failed else TOOL)
    yield indented(safe(result))


def reasoning_parts(text: str) -> Iterator[RenderableType]:
    """Yield the reasoning of a model, as every command shows it."""
    yield safe("(reasoning)", DIM)
    yield indented(safe(text, "dim italic"))


def arguments_text(arguments: object) -> str:
    """Return the arguments of a call, one per line if they are JSON; other texts unchanged."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return str(arguments)
    if not isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    lines = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{name}: {text}" if "\n" not in text else f"{name}:\n{text}")
    return "\n".join(lines)


def pairs_table() -> Table:
    """Return a table of two columns without a header: names and their values."""
    pairs = Table(box=None, show_header=False, pad_edge=False)
    pairs.add_column(no_wrap=True)
    pairs.add_column()
    return pairs


def dollars(cost: float) -> str:
    """Return US dollars to the cent, or with two significant digits below a tenth of a dollar."""
    return f"{cost:,.2f} $" if cost >= 0.1 or cost == 0 else f"{cost:.2g} $"


def dollars_by_role(costs: Mapping[str, float]) -> str:
    """Return the sum of the models' costs, and each role's part if there are several."""
    each = ", ".join(f"{role} {dollars(cost)}" for role, cost in costs.items())
    return dollars(sum(costs.values())) + (f" ({each})" if len(costs) > 1 else "")


def cost_lines(usage: Mapping[str, Usage]) -> Iterator[str]:
    """Yield lines with a run's known cost and the number of unpriced calls; none if no call has a price."""
    known_costs = {role: used.known_cost for role, used in usage.items() if used.calls > used.unpriced}
    if not known_costs:
        return
    yield f"cost: {dollars_by_role(known_costs)}"
    for role, used in usage.items():
        if used.unpriced:
            calls = pluralize(used.unpriced, "call")
            yield f"cost: excludes {calls} of the {role}, whose prices are unknown; set servers.{role}.prices"


def _show_in_pager(text: str) -> bool:
    """Show a text in the pager that `PAGER` names, else in `less`; return False if there is none."""
    command = shlex.split(os.environ.get("PAGER", "less")) or ["cat"]
    environ = {"LESS": "FRX", **os.environ}  # as git does: keep colours, and quit if the output fits on the screen
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pager handles Ctrl-C while it is open
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ) as process:
            try:
                process.communicate(text.encode("utf-8", "replace"))
            except BrokenPipeError:
                process.wait()
    except OSError:
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return process.returncode != 127
