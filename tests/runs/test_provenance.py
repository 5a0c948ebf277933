"""`run.json` says how the policy was asked to sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_rl.runs.provenance import provenance
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Mode

SPEC = """
dataset: {items: [{q: hi}]}
prompt: {user: "{{ q }}"}
rewards: {contains: {args: {target: hi}}}
servers: {policy: {type: TYPE, base_url: "http://127.0.0.1:9/v1", model: m}}
"""
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@pytest.mark.parametrize(
    ("kind", "mode", "agent", "asked"),
    [
        ("vllm", "process", "{}", {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **NEUTRAL, "seed": "call"}),
        ("vllm", "evaluate", "{}", {"temperature": 0.0, "top_p": 1.0, "top_k": 0, **NEUTRAL, "seed": "call"}),
        (
            "sglang",
            "serve",
            "{temperature: 0.7, top_p: 0.9, seed: none}",
            {"temperature": 0.7, "top_p": 0.9, "top_k": -1, **NEUTRAL, "seed": "none"},
        ),
        ("atropos", "process", "{}", {"temperature": 1.0, "seed": "call"}),
        (
            "openai",
            "process",
            "{extra_body: {top_k: 20, user: hidden}}",
            {"temperature": 1.0, "top_k": 20, "seed": "call"},
        ),
    ],
)
def test_provenance_records_the_sampling_of_each_policy_server(
    tmp_path: Path, kind: str, mode: Mode, agent: str, asked: dict[str, Any]
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("TYPE", kind) + f"agent: {agent}\n")
    made_with = provenance(load_spec(tmp_path / "spec.yaml", environ={}), mode)
    assert made_with["policy"][0]["sampling"] == asked
    assert "hidden" not in str(made_with)
