"""Declare `dataset`: the source of the rows, derived columns, and the rows reserved for evaluation."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from hermes_rl.spec.section import EMPTY, FreeMap, Late, Section, Seq, freeze, wrong


def _data_files(value: Any) -> Any:
    """Return one path, several, or one or several per split: the forms that `datasets.load_dataset` accepts."""
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


class EvalRows(Section):
    """Selection of the rows for evaluation, which are never trained on: exactly one of split, fraction, only."""

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
    """Source of the rows: exactly one of path, items, generator, harbor."""

    path: str | None = Field(
        None,
        description="A file (questions.jsonl), pattern or directory relative to this file, a dataset on the hub, or a "
        "format (json, csv, parquet, text) with data_files.",
    )
    name: str | None = Field(None, description="Configuration of the dataset on the hub.")
    split: str = Field("train", description="Split that training rows come from.")
    data_files: DataFiles | None = Field(
        None,
        description="Files to read, relative to this file: a path or glob, a list, or a mapping by split.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of the dataset on the hub, such as main.")
    streaming: bool = Field(False, description="Read rows when they are needed instead of all at the start.")
    items: Items | None = Field(None, description="Rows written here; never substituted, never rendered.")
    generator: str | None = Field(
        None, description="file.py:function, called as fn(*, seed, split); it yields rows and may be endless."
    )
    harbor: str | None = Field(
        None, description="A task folder in Harbor's format, or a folder of such folders; a row for each task."
    )


class Dataset(Source):
    """The rows that rollouts start from."""

    fallback: Late[Source] | None = Field(
        None, description="Rows for when the hub is out of reach; their use is said aloud."
    )
    columns: FreeMap = Field(
        EMPTY, description="New columns, each a template over the row; later ones see earlier ones."
    )
    filter: str | None = Field(
        None, description="Expression without braces, such as `level > 2`; rows for which it is false are excluded."
    )
    key: str | None = Field(
        None, description="Column that identifies a row; default: a hash of its content, and the occurrence."
    )
    shuffle: int | None = Field(None, description="Seed of the shuffle; absent keeps the order of the source.")
    order: str | None = Field(
        None,
        description="Column that training rows are ordered by, smallest first; with `-` in front, such as `-length`, "
        "largest first.",
    )
    row_selection: Literal["all", "skip_uniform"] = Field(
        "all",
        description="all: every row in every pass; skip_uniform: rows whose last groups were uniform more rarely.",
    )
    limit: int | None = Field(
        None, ge=1, description="At most this many training rows; with `eval: only`, of evaluation rows."
    )
    eval: Annotated[Late[EvalRows], BeforeValidator(lambda rows: {"only": True} if rows == "only" else rows)] | None = (
        Field(None, description="Rows for evaluation: {split}, {fraction} or only, each with an optional limit.")
    )


# ``serve``, ``process``, ``evaluate``, ``budget`` and ``wandb``: the amount of work, and the destination of results
