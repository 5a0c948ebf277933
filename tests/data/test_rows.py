"""Sources, derived columns, filter, key, order and limit."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import hermes_rl.data.rows as rows_module
from hermes_rl.data import files
from hermes_rl.data.check import check_spec
from hermes_rl.data.files import read_files
from hermes_rl.data.load import Split, load_rows
from hermes_rl.data.rows import Rows, digest
from hermes_rl.errors import SpecError, UserError
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.spec.model import Spec


def spec_of(dataset: str, folder: Path | None = None, more: str = "") -> Spec:
    text = f"version: 1\ndataset:\n{dataset}\nprompt: {{user: x}}\n{more}"
    return parse_spec(text, folder=folder)


def load(spec: Spec, split: Split = "train") -> Rows:
    return load_rows(spec, split, notify=lambda text: None)


ITEMS = "  items: [{q: a, n: 1}, {q: b, n: 2}, {q: c, n: 3}, {q: a, n: 1}]\n"


def test_items() -> None:
    rows = load(spec_of(ITEMS))
    assert (len(rows), rows.length, [row.columns["q"] for row in rows]) == (4, 4, ["a", "b", "c", "a"])
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.columns for row in rows] == [row.columns for row in rows]
    assert rows[1].columns["n"] == 2 and rows[-1].key == rows[3].key
    with pytest.raises(IndexError):
        rows[9]
    assert rows[:2] == [rows[0], rows[1]] and rows[-1:] == [rows[3]]


def test_keys_are_content_and_occurrence() -> None:
    keys = [row.key for row in load(spec_of(ITEMS))]
    assert keys[3] == f"{keys[0]}-2" and len(set(keys)) == 4
    assert keys == [row.key for row in load(spec_of(ITEMS + "  columns: {z: '{{ n * 2 }}'}\n"))]
    assert keys[1] == load(spec_of("  items: [{n: 2, q: b}]\n"))[0].key


def test_rows_cannot_be_changed() -> None:
    row = load(spec_of(ITEMS))[0]
    with pytest.raises(TypeError):
        row.columns["q"] = "z"  # type: ignore[index]


def test_columns_in_order_then_filter_then_key() -> None:
    spec = spec_of(
        "  items: [{q: a, n: 1}, {q: b, n: 2}]\n"
        "  columns: {double: '{{ n * 2 }}', text: 'x{{ double }}'}\n  filter: double > 2\n  key: text\n"
    )
    assert [(row.key, row.columns["double"], row.index) for row in load(spec)] == [("x4", 4, 1)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("  key: q\n", "`a` of row 4 occurs twice"),
        ("  key: qq\n", "no column `qq`"),
        ("  key: z\n  columns: {z: '{{ none }}'}\n", "is empty"),
        ("  filter: m > 1\n", "no column `m`"),
        ("  filter: n > 'x'\n", "TypeError"),
    ],
)
def test_errors_of_rows(more: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(spec_of(ITEMS + more))


def test_limit_and_shuffle() -> None:
    plain = [row.key for row in load(spec_of(ITEMS))]
    shuffled = [row.key for row in load(spec_of(ITEMS + "  shuffle: 7\n"))]
    assert sorted(shuffled) == sorted(plain)
    assert shuffled == [row.key for row in load(spec_of(ITEMS + "  shuffle: 7\n"))]
    orders = {tuple(row.key for row in load(spec_of(ITEMS + f"  shuffle: {seed}\n"))) for seed in range(12)}
    assert len(orders) > 4
    assert [row.key for row in load(spec_of(ITEMS + "  shuffle: 7\n  limit: 2\n"))] == shuffled[:2]


def test_without_eval_there_are_no_evaluation_rows() -> None:
    assert len(load(spec_of(ITEMS), "eval")) == 0


def test_only_evaluation() -> None:
    spec = spec_of(ITEMS + "  eval: only\n")
    assert (len(load(spec)), len(load(spec, "eval"))) == (0, 4)
    assert len(load(spec_of(ITEMS + "  eval: {only: true, limit: 2}\n"), "eval")) == 2


def test_fingerprints() -> None:
    assert load(spec_of(ITEMS)).fingerprint == load(spec_of(ITEMS)).fingerprint
    assert load(spec_of(ITEMS)).fingerprint != load(spec_of(ITEMS + "  limit: 2\n")).fingerprint


def test_json_lines_lists_and_single_objects(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "a"}\n\n{"q": "b", "z": 1}\n')
    (tmp_path / "b.json").write_text('[{"q": "c"},\n {"q": "d"}]')
    (tmp_path / "c.json").write_text('{\n "q": "e"\n}\n')
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"q": "f"}\n'))
    (tmp_path / "e.jsonl.bz2").write_bytes(bz2.compress(b'{"q": "g"}\n'))
    (tmp_path / "f.jsonl.xz").write_bytes(lzma.compress(b'{"q": "h"}\n'))
    spec = spec_of("  {path: json, data_files: [a.jsonl, b.json, c.json, '*.gz', '*.bz2', '*.xz']}", tmp_path)
    rows = [dict(row.columns) for row in load(spec)]
    assert [row["q"] for row in rows] == list("abcdefgh")
    assert rows[0] == {"q": "a", "z": None}
    assert [row.columns["q"] for row in load(spec_of("  path: f.jsonl.xz\n", tmp_path))] == ["h"]


@pytest.mark.parametrize(("stop_reason", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_file_that_unpacks_to_many_times_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_reason: str, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(files, "LEAST_UNPACKED", 1 << 20)
    (tmp_path / f"a.jsonl.{stop_reason}").write_bytes(pack(b" " * (3 << 20)))
    with pytest.raises(UserError, match=r"a\.jsonl\.\w+: unpacks to more than 1 MiB, 100 times its size"):
        load(spec_of(f"  path: a.jsonl.{stop_reason}\n", tmp_path))
    (tmp_path / f"a.jsonl.{stop_reason}").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"a\.jsonl\.\w+: cannot be read"):
        load(spec_of(f"  path: a.jsonl.{stop_reason}\n", tmp_path))


def test_pattern_that_looks_at_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_ENTRIES", 20)
    for number in range(4):
        (tmp_path / f"{number}" / "deep").mkdir(parents=True)
        for name in "abcdef":
            (tmp_path / f"{number}" / "deep" / f"{name}.jsonl").write_text('{"q": "a"}\n')
    assert len(list(load(spec_of("  path: json\n  data_files: '[01]/*/*.jsonl'\n", tmp_path)))) == 12
    for pattern in ("**/*.jsonl", "*/*/*"):
        with pytest.raises(UserError, match=r"looks at more than 20 files and folders below .*name the folder"):
            load(spec_of(f"  path: json\n  data_files: '{pattern}'\n", tmp_path))
    with pytest.raises(UserError, match="looks at more than 20 files"):
        load(spec_of(f"  path: {tmp_path}\n", tmp_path))


def test_files_are_named_by_path_alone(tmp_path: Path) -> None:
    lines = '{"q": "a"}\n{"q": "b"}\n'
    (tmp_path / "q.jsonl").write_text(lines)
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "q.json").write_text('[{"q": "a"}, {"q": "b"}]')
    (tmp_path / "q.csv").write_text("q\na\nb\n")
    (tmp_path / "parts").mkdir()
    for name in "ab":
        (tmp_path / "parts" / f"{name}.jsonl").write_text(json.dumps({"q": name}))
    for path in (
        "q.jsonl",
        "./q.jsonl",
        "q.jsonl.gz",
        "q.json",
        "q.csv",
        "parts/*",
        "parts/?.jsonl",
        tmp_path / "q.csv",
    ):
        spec = spec_of(f"  path: {path}\n", tmp_path)
        assert [row.columns for row in load(spec)] == [{"q": "a"}, {"q": "b"}], path
        assert check_spec(spec)[0] == [], path


def test_parquet_and_folders_are_read_alike_by_run_and_validate(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"q": ["a", "b"]}), tmp_path / "q.parquet")
    for split, name in (("train", "a"), ("test", "b")):
        (tmp_path / "data" / f"{split}.jsonl").write_text(json.dumps({"q": name}))
    assert [row.columns["q"] for row in load(spec_of("  path: q.parquet\n", tmp_path))] == ["a", "b"]
    folder = spec_of("  path: data\n  eval: {split: test}\n", tmp_path)
    assert [row.columns["q"] for side in ("train", "eval") for row in load(folder, side)] == ["a", "b"]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 is not enough")
    for path in ("q.parquet", "data", "bad.parquet"):
        spec = spec_of(f"  path: {path}\n  columns: {{upper: '{{{{ question }}}}'}}\n", tmp_path)
        with pytest.raises(UserError) as failed:
            load(spec)
        problems, _ = check_spec(spec)
        assert [problem.message for problem in problems] and problems[0].message in str(failed.value)


def test_a_name_that_the_hub_may_have_too_is_said_to_be_the_folder(tmp_path: Path) -> None:
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "train.jsonl").write_text('{"q": "a"}')
    said: list[str] = []
    spec = spec_of("  path: squad\n", tmp_path)
    assert len(load_rows(spec, "train", notify=said.append)) == 1
    assert "is read from" in said[0] and str(tmp_path / "squad") in said[0]
    assert [warning.line for warning in check_spec(spec)[1] if "is read from" in warning.message] == [3]
    load_rows(spec_of("  path: ./squad\n", tmp_path), "train", notify=said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("  path: p.jsonl\n", "no such file; did you mean `q.jsonl`?"),
        ("  path: ./nothing\n", "no such file or folder"),
        ("  path: q.xlsx\n", "its suffix names no format"),
        ("  path: q.jsonl\n  eval: {split: test}\n", "data_files: {train: …, test: …}}"),
    ],
)
def test_validate_reports_an_unreadable_path_like_load(tmp_path: Path, dataset: str, message: str) -> None:
    (tmp_path / "q.jsonl").write_text('{"q": "a"}\n')
    (tmp_path / "q.xlsx").write_text("x")
    spec = spec_of(dataset, tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        load(spec, "eval" if "eval" in dataset else "train")
    (problem,) = check_spec(spec)[0]
    assert message in problem.message and (problem.line, problem.column) == (3, 9)


def test_a_file_is_not_named_twice(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="`path` names a file already"):
        spec_of("  path: q.jsonl\n  data_files: p.jsonl\n", tmp_path)


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,n,x,text\n007,1,1.5,"a, b"\n008,,2,\n')
    rows = load(spec_of("  {path: csv, data_files: a.csv}", tmp_path))
    assert [dict(row.columns) for row in rows] == [
        {"id": 7, "n": 1.0, "x": 1.5, "text": "a, b"},
        {"id": 8, "n": None, "x": 2.0, "text": None},
    ]


COLUMNS: list[tuple[list[str], list[Any]]] = [
    (["True", "FALSE", "tRuE"], [True, False, True]),
    (["True", "", "False"], [True, None, False]),
    (["True", "NA", "null"], [True, None, None]),
    (["True", "1", "0"], ["True", "1", "0"]),
    ([" True", "False", "True"], [" True", "False", "True"]),
    (["1", "-2", "+3"], [1, -2, 3]),
    ([" 1", "2 ", "3"], [1, 2, 3]),
    (["1", "", "3"], [1.0, None, 3.0]),
    (["1.", ".5", "1e3"], [1.0, 0.5, 1000.0]),
    (["nan", "1", "2.5"], [None, 1.0, 2.5]),
    (["inf", "-Infinity", "1"], [math.inf, -math.inf, 1.0]),
    (["NA", "N/A", "x"], [None, None, "x"]),
    (["None", "null", ""], [None, None, None]),
    (["0x10", "1", "2"], ["0x10", "1", "2"]),
    (["1_000", "1", "2"], ["1_000", "1", "2"]),
    (["１", "1", "2"], ["１", "1", "2"]),
    (["2024-01-02", "2024-01-03", ""], ["2024-01-02", "2024-01-03", None]),
    (["18446744073709551615", "1", "2"], [2**64 - 1, 1, 2]),
    (["18446744073709551615", "-1", "2"], ["18446744073709551615", "-1", "2"]),
    (["18446744073709551615", "", "2"], ["18446744073709551615", "", "2"]),
    (["9223372036854775808", "1.5", ""], [2.0**63, 1.5, None]),
]
HEADERS = {
    "a,a,a.1\n1,2,3\n": {"a": 1, "a.2": 2, "a.1": 3},
    ",b,\n1,2,3\n": {"Unnamed: 0": 1, "b": 2, "Unnamed: 2": 3},
    "a,b\n   \n1,2\n\n": {"a": 1, "b": 2},
    'a\n""\n': {"a": None},
    "\ufeffa,b\r1\r": {"a": 1, "b": None},
}


def table() -> str:
    """Return a CSV file with all columns, by their numbers."""
    lines = [",".join(f"c{number}" for number in range(len(COLUMNS)))]
    lines += [",".join(f'"{values[row]}"' for values, _ in COLUMNS) for row in range(3)]
    return "\n".join(lines) + "\n"


def test_columns_of_csv_have_the_types_of_their_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(table())
    rows = read_files("csv", [str(tmp_path / "a.csv")])
    for number, (values, expected) in enumerate(COLUMNS):
        assert repr([row[f"c{number}"] for row in rows]) == repr(expected), values


@pytest.mark.parametrize("text", HEADERS)
def test_header_of_csv_names_each_column_once(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text, newline="")
    assert read_files("csv", [str(tmp_path / "a.csv")]) == [HEADERS[text]]


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, *HEADERS])
def test_csv_is_read_as_datasets_reads_it(tmp_path: Path, text: str | None) -> None:
    import datasets

    path = tmp_path / "a.csv"
    path.write_text(table() if text is None else text, newline="")
    theirs = datasets.load_dataset("csv", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert repr(read_files("csv", [str(path)])) == repr(list(theirs))


def test_data_files_by_split(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"q": "c"}\n{"q": "b"}\n')
    spec = spec_of("  path: json\n  data_files: {train: a.jsonl, test: b.jsonl}\n  eval: {split: test}\n", tmp_path)
    said: list[str] = []
    train = load_rows(spec, "train", notify=said.append)
    assert [row.columns["q"] for row in train] == ["a"], "a row of the other split is not trained on"
    assert "1 training rows are also in split test" in said[0]
    assert [row.columns["q"] for row in load(spec, "eval")] == ["c", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"q": 1}\n[1]\n', r"a\.jsonl:2: expected an object"),
        ('{"q": 1}\n{"q": }\n', r"a\.jsonl:2: is not JSON"),
        ("[1, 2]", "row 1: expected an object"),
        ('[{"q": 1},\n{"q": }]', r"a\.jsonl:2: is not JSON"),
    ],
)
def test_broken_json(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        read_files("json", [str(tmp_path / "a.jsonl")])


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2,3\n")
    with pytest.raises(UserError, match="more fields than there are columns"):
        read_files("csv", [str(tmp_path / "a.csv")])
    (tmp_path / "b.jsonl").write_bytes(b'{"q": "\xff"}')
    with pytest.raises(UserError, match="not UTF-8 at byte 7"):
        read_files("json", [str(tmp_path / "b.jsonl")])
    with pytest.raises(UserError, match=r"did you mean `b\.jsonl`"):
        read_files("json", [str(tmp_path / "c.jsonl")])
    with pytest.raises(UserError, match="no such file"):
        read_files("json", [str(tmp_path / "*.parquet")])


def test_a_split_that_the_files_do_not_have(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": 1}\n')
    with pytest.raises(UserError, match=r"data_files: \{train: …, test: …\}"):
        load(spec_of("  path: json\n  data_files: a.jsonl\n  eval: {split: test}\n", tmp_path), "eval")
    with pytest.raises(UserError, match="no split `test`; did you mean `tests`"):
        files = "{train: a.jsonl, tests: a.jsonl}"
        load(spec_of(f"  path: json\n  data_files: {files}\n  eval: {{split: test}}\n", tmp_path), "eval")


GENERATORS = """
from itertools import count
def few(*, seed, split):
    for n in range(20):
        yield {"q": f"{split} {seed} {n}"}
