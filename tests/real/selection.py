"""Choose which tests on real components CI runs: all whose code has changed, and a third of the others each day.

Asked for by the variable TEST_CHOICE: `changed` for this choice, `all` for everything (the default, so that whoever
names a test runs it). A test of a changed component always runs. The turn of any other follows from its name and the
date, so that each runs on one of three days. Changes are counted from the commit at which the test last passed, which
the cache has, and from three days of history for a test without one.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from tests.real.environments import ROOT, cache

TURNS = 3
"""Days on which all tests have run once."""
DAYS = 3
"""Days of history that count as changed where no complete run is known."""
DOCKER = (
    "hermes_rl/sandbox/docker*",
    "hermes_rl/sandbox/helper*",
    "hermes_rl/sandbox/channel.py",
    "tests/real/docker_*",
)
REQUIRED_BY_PORTS = ("agentdojo", "bfcl", "humaneval", "scienceworld", "sql")
PORTS = ("specs/*/*.py", "tests/real/port_*", *(f"tests/real/requirements/{name}.txt" for name in REQUIRED_BY_PORTS))
ENGINES = (
    "hermes_rl/servers/token_level.py",
    "hermes_rl/tokens/*",
    "tests/real/tiny_qwen.py",
    "tests/real/recompute.py",
)
BROWSER = ("tests/real/browser_steps.py", "tests/real/requirements/browser.txt", "tests/real/requirements/axe/*")
AREAS: Mapping[str, Sequence[str]] = {
    "agentlightning": ("hermes_rl/integrations/agentlightning.py", "tests/real/agl_steps.py"),
    "agents": ("agents/*", "hermes_rl/agent/program.py", "hermes_rl/agent/endpoint.py", "hermes_rl/agent/dialects/*"),
    "constraints": ("constraints.txt", "pyproject.toml"),
    "docker_daemon": DOCKER,
    "docker_registry": ("hermes_rl/sandbox/images.py", "tests/real/docker_registry.py"),
    "duels": ("specs/textarena/*", "tests/real/duel_trajectories.py"),
    "harbor": ("hermes_rl/data/harbor.py", "hermes_rl/data/compose.py", "specs/harbor.yaml"),
    "harbor_cookbook": ("hermes_rl/data/harbor.py", "hermes_rl/data/compose.py", "specs/harbor.yaml"),
    "hub": ("hermes_rl/data/hub.py", "hermes_rl/reading/push.py", "hermes_rl/repositories/hub.py", "tests/real/hub.py"),
    "litellm": ("hermes_rl/servers/openai.py", "hermes_rl/servers/transport.py"),
    "llama_cpp": ("hermes_rl/servers/completion.py", "tests/real/llama_server.py", "tests/real/requirements/llama.txt"),
    "mcp_npm": ("hermes_rl/tools/mcp_client.py", "tests/real/requirements/n[op]*"),
    "mcp_servers": ("hermes_rl/tools/mcp_client.py", "tests/real/requirements/mcp-*"),
    "nemo_gym": ("hermes_rl/service/*", "tests/real/nemo_collect.py", "tests/real/requirements/nemo-gym.txt"),
    "openenv": ("hermes_rl/integrations/openenv.py", "hermes_rl/integrations/opened.py", "tests/real/openenv_*"),
    "openrlhf": ("hermes_rl/integrations/openrlhf.py", "tests/real/openrlhf_programs.py"),
    "podman": ("tests/real/podman_service.py", *DOCKER),
    "ports": PORTS,
    "ray": ("hermes_rl/runs/cluster.py", "hermes_rl/runs/travel.py", "tests/real/ray_*"),
    "searx": ("hermes_rl/tools/hermes_toolsets.py", "hermes_rl/tools/hermes_worker.py"),
    "skyrl": ("hermes_rl/integrations/skyrl.py", "tests/real/skyrl_programs.py"),
    "tau2": ("specs/tau2/*", "tests/real/tau2_trajectories.py"),
    "tinker": ("hermes_rl/integrations/tinker.py", "tests/real/tinker_programs.py"),
    "transformers_serve": ("hermes_rl/servers/completion.py", "tests/real/requirements/transformers.txt"),
    "trl": ("hermes_rl/integrations/trl*.py", "tests/real/trl_*", "tests/real/small_*"),
    "verifiers": ("hermes_rl/integrations/verifiers.py", "hermes_rl_verifiers.py", "tests/real/verifiers_train.py"),
    "verl": ("hermes_rl/integrations/verl.py", "tests/real/verl_programs.py"),
    "view": ("hermes_rl/view/*", "hermes_rl/reading/report.py", "hermes_rl/reading/pages/*", *BROWSER),
    "vllm": ("hermes_rl/servers/vllm.py", *ENGINES),
    "wandb": ("hermes_rl/runs/progress.py",),
}  # fmt: skip
"""Component, as `test_<component>.py` names it → patterns of the files that its tests are about, beside that file and
`requirements/<component>.txt`."""


class Pass(NamedTuple):
    """When a test last passed on this machine, and which commit was checked out."""

    day: str
    commit: str


def load_passes() -> dict[str, Pass]:
    """Return the last pass of each test that the cache knows; of none if it has no file that can be read."""
    try:
        return {test: Pass(*found) for test, found in json.loads(_file().read_text("utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def save_passes(passes: Mapping[str, Pass]) -> None:
    """Write the file in one step, as two test runs may do."""
    new = _file().with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(passes, indent=0, sort_keys=True), "utf-8")
    new.replace(_file())


def _file() -> Path:
    return cache() / "last-passes.json"


def component_of(test: str) -> str:
    """Return the component of a test by its id, `tests/real/test_ray.py::test_x[1]`."""
    return Path(test.partition("::")[0]).stem.removeprefix("test_")


@functools.cache
def changed_components(files: frozenset[str]) -> set[str]:
    """Return the components that changed files belong to."""
    changed = set()
    for component, patterns in AREAS.items():
        own = (f"tests/real/test_{component}.py", f"tests/real/requirements/{component.replace('_', '-')}.txt")
        if any(fnmatch(file, pattern) for file in files for pattern in (*own, *patterns)):
            changed.add(component)
    return changed


def is_turn(test: str, day: date) -> bool:
    """Return True if it is this test's day; the cases of a parametrised test have the same."""
    return (crc32(test.partition("[")[0].encode()) + day.toordinal()) % TURNS == 0


