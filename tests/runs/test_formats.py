"""`process.format`: files that trainers of supervised and preference data load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.agent.result import AgentResult
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey
from hermes_rl.runs.formats import dpo_rows, sft_rows
from hermes_rl.runs.parquet import write_table
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import parse_spec
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.transcript import TokenSequence
from tests.tokens.families import FAMILIES, tokenizer_of

TEXT = """
name: made
dataset: {{items: [{{q: one, hard: true}}, {{q: two, hard: false}}]}}
prompt: {{system: s, user: "{{{{ q }}}}"}}
toolsets: [todo]
solution:
  turns:
    - tools: [{{name: todo, args: {{todos: []}}}}]
    - tools: [{{name: todo, args: {{merge: true}}}}]
    - say: "the answer is 7"
rewards: {{right: {{fn: regex_match, args: {{pattern: "is 7"}}}}}}
servers: {{policy: {{type: scripted, error_rate: 0.5}}}}
process: {{groups: 2, group_size: 2, format: {format}{more}}}
"""


CALLED = ("assistant", "tool")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def made(
    kind: str, folder: Path, more: str = "", notes: list[str] | None = None
) -> tuple[Path, list[dict[str, Any]]]:
    progress = Progress(quiet=True)
    if notes is not None:
        progress.note = notes.append  # type: ignore[method-assign]
    spec = parse_spec(TEXT.format(format=kind, more=more))
    _, directory = await run_process(spec, RunOptions("process", folder, progress=progress))
    path = directory.path / f"{kind}.jsonl"
    return path, lines(path)


async def test_rows_for_supervised_training_have_messages_and_labels(tmp_path: Path) -> None:
    path, rows = await made("sft", tmp_path / "run")
    assert len(rows) == 4
    tokenizer = load_tokenizer()
    for row in rows:
        assert len(row["input_ids"]) == len(row["labels"]) == len(row["attention_mask"])
        said = tokenizer.decode([label for label in row["labels"] if label != -100])
        assert said.startswith("<tool_call>") and said.endswith("<|im_end|>")
        assert [message["role"] for message in row["messages"]] == ["system", "user", *CALLED, *CALLED, "assistant"]
        assert json.loads(row["tools"])[0]["function"]["name"] == "todo"
    again, same = await made("sft", tmp_path / "run")
    assert (again, same) == (path, rows)


async def test_supervised_rows_may_be_the_right_ones_alone(tmp_path: Path) -> None:
    """Fault 27: wrong answers stood among the right ones, and nothing could be done or was said about it."""
    notes: list[str] = []
    _, rows = await made("sft", tmp_path / "run", notes=notes)
    assert {row["score"] for row in rows} == {0, 1}
    assert any("scores are from 0 to 1" in note and "process.min_score" in note for note in notes)
    for more in (", min_score: 1", ", keep_best: 1", ", min_score: 0.5, keep_best: 2"):
        notes.clear()
        _, rows = await made("sft", tmp_path / "run", more, notes)
        assert [row["score"] for row in rows] == [1, 1]
        assert len({row["group"] for row in rows}) == 2
        assert not any("process.min_score" in note for note in notes)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
async def test_rows_have_the_columns_of_the_dataset(kind: str, tmp_path: Path) -> None:
    """Faults 27 and 41."""
    path, rows = await made(kind, tmp_path / "run")
    rows += lines(path.with_name("dpo-text.jsonl")) if kind == "dpo" else []
    assert {row["row_key"]: json.loads(row["row"]) for row in rows}.keys() == {row["row_key"] for row in rows}
    assert {(json.loads(row["row"])["q"], json.loads(row["row"])["hard"]) for row in rows} == {
        ("one", True),
        ("two", False),
    }
    assert all(row["row"] for row in loaded(path))


async def test_preference_pairs_label_only_model_tokens(tmp_path: Path) -> None:
    """Fault 41: trainers of pairs take all behind the prompt for the model's words, what tools said too."""
    _, rows = await made("dpo", tmp_path / "run")
    tokenizer = load_tokenizer()
    for row in rows:
        for side in ("chosen", "rejected"):
            ids, labels = row[f"{side}_input_ids"], row[f"{side}_labels"]
            assert [label for label in labels if label != -100] == [
                token for token, label in zip(ids, labels, strict=True) if label != -100
            ]
            written = tokenizer.decode([label for label in labels if label != -100])
            assert "tool_response" in tokenizer.decode(ids)
            assert "tool_response" not in written
            assert written.startswith("<tool_call>")