def endless(*, seed, split):
    for n in count():
        yield {"q": n}
def wrong(*, seed, split):
    yield 3
"""


def generator(tmp_path: Path, name: str, more: str = "") -> Spec:
    (tmp_path / "g.py").write_text(GENERATORS)
    return spec_of(f"  generator: g.py:{name}\n{more}", tmp_path, "seed: 5\n")


def test_a_generator_that_ends_is_finite(tmp_path: Path) -> None:
    spec = generator(tmp_path, "few", "  eval: {fraction: 0.25}\n")
    train, held = load(spec), load(spec, "eval")
    assert (train.length, held.length) == (15, 5)
    assert all(row.columns["q"].startswith("train 5 ") for row in held)


def test_an_endless_generator(tmp_path: Path) -> None:
    spec = generator(tmp_path, "endless", "  eval: {fraction: 0.2}\n  limit: 100\n")
    train, held = load(spec), load(spec, "eval")
    assert train.length is None and held.length is None
    with pytest.raises(TypeError, match="look at `length`"):
        len(train)
    first = [row.key for row in train]
    assert len(first) == 100 and first == [row.key for row in train]
    others = [row.key for row in held]
    assert 5 <= len(others) <= 60, "those that lie between the training rows"
    assert not set(first) & set(others)


def test_limit_ends_an_endless_generator_where_all_rows_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.data.load.ENDLESS", 500)
    assert check_spec(generator(tmp_path, "endless", "  limit: 300\n  eval: {fraction: 0.2}\n"), count="all")[0] == []
    text = "  limit: 300\n  eval: {fraction: 0.2}\n  columns: {q: '{{ q % 310 }}'}\n  key: q\n"
    (problem,) = check_spec(generator(tmp_path, "endless", text), count="all")[0]
    assert "`0` of row 311 occurs twice" in problem.message, "the rows of both sides are checked"
    (problem,) = check_spec(generator(tmp_path, "endless"), count="all")[0]
    assert "endless has given 501 rows in 0 s and not ended" in problem.message


def test_endless_rows_in_a_moving_shuffle(tmp_path: Path) -> None:
    rows = load(generator(tmp_path, "endless", "  shuffle: 3\n"))
    numbers = [row.columns["q"] for row in islice(rows, 50)]
    assert numbers == [row.columns["q"] for row in islice(rows, 50)]
    assert numbers != sorted(numbers) and max(numbers) < 1100


def test_eval_limits_of_endless_rows(tmp_path: Path) -> None:
    spec = generator(tmp_path, "endless", "  eval: {fraction: 0.2, limit: 7}\n")
    assert len(list(load(spec, "eval"))) == 7
    assert len(list(islice(load(spec), 3000))) == 3000


def test_a_generator_that_yields_no_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row 0 is a int; yield dicts"):
        load(generator(tmp_path, "wrong"))


class FakeHub:
    """Stands for `datasets.load_dataset`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, path: str, **arguments: Any) -> Any:
        self.calls.append((path, arguments))
        if self.error is not None:
            raise self.error
        rows = [{"q": f"{arguments['split']}-{n}"} for n in range(4)]
        return rows if not arguments["streaming"] else _Stream(rows)


