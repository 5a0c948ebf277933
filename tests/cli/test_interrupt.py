"""Ctrl-C at any moment, and a machine without room for temporary files, end a command with a sentence."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile

import pytest

from hermes_rl.cli.main import status

BEFORE = """
import sys
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from hermes_rl.cli.main import main
main(["list", "rewards"])
"""
SWALLOWED = """
import signal
import time
import hermes_rl.cli.main as program

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background inherit that it is ignored

class Finalized:
    def __del__(self):
        raise KeyboardInterrupt

def status(arguments):
    Finalized()
    time.sleep(60)

program.status = status
program.main()
"""
LIGHT = """
import sys
before = set(sys.modules)
import hermes_rl.cli.main
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("hermes_rl")))
"""


def ended(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "module", ["typer", "pydantic", "hermes_rl.errors", "hermes_rl.cli.commands", "hermes_rl.cli.listing"]
)
def test_interrupt_during_imports_is_a_sentence(module: str) -> None:
    done = ended(BEFORE, module)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_interrupt_that_a_finalizer_swallows_ends_the_program() -> None:
    done = ended(SWALLOWED)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_interrupt_that_a_library_wraps_is_a_sentence() -> None:
    raising = "def status(a): raise ValueError('schema: KeyboardInterrupt:')"
    code = f"import hermes_rl.cli.main as p\n{raising}\np.status = status\np.main()"
    done = ended(code)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    bug = ended(code.replace("KeyboardInterrupt", "a bug"))
    assert bug.returncode == 1 and "Traceback" in bug.stderr


def test_little_is_imported_before_interrupts_are_handled() -> None:
    done = ended(LIGHT)
    assert len(done.stdout.split()) < 20 and not {"typing", "re"} & set(done.stdout.split()), done.stdout


def test_no_directory_for_temporary_files_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    assert status(["validate", "--deep", "tool-calling"]) == 2
    assert capsys.readouterr().err == (
        "error: no usable temporary directory found in ['/tmp', '/var/tmp']: set TMPDIR to one that can be written\n"
    )
