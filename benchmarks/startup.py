"""How long the command line takes to start, beside what Python needs to import the packages that it cannot do without.

python benchmarks/startup.py [--repetitions N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import machine, say, spread, table

SPEC = "dataset: {items: [{q: hi}]}\nprompt: {user: '{{ q }}'}\nservers: {policy: {type: scripted}}\n"
MODULE = ["-m", "hermes_rl.cli.main"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text(SPEC)
        commands = {
            "import typer, pydantic, yaml, jinja2": ["-c", "import typer, pydantic, yaml, jinja2"],
            "hermes-rl --help": [*MODULE, "--help"],
            "hermes-rl validate, inline spec": [*MODULE, "validate", str(spec)],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.repetitions):
            for name, command in commands.items():
                began = time.perf_counter()
                subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - began)
    base = next(iter(seconds.values()))
    rows = [
        [name, spread([1000 * one for one in found], 0), spread([a / b for a, b in zip(found, base, strict=True)])]
        for name, found in seconds.items()
    ]
    say(f"{options.repetitions} repetitions; median (smallest to largest).\n{machine()}.\n")
    say(table(["", "ms", "ratio"], rows))


if __name__ == "__main__":
    main()
