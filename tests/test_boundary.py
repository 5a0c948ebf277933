"""Hostile values through every public reader and writer: an error in words or a right value, and nothing lost.

A case takes something that is right, such as the answer of a server, a line of a run or a row, and puts a hostile value
into it: NaN, numbers of hundreds of digits, halves of characters, levels without end, another type. Whoever reads it
may refuse it by the errors that it documents, and by no other. The seed is printed: ``BOUNDARY_SEED=…`` repeats a
failure.
"""

from __future__ import annotations

import copy
import csv
import gzip
import json
import math
import os
import random
import shutil
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.analysis.external_trajectories import read_atif
from hermes_rl.analysis.record import RunRecord
from hermes_rl.analysis.report import report
from hermes_rl.analysis.rollout_view import Screen, shown_rollout
from hermes_rl.data.files import read_files
from hermes_rl.data.rows import Row, derive, readable_columns
from hermes_rl.errors import Failure, UserError
from hermes_rl.rollouts.rollout import RolloutKey
from hermes_rl.runs.atif import trajectory
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.formats import RecordedRollouts, RolloutChoice, group_of, seats_of, write_format
from hermes_rl.runs.store import RolloutStore, rollout_of, rollout_record
from hermes_rl.scoring.reward_value import interpret, of_plain, to_builtin
from hermes_rl.servers.base import Malformed, ServerConfig, Timing, read_answer, read_reply
from hermes_rl.servers.sglang import Generate
from hermes_rl.servers.vllm import Completions
from hermes_rl.spec.load import parse_spec
from hermes_rl.terminal_text import escape_controls
from hermes_rl.values import LARGEST_NUMBER, read_json, write_json
from tests.analysis.recorded import programmed, recorded, write_run
from tests.test_values import as_read

VALUES = 1000
SECONDS = 2.0
"""A value may take, on a busy machine."""
HALF = "half \ud83d, whole \U0001f600"
NUMBERS = [
    *(math.nan, math.inf, -math.inf, 10**400, -(10**400), 1.7e308, -1.7e308, 2**53, 2**53 + 1, 2**63, 2**64, 5e-324),
    *(-0.0, 0, -1, 1e999, 0.1, 1e17, True, False),
]
TEXTS = [
    *(
        "",
        " ",
        "\0",
        HALF,
        "\ude00",
        "NaN",
        "1e999",
        "9" * 400,
        "-0",
        "e7",
        "007",
        "\u2028",
        "\r\n",
        "a\x1b[31mb",
        "\ufeff",
    ),
    *("null", "[]", "{}", "{{ x }}", "=1+1", '"', "\\", "中" * 300, "../..", "x" * 5000, "\u202e", "٣", "\ud83d\ude00"),
]
BROAD: list[Any] = [None, [], {}, [[]], {"": None}, [None, 1, "a"], {"a": {"b": [1]}}, [1.5] * 300, {HALF: HALF}]


def deep(levels: int, chance: random.Random) -> Any:
    nested: Any = chance.choice(NUMBERS)
    for _ in range(levels):
        nested = [nested] if chance.random() < 0.5 else {"a": nested}
    return nested


def hostile(chance: random.Random) -> Any:
    kind = chance.randrange(8)
    if kind == 0:
        return deep(chance.choice((3, 190, 210, 900)), chance)
    if kind == 1:
        return {text: hostile(chance) for text in chance.sample(TEXTS, 2)}
    if kind == 2:
        return [hostile(chance) for _ in range(chance.randrange(3))]
    return chance.choice(chance.choice((NUMBERS, TEXTS, BROAD)))


def spoiled(right: Any, chance: random.Random) -> Any:
    """One value of something right replaced by a hostile one, under another name, or left out."""
    spoilt = copy.deepcopy(right)
    places: list[tuple[Any, Any]] = []

    def look(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            look(value[key])

    look(spoilt)
    holder, key = chance.choice(places)
    how = chance.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[chance.choice(TEXTS)] = holder.pop(key)
    else:
        holder[key] = hostile(chance)
    return spoilt


def python_json(value: Any) -> bytes:
    """JSON as careless programs write it: with NaN, infinity, and halves of characters."""
    return json.dumps(value, ensure_ascii=True).encode()


def is_whole(value: Any) -> None:
    """What goes out is JSON that others read too, and comes back as it was."""
    data = write_json(value)
    json.loads(data, parse_constant=pytest.fail)
    data.decode()


# ---------------------------------------------------------------------------------------------------- The doors

Door = Callable[[random.Random, Path], None]
CHAT = {
    "id": "c",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {
                "role": "assistant",
                "content": "hi",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            "logprobs": {"content": [{"token": "hi", "logprob": -0.5, "bytes": [1], "top_logprobs": []}]},
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
}
CONFIG = ServerConfig("openai", base_url="http://127.0.0.1:9/v1", model="m")


def a_chat_answer(chance: random.Random, folder: Path) -> None:
    reply = read_reply(python_json(spoiled(CHAT, chance)), CONFIG, Timing())
    assert reply.logprobs is None or all(abs(value) <= LARGEST_NUMBER for value in reply.logprobs)
    is_whole([reply.message, reply.usage, reply.model, reply.finish_reason])


SAMPLED = {
    "model": "m",
    "weight_version": "3",
    "choices": [
        {
            "finish_reason": "stop",
            "token_ids": [5, 6],
            "logprobs": {"token_logprobs": [-0.5, -1.0], "tokens": ["a", "b"]},
            "prompt_logprobs": [None, {"7": {"logprob": -0.5}}, {"8": {"logprob": -0.25}, "9": {"logprob": -3.0}}],
        }
    ],
}
GENERATED = {
    "text": "ab",
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, 5, None], [-1.0, 6, None]],
        "input_token_logprobs": [[None, 6, None], [-0.5, 7, None], [-0.25, 8, None]],
        "input_top_logprobs": [None, [[-0.5, 7, None]], [[-0.25, 8, None]]],
    },
}


