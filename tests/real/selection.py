"""Choose which tests on real components CI runs: all whose code has changed, and a third of the others each day.

Asked for by the variable TEST_CHOICE: `changed` for this choice, `all` for everything (the default, so that whoever
names a test runs it). A test runs until it has passed with the files of its component as they are
(`tests.last_passes`). The turn of any other follows from its name and the date, so that each runs on one of three days.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from zlib import crc32

from tests.last_passes import ROOT, Pass, has_changed

TURNS = 3
"""Days on which all tests have run once."""
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
    "hub": (
        "hermes_rl/data/hub.py",
        "hermes_rl/analysis/push.py",
        "hermes_rl/repositories/hub.py",
        "tests/real/hub.py",
    ),
    "litellm": ("hermes_rl/servers/openai.py", "hermes_rl/servers/transport.py"),
    "llama_cpp": ("hermes_rl/servers/completion.py", "tests/real/llama_server.py", "tests/real/requirements/llama.txt"),
    "mcp_npm": ("hermes_rl/tools/mcp_client.py", "tests/real/requirements/n[op]*"),
    "mcp_servers": ("hermes_rl/tools/mcp_client.py", "tests/real/requirements/mcp-*"),
    "nemo_gym": ("hermes_rl/service/*", "tests/real/nemo_collect.py", "tests/real/requirements/nemo-gym.txt"),
    "openenv": ("hermes_rl/integrations/openenv.py", "hermes_rl/integrations/common.py", "tests/real/openenv_*"),
    "openrlhf": ("hermes_rl/integrations/openrlhf.py", "tests/real/openrlhf_programs.py"),
    "podman": ("tests/real/podman_service.py", *DOCKER),
    "ports": PORTS,
    "ray": ("hermes_rl/runs/cluster.py", "hermes_rl/runs/packaging.py", "tests/real/ray_*"),
    "searx": ("hermes_rl/tools/hermes_toolsets.py", "hermes_rl/tools/hermes_worker.py"),
    "skyrl": ("hermes_rl/integrations/skyrl.py", "tests/real/skyrl_programs.py"),
    "tau2": ("specs/tau2/*", "tests/real/tau2_trajectories.py"),
    "tinker": ("hermes_rl/integrations/tinker.py", "tests/real/tinker_programs.py"),
    "transformers_serve": ("hermes_rl/servers/completion.py", "tests/real/requirements/transformers.txt"),
    "trl": ("hermes_rl/integrations/trl*.py", "tests/real/trl_*", "tests/real/small_*"),
    "verifiers": ("hermes_rl/integrations/verifiers.py", "hermes_rl_verifiers.py", "tests/real/verifiers_train.py"),
    "verl": ("hermes_rl/integrations/verl.py", "tests/real/verl_programs.py"),
    "view": ("hermes_rl/view/*", "hermes_rl/analysis/report.py", "hermes_rl/analysis/pages/*", *BROWSER),
    "vllm": ("hermes_rl/servers/vllm.py", *ENGINES),
    "wandb": ("hermes_rl/runs/progress.py",),
}  # fmt: skip
"""Component, as `test_<component>.py` names it → patterns of the files that its tests are about, beside that file and
`requirements/<component>.txt`."""


def component_of(test: str) -> str:
    """Return the component of a test by its id, `tests/real/test_ray.py::test_x[1]`."""
    return Path(test.partition("::")[0]).stem.removeprefix("test_")


def files_of(component: str) -> tuple[str, ...]:
    """Return the patterns of a component's files, with those that every component has."""
    requirements = f"tests/real/requirements/{component.replace('_', '-')}.txt"
    return (f"tests/real/test_{component}.py", requirements, *AREAS.get(component, ()))


def is_turn(test: str, day: date) -> bool:
    """Return True if it is this test's day; the cases of a parametrised test have the same."""
    return (crc32(test.partition("[")[0].encode()) + day.toordinal()) % TURNS == 0


def chosen(tests: Sequence[str], passes: Mapping[str, Pass], day: date, root: Path = ROOT) -> set[str]:
    """Return the tests that run: those whose turn it is, and those whose component has changed."""
    return {
        test for test in tests if is_turn(test, day) or has_changed(test, files_of(component_of(test)), passes, root)
    }


def describe_skipped(tests: Iterable[str], passes: Mapping[str, Pass]) -> list[str]:
    """Return a line for each module with tests that do not run, with the dates on which they last passed here."""
    modules = defaultdict(list)
    for test in tests:
        module, _, name = test.partition("::")
        modules[module].append(f"{name} ({passes[test].day if test in passes else 'no run known'})")
    return [f"not chosen: {module}: {', '.join(names)}" for module, names in sorted(modules.items())]
