"""The spec of the integration tests in a directory, with its scripted policy instead of an engine.

Programs of tests/real say for each rollout the key of its row, the score that the trainer holds, and how many tokens
the trainer's own output trains on; tests require what every other door gives.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.integrations.doors import ALONE, CODE, COMPARED, SCORES, TEXT, answer, sample, tokens_of

MEMBERS = 2
"""Rollouts of each row."""


def write_doors(folder: Path) -> None:
    """Write the spec as `doors.yaml`, a copy without the comparing reward as `alone.yaml`, and their code."""
    (folder / "code.py").write_text(CODE)
    (folder / "doors.yaml").write_text(TEXT)
    (folder / "alone.yaml").write_text(ALONE)


def require_as_everywhere(rows: Iterable[Sequence[Any]], *, compared: bool, members: int = MEMBERS) -> None:
    """Require the same results as from every other integration: row key, score and number of trained tokens."""
    more = COMPARED if compared else 0
    wanted = [(key, SCORES[key] + more, tokens_of(key)) for key in SCORES for _ in range(members)]
    assert sorted(map(tuple, rows)) == wanted


def require_scores_as_everywhere(rows: Iterable[Sequence[Any]], *, members: int = MEMBERS) -> None:
    """Require the same keys and scores, for a trainer that counts tokens itself and receives single rollouts."""
    assert sorted(map(tuple, rows)) == [(key, SCORES[key]) for key in SCORES for _ in range(members)]


def model_folder(folder: Path) -> Path:
    """Write the files that a trainer reads of an unloaded model: the small tokenizer, and a configuration."""
    shutil.copytree(small_tokenizer_path(), folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 1024}
    made_of = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(made_of | sizes))
    return folder


def message_of(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the next message of the scripted policy, in the form of a chat endpoint."""
    question = next(str(one["content"]) for one in messages if one["role"] == "user")
    told = sum(one["role"] == "tool" for one in messages)
    said = answer(f"<|im_start|>user\n{question}" + "<tool_response>" * told)
    called = re.search(r"<tool_call>\n(.*)\n</tool_call>", said)
    if called is None:
        return {"role": "assistant", "content": said}
    call = json.loads(called[1])
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call{told}", "type": "function", "function": function}],
    }


class ScriptedEngine:
    """The scripted policy, with the method of a `SmallEngine`."""

    async def sample(self, prompt: Sequence[int], most: int, stop: Sequence[int]) -> tuple[list[int], list[float]]:
        answered = await sample(list(prompt), SimpleNamespace())  # type: ignore[arg-type]
        ids, logprobs = list(answered.ids), list(answered.logprobs)
        assert len(ids) <= most
        assert ids[-1] in stop
        return ids, logprobs
