"""`hermes-rl export`: each format of a finished run, equal to what `process` writes, and read back by its readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.cli.main import status
from hermes_rl.runs.formats import FILES
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import parse_spec
from tests.analysis.recorded import recorded, write_run
from tests.runs.test_formats import TEXT, lines


async def processed(kind: str, folder: Path, more: str = "") -> Path:
    """Run process mode with a format; return the run directory."""
    spec = parse_spec(TEXT.format(format=kind, more=more))
    _, directory = await run_process(spec, RunOptions("process", folder, progress=Progress(quiet=True)))
    return directory.path


def content(path: Path) -> dict[str, bytes]:
    """Return a file, or all files of a directory, by name."""
    return {each.name: each.read_bytes() for each in ([path] if path.is_file() else sorted(path.iterdir()))}


@pytest.mark.parametrize("kind", FILES)
async def test_export_writes_the_bytes_of_process(kind: str, tmp_path: Path) -> None:
    run = await processed(kind, tmp_path / "run")
    assert status(["export", str(run), "--format", f"sft,{kind}", "--out", str(tmp_path / "out")]) == 0
    assert content(tmp_path / "out" / FILES[kind]) == content(run / FILES[kind])
    assert len(content(run / FILES[kind])) == (4 if kind == "atif" else 1)
    if kind == "dpo":
        assert (tmp_path / "out/dpo-text.jsonl").read_bytes() == (run / "dpo-text.jsonl").read_bytes() != b""


@pytest.mark.parametrize("kind", ["sft", "openai", "sharegpt", "parquet", "jsonl", "atif"])
async def test_export_chooses_rollouts_as_process(kind: str, tmp_path: Path) -> None:
    run = await processed(kind, tmp_path / "run")
    chosen = await processed(kind, tmp_path / "run", ", min_score: 0.5, keep_best: 1")
    assert chosen == run
    options = ["--min-score", "0.5", "--keep-best", "1", "--out", str(tmp_path / "out")]
    assert status(["export", str(run), "--format", "sft", "--format", kind, *options]) == 0
    assert content(tmp_path / "out" / FILES[kind]) == content(run / FILES[kind])
    assert [row["score"] for row in lines(tmp_path / "out/sft.jsonl")] == [1, 1]
    if kind == "atif":
        assert len(content(run / "atif")) == 2


async def test_openai_rows_follow_the_published_rules(tmp_path: Path) -> None:
    """The checks of OpenAI's cookbook, the schema FineTuneChatRequestInput, and the types of its package."""
    from openai.types.chat import ChatCompletionMessageParam
    from pydantic import TypeAdapter

    run = await processed("openai", tmp_path / "run")
    rows = lines(run / "openai.jsonl")
    assert len(rows) == 4
    for row in rows:
        assert row.keys() <= {"messages", "tools", "parallel_tool_calls", "functions"}
        assert row["messages"][-1]["role"] == "assistant"
        for message in row["messages"]:
            TypeAdapter(ChatCompletionMessageParam).validate_python(message)
            known = {"role", "content", "name", "weight", "tool_calls", "tool_call_id"}
            assert message.keys() <= known and message["role"] in ("system", "user", "assistant", "tool")
            assert isinstance(message.get("content"), str) or message.get("tool_calls")
            for call in message.get("tool_calls", ()):
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert {tool["function"]["name"] for tool in row["tools"]} == {"todo"}


async def test_sharegpt_rows_are_read_back_as_the_conversation(tmp_path: Path) -> None:
    import datasets

    from hermes_rl.tokens.parsers.table import load_parser

    run = await processed("sharegpt", tmp_path / "run")
    path = run / "sharegpt.jsonl"
    table = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    originals = {line["id"]: line["messages"] for line in lines(run / "rollouts.jsonl")}
    for row in table:
        original = originals[row["rollout"]]
        assert [entry["from"] for entry in row["conversations"]] == [
            {"user": "human", "assistant": "gpt"}.get(message["role"], message["role"]) for message in original
        ]
        for entry, message in zip(row["conversations"], original, strict=True):
            if entry["from"] != "gpt":
                assert message["content"] in entry["value"]
                continue
            text, calls = load_parser("hermes").calls(entry["value"], None)
            assert text.strip() == (message["content"] or "")
            assert [call.arguments for call in calls] == [
                json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()
            ]


