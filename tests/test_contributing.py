"""CONTRIBUTING.md: each example of something to add is installed as a package and played by the command line."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hermes_rl import Sampled
from hermes_rl.errors import UserError
from hermes_rl.servers.scripted.server import ScriptedServer
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.cli.test_run import lines
from tests.commands import LIBRARIES, hermes
from tests.integrations.doors import COMPARED, SCORES, TOKENIZER, doors_spec, sample, tokens_of

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"^### An? ([\w ]+)\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL))
BASE: dict[str, Any] = {
    "dataset": {"items": [{"word": "one"}, {"word": "two"}, {"word": "three"}]},
    "prompt": {"user": "Do it: {{ word }}"},
    "servers": {"policy": {"type": "scripted"}},
    "process": {"groups": 1, "group_size": 1},
}


def block(example: str, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", EXAMPLES[example], re.MULTILINE | re.DOTALL)
    assert found is not None, f"{example} has no {language}"
    return found[1]


async def play(example: str, mode: str, install: Callable[..., Path], folder: Path, **changes: Any) -> tuple[Path, str]:
    """The run's directory, and what it printed."""
    group, line = re.findall(r'entry-points\."(.*)"\]\n(.*)', block(example, "toml"))[0]
    site = install("mine", block(example, "python"), {group: line.replace('"', "")})
    spec = {**BASE, **yaml.safe_load(block(example, "yaml")), **changes}
    (folder / "spec.yaml").write_text(json.dumps(spec))
    for command in (("validate", "spec.yaml"), ("run", "spec.yaml", mode, "--out", "out")):
        done = await asyncio.to_thread(hermes, *command, cwd=folder, env={"PYTHONPATH": str(site)}, loaded=LIBRARIES)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out", done.stdout + done.stderr


def test_there_is_an_example_of_each() -> None:
    assert list(EXAMPLES) == ["reward", "toolset", "server type", "sandbox backend", "trainer", "trainer adapter"]


@pytest.mark.parametrize("example", ["reward", "toolset", "sandbox backend"])
async def test_extension_examples_of_the_contributing_guide_run(
    example: str, install: Callable[..., Path], tmp_path: Path
) -> None:
    out, _ = await play(example, "process", install, tmp_path)
    (rollout,) = lines(out / "rollouts.jsonl")
    assert (rollout["stop_reason"], rollout["score"]) == ("finished", 1.0)
    if example == "toolset":
        assert [one["content"] for one in rollout["messages"] if one["role"] == "tool"] == ["5.08 cm"]  # type: ignore[attr-defined]


async def test_an_added_type_of_server_is_asked_in_its_own_way(install: Callable[..., Path], tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    class Listening(ScriptedServer):
        async def _completions(self, request: Any) -> Any:
            asked.append(json.loads(await request.read()))
            return await super()._completions(request)

    server = Listening("m", load_tokenizer(None))
    url = await server.start()
    policy = yaml.safe_load(block("server type", "yaml"))["servers"]["policy"]
    policy |= {"base_url": url, "tokenizer": str(small_tokenizer_path())}
    try:
        out, _ = await play("server type", "process", install, tmp_path, servers={"policy": policy})
    finally:
        await server.close()
    assert [one["priority"] for one in asked] == [10]
    (line,) = lines(out / "groups.jsonl")
    assert line["provenance"]["exact"] is True  # type: ignore[index]


async def test_an_added_trainer_is_served(install: Callable[..., Path], tmp_path: Path) -> None:
    _, said = await play("trainer", "serve", install, tmp_path)
    assert len(re.findall(r"a group with 2 sequences and the scores \[(?:0.0, 1.0|1.0, 0.0)\]", said)) == 2


async def test_trainer_adapter_example_gives_the_same_scores_and_tokens(tmp_path: Path) -> None:
    class Engine:
        async def generate(self, ids: list[int], **asked: Any) -> Sampled:
            assert (asked["temperature"], asked["max_tokens"]) == (0.5, 200)
            return await sample(ids, SimpleNamespace())  # type: ignore[arg-type]

    namespace: dict[str, Any] = {}
    exec(compile(block("trainer adapter", "python"), "mine.py", "exec"), namespace)
    door = namespace["Mine"](doors_spec(tmp_path), Engine(), TOKENIZER)
    batch = await door.batch(list(SCORES), 2, temperature=0.5)
    with pytest.raises(UserError, match="top_k=5 of Mine is not applied"):
        await door.batch(list(SCORES), 2, top_k=5)
    await door.close()
    assert [score for score, _ in batch] == [SCORES[key] + COMPARED for key in SCORES for _ in range(2)]
    trained = [sum(example.mask) for _, (example,) in batch]
    assert trained == [tokens_of(key) for key in SCORES for _ in range(2)]