def tokens_of_an_engine(chance: random.Random, folder: Path) -> None:
    dialect, right = chance.choice(((Completions(), SAMPLED), (Generate(), GENERATED)))
    answer = python_json(spoiled(right, chance))
    if chance.random() < 0.5:
        sampled = read_answer(answer, dialect.read)
        assert len(sampled.ids) == len(sampled.logprobs)
        assert all(type(token) is int and 0 <= token < 2**31 for token in sampled.ids)
        assert all(-9999 < value <= 0 for value in sampled.logprobs)
    else:
        scores = read_answer(answer, lambda data: dialect.read_scores(data, array("i", [6, 7, 8]), 1))
        assert len(scores.token_logprobs) == 2
        assert all(value <= 0 for value in (*scores.token_logprobs, *scores.top_logprobs))


def rows_of_files(chance: random.Random, folder: Path) -> None:
    records = [
        {"question": hostile(chance), "answer": "x", chance.choice(TEXTS) or "more": hostile(chance)} for _ in range(2)
    ]
    path = folder / chance.choice(("rows.jsonl", "rows.json", "rows.jsonl.gz"))
    data = b"\n".join(map(python_json, records)) if path.name != "rows.json" else python_json(records)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    read = read_files("json", [str(path)])
    columns = dict.fromkeys(name for record in records for name in as_read(record))
    assert read == [{name: as_read(record).get(name) for name in columns} for record in records]
    for row in derive(ROWS, read):
        row.key.encode()
        is_whole(readable_columns(row.columns))


ROWS = parse_spec("dataset: {items: [{question: a}]}\nprompt: {user: x}\nrewards: {exact_match: {args: {target: x}}}\n")


MISSING = ("", "NaN", "nan", "null", "None", "NA")
"""Some of the cells that `datasets` takes for missing ones."""


def cells_of_a_table(chance: random.Random, folder: Path) -> None:
    cells = [text.encode("utf-8", "replace").decode() for text in chance.sample(TEXTS, 4)]
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["a", "b"], cells[:2], cells[2:]])
    first, second = read_files("csv", [str(folder / "rows.csv")])
    for name, texts in (("a", cells[::2]), ("b", cells[1::2])):
        for value, text in zip((first[name], second[name]), texts, strict=True):
            assert value == text or (value is None and text in MISSING) or isinstance(value, int | float)
            if isinstance(value, bool):
                assert str(value).lower() == text.lower()
            elif isinstance(value, int | float):
                assert value == float(text)


def a_line_of_a_run(chance: random.Random, folder: Path) -> None:
    right = recorded("a") if chance.random() < 0.5 else programmed("a", [("main", None, 3, True)])
    run = write_run(folder / "run", [])
    (run / "rollouts.jsonl").write_bytes(
        python_json(spoiled(right, chance)) + b"\n" + python_json(recorded("b")) + b"\n"
    )
    record = RunRecord(run)
    assert record.refresh() == 2
    assert len(record.rollouts) + record.torn == 2
    assert record.rollouts[-1].row_key == "b", "what stands behind is not lost"
    report(record)
    for rollout in record.rollouts:
        is_whole(shown_rollout(record, rollout.id, Screen()))
        escape_controls(str(rollout))


def what_run_json_says(chance: random.Random, folder: Path) -> None:
    run = write_run(folder / "run", [recorded("a")])
    said = {
        "format": 2,
        "name": "n",
        "mode": "evaluate",
        "fingerprint": "01",
        "group_size": 2,
        "started": "2026-11-26",
        "versions": {},
    }
    (run / "run.json").write_bytes(python_json(spoiled(said, chance)))
    record = RunRecord(run)
    record.refresh()
    report(record)


