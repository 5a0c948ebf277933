"""`hermes-rl init`: copy starter files for an environment, one set for each kind of task.

The files are in `starters/` of a checkout. Each set is an environment that is valid and runs immediately, with its
rewards, a test of them and its rows; NAME in them is replaced by the new name. With `--from`, the files are a draft of
an environment of another framework, which `draft` makes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.shipped import shipped_dir

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,59}")


def start(name: str, kind: str, parent: Path) -> list[str]:
    """Create the directory `name` in `parent` with the starter files of a kind, and return the messages to print.

    Raises:
        UserError: the name is invalid, or the directory exists or cannot be written.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is not a valid name: use small letters, digits, - and _, at most 60, such as my-environment"
        )
    folder = parent / name

    def fill(partial: Path) -> None:
        shutil.copytree(
            shipped_dir("starters") / kind, partial, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
        spec = partial / "NAME.yaml"
        (partial / f"{name}.yaml").write_text(spec.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
        spec.unlink()

    return [
        _create_directory(folder, fill),
        "next:",
        f"  cd {folder}",
        f"  hermes-rl validate {name}.yaml --deep",
        f"  hermes-rl run {name}.yaml process --demo",
        "  pytest test_rewards.py",
    ]


def draft(file: Path, framework: str, parent: Path) -> list[str]:
    """Create a directory with the draft of a spec, named after the file it is made from; return the messages.

    Raises:
        UserError: the file cannot be moved, or the directory exists or cannot be written.
    """
    from hermes_rl.spec.draft import draft_files

    name, files, unmoved_parts = draft_files(file, framework)
    folder = parent / name

    def fill(partial: Path) -> None:
        for file_name, text in files.items():
            (partial / file_name).write_text(text, encoding="utf-8")

    return [
        _create_directory(folder, fill),
        *(["could not move, also in the draft:", *(f"  {each}" for each in unmoved_parts)] if unmoved_parts else []),
        "next:",
        f"  cd {folder}",
        f"  hermes-rl validate {name}.yaml",
        "  docs/moving.md has the counterpart of each name",
    ]


def _create_directory(folder: Path, fill: Callable[[Path], None]) -> str:
    """Create a directory as a whole, and return it with its files."""
    partial = folder.with_name(f".{folder.name}.partial")
    if folder.exists():
        raise UserError(f"{folder} already exists; choose another name (nothing was written)")
    try:
        partial.mkdir()
        fill(partial)
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}; choose another place") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return f"{folder}: {', '.join(files)}"