class _Stream:
    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    import sys
    import types

    module = types.ModuleType("datasets")
    fake = FakeHub()
    module.load_dataset = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return fake


HUB = "  path: org/data\n  name: main\n  eval: {split: test, limit: 2}\n  fallback: {items: [{q: x}, {q: y}, {q: z}]}\n"


def test_the_hub_is_asked_as_the_spec_says(hub: FakeHub) -> None:
    rows = load(spec_of(HUB))
    assert [row.columns["q"] for row in rows] == ["train-0", "train-1", "train-2", "train-3"]
    assert hub.calls[0] == ("org/data", {"split": "train", "streaming": False, "name": "main"})
    assert [row.columns["q"] for row in load(spec_of(HUB), "eval")] == ["test-0", "test-1"]
    assert not rows.fallback


def test_a_hub_out_of_reach_means_the_fallback_said_aloud(hub: FakeHub) -> None:
    hub.error = ConnectionError("no route")
    said: list[str] = []
    spec = spec_of(HUB)
    train = load_rows(spec, "train", notify=said.append)
    held = load_rows(spec, "eval", notify=said.append)
    assert train.fallback and (len(train), len(held)) == (2, 1)
    assert not {row.digest for row in train} & {row.digest for row in held}
    assert len(said) == 2 and "FALLBACK" in said[0] and "no route" in said[0]