async def test_kto_rows_have_the_form_of_unpaired_preferences(tmp_path: Path) -> None:
    run = await processed("kto", tmp_path / "run")
    rows = lines(run / "kto.jsonl")
    assert sorted(row["label"] for row in rows) == [False, False, True, True]
    for row in rows:
        assert row["label"] is (row["score"] >= 1)
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["completion"][0]["role"] == row["completion"][-1]["role"] == "assistant"
    assert status(["export", str(run), "--format", "kto", "--success", "0", "--out", str(tmp_path)]) == 0
    assert [row["label"] for row in lines(tmp_path / "kto.jsonl")] == [True] * 4


async def test_jsonl_has_the_rows_of_the_table(tmp_path: Path) -> None:
    import pandas

    run = await processed("parquet", tmp_path / "run")
    assert status(["export", str(run), "--format", "jsonl"]) == 0
    table = pandas.read_parquet(run / "rollouts.parquet")
    rows = pandas.read_json(run / "table.jsonl", lines=True)
    assert set(rows.columns) == set(table.columns)
    for name in ("rollout", "score", "reward/right", "turns", "row"):
        assert list(rows[name]) == list(table[name])
    assert [list(tokens) for tokens in rows["tokens"]] == [list(tokens) for tokens in table["tokens"]]


