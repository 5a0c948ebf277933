"""How long the command line takes to start, beside what Python needs to import the packages that it cannot do without.

`import pydantic` loads next to nothing: pydantic loads itself when the first model is made, and whoever checks a spec
makes one. So the second line makes one model of one field; it is the floor of `validate`, the first that of `--help`.

Everything runs from bytecode, as installed packages do: one round that is not counted writes that of our own modules.

python benchmarks/startup.py [--repetitions N]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import machine, say, spread, table

IMPORTS = "import typer, pydantic, yaml, jinja2"
ONE_MODEL = IMPORTS + "; pydantic.create_model('Floor', a=(int, 1))()"
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
            IMPORTS: ["-c", IMPORTS],
            "… and one model": ["-c", ONE_MODEL],
            "hermes-rl --help": [*MODULE, "--help"],
            "hermes-rl validate, inline spec": [*MODULE, "validate", str(spec)],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for repetition in range(-1, options.repetitions):
            for name, command in commands.items():
                took = run([sys.executable, *command])
                if repetition >= 0:
                    seconds[name].append(took)
    floors = list(seconds.values())[:2]
    rows = [
        [
            name,
            spread([1000 * one for one in found], 0),
            *(spread([a / b for a, b in zip(found, floor, strict=True)]) for floor in floors),
        ]
        for name, found in seconds.items()
    ]
    say(f"{options.repetitions} repetitions; median (smallest to largest).\n{machine()}.\n")
    say(table(["", "ms", "to the imports", "to one model"], rows))


def run(command: list[str]) -> float:
    """Seconds that a command takes; ends the benchmark with what it printed where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, env=environment, text=True)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return took


if __name__ == "__main__":
    main()
