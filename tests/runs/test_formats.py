"""`process.format`: files that trainers of supervised and preference data load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.runs.launch import Launch, run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.spec.load import parse_spec
from hermes_rl.tokens.tokenizer import load_tokenizer

TEXT = """
name: made
dataset: {{items: [{{q: one}}, {{q: two}}]}}
prompt: {{system: s, user: "{{{{ q }}}}"}}
toolsets: [todo]
solution: {{turns: [{{tools: [{{name: todo, args: {{todos: []}}}}]}}, {{say: "the answer is 7"}}]}}
rewards: {{right: {{fn: regex_match, args: {{pattern: "is 7"}}}}}}
servers: {{policy: {{type: scripted, deviate: 0.5}}}}
process: {{groups: 2, group_size: 2, format: {format}}}
"""


async def made(kind: str, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    spec = parse_spec(TEXT.format(format=kind))
    _, directory = await run_process(spec, Launch("process", folder, progress=Progress(quiet=True)))
    path = directory.path / f"{kind}.jsonl"
    return path, [json.loads(line) for line in path.read_text().splitlines()]


async def test_rows_for_supervised_training_have_messages_and_labels(tmp_path: Path) -> None:
    path, rows = await made("sft", tmp_path / "run")
    assert len(rows) == 4
    tokenizer = load_tokenizer()
    for row in rows:
        assert len(row["input_ids"]) == len(row["labels"]) == len(row["attention_mask"])
        said = tokenizer.decode([label for label in row["labels"] if label != -100])
        assert said.startswith("<tool_call>") and said.endswith("<|im_end|>")
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
        assert json.loads(row["tools"])[0]["function"]["name"] == "todo"
    again, same = await made("sft", tmp_path / "run")
    assert (again, same) == (path, rows)


async def test_pairs_are_the_best_and_the_worst_of_each_group(tmp_path: Path) -> None:
    _, rows = await made("dpo", tmp_path / "run")
    assert len(rows) == 2
    for row in rows:
        assert row["chosen_score"] > row["rejected_score"]
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["chosen"][-1]["content"] == "the answer is 7" != row["rejected"][-1]["content"]
        assert row["chosen"][0]["tool_calls"][0]["function"]["name"] == "todo"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
async def test_the_loader_of_trainers_reads_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path, rows = await made(kind, tmp_path / "run")
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    key = "messages" if kind == "sft" else "chosen"
    assert [[message["content"] for message in row[key]] for row in loaded] == [
        [message["content"] for message in row[key]] for row in rows
    ]
    assert loaded[0]["tools"] == rows[0]["tools"]
