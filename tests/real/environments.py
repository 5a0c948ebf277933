"""Real components, each in an environment of its own: built once from pinned versions, and kept in a cache folder.

The folder is `HERMES_RL_REAL` or ``~/.cache/hermes-rl-real``. A component that cannot be had makes its tests fail: they
are there to show what works with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements")
HERE = Path(__file__).parent


def cache() -> Path:
    """Return the folder that keeps what takes long to build."""
    folder = Path(os.environ.get("HERMES_RL_REAL") or Path.home() / ".cache" / "hermes-rl-real")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def built(name: str, made_of: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """Return the folder `name`, built anew where one of the files that it is made of has changed."""
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


def python_of(name: str, without: Sequence[str] = (), upon: Path | None = None) -> Path:
    """Return the Python of the environment that `requirements/<name>.txt` describes.

    Args:
        name: of the file. Its lines are pinned by hash; what they depend on is installed behind them.
        without: packages that are taken out again.
        upon: the Python of an environment whose packages this one has too.
    """
    pinned = REQUIREMENTS / f"{name}.txt"

    def build(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        if upon is not None:
            (own,) = folder.glob("lib/python*/site-packages")
            (other,) = upon.parents[1].glob("lib/python*/site-packages")
            (own / "upon.pth").write_text(f"{other}\n", "utf-8")
        pip = [str(folder / "bin" / "pip"), "-qq"]
        subprocess.run([*pip, "install", "--no-deps", "--require-hashes", "-r", str(pinned)], check=True)
        names = [line.split()[0] for line in pinned.read_text("utf-8").splitlines() if line[:1].isalnum()]
        subprocess.run([*pip, "install", *names], check=True)
        if without:
            subprocess.run([*pip, "uninstall", "--yes", *without], check=True)

    return built(name if upon is None else f"{name}-on-{upon.parents[1].name}", [pinned], build) / "bin" / "python"


def vllm_python() -> Path:
    """Return the Python of an environment with vLLM for processors."""
    return python_of("vllm", without=("torchvision", "torchaudio", "torchcodec"))  # builds for other machines


def transformers_python() -> Path:
    """Return the Python of an environment with `transformers serve`, beside the torch of vLLM's."""
    return python_of("transformers", upon=vllm_python())


def llama_python() -> Path:
    """Return the Python of an environment with llama.cpp."""
    return python_of("llama")


def litellm_python() -> Path:
    """Return the Python of an environment with LiteLLM's proxy."""
    return python_of("litellm")


def mcp_servers_python() -> Path:
    """Return the Python of an environment with MCP servers that others wrote."""
    return python_of("mcp-servers")


def version_in(python: Path, package: str) -> str:
    """Return the version of a package of such an environment."""
    command = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def tiny_model() -> Path:
    """Return the folder of a tiny model that calls tools, trained here; `random` beside it has random weights."""

    def build(folder: Path) -> None:
        subprocess.run([str(vllm_python()), str(HERE / "tiny_qwen.py"), str(folder)], check=True)

    return built("tiny-qwen", [HERE / "tiny_qwen.py", HERE / "qwen.jinja"], build) / "trained"
