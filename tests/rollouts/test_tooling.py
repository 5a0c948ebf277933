"""What a spec's toolsets lack on a machine: told at their place, before anything runs."""

from __future__ import annotations

import pytest

from hermes_rl.errors import UserError
from hermes_rl.rollouts.sandboxes import Tooling, named_toolsets, toolset_problems
from hermes_rl.sandbox import SandboxConfig
from hermes_rl.spec import parse_spec
from hermes_rl.tools.hermes_toolsets import HermesToolsets

BASE = "version: 1\ndataset: {items: [{q: a}]}\nprompt: {user: a}\nservers: {policy: {type: scripted}}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("toolsets", "expected"),
    [
        ("[file, web]", ["5:18: toolset web cannot work here: set SEARXNG_URL"]),
        ("{enabled: [web, file], disabled: [web]}", []),
        ("{distribution: {file: 1, web: 0.5, tts: 0}}", ["5:41: toolset web cannot work here"]),
        ("{distribution: terminal_only}", []),
        ("{distribution: minimal}", ["5:26: toolset web cannot work here"]),
        ("{distribution: minimal, disabled: [web]}", []),
        ("[memory, clarify]", ["5:12: toolset memory cannot be used", "5:20: toolset clarify cannot be used"]),
    ],
)
def test_what_toolsets_lack(toolsets: str, expected: list[str]) -> None:
    spec = parse_spec(f"{BASE}toolsets: {toolsets}\n", name="s.yaml")
    found = [str(problem) for problem in toolset_problems(spec, HermesToolsets({}))]
    assert len(found) == len(expected)
    assert all(said.startswith(f"s.yaml:{start}") for said, start in zip(found, expected, strict=True))


async def test_a_run_stops_before_it_starts() -> None:
    tooling = Tooling(parse_spec(f"{BASE}toolsets: [memory]\n", name="s.yaml"), {})
    with pytest.raises(UserError, match=r"s\.yaml:5:12: toolset memory cannot be used in a rollout"):
        await tooling.open(SandboxConfig())


def test_a_distribution_names_all_that_it_may_draw() -> None:
    spec = parse_spec(f"{BASE}toolsets: {{distribution: {{file: 1, web: 0.5, tts: 0}}}}\n")
    assert [name for _, name in named_toolsets(spec)] == ["file", "web"]
