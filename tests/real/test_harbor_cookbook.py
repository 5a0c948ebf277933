"""Recipes of Harbor's cookbook, which no registry has; `HARBOR_COOKBOOK` names a checkout.

The images that they are built upon come from a registry. In their place stand images of this machine's files, which
have what the recipes would install; so `apt-get` and `pip` have nothing to do there. The test prints the table of
docs/ports.md, and holds it to what was played.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import SpecError
from hermes_rl.sandbox.launcher import own_python, system_python
from tests.cli.test_harbor import all_played, offline
from tests.real.docker_daemon import DockerDaemon
from tests.real.environments import ROOT
from tests.rootfs import install, libraries, make_rootfs

COOKBOOK = os.environ.get("HARBOR_COOKBOOK")
"""A checkout of harbor-framework/harbor-cookbook; e093c9a was played."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("docker_host"),
    pytest.mark.skipif(COOKBOOK is None, reason="HARBOR_COOKBOOK names no checkout of Harbor's cookbook"),
]
STOOD_IN = ("ubuntu:24.04", "python:3.12-slim", "ghcr.io/astral-sh/uv:latest")
PACKAGES = ("flask", "fastmcp<4")
"""What the services import; a recipe's own solution needs the MCP SDK before 2.0, and does not say so."""
STUBS = {
    "apt-get": "exit 0",
    "pip": "exit 0",
    "python": 'exec python3 "$@"',
    "uv": 'shift; while [ "$1" = --with ]; do shift 2; done; [ "$1" = python3 ] && shift; exec python3 "$@"',
}
"""Programs that fetch, where there is nothing to be fetched."""
PYTEST = "pytest==8.4.1, pytest-json-ctrf==0.3.5"
WRONG = {
    "simple-task": "echo bye > hello.txt",
    "multi-reward": "echo 'deduplicate = list' > deduplicate.py",
    "skills": "echo bye > greeting.txt",
    "multi-container": "curl -s http://api-server:5000/items > /app/items.json",
    "mcp-tools": "echo x | tee /app/secret.txt > /app/timestamp.txt",
    "dns-blacklisting": "cp /etc/candidate-domains.txt /app/accessible.txt",
}
"""A wrong answer to each recipe of one step."""
MORE: dict[str, Sequence[str]] = {
    "mcp-tools": (
        'tools=[{"mcp": {"name": "mcp-server", "command": '
        '["mcp-proxy", "--transport", "streamablehttp", "http://mcp-server:8000/mcp"]}}]',
        f"sandbox.python=[mcp-proxy, {PYTEST}]",
    ),
    "dns-blacklisting": ("sandbox.keep_processes=true",),
}
"""What a refusal says that a recipe needs."""
CHECKS = {"dns-blacklisting": "curl -s http://example.com"}
"""Of recipes that do not say when what their images start is ready."""
BUBBLEWRAP = ("simple-task", "multi-reward", "multi-step", "skills")
"""Recipes that the default sandbox plays too."""
REFUSED = {
    "computer-use-ubuntu": "task.toml:15: ",
    "computer-use-windows": "docker-compose.yaml:16: ",
    "simulated-user": "docker-compose.yaml:14: ",
}
"""Recipes that are not played, and a line that says why."""
STEPS = {"oracle": (0, 1, 2), "nothing": (), "third": (0, 1, None), "second": (0, None, 2), "order": (1, 0, 2)}
"""Of the recipe of several steps: whose solution is played in each; None: nothing is done."""


