"""Toolsets that exist, but not in this version: told at their place, once, before anything runs."""

from __future__ import annotations

import pytest

from hermes_rl.errors import NotYetAvailable
from hermes_rl.rollouts.needs import available, require_available
from hermes_rl.spec import parse_spec

BASE = "version: 1\ndataset: {items: [{q: a}]}\nprompt: {user: a}\nservers: {policy: {type: scripted}}\n"


@pytest.mark.parametrize(
    ("toolsets", "expected"),
    [
        ("[file, web]", ["5:18: a run needs the toolset web"]),
        ("{enabled: [web, file], disabled: [web]}", []),
        ("{distribution: {file: 1, web: 0.5, tts: 0}}", ["5:41: a run needs the toolset web"]),
        ("{distribution: terminal_only}", []),
        ("{distribution: minimal}", ["5:26: a run needs what the distribution minimal draws from: the toolset web"]),
        ("{distribution: minimal, disabled: [web]}", []),
        ("[no_such_toolset]", []),
    ],
)
def test_toolsets_that_are_elsewhere(toolsets: str, expected: list[str]) -> None:
    spec = parse_spec(f"{BASE}toolsets: {toolsets}\n", name="s.yaml")
    found = [str(problem) for problem in available(spec, "process")]
    assert found == [f"s.yaml:{text}, which is not available yet" for text in expected]
    if expected:
        with pytest.raises(NotYetAvailable, match="web is not available yet"):
            require_available(spec, "process")
    else:
        require_available(spec, "process")


def test_all_places_are_told() -> None:
    spec = parse_spec(f"{BASE}toolsets: [web, tts]\nprocess: {{format: sft}}\n")
    assert len(available(spec, "process")) == 3
