"""Runs of pytest with plugins of these tests, each in a directory and process of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from _pytest.config import default_plugins

from tests.commands import Command, started

PLUGINS = ("tests.forks", "tests.thorough", "tests.budget", "pytest_timeout")
LOADED = ("pytest", *(f"_pytest.{name}" for name in default_plugins), *PLUGINS)
CODE = "import os, pytest, sys; os.setsid(); sys.exit(pytest.main(sys.argv[1:]))"


def start(folder: Path, *options: str) -> Command:
    """Start pytest in this directory, with two workers unless the options have another number."""
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    plugins += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # they are loaded already
    env = {"NOTES": str(folder / "notes"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}
    return started(*plugins, "-n", "2", *options, cwd=folder, env=env, code=CODE, loaded=LOADED)


def finish(run: Command) -> SimpleNamespace:
    """Wait for this run, and return its status and output."""
    try:
        status = run.wait(60)
    except BaseException:
        run.kill()
        raise
    return SimpleNamespace(returncode=status, stdout="".join(run.said()))