@pytest.fixture(scope="session")
def stood_in(engine: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import images that replace the base images of the recipes."""
    root = make_rootfs(tmp_path_factory.mktemp("base") / "root")
    for name in ("curl", "date", "dirname", "tee", "mktemp"):
        install(Path(str(shutil.which(name))), root, f"bin/{name}")
    python = system_python() or own_python()
    version = subprocess.check_output([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True)
    target = root / "usr/lib/python3/dist-packages"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--only-binary=:all:", "--python-version", version.strip()]
    subprocess.run([*pip, "--target", str(target), *PACKAGES], check=True)
    for module in target.rglob("*.so"):
        libraries(module, root)
    for library in Path("/lib").glob("*-linux-gnu/lib[gs][ct][cd]*.so.[16]"):  # that of gcc is loaded by name
        install(library, root, str(library).lstrip("/"))
    for name, text in STUBS.items():
        program = root / "usr/local/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    for name in ("uv", "uvx"):
        shutil.copy(root / "usr/local/bin/uv", root / name)
    for image in STOOD_IN:
        engine.have(image, root, {"ENV": "PATH=/usr/local/bin:/usr/bin:/bin"})


async def scores(name: str, out: Path, *more: str) -> dict[str, float]:
    """Return the scores of a recipe for its solution, for no answer, and for wrong answers."""
    folder = Path(str(COOKBOOK)) / "harbor_cookbook/recipes" / name
    if name in CHECKS:
        folder = shutil.copytree(folder, out / "copy" / name)
        with (folder / "task.toml").open("a") as toml:
            toml.write(f"[environment.healthcheck]\ncommand = '{CHECKS[name]}'\ninterval_sec = 1\nretries = 60\n")
    sets = [f"rewards.verified.args.command={offline()}", f"sandbox.python=[{PYTEST}]", *more]
    sets = list({each.partition("=")[0]: each for each in sets}.values())
    if name == "multi-step":
        own = [
            (folder / "steps" / step / "solution/solve.sh").read_text()
            for step in ("scaffold", "implement", "document")
        ]
        written = {
            each: ["true" if n is None else own[n] for n in order] or ["true"] * 3 for each, order in STEPS.items()
        }
        played = {each: [f"bash <<'SOLVE'\n{text}\nSOLVE" for text in texts] for each, texts in written.items()}
    else:
        played = {"oracle": [], "nothing": ["true"], "wrong": [WRONG[name]]}
    numbers = {}
    for each, commands in played.items():
        calls = [{"tools": [{"name": "terminal", "args": {"command": command}}]} for command in commands]
        turns = json.dumps({"turns": [turn for call in calls for turn in (call, {"say": "Done."})]})
        solution = [f"solution={turns}"] if commands else []
        (line,) = await all_played(f"harbor:{folder}", out / name / each, None, *sets, *solution)
        assert line["error"] is None
        numbers[each] = round(line["score"], 2)
    return numbers


@pytest.mark.usefixtures("stood_in")
async def test_the_recipes_score_as_the_table_says(tmp_path: Path, record_property: Any) -> None:
    rows = []
    for name in sorted({*WRONG, "multi-step"}):
        docker = await scores(name, tmp_path / "docker", "sandbox.backend=docker", *MORE.get(name, ()))
        backends = ["docker"]
        if name in BUBBLEWRAP:
            assert await scores(name, tmp_path / "bubblewrap") == docker
            backends.insert(0, "bubblewrap")
        said = ", ".join(f"{each} {score:g}" for each, score in docker.items() if each not in ("oracle", "nothing"))
        rows.append(f"| `{name}` | {', '.join(backends)} | {docker['oracle']:g} | {docker['nothing']:g} | {said} |")
    record_property("figure", "\n".join(["", *rows]))
    page = (ROOT / "docs/ports.md").read_text("utf-8")
    assert [row for row in rows if row not in page.splitlines()] == []


@pytest.mark.parametrize("name", REFUSED)
async def test_unsupported_recipe_is_refused_with_file_and_line(name: str, tmp_path: Path) -> None:
    folder = Path(str(COOKBOOK)) / "harbor_cookbook/recipes" / name
    with pytest.raises(SpecError) as refused:
        await all_played(f"harbor:{folder}", tmp_path / "run", None, "sandbox.backend=docker")
    assert any(
        REFUSED[name] in f"{Path(str(problem.file)).name}:{problem.line}: " for problem in refused.value.problems
    )
