"""What a start of a command costs: processor time, memory, and the seconds to the first rollout with many workers.

    python benchmarks/startup.py [--repetitions N] [--checkout DIRECTORY …] [--torch DIRECTORY] [--workers N …]

Processor time is that of the command and of all processes that it waited for; memory is that of the largest of them.
With several checkouts the commands of all of them alternate, and the ratios are those of pairs to the first checkout:
on a machine that does other things too, only those mean something. With torch, the commands that read a tokenizer from
a directory run with it and without it, and the last lines are the verdict: at most 1.15 times as much with torch.

`import pydantic` loads next to nothing: pydantic loads itself when the first model is made, and every check of a spec
makes one. So the second line makes one model of one field; it is the floor of `validate`, the first that of `--help`.

Everything runs from bytecode, as installed packages do: one round that is not counted writes that of our own modules.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from report import PAIRS, Usage, machine, ratio, say, spread, table, usage

IMPORTS = "import typer, pydantic, yaml, jinja2"
ONE_MODEL = IMPORTS + "; pydantic.create_model('Floor', a=(int, 1))()"
HERMES = ("-m", "hermes_rl.cli.main")
MOST = 1.15
"""How many times as much processor time a command may take with torch installed."""
TORCH = re.compile(r"(torch|torchgen|functorch|torch-.*\.dist-info)")
ADDRESS = re.compile(r"http://\S+")


@dataclass(frozen=True)
class Command:
    """A command, and when it is ready if that is not its end."""

    words: tuple[str, ...]
    ready: Callable[[str], bool] | None = None
    ends: bool = True
    reads_tokenizer: bool = False
    """It is measured with torch too."""
    record: str = ""
    """A directory that the command needs to be absent."""


def main() -> None:
    repository = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=PAIRS, help=f"at least {PAIRS} give intervals of 95 %%")
    parser.add_argument("--checkout", type=Path, action="append", help="a checkout to measure (default: this one)")
    parser.add_argument("--torch", type=Path, help="a site-packages directory that has torch")
    parser.add_argument("--workers", type=int, nargs="*", default=[16, 64], help="workers until the first rollout")
    parser.add_argument("--only", default="", help="a regular expression of the names of commands")
    options = parser.parse_args()
    checkouts = [path.resolve() for path in options.checkout or [repository]]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        torch = None if options.torch is None else only_torch(options.torch, work / "torch")
        tokenizer = repository / "hermes_rl" / "tokens" / "small"
        commands = {
            name: command
            for name, command in all_commands(work, tokenizer, options.workers).items()
            if re.search(options.only, name)
        }
        usages = measure(commands, checkouts, torch, work, options.repetitions)
    say(f"{options.repetitions} repetitions; median (smallest to largest), ratios with an interval of 95 %.")
    say(f"{machine()}.\n")
    show(usages, commands, checkouts)
    if torch is None:
        say("\nNot measured with torch installed: name a site-packages directory that has it, --torch DIRECTORY.")
    else:
        verdict(usages, commands, checkouts)


def all_commands(work: Path, tokenizer: Path, workers: list[int]) -> dict[str, Command]:
    """Return the commands by name, and write the files that they read."""
    write_spec(work / "spec.yaml", 2, "")
    model = work / "model"
    shutil.copytree(tokenizer, model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16"}), encoding="utf-8")
    write_spec(work / "tokenizer.yaml", 2, ", tokenizer: ./model")
    process = ("process", "--env.group_size", "2", "--quiet")
    played = (*process, "--env.total_steps", "2", "--out")
    commands = {
        IMPORTS: Command(("-c", IMPORTS)),
        "… and one model": Command(("-c", ONE_MODEL)),
        "--version": Command((*HERMES, "--version")),
        "--help": Command((*HERMES, "--help")),
        "validate": Command((*HERMES, "validate", "spec.yaml")),
        "run": Command((*HERMES, "run", "spec.yaml", *played, "played"), record="played"),
        "show": Command((*HERMES, "show", "played", "--no-pager")),
        "view, until it answers": Command((*HERMES, "view", "played"), ready=answers, ends=False),
        "render, tokenizer of a directory": Command(
            (*HERMES, "render", "tokenizer.yaml", "--tokens", "--no-pager"), reads_tokenizer=True
        ),
        "run, tokenizer of a directory": Command(
            (*HERMES, "run", "tokenizer.yaml", *played, "tokens"), reads_tokenizer=True, record="tokens"
        ),
        "environment of Atropos": Command(("-c", "import hermes_rl.env.spec_env"), reads_tokenizer=True),
    }
    for count in workers:
        write_spec(work / f"workers{count}.yaml", 2 * count, "")
        more = ("--workers", str(count), "--env.total_steps", str(2 * count), "--out", f"by{count}")
        arguments = (*HERMES, "run", f"workers{count}.yaml", *process, *more)
        commands[f"run --workers {count}, to the first rollout"] = Command(
            arguments, ready=has_record(work / f"by{count}" / "rollouts.jsonl"), record=f"by{count}"
        )
    return commands


def write_spec(path: Path, rows: int, more: str) -> None:
    items = json.dumps([{"q": f"question {row}"} for row in range(rows)])
    servers = f"servers: {{policy: {{type: scripted{more}}}}}\n"
    path.write_text(f"dataset: {{items: {items}}}\nprompt: {{user: '{{{{ q }}}}'}}\n{servers}", encoding="utf-8")


def answers(output: str) -> bool:
    """Return True once the address that a command has printed gives its page."""
    address = ADDRESS.search(output)
    if address is None:
        return False
    with urllib.request.urlopen(address[0], timeout=60) as response:
        return bool(response.read())


def has_record(path: Path) -> Callable[[str], bool]:
    """Return the check that a file has a whole line."""
    return lambda _: path.exists() and b"\n" in path.read_bytes()


def only_torch(site: Path, directory: Path) -> Path:
    """Make a directory with torch alone, so that all other packages are the same with it and without it."""
    directory.mkdir()
    for path in site.resolve().iterdir():
        if TORCH.fullmatch(path.name):
            (directory / path.name).symlink_to(path)
    if not (directory / "torch").exists():
        sys.exit(f"{site} has no torch")
    return directory


Measured = dict[tuple[str, Path, bool], list[Usage]]
"""The usage by command, checkout, and whether torch was installed."""


def measure(
    commands: dict[str, Command], checkouts: list[Path], torch: Path | None, work: Path, repetitions: int
) -> Measured:
    cases = [
        (name, checkout, with_torch)
        for name, command in commands.items()
        for with_torch in (False, True)
        for checkout in checkouts
        if not with_torch or (torch is not None and command.reads_tokenizer)
    ]
    usages: Measured = {case: [] for case in cases}
    for repetition in range(-1, repetitions):
        for name, checkout, with_torch in cases if repetition % 2 else reversed_pairs(cases, len(checkouts)):
            command = commands[name]
            if command.record:
                shutil.rmtree(work / command.record, ignore_errors=True)
            paths = [str(checkout), *([str(torch)] if with_torch else [])]
            excluded = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
            variables = {key: value for key, value in os.environ.items() if key not in excluded}
            variables |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
            used = usage([sys.executable, *command.words], work, variables, command.ready, ends=command.ends)
            if repetition >= 0:
                usages[name, checkout, with_torch].append(used)
    return usages


def reversed_pairs(cases: list[tuple[str, Path, bool]], size: int) -> list[tuple[str, Path, bool]]:
    """Return the cases with the checkouts of each command in reverse order: none is always measured first."""
    return [case for start in range(0, len(cases), size) for case in reversed(cases[start : start + size])]


def show(usages: Measured, commands: dict[str, Command], checkouts: list[Path]) -> None:
    rows = []
    for (name, checkout, with_torch), used in usages.items():
        base = usages[name, checkouts[0], with_torch]
        label = f"{name}, torch installed" if with_torch else name
        row = [
            label if len(checkouts) == 1 else f"{label}: {checkout}",
            spread([1000 * one.cpu for one in used], 0),
            spread([one.peak for one in used], 0),
            spread([one.ready for one in used]) if commands[name].ready is not None else "",
        ]
        if checkout != checkouts[0]:
            for figure in (attrgetter("cpu"), attrgetter("peak"), attrgetter("ready")):
                row.append(str(ratio([figure(one) for one in used], [figure(one) for one in base])))
        rows.append(row)
    heads = ["", "processor time, ms", "peak, MiB", "s until ready"]
    if len(checkouts) > 1:
        heads += ["ratio of processor time", "of peak", "of seconds"]
    say(table(heads, [[*row, *[""] * (len(heads) - len(row))] for row in rows]))


def verdict(usages: Measured, commands: dict[str, Command], checkouts: list[Path]) -> None:
    say(f"\nWith torch installed, a command may take {MOST} times the processor time.\n")
    rows = []
    for checkout in checkouts:
        for name in (name for name, command in commands.items() if command.reads_tokenizer):
            with_torch, without = usages[name, checkout, True], usages[name, checkout, False]
            cpu = ratio([one.cpu for one in with_torch], [one.cpu for one in without])
            peak = ratio([one.peak for one in with_torch], [one.peak for one in without])
            rows.append(
                [
                    name if len(checkouts) == 1 else f"{name}: {checkout}",
                    str(cpu),
                    str(peak),
                    "holds" if cpu.median <= MOST else "does not hold",
                ]
            )
    say(table(["", "processor time", "peak", "verdict"], rows))


if __name__ == "__main__":
    main()