def test_a_hub_out_of_reach_without_fallback(hub: FakeHub) -> None:
    hub.error = ConnectionError("no route")
    with pytest.raises(UserError, match=r"no route.*no `dataset\.fallback`"):
        load(spec_of("  path: org/data\n"))


def test_missing_hub_dataset_does_not_use_the_fallback(hub: FakeHub) -> None:
    hub.error = FileNotFoundError("Dataset 'org/data' doesn't exist on the Hub")
    with pytest.raises(UserError, match="doesn't exist"):
        load(spec_of(HUB))


def test_a_wrapped_connection_error_counts(hub: FakeHub) -> None:
    error = RuntimeError("could not load")
    error.__cause__ = TimeoutError("slow")
    hub.error = error
    with pytest.raises(UserError, match="could not load"):
        load(spec_of("  path: org/data\n"))
    error.__cause__ = type("ConnectTimeout", (Exception,), {})("slow")
    with pytest.raises(UserError, match="the hub cannot be reached"):
        load(spec_of("  path: org/data\n"))


@pytest.mark.parametrize(
    "kind", ["RemoteProtocolError", "ReadError", "ChunkedEncodingError", "IncompleteRead", "ClientPayloadError"]
)
def test_a_hub_that_breaks_off_a_download_is_out_of_reach(kind: str, hub: FakeHub) -> None:
    base = type("NetworkError", (Exception,), {}) if kind == "ReadError" else Exception  # httpx derives it so
    hub.error = type(kind, (base,), {})("peer closed connection")
    with pytest.raises(UserError, match="the hub cannot be reached"):
        load(spec_of("  path: org/data\n"))


