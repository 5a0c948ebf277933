"""`hermes-rl explain`: every key, reward, stop reason and toolset has a meaning and a valid example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl.cli.explain import explain
from hermes_rl.cli.main import status
from hermes_rl.shipped import shipped_rewards
from hermes_rl.spec.json_schema import CompiledSchema
from hermes_rl.spec.reference import find_key, key_paths, reference_page, reward_example
from hermes_rl.spec.schema import spec_json_schema
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools.catalogue import toolsets

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_keys_is_fresh() -> None:
    page = (DOCS / "spec-reference.md").read_text(encoding="utf-8")
    assert page == reference_page(), "run: hermes-rl schema --markdown > docs/spec-reference.md"


def test_every_key_has_a_type_a_meaning_and_an_example() -> None:
    paths = key_paths()
    assert len(paths) > 300
    for path in paths:
        key = find_key(path)
        assert key is not None, path
        assert key.path == path or path.count("[]"), path
        assert key.kind and key.meaning and key.example is not None, path
        below: Any = yaml.safe_load(key.yaml)
        for name in key.path.split("."):
            below = below[name.removesuffix("[]")]
            below = below[0] if name.endswith("[]") else below
        assert below == key.example, path


def test_examples_of_rewards_are_valid() -> None:
    schema = spec_json_schema()
    rewards = CompiledSchema({"$defs": schema["$defs"], **schema["properties"]["rewards"]})
    for reward in shipped_rewards():
        example = yaml.safe_load(reward_example(reward))["rewards"]
        assert rewards.validator.is_valid(example), reward
        lines = "\n".join(explain(reward))
        assert f"{reward} (a shipped reward)" in lines and "  example" in lines


def test_stop_reasons_and_toolsets_are_explained() -> None:
    for reason in StopReason:
        assert next(explain(reason)) == f"{reason} (a stop reason)"
    for name in toolsets():
        assert next(explain(f"toolsets.{name}")) == f"{name} (a toolset)"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("serve.max_staleness", ["serve.max_staleness", "type     integer ≥ 0", "in weight versions", "default:"]),
        (
            "rewards.llm_judge",
            [
                "llm_judge (a shipped reward)",
                "rubric: text or template",
                "description of the answers that deserve each score.",
            ],
        ),
        ("rewards.llm_judge.args.where", ["`final` or `conversation`", "default  final"]),
        ("rewards.mine.weight", ["rewards.mine.weight", "type     number"]),
        ("rewards.*.weight", ["rewards.NAME.weight"]),
        ("group_size", ["serve.group_size", "process.group_size"]),
        (
            "max_turns",
            [
                "max_turns (a stop reason)",
                "for this reason: raise agent.max_turns.",
                "agent.max_turns",
                "evaluate.agent.max_turns",
            ],
        ),
        ("user.tools.python", ["user.tools[].python", "- python: file.py:name"]),
        ("serve", ["type     section", "  keys", "max_staleness"]),
        ("write_file", ["write_file (a tool of the toolset file)"]),
        ("stop_reasons", ["  max_turns ", "  stale "]),
        ("sandbox.limits.open_files", ["open_files: 256"]),
        ("servers.NAME.api_key_env", ["api_key_env: MY_API_KEY"]),
        ("sandbox.python", ["- pytest==8.4.1"]),
        ("bubblewrap", ["bubblewrap (sandbox backend)"]),
    ],
)
def test_words_are_explained(word: str, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["explain", word]) == 0
    out = capsys.readouterr().out
    assert [text for text in said if text not in out] == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("serve.max_stalenes", "did you mean `serve.max_staleness`?"),
        ("llm_jugde", "did you mean `llm_judge`?"),
        ("evaluate.by", "`evaluate.by` is now `evaluate.group_by`"),
        ("openenv", "`hermes-rl openenv` is now `hermes-rl serve-openenv`"),
        ("sft", "'sft' is a value of process.format: hermes-rl explain process.format"),
        ("zzzzzz", "nothing is called 'zzzzzz'. docs/spec-reference.md lists every key"),
    ],
)
def test_unknown_words_get_suggestions(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["explain", word]) == 2
    assert said in capsys.readouterr().err