def test_a_pair_of_several_sequences_has_no_tokens() -> None:
    group = group_of({"role": "assistant", "content": "x"})
    group.rollouts[0].sequences = [TokenSequence.from_lists([1, 2], [-100, 2])]
    group.rollouts[1].sequences = [TokenSequence.from_lists([1], [1]), TokenSequence.from_lists([3], [3])]
    (pair,) = dpo_rows(group)
    assert pair["chosen_labels"] is pair["chosen_input_ids"] is pair["rejected_labels"] is None


async def test_pairs_are_the_best_and_the_worst_of_each_group(tmp_path: Path) -> None:
    _, rows = await made("dpo", tmp_path / "run")
    assert len(rows) == 2
    for row in rows:
        assert row["chosen_score"] > row["rejected_score"]
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["chosen"][-1]["content"] == "the answer is 7" != row["rejected"][-1]["content"]
        assert row["chosen"][0]["tool_calls"][0]["function"] == {"name": "todo", "arguments": {"todos": []}}


async def test_pairs_are_texts_too_as_the_model_saw_and_wrote_them(tmp_path: Path) -> None:
    path, pairs = await made("dpo", tmp_path / "run")
    texts = lines(path.with_name("dpo-text.jsonl"))
    tokenizer = load_tokenizer()
    for text, pair in zip(texts, pairs, strict=True):
        assert text["group"] == pair["group"]
        for side in ("chosen", "rejected"):
            whole = tokenizer.render(
                pair["prompt"] + pair[side], json.loads(pair["tools"]), add_generation_prompt=False
            )
            assert text["prompt"] + text[side] == whole.rstrip("\n")


def group_of(*messages: dict[str, Any]) -> Group:
    row = Row(key="k", columns={}, index=0, digest="")
    rollouts = []
    for place in range(2):
        result = AgentResult(messages=[{"role": "user", "content": "q"}, *messages], prompt_length=1)
        rollouts.append(Rollout(RolloutKey(row, "g", place, 2), 0, result=result, score=float(place)))
    return Group("g", row, rollouts)