@functools.cache
def changed_files(commit: str | None, root: Path = ROOT) -> set[str] | None:
    """Return the files that differ from a commit, or that the last days changed; None without a history."""
    since_commit = _git(root, "diff", "--name-only", commit) if commit is not None else None
    if since_commit is not None:
        return since_commit
    recent = _git(root, "log", f"--since={DAYS} days ago", "--name-only", "--pretty=format:")
    uncommitted = _git(root, "diff", "--name-only", "HEAD")
    return None if recent is None or uncommitted is None else recent | uncommitted


def head(root: Path = ROOT) -> str | None:
    """Return the commit that is checked out."""
    names = _git(root, "rev-parse", "HEAD")
    return None if names is None else names.pop()


def _git(root: Path, *arguments: str) -> set[str] | None:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return set(done.stdout.split("\n")) - {""} if done.returncode == 0 else None


def chosen(tests: Sequence[str], passes: Mapping[str, Pass], day: date, root: Path = ROOT) -> set[str]:
    """Return the tests that run: those of changed components, and those whose turn it is.

    Every component counts as changed if the changes are not known.
    """
    running = set()
    for test in tests:
        files = changed_files(passes[test].commit if test in passes else None, root)
        if files is None or component_of(test) in changed_components(frozenset(files)) or is_turn(test, day):
            running.add(test)
    return running


def describe_skipped(tests: Iterable[str], passes: Mapping[str, Pass]) -> list[str]:
    """Return a line for each module with tests that do not run, with the dates on which they last passed here."""
    modules = defaultdict(list)
    for test in tests:
        module, _, name = test.partition("::")
        modules[module].append(f"{name} ({passes[test].day if test in passes else 'no run known'})")
    return [f"not chosen: {module}: {', '.join(names)}" for module, names in sorted(modules.items())]
