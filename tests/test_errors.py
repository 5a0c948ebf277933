"""The command that installs an extra works for how hermes-rl was installed."""

from __future__ import annotations

import importlib.metadata
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import errors

ROOT = Path(__file__).parents[1]
WHEEL = "file:///tmp/hermes_rl-0.1.0-py3-none-any.whl"
REPOSITORY = {"url": "https://example.org/hermes-rl", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


def test_extra_of_a_checkout_is_installed_from_its_path() -> None:
    assert errors.install_command("ray") == f"pip install -e '{ROOT}[ray]'"


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ({"url": WHEEL, "archive_info": {}}, f"pip install 'hermes-rl[ray] @ {WHEEL}'"),
        ({"url": "file:///src/hermes", "dir_info": {}}, "pip install 'hermes-rl[ray] @ file:///src/hermes'"),
        (REPOSITORY, "pip install 'hermes-rl[ray] @ git+https://example.org/hermes-rl@abc'"),
        (None, "pip install 'hermes-rl[ray]'"),
        (PackageNotFoundError("hermes-rl"), "pip install 'hermes-rl[ray]'"),
    ],
    ids=["wheel", "directory", "repository", "index", "not installed"],
)
def test_extra_is_installed_from_where_the_package_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, command: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if source is None else json.dumps(source)

    def distribution(name: str) -> Installed:
        if isinstance(source, Exception):
            raise source
        return Installed()

    monkeypatch.setattr(errors, "__file__", str(tmp_path / "hermes_rl" / "errors.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert errors.install_command("ray") == command