def test_keys_without_a_value_are_not_there() -> None:
    (row, _) = sft_rows(group_of({"role": "assistant", "content": None, "tool_calls": []}), tokens=False)
    assert row["messages"] == [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    assert row["tools"] is None


def test_reasoning_is_stored_under_the_key_that_templates_read() -> None:
    (row, _) = sft_rows(group_of({"role": "assistant", "content": "a", "reasoning": "hm"}), tokens=False)
    assert row["messages"][-1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_a_call_that_could_not_be_read_is_text() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}, "error": "no JSON"},
        {"id": "2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    ]
    (pair,) = dpo_rows(group_of({"role": "assistant", "content": "so:", "tool_calls": calls}))
    function = {"name": "add", "arguments": {"a": 1}}
    assert pair["chosen"] == [
        {
            "role": "assistant",
            "content": 'so:\n{"a": 1',
            "tool_calls": [{"id": "2", "type": "function", "function": function}],
        }
    ]


def test_one_rollout_without_tokens_is_a_file_without_tokens(tmp_path: Path) -> None:
    """A trainer asks the first row alone."""
    group = group_of({"role": "assistant", "content": "x"})
    group.rollouts[0].sequences = [TokenSequence.from_lists([1, 2], [-100, 2])]
    assert [row.get("labels") for row in sft_rows(group, tokens=False)] == [None, None]
    group.rollouts[1].sequences = [TokenSequence.from_lists([1], [1]), TokenSequence.from_lists([3], [3])]
    assert [row["labels"] for row in sft_rows(group, tokens=True)] == [[-100, 2], [1], [3]]


def loaded(path: Path) -> Any:
    """The file as the loader of trainers reads it."""
    import datasets

    return datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
async def test_templates_give_what_was_seen_and_said_of_loaded_rows(kind: str, tmp_path: Path) -> None:
    """Also those that ask which keys a message has, or take arguments as objects."""
    path, rows = await made(kind, tmp_path / "run")
    for row, original in zip(loaded(path), rows, strict=True):
        assert row["tools"] == original["tools"]
        tools = json.loads(row["tools"])
        side = row["messages"] if kind == "sft" else row["prompt"] + row["chosen"]
        expected = original["messages"] if kind == "sft" else original["prompt"] + original["chosen"]
        for name in ("small", *FAMILIES):
            tokenizer = load_tokenizer() if name == "small" else tokenizer_of(name)
            text = tokenizer.render(side, tools, add_generation_prompt=False)
            assert text == tokenizer.render(expected, tools, add_generation_prompt=False)
            if name == "small" and kind == "sft":
                assert tokenizer.encode(text)[: len(row["input_ids"])] == row["input_ids"]


async def test_a_table_is_read_by_pandas_polars_and_datasets_alike(tmp_path: Path) -> None:
    import datasets
    import pandas
    import polars

    spec = parse_spec(TEXT.format(format="parquet", more=""))
    _, directory = await run_process(spec, RunOptions("process", tmp_path / "run", progress=Progress(quiet=True)))
    path = directory.path / "rollouts.parquet"
    found = pandas.read_parquet(path).to_dict("records")
    assert polars.read_parquet(path).height == len(found) == 4
    loaded = datasets.load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "cache"))["train"]
    recorded = {line["id"]: line for line in lines(directory.path / "rollouts.jsonl")}
    written = {line["group"]: line for line in lines(directory.path / "groups.jsonl")}
    for row, same in zip(found, loaded, strict=True):
        line, group = recorded[row["rollout"]], written[row["group"]]
        assert row["score"] == same["score"] == line["score"]
        assert json.loads(row["row"])["q"] in ("one", "two")
        assert row["reward/right"] == line["rewards"]["right"]["value"]
        assert list(row["tokens"]) == same["tokens"] == group["tokens"][row["index"]]
        assert same["masks"] == group["masks"][row["index"]]
        assert [one["role"] for one in same["messages"]] == [one["role"] for one in line["messages"]]
        assert json.loads(same["tools"])[0]["function"]["name"] == "todo"
    assert polars.read_ndjson(directory.path / "rollouts.jsonl", infer_schema_length=None).height == 4
    assert len(pandas.read_json(directory.path / "rollouts.jsonl", lines=True)) == 4


def test_what_a_rollout_lacks_is_empty_in_a_table(tmp_path: Path) -> None:
    from pyarrow import parquet

    result = AgentResult(
        messages=[{"role": "user", "content": "half a pair: \ud83d"}],
        turns_used=0, finished_naturally=False, reasoning_per_turn=[], tool_errors=[],
    )  # fmt: skip
    rollout = Rollout(RolloutKey(Row("r", {}, 0, ""), "r:0", 0, 1), 0, result=result)
    assert write_table(tmp_path / "t.parquet", [Group("r:0", rollout.key.row, [rollout])], ["right"]) == 1
    (row,) = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert row["tokens"] is row["logprobs"] is row["tools"] is row["reward/right"] is row["score"] is None
    assert row["messages"][0]["content"] == "half a pair: \ufffd"
    assert list(tmp_path.iterdir()) == [tmp_path / "t.parquet"]


async def test_a_table_has_all_rewards_of_the_spec(tmp_path: Path) -> None:
    assert write_table(tmp_path / "empty.parquet", [], ["one", "two"]) == 0
    from pyarrow import parquet

    assert {"reward/one", "reward/two"} < set(parquet.read_schema(tmp_path / "empty.parquet").names)
