"""Run directories and task folders that were damaged at random: commands say what is wrong, and follow no link."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import ROOT, SECONDS, hermes, started
from tests.thorough import THOROUGH

SECRET = "the-key-of-the-one-who-looks"
DRAWS = 160 if THOROUGH else 8
TERMINATED = 4
"""Of so many commands one is ended by SIGTERM."""
COMMANDS = (
    ["show", "run"], ["report", "run"], ["audit", "run"], ["compare", "run", "other"], ["export", "run", "--out", "x"],
    ["push", "run", "./pushed"], ["regrade", "run", "--trust"], ["validate", "harbor:tasks", "--rows", "all"],
    ["render", "harbor:tasks"], ["run", "harbor:tasks", "evaluate", "--demo", "--out", "tried"],
)  # fmt: skip


def changed(content: bytes, chance: random.Random) -> bytes:
    """Return content of which some bytes have other values."""
    changing = bytearray(content)
    for _ in range(min(len(changing), 20)):
        changing[chance.randrange(len(changing))] = chance.randrange(256)
    return bytes(changing)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


REPLACED: dict[str, Callable[[Path, Path], object]] = {
    "removed": lambda path, secret: None,
    "link": lambda path, secret: path.symlink_to(secret),
    "link to a directory": lambda path, secret: path.symlink_to(secret.parent),
    "pipe": lambda path, secret: os.mkfifo(path),
    "zeros": lambda path, secret: path.write_bytes(bytes(5_000)),
    "deep": lambda path, secret: path.write_text("[" * 50_000 + '{"a":' * 50_000),
}
"""What stands in the place of a file or directory."""
CHANGED: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda content, chance: content[: chance.randrange(len(content) + 1)],
    "bytes": changed,
    "doubled": lambda content, chance: content + content,
}


def damage(top: Path, secret: Path, chance: random.Random) -> str:
    """Damage one file or directory below `top`, and return what was done."""
    paths = [each for each in sorted(top.rglob("*")) if not each.is_symlink() and (each.is_dir() or each.is_file())]
    if not paths:
        return "nothing is left"
    path = chance.choice(paths)
    how = chance.choice([*REPLACED, *(() if path.is_dir() else (*CHANGED, "sparse"))])
    if how in REPLACED:
        remove(path)
        REPLACED[how](path, secret)
    elif how == "sparse":
        os.truncate(path, 8 << 30)
    else:
        path.write_bytes(CHANGED[how](path.read_bytes() if path.stat().st_size < 1 << 26 else b"", chance))
    return f"{how}: {path.relative_to(top.parent)}"


@pytest.mark.generated
@pytest.mark.timeout(1200)
def test_commands_name_what_is_damaged_and_follow_no_link(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    for number in range(DRAWS):
        chance, folder = random.Random(f"{seed} {number}"), tmp_path / f"draw-{number}"
        for name in ("run", "other"):
            shutil.copytree(ROOT / "tests/data/recorded_runs/evaluate", folder / name)
        shutil.copytree(ROOT / "specs/data/harbor", folder / "tasks")
        secret = folder / "elsewhere" / "secret"
        secret.parent.mkdir()
        secret.write_text(SECRET)
        command = chance.choice(COMMANDS)
        top = folder / ("tasks" if "harbor:tasks" in command else "run")
        done = [damage(top, secret, chance) for _ in range(chance.randrange(1, 4))]
        if number % TERMINATED:
            ended = hermes(*command, cwd=folder)
            status, said = ended.returncode, ended.stdout + ended.stderr
        else:
            running = started(*command, cwd=folder)
            time.sleep(chance.random() / 4)
            if running.poll() is None:
                os.kill(running.pid, signal.SIGTERM)
            status = running.wait(SECONDS)
            said = "".join(running.said())
        about = f"seed {seed}, number {number}: {command}, {done}: status {status}: {said[-3000:]}"
        assert "Traceback" not in said and SECRET not in said, about
        published = (path for path in folder.rglob("*") if path != secret and not path.is_symlink() and path.is_file())
        assert not any(SECRET.encode() in path.read_bytes() for path in published if path.stat().st_size < 1 << 26), (
            about
        )
        shutil.rmtree(folder)
