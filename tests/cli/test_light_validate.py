"""`validate` imports only what the spec at hand needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SPEC = "dataset: {items: [{q: hi}]}\nprompt: {user: '{{ q }}'}\nservers: {policy: {type: scripted}}\n"
CHECK = """
import sys
from hermes_rl.cli.validate import validate_one
verdict = validate_one(sys.argv[1])
assert verdict.problems == [], verdict
assert verdict.tokens == "a rollout has 1 sequence", verdict
heavy = {"aiohttp", "asyncio", "logging", "hermes_rl.tools.catalogue", "hermes_rl.tokens.rendering"}
heavy |= {"hermes_rl.rollouts.compiled", "hermes_rl.spec.signatures", "hermes_rl.data.files"}
print(*sorted(heavy & set(sys.modules)))
"""
BUILT = """
import sys
from hermes_rl.cli.validate import validate_one
from hermes_rl.spec.sections.dataset import Source
from hermes_rl.spec.section import Section
assert validate_one(sys.argv[1]).problems == []
sections = [*Section.__subclasses__(), *Source.__subclasses__()]
print(*sorted(section.__name__ for section in sections if section.__pydantic_complete__))
"""

COUNTED = """
import atexit, gc, sys
from hermes_rl.cli.main import main
looked = lambda: sum(generation["collections"] for generation in gc.get_stats())
before = looked()
atexit.register(lambda: print("looked for garbage", looked() - before, "times"))
main(["validate", sys.argv[1]])
"""


def test_a_small_spec_is_checked_without_servers_tools_and_renderers(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    done = subprocess.run([sys.executable, "-c", CHECK, str(spec)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_only_sections_that_the_spec_has_are_built(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    done = subprocess.run([sys.executable, "-c", BUILT, str(spec)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Dataset", "Prompt", "Server", "Spec"]


def test_a_small_spec_is_checked_without_a_look_for_garbage(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    done = subprocess.run([sys.executable, "-c", COUNTED, str(spec)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{spec}: valid", "looked for garbage 0 times"]


def test_a_misspelt_toolset_is_still_found(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC + "toolsets: {disabled: [terminl]}\n")
    command = [sys.executable, "-m", "hermes_rl.cli.main", "validate", str(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no toolset `terminl`" in done.stderr


def test_help_is_shown_without_reading_specs() -> None:
    code = (
        "import sys\nfrom hermes_rl.cli.main import status\nstatus(['--help'])\n"
        "print('hermes_rl.spec.model' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
