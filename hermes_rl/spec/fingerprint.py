"""Compute the fingerprint of a rollout's definition, so that only a run with the same rollouts continues a run
directory.

The 8 hex digits include rows, prompt, tools, state, user, sandbox, artifacts, agent, the policy's model and sampling,
the requests to a teacher, and the content of the files that these name. They exclude addresses, keys, timeouts,
concurrency, scoring, and the number of rollouts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hermes_rl.others_files import open_regular
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.paths import names_host_file
from hermes_rl.spec.renamed import with_old_names
from hermes_rl.spec.section import Section, is_template, to_plain

_TIMEOUTS = frozenset({"timeout", "tool_timeout", "lifetime"})
_LARGE_TREE = 10_000
"""Files; of a larger folder (a root file system) names and sizes stand for the content."""


def fingerprint(spec: Spec, mode: Mode = "process") -> str:
    """Return 8 hex digits computed from every setting that affects a rollout."""
    text = json.dumps(_hashed_settings(spec, mode), sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def fingerprint_parts(spec: Spec, mode: Mode) -> dict[str, str]:
    """Return a hash of each part, so that a message can name the changed parts."""
    return {
        name: hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()[:8]
        for name, part in _hashed_settings(spec, mode).items()
    }


def _hashed_settings(spec: Spec, mode: Mode) -> dict[str, Any]:
    dataset = _dump_section(spec.dataset)
    dataset.pop("limit", None)
    if isinstance(dataset.get("eval"), dict):
        dataset["eval"].pop("limit", None)
    scripted = any(server.kind.embedded for server in spec.servers.get("policy", ()))
    # Only servers that take part in a rollout define it.
    of_seats = {role for seat in spec.agents.values() for role in (seat.opponents or (seat.server,))}
    acting = {"policy", spec.user.server if spec.user else "policy", *of_seats}
    parts: dict[str, Any] = {
        "seed": spec.seed,
        "dataset": dataset,
        "prompt": _dump_section(spec.prompt),
        "toolsets": {key: value for key, value in _dump_section(spec.toolsets).items() if key != "record"},
        "tools": [_dump_section(tool) for tool in spec.tools],
        "state": spec.state
        and (state_fields if len(state_fields := _dump_section(spec.state)) > 1 else spec.state.python),
        "user": _dump_section(spec.user) if spec.user else None,
        "sandbox": _dump_section(spec.sandbox),
        "agent": _dump_section(spec.agent_for(mode)),
        "solution": _dump_section(spec.solution) if spec.solution and scripted else None,
        "servers": {role: [*map(_model_settings, servers)] for role, servers in spec.servers.items() if role in acting},
    }
    if spec.agents:
        parts["agents"] = {name: _dump_section(seat) for name, seat in spec.agents.items()}
        parts["schedule"] = _dump_section(spec.schedule) if spec.schedule is not None else None
    # The rewards of a step decide whether the next step runs.
    of_steps = {name: _dump_section(reward) for name, reward in spec.rewards.items() if reward.per_step is not None}
    if of_steps:
        graded = {
            name: {k: v for k, v in fields.items() if k not in ("weight", "gate")} for name, fields in of_steps.items()
        }
        parts["rewards"] = graded
    if spec.distill is not None and mode != "evaluate":
        teachers = spec.servers.get(spec.distill.server, ())
        parts["distill"] = [_dump_section(spec.distill), [_model_settings(server) for server in teachers]]
    if spec.artifacts:
        # The restore path affects only grading.
        artifacts = {name: _dump_section(artifact) for name, artifact in spec.artifacts.items()}
        parts["artifacts"] = {
            name: {k: v for k, v in fields.items() if k != "restore"} for name, fields in artifacts.items()
        }
    timeless = {name: part if name == "dataset" else _without_timeouts(part) for name, part in parts.items()}

    def value_at(path: NodePath) -> object:
        value: Any = timeless
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        return value

    # Runs recorded before a key was renamed have the hash of its old name.
    filled: dict[str, Any] = with_old_names(_fill_in_files(timeless, value_at, cache(_files_digest)))
    return filled


def _dump_section(section: Section) -> dict[str, Any]:
    value = to_plain(section.model_dump(by_alias=True, exclude_defaults=True))
    assert isinstance(value, dict)
    return value


def _model_settings(server: Section) -> dict[str, Any]:
    keep = ("type", "model", "tokenizer", "renderer", "error_rate", "seed")
    return {key: value for key, value in _dump_section(server).items() if key in keep}


def _without_timeouts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_timeouts(item) for key, item in value.items() if key not in _TIMEOUTS}
    return [_without_timeouts(item) for item in value] if isinstance(value, list) else value


def _fill_in_files(
    value: Any, value_at: Callable[[NodePath], object], content: Callable[[str], str], path: NodePath = ()
) -> Any:
    """Return the value at `path` with the content of its files, so that moving a spec to another directory does not
    change the hash.

    Only keys that name files on the host count. A sandbox directory or a text of a row may look like a path too, but a
    host file of that name has nothing to do with the rollout.
    """
    if isinstance(value, dict):
        return {key: _fill_in_files(item, value_at, content, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill_in_files(item, value_at, content, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, str) or not value.startswith("/") or is_template(value):
        return value
    if not names_host_file(path, value_at):
        return value
    file, colon, name = value.rpartition(":")
    return f"{content(file)}:{name}" if colon and file.endswith(".py") else content(value)


def _files_digest(path: str) -> str:
    try:
        if any(wildcard in path for wildcard in "*?["):
            paths = sorted(Path("/").glob(path.lstrip("/")))
            return "+".join(_files_digest(str(file)) for file in paths) if paths else path
        if Path(path).is_file():
            return _hash_file(Path(path))
        return _hash_folder(Path(path)) if Path(path).is_dir() else path
    except (OSError, ValueError):
        return path


def _hash_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_folder(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    fingerprint_file: Callable[[Path], str] = (
        _hash_file if len(files) <= _LARGE_TREE else lambda path: str(path.stat().st_size)
    )
    lines = [f"{path.relative_to(folder)} {fingerprint_file(path)}" for path in files]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
