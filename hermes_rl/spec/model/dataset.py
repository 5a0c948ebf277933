"""``dataset``: where the rows come from, what is derived from them, and which are kept for evaluation."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from hermes_rl.spec.model.base import EMPTY, FreeMap, Late, Section, Seq, freeze, wrong


def _data_files(value: Any) -> Any:
    """One path, several, or one or several per split: what `datasets.load_dataset` takes."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(value, Mapping) and value:
        return freeze({split: _data_files(files) for split, files in value.items()})
    raise wrong("expected a path, a list of paths, or a mapping from split to paths")


_FILES_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {
            "type": "object",
            "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        },
    ]
}
DataFiles = Annotated[Any, PlainValidator(_data_files), WithJsonSchema(_FILES_SCHEMA)]
Items = Seq[FreeMap]


def _only(value: Any) -> Any:
    return {"only": True} if value == "only" else value


class EvalRows(Section):
    """Which rows are for evaluation and never for training: exactly one of split, fraction, only."""

    split: str | None = Field(None, description="Name of another split of the dataset.")
    fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the rows, between 0 and 1; which ones depends on seed and content.",
    )
    only: bool = Field(False, description="Every row is for evaluation; serve and process refuse to run.")
    limit: int | None = Field(None, ge=1, description="At most this many evaluation rows.")


class Source(Section):
    """Where rows come from: exactly one of path, items, generator."""

    path: str | None = Field(
        None,
        description="A file (questions.jsonl), pattern or folder beside this file, a dataset on the hub, or a format "
        "(json, csv, parquet, text) with data_files.",
    )
    name: str | None = Field(None, description="Configuration of the dataset on the hub.")
    split: str = Field("train", description="Split that training rows come from.")
    data_files: DataFiles | None = Field(
        None,
        description="Files to read, relative to this file: a path or glob, a list, or a mapping by split.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of the dataset on the hub.")
    streaming: bool = Field(False, description="Read rows as they are needed instead of all at first.")
    items: Items | None = Field(None, description="Rows written here; never substituted, never rendered.")
    generator: str | None = Field(
        None, description="file.py:function, called as fn(*, seed, split); it yields rows and may be endless."
    )


class Dataset(Source):
    """The rows that rollouts start from."""

    fallback: Late[Source] | None = Field(
        None, description="Rows for when the hub is out of reach; their use is said aloud."
    )
    columns: FreeMap = Field(
        EMPTY, description="New columns, each a template over the row; later ones see earlier ones."
    )
    filter: str | None = Field(None, description="Expression without braces; a row stays where it is true.")
    key: str | None = Field(
        None, description="Column that identifies a row; default: a hash of its content, and the occurrence."
    )
    shuffle: int | None = Field(None, description="Seed of the shuffle; absent keeps the order of the source.")
    order: str | None = Field(
        None, description="Column that training rows are ordered by, smallest first; with `-` in front, largest first."
    )
    sampling: Literal["all", "differing"] = Field(
        "all", description="all: every row in every pass; differing: rows whose last groups were uniform more rarely."
    )
    limit: int | None = Field(
        None, ge=1, description="At most this many training rows; with `eval: only`, of evaluation rows."
    )
    eval: Annotated[Late[EvalRows], BeforeValidator(_only)] | None = Field(
        None, description="Rows for evaluation: {split}, {fraction} or only, each with an optional limit."
    )
