"""What an offline run of wandb has written down."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER, CHUNK_HEADER, BLOCK = 7, 7, 1 << 15
FULL, LAST = 1, 4


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged steps of the one offline run below `folder`/wandb, without wandb's own fields."""
    (run,) = (folder / "wandb").glob("offline-run-*")
    steps = []
    for record in _complete(run):
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            steps.append({name: value for name, value in items.items() if not name.startswith("_")})
    return steps


def table(folder: Path, name: str) -> list[list[Any]]:
    """The rows of the table that was logged under `name`."""
    (path,) = (folder / "wandb").glob(f"offline-run-*/files/media/table/{name}_*.table.json")
    rows: list[list[Any]] = json.loads(path.read_text())["data"]
    return rows


def _complete(run: Path) -> list[Any]:
    """All records; wandb's own process may write the last ones a moment after the run was finished."""
    for _ in range(500):
        records = [record for file in run.glob("run-*.wandb") for record in _records(file)]
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.01)
    raise AssertionError(f"{run} was never finished")


def _records(file: Path) -> Iterator[Any]:
    """Records of the log: blocks of chunks, each with a checksum, a length, and whether it begins or ends a record."""
    content, position, pending = file.read_bytes(), HEADER, b""
    while position + CHUNK_HEADER <= len(content):
        rest = BLOCK - position % BLOCK
        if rest < CHUNK_HEADER:
            position += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += CHUNK_HEADER
        if position + length > len(content):
            return
        pending += content[position : position + length]
        position += length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(pending)
            pending = b""
            yield record