def odd_rollouts(folder: Path) -> Path:
    """Write an evaluation whose rollouts break rules of OpenAI, or have what few conversations have."""
    given = recorded("given")
    given["messages"] = [{"role": "assistant", "content": "an example"}, *given["messages"]]
    given["prompt_length"] = 2
    cut = recorded("cut", score=0.0)
    cut["messages"] = cut["messages"][:3]
    malformed = recorded("malformed")
    malformed["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"a": '
    unanswered = recorded("unanswered")
    del unanswered["messages"][2]
    two = recorded("two")
    two["messages"].insert(3, dict(two["messages"][2], tool_call_id="c2"))
    two["messages"][1]["tool_calls"].append(dict(two["messages"][1]["tool_calls"][0], id="c2"))
    return write_run(folder, [given, cut, malformed, unanswered, two])


def test_rollouts_that_openai_would_refuse_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = odd_rollouts(tmp_path / "run")
    assert status(["export", str(run), "--format", "openai"]) == 0
    said = capsys.readouterr().out
    assert "3 rows for openai" in said and "2 rollouts excluded" in said
    assert "a call whose arguments are not a JSON object (1)" in said and "a call without a result (1)" in said
    given, cut, two = lines(run / "openai.jsonl")
    assert [message.get("weight") for message in given["messages"]] == [0, None, None, None, None]
    assert [message["role"] for message in cut["messages"]] == ["user", "assistant"]
    assert [message["role"] for message in two["messages"]] == ["user", "assistant", "tool", "tool", "assistant"]


def test_sharegpt_speakers_alternate(tmp_path: Path) -> None:
    run = odd_rollouts(tmp_path / "run")
    assert status(["export", str(run), "--format", "sharegpt"]) == 0
    given, *_, two = lines(run / "sharegpt.jsonl")
    assert [entry["from"] for entry in two["conversations"]] == ["human", "gpt", "tool", "gpt"]
    assert two["conversations"][2]["value"].count("<tool_response>") == 2
    assert given["conversations"][0] == {"from": "gpt", "value": "an example", "weight": 0}


def test_images_of_sharegpt_have_their_addresses(tmp_path: Path) -> None:
    seen = recorded("seen")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    seen["messages"][0]["content"] = [{"type": "text", "text": "What is "}, image, {"type": "text", "text": "?"}]
    run = write_run(tmp_path / "run", [seen, recorded("plain")])
    assert status(["export", str(run), "--format", "sharegpt", "--format", "openai"]) == 0
    first, second = lines(run / "sharegpt.jsonl")
    assert first["conversations"][0]["value"] == "What is <image>?"
    assert first["images"] == [image["image_url"]["url"]] and "images" not in second  # type: ignore[index]
    assert lines(run / "openai.jsonl")[0]["messages"][0]["content"][1] == image


def test_only_written_groups_and_trained_seats_are_exported(tmp_path: Path) -> None:
    seat = {"name": "judge", "of": "a:0", "role": "policy", "trained": False}
    members: list[dict[str, Any]] = [recorded("a"), {**recorded("a"), "id": "j", "group": "a:0@judge", "seat": seat}]
    run = write_run(tmp_path / "run", [*members, recorded("b")], mode="process")
    (run / "groups.jsonl").write_text('{"group": "a:0", "scores": [1.0]}\n')
    assert status(["export", str(run), "--format", "sft,atif"]) == 0
    assert [row["rollout"] for row in lines(run / "sft.jsonl")] == ["a:0-0"]
    assert [path.name for path in sorted((run / "atif").iterdir())] == ["a:0-0.json", "b:0-0.json", "j.json"]


def test_untrained_rollouts_are_marked_alike_in_every_format(tmp_path: Path) -> None:
    seat = {"name": "b", "of": "a:0", "role": "policy", "trained": False}
    silent = recorded("silent")
    silent["messages"], silent["tool_calls"] = silent["messages"][:1], []
    untrained: list[dict[str, Any]] = [
        {**recorded("masked"), "stop_reason": "max_turns"},
        {**recorded("dropped"), "stop_reason": "length", "state": "excluded", "score": None, "error": "dropped"},
        {**recorded("failed", score=None), "messages": recorded("failed")["messages"]},
        {**recorded("a"), "id": "a:0-0@b", "group": "a:0@b", "seat": seat},
        silent,
    ]
    run = write_run(tmp_path / "run", [recorded("a"), *untrained])
    (run / "spec.yaml").write_text("name: asking\non_stop: {max_turns: mask, length: drop}\n")
    kinds = [kind for kind in FILES if kind != "parquet"]
    assert status(["export", str(run), "--format", ",".join(kinds)]) == 0
    for kind in ("sft", "kto", "sharegpt"):
        assert [row["rollout"] for row in lines(run / FILES[kind])] == ["a:0-0"], kind
    assert len(lines(run / "openai.jsonl")) == 1 and not lines(run / "dpo.jsonl")
    table = {row["rollout"]: row["masked"] for row in lines(run / "table.jsonl")}
    of_seats = {line["id"]: line["id"] != "a:0-0" for line in [recorded("a"), *untrained]}
    assert table == {name: masked for name, masked in of_seats.items() if not name.endswith("@b")}
    files = [json.loads(path.read_text()) for path in (run / "atif").iterdir()]
    assert {file["session_id"]: file["extra"]["masked"] for file in files} == of_seats


def test_rollouts_without_a_reply_are_in_tables_alone(tmp_path: Path) -> None:
    """Such as a seat whose turn never came; its missing tokens took those of all others."""
    silent = recorded("silent")
    silent["messages"], silent["tool_calls"] = silent["messages"][:1], []
    run = write_run(tmp_path / "run", [recorded("a"), silent])
    assert status(["export", str(run), "--format", "sft,kto,openai,sharegpt,jsonl"]) == 0
    for name in ("sft", "kto", "sharegpt"):
        assert [row["row_key"] for row in lines(run / f"{name}.jsonl")] == ["a"]
    assert len(lines(run / "openai.jsonl")) == 1
    assert [row["row_key"] for row in lines(run / "table.jsonl")] == ["a", "silent"]


def test_pairs_without_tokens_leave_no_empty_file(tmp_path: Path) -> None:
    members = [recorded("a", index, float(index), size=2) for index in range(2)]
    run = write_run(tmp_path / "run", members)
    (run / "dpo-text.jsonl").write_text("of an earlier export\n")
    assert status(["export", str(run), "--format", "dpo"]) == 0
    assert len(lines(run / "dpo.jsonl")) == 1
    assert not (run / "dpo-text.jsonl").exists()


def test_masked_rollouts_are_in_tables_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [recorded("a"), recorded("b") | {"stop_reason": "max_turns"}])
    (run / "spec.yaml").write_text("name: asking\non_stop: {max_turns: mask}\n")
    assert status(["export", str(run), "--format", "sft,jsonl"]) == 0
    assert [row["row_key"] for row in lines(run / "sft.jsonl")] == ["a"]
    assert [(row["row_key"], row["masked"]) for row in lines(run / "table.jsonl")] == [("a", False), ("b", True)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "shargpt"], "no format 'shargpt'; did you mean `sharegpt`?"),
        (["--format", "dpo", "--min-score", "1"], "--min-score and --keep-best choose rollouts to imitate"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    run = write_run(tmp_path / "run", [recorded("a")])
    before = sorted(run.iterdir())
    assert status(["export", str(run), *options]) == 2
    assert said in capsys.readouterr().err
    assert sorted(run.iterdir()) == before