@pytest.mark.parametrize(("status", "passing"), [(429, True), (503, True), (401, False), (404, False)])
def test_a_status_that_may_pass_is_out_of_reach(status: int, passing: bool, hub: FakeHub) -> None:
    hub.error = RuntimeError("refused")
    hub.error.response = type("Response", (), {"status_code": status})()  # type: ignore[attr-defined]
    with pytest.raises(UserError) as caught:
        load(spec_of("  path: org/data\n"))
    assert ("cannot be reached" in str(caught.value)) is passing


def test_streams_are_not_finite(hub: FakeHub) -> None:
    rows = load(spec_of("  path: org/data\n  streaming: true\n"))
    assert rows.length is None and len(list(rows)) == 4 and len(list(rows)) == 4
    assert rows[1:3] == list(rows)[1:3]
    for endless in (slice(2, None), slice(None, -1)):
        with pytest.raises(UserError, match="may be endless: give the number of rows"):
            rows[endless]


def test_demo_uses_the_fallback_without_asking(hub: FakeHub) -> None:
    said: list[str] = []
    text = f"version: 1\ndataset:\n{HUB}prompt: {{user: x}}\n"
    rows = load_rows(parse_spec(text, demo=True), "train", notify=said.append)
    assert rows.fallback and not hub.calls and "demo" in said[0]
    with pytest.raises(UserError, match="needs a `fallback`"):
        load(parse_spec("version: 1\ndataset: {path: org/data}\nprompt: {user: x}\n", demo=True))