def what_is_gone_on_from(chance: random.Random, folder: Path) -> None:
    run = write_run(folder / "run", [])
    right = {**recorded("a"), "row_key": "a"}
    line = spoiled(right, chance)
    (run / "rollouts.jsonl").write_bytes(python_json(line) + b"\n" + python_json(recorded("b")) + b"\n")
    with RunDirectory(run) as directory:
        store = RolloutStore(directory, 1)
        try:
            for name in ("a:0", "b:0"):
                for lines in store.lines([name]):
                    for each in lines:
                        key = RolloutKey(Row(each["row_key"], {}, 0, "d"), name, each["index"], 1)
                        is_whole(rollout_record(rollout_of(each, key)))
        finally:
            store.close()


def a_line(chance: random.Random, folder: Path) -> dict[str, Any]:
    """A spoiled line that a reader of runs lets through."""
    run = write_run(folder / "run", [])
    (run / "rollouts.jsonl").write_bytes(python_json(spoiled(recorded("a"), chance)) + b"\n")
    record = RunRecord(run)
    record.refresh()
    if not record.rollouts:
        raise UserError("it was counted as torn")
    return record.line(record.rollouts[0].id)


def files_of_trainers(chance: random.Random, folder: Path) -> None:
    line = {**a_line(chance, folder), "others": ()}
    for members in seats_of([line]):
        recorded = RecordedRollouts(partial(iter, [group_of(members, {})]), partial(iter, []), ["right"], None, {})
        for kind in ("sft", "dpo", "kto", "openai", "sharegpt", "jsonl"):
            write_format(kind, folder / f"{kind}.jsonl", recorded, RolloutChoice())
            for row in (folder / f"{kind}.jsonl").read_bytes().splitlines():
                is_whole(json.loads(row))
        write_format("parquet", folder / "table.parquet", recorded, RolloutChoice())


def a_trajectory(chance: random.Random, folder: Path) -> None:
    right = trajectory({**recorded("a"), "others": ()}, masked=False)
    (folder / "t.json").write_bytes(python_json(spoiled(right, chance)))
    result, _ = read_atif(folder / "t.json")
    is_whole(result.messages)


def a_line_as_a_trajectory(chance: random.Random, folder: Path) -> None:
    is_whole(trajectory(a_line(chance, folder), masked=False))


def what_a_reward_returns(chance: random.Random, folder: Path) -> None:
    returned = hostile(chance)
    value = interpret("r", of_plain("r", read_json(write_json(to_builtin(returned)))), 0.1)
    assert value.value is None or abs(value.value) <= LARGEST_NUMBER
    is_whole(value.record())


def a_spec(chance: random.Random, folder: Path) -> None:
    right = {
        "name": "n",
        "dataset": {"items": [{"q": "a"}]},
        "prompt": {"user": "{{ q }}"},
        "agent": {"max_turns": 3, "temperature": 1.0},
        "rewards": {"exact_match": {"weight": 1.0, "args": {"target": "{{ q }}"}}},
        "sandbox": {"timeout": 5, "limits": {"memory": "1GiB"}},
        "servers": {
            "policy": {"type": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m", "max_concurrency": 3}
        },
    }
    parse_spec(python_json(spoiled(right, chance)).decode(), folder=folder)


DOORS: dict[Door, tuple[float, tuple[type[BaseException], ...]]] = {
    a_chat_answer: (4, (Malformed,)),
    tokens_of_an_engine: (4, (Malformed,)),
    rows_of_files: (3, (UserError,)),
    cells_of_a_table: (2, (UserError,)),
    a_line_of_a_run: (2, (UserError,)),
    what_run_json_says: (1, (UserError,)),
    what_is_gone_on_from: (2, (UserError,)),
    files_of_trainers: (1, (UserError,)),
    a_trajectory: (2, (UserError,)),
    a_line_as_a_trajectory: (2, (UserError,)),
    what_a_reward_returns: (3, (Failure, UserError, TypeError)),
    a_spec: (1, (UserError,)),
}
"""Each with its share of the values, and with the errors that it documents."""


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_hostile_values_are_refused_with_a_message_or_accepted(door: Door, tmp_path: Path) -> None:
    played(door, VALUES, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.by_turns(2)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_twenty_times_as_many_hostile_values(door: Door, tmp_path: Path) -> None:
    played(door, 20 * VALUES, tmp_path)


def played(door: Door, values: int, folder: Path) -> None:
    """Play a door's share of so many values."""
    seed = int(os.environ.get("BOUNDARY_SEED", random.randrange(2**32)))
    share, documented = DOORS[door]
    for number in range(round(values * share / sum(share for share, _ in DOORS.values()))):
        chance = random.Random(f"{seed} {number}")
        place = folder / str(number)
        place.mkdir()
        began = time.thread_time()
        try:
            door(chance, place)
        except documented as error:
            assert str(error), "an error says something"
        except BaseException as error:
            error.add_note(f"BOUNDARY_SEED={seed}, value {number}")
            raise
        assert time.thread_time() - began < SECONDS, f"BOUNDARY_SEED={seed}, value {number}"
        shutil.rmtree(place)
