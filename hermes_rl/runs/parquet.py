"""Tables for pandas, polars and `datasets`: the formats `parquet` and `jsonl`. This is the only importer of pyarrow.

A row is one sequence of a rollout, or a rollout if its tokens are not known. Columns have one type in every row, so
that each library reads the file without conversion: rewards are a column each, and values of varying shape are JSON as
text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hermes_rl.agent.result import reasoning_of, text_of
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.runs.journal import replaced
from hermes_rl.values import replace_surrogates, write_json

BATCH = 256
"""Rows that are written together and are in memory at the same time."""


def write_table(path: Path, groups: Iterable[Group], rewards: Sequence[str]) -> int:
    """Write the rollouts of groups into a file, which exists once it is complete; return the number of rows.

    Each of the `rewards` becomes the column `reward/<name>`. Raises `RunError` if it cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    message = dict.fromkeys(("role", "content", "reasoning", "tool_calls", "tool_call_id"), pyarrow.string())
    columns = {
        **dict.fromkeys(("group", "rollout", "row_key", "row"), pyarrow.string()),
        "index": pyarrow.int32(),
        "sequence": pyarrow.int32(),
        "score": pyarrow.float64(),
        "stop_reason": pyarrow.string(),
        "masked": pyarrow.bool_(),
        **{f"reward/{name}": pyarrow.float64() for name in rewards},
        "messages": pyarrow.list_(pyarrow.struct(message)),
        "tools": pyarrow.string(),
        "turns": pyarrow.int32(),
        "prompt_tokens": pyarrow.int64(),
        "completion_tokens": pyarrow.int64(),
        "tokens": pyarrow.list_(pyarrow.int32()),
        "masks": pyarrow.list_(pyarrow.int32()),
        "logprobs": pyarrow.list_(pyarrow.float64()),
    }
    schema = pyarrow.schema(list(columns.items()))
    count = 0
    with replaced(path) as unfinished, parquet.ParquetWriter(unfinished, schema, compression="zstd") as file:
        each = (row for group in groups for row in table_rows(group, rewards))
        while batch := list(islice(each, BATCH)):
            file.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def table_rows(group: Group, rewards: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a group's rollouts, including those that are not trained on."""
    for rollout in group.rollouts:
        if rollout.result is None:
            continue
        of_rollout = _rollout_columns(rollout, rewards)
        for index, sequence in enumerate(rollout.trained_sequences or [None]):
            names = ("tokens", "masks", "logprobs") if sequence is not None else ()
            row = {**of_rollout, "sequence": index, **{name: getattr(sequence, name) for name in names}}
            yield {name: replace_surrogates(value) if isinstance(value, str) else value for name, value in row.items()}


def of_row(row: Row) -> dict[str, Any]:
    """Return the key of a row, and its columns as text: they may have the names of other columns here, and any
    types.
    """
    return {"row_key": row.key, "row": replace_surrogates(write_json(row.columns).decode()) if row.columns else None}


def _rollout_columns(rollout: Rollout, rewards: Sequence[str]) -> dict[str, Any]:
    result = rollout.result
    assert result is not None
    values = {name: rollout.rewards[name].value if name in rollout.rewards else None for name in rewards}
    return {
        "group": rollout.key.group,
        "rollout": rollout.id,
        **of_row(rollout.key.row),
        "index": rollout.key.index,
        "score": _as_double(rollout.score),
        "stop_reason": str(rollout.stop_reason),
        "masked": not rollout.trainable,
        **{f"reward/{name}": _as_double(value) for name, value in values.items()},
        "messages": [_message_record(message) for message in result.messages],
        "tools": json.dumps(list(result.tool_schemas), ensure_ascii=False) if result.tool_schemas else None,
        "turns": result.turns_used,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
    }


def _as_double(value: float | None) -> float | None:
    """Return a number in the column's form, which accepts no integer that a double cannot represent exactly."""
    return None if value is None else float(value)


def _message_record(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    message_row = {
        "role": message["role"],
        "content": text_of(message.get("content")),
        "reasoning": reasoning_of(message),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
    }
    return {name: None if text is None else replace_surrogates(text) for name, text in message_row.items()}