def test_hashes_are_the_same_on_every_machine() -> None:
    assert digest({"a": 1, "b": [None, 1.5, "ü"]}) == digest({"b": [None, 1.5, "ü"], "a": 1})
    assert digest({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    assert digest({"a": b"x", "d": __import__("datetime").date(2026, 1, 2), "n": float("nan")})
    assert digest({"a": "1"}) != digest({"a": 1})
    with pytest.raises(UserError, match="holds a object"):
        digest({"a": object()})


def test_json_numbers_survive(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"big": 10**30, "f": 0.1}) + "\n")
    assert read_files("json", [str(tmp_path / "a.jsonl")]) == [{"big": 10**30, "f": 0.1}]


@pytest.mark.parametrize(("by", "expected"), [("level", "acbd"), ("-level", "dbca")])
def test_training_rows_are_ordered_by_a_column(by: str, expected: str) -> None:
    items = "[{n: a, level: 1}, {n: b, level: 3}, {n: c, level: 2}, {n: d, level: 10}]"
    spec = parse_spec(f"dataset: {{items: {items}, order: '{by}'}}\nprompt: {{user: '{{{{ n }}}}'}}\n")
    assert "".join(row.columns["n"] for row in load_rows(spec, "train", notify=print)) == expected


def test_the_order_comes_before_the_limit() -> None:
    spec = parse_spec("dataset: {items: [{n: 3}, {n: 1}, {n: 2}], order: n, limit: 2}\nprompt: {user: '{{ n }}'}\n")
    assert [row.columns["n"] for row in load_rows(spec, "train", notify=print)] == [1, 2]


@pytest.mark.parametrize(
    ("items", "by", "told"),
    [
        ("[{level: 1}]", "levl", "has no column 'levl'; did you mean `level`"),
        ("[{level: 1}, {level: x}]", "level", "cannot be compared"),
    ],
)
def test_an_order_that_cannot_be(items: str, by: str, told: str) -> None:
    spec = parse_spec(f"dataset: {{items: {items}, order: {by}}}\nprompt: {{user: hi}}\n")
    with pytest.raises(UserError, match=told):
        load_rows(spec, "train", notify=print)


def test_csv_column_of_identifiers_stays_text(tmp_path: Path) -> None:
    many = "7" * 5000
    (tmp_path / "a.csv").write_text(f"square,hash,long\ne4,1234e567,{many}\ne5,5e6,8\n")
    columns = [dict(row) for row in read_files("csv", [str(tmp_path / "a.csv")])]
    assert columns == [{"square": "e4", "hash": "1234e567", "long": many}, {"square": "e5", "hash": "5e6", "long": "8"}]


@pytest.mark.parametrize("damage", [lambda data: data[:30], lambda data: data[:20] + bytes(8) + data[28:]])
def test_damaged_archive_error_names_the_file(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    whole = gzip.compress(json.dumps([{"q": f"{n * n}"} for n in range(100)]).encode())
    (tmp_path / "a.json.gz").write_bytes(damage(whole))
    with pytest.raises(UserError, match=r"a\.json\.gz: cannot be read"):
        read_files("json", [str(tmp_path / "a.json.gz")])


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000])
def test_oversized_json_value_error_names_the_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": 1}\n{"q": ' + value + "}\n")
    with pytest.raises(UserError, match=r"a\.jsonl:2: is not JSON"):
        read_files("json", [str(tmp_path / "a.jsonl")])


def test_unpaired_surrogate_is_refused_in_keys_and_accepted_in_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "a"}\n{"q": "\\ud83d"}\n')
    data = f"  path: json\n  data_files: {tmp_path}/a.jsonl\n  shuffle: 1\n"
    assert {row.columns["q"] for row in load(spec_of(data))} == {"a", "\ud83d"}
    with pytest.raises(UserError, match=r"column `q` of row 2 contains an unpaired surrogate: '\\ud83d'"):
        load(spec_of(data + "  key: q\n"))


def lines_of(folder: Path, count: int) -> Spec:
    (folder / "rows.jsonl").write_text("".join(f'{{"q": "{n}"}}\n' for n in range(count)))
    (folder / "s.yaml").write_text("dataset: {path: json, data_files: rows.jsonl}\nprompt: {user: '{{ q }}'}\n")
    return load_spec(folder / "s.yaml", environ={})


def test_lazy_rows_are_created_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, made = lines_of(tmp_path, 100), list[int]()
    real = rows_module.digest
    monkeypatch.setattr(rows_module, "digest", lambda columns: [made.append(1), real(columns)][1])
    rows = load_rows(spec, "train", notify=print, lazily=True)
    assert [row.columns["q"] for row in islice(rows, 3)] == ["0", "1", "2"] and len(made) == 3
    eager = load_rows(spec, "train", notify=print)
    assert [row.key for row in rows] == [row.key for row in eager]


@pytest.mark.parametrize("dataset", ["shuffle: 1", "order: -q", "eval: {fraction: 0.1}"])
def test_rows_in_another_order_are_not_loaded_lazily(tmp_path: Path, dataset: str) -> None:
    lines_of(tmp_path, 20)
    text = (tmp_path / "s.yaml").read_text().replace("rows.jsonl}", f"rows.jsonl, {dataset}}}")
    (tmp_path / "s.yaml").write_text(text)
    spec = load_spec(tmp_path / "s.yaml", environ={})
    lazily, eager = (load_rows(spec, "train", notify=print, lazily=lazy) for lazy in (True, False))
    assert [row.key for row in lazily] == [row.key for row in eager] and lazily.length == eager.length


def test_long_row_loading_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "PATIENCE", 0.0)
    monkeypatch.setattr(rows_module, "LOOKED_AFTER", 10)
    monkeypatch.setattr("hermes_rl.data.sources.LARGE", 10)
    spec, told = lines_of(tmp_path, 25), list[str]()
    load_rows(spec, "train", notify=told.append)
    expected = [f"reading {tmp_path}/rows.jsonl (0 MiB)", "read 10 rows so far", "read 20 rows so far"]
    assert told == expected
    told.clear()
    check_spec(spec, notify=told.append)
    assert told == expected
