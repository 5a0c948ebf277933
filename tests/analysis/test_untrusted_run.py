"""Commands read only the run's files of an untrusted run directory, and never end in a traceback."""

from __future__ import annotations

import base64
import copy
import json
import os
import random
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl.analysis.record import RunRecord
from hermes_rl.analysis.rollout_view import Screen, shown_rollout
from hermes_rl.analysis.settings import spec_of
from hermes_rl.errors import UserError
from hermes_rl.others_files import LARGEST, LARGEST_DIRECTORY
from hermes_rl.rollouts.sandboxes import kept_artifacts
from hermes_rl.runs import journal
from hermes_rl.tokens.transcript import unpacked
from tests.commands import ROOT, hermes
from tests.thorough import THOROUGH

RECORDED = ROOT / "tests" / "data" / "recorded_runs" / "evaluate"
COMMANDS = (
    ["show", "run"], ["report", "run"], ["audit", "run"], ["compare", "run", "other"],
    ["export", "run", "--out", "exported"],
    ["export", "run", "--out", "files", "--format", "sft,dpo,kto,openai,sharegpt,parquet,jsonl"],
    ["push", "run", "./pushed"], ["regrade", "run", "--trust"],
)  # fmt: skip
SECRET = "the-key-of-the-one-who-looks"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("run", "other"):
        shutil.copytree(RECORDED, tmp_path / name)
    (tmp_path / "secret").write_text(SECRET)
    return tmp_path


def printed(folder: Path, command: list[str]) -> str:
    """Return what a command prints; it ends by itself, and not in a traceback."""
    done = hermes(*command, cwd=folder)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    assert SECRET not in said
    return said


SLOW = pytest.mark.slow


@pytest.mark.parametrize("file", [
    "rollouts.jsonl", "metrics.json", pytest.param("run.json", marks=SLOW), pytest.param("spec.yaml", marks=SLOW),
])  # fmt: skip
@pytest.mark.parametrize("kind", [
    "link", "pipe", pytest.param("device", marks=SLOW), pytest.param("directory", marks=SLOW),
])  # fmt: skip
def test_commands_neither_follow_nor_block_on_special_run_files(folder: Path, file: str, kind: str) -> None:
    place = folder / "run" / file
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero" if kind == "device" else folder / "secret")
    for command in COMMANDS if kind == "link" else COMMANDS[:3] + COMMANDS[5:]:
        said = printed(folder, command)
        if file == "rollouts.jsonl" and command[0] in ("show", "report"):
            assert "run/rollouts.jsonl: is a" in said, said
    published = [path for path in (folder / "pushed").rglob("*") if path.is_file()] if kind == "link" else []
    assert not any(SECRET.encode() in path.read_bytes() for path in published)


def test_run_does_not_write_through_a_link(folder: Path) -> None:
    (folder / "victim").write_text("mine\n")
    run = folder / "run"
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    (folder / "spec.yaml").write_text(
        yaml.safe_dump(spec).replace("/recorded/", f"{folder}/").replace("/shipped/", f"{ROOT}/")
    )
    (run / "rollouts.jsonl").unlink()
    (run / "rollouts.jsonl").symlink_to(folder / "victim")
    printed(folder, ["run", "spec.yaml", "evaluate", "--out", "run"])
    assert (folder / "victim").read_text() == "mine\n"


def test_code_that_a_strangers_spec_names_does_not_run_unasked(folder: Path) -> None:
    (folder / "run" / "evil.py").write_text('open("ran", "w").write("x")\ndef f(result) -> float:\n    return 1.0\n')
    spec = yaml.safe_load((folder / "run" / "spec.yaml").read_text())
    for fn in ("evil.py:f", "os:getcwd"):
        spec["rewards"] = {"own": {"fn": fn}}
        (folder / "run" / "spec.yaml").write_text(yaml.safe_dump(spec))
        done = hermes("regrade", "run", cwd=folder)
        assert done.returncode == 2
        assert "this run was not made here, or its spec has been changed since" in done.stderr
        assert fn in done.stderr and "--trust" in done.stderr
    assert list(folder.rglob("ran")) == []


def test_unknown_stop_reason_of_another_version_is_shown_unchanged(folder: Path) -> None:
    path = folder / "run" / "rollouts.jsonl"
    first, *others = map(json.loads, path.read_text().splitlines())
    lines = [
        first | {"ending": "of_later"},
        *(other | {"ending": "of_later", "score": None} for other in others),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for command in (
        ["show", "run"],
        ["show", "run", "one-0"],
        ["show", "run", others[0]["id"]],
    ):
        assert "of_later" in printed(folder, command), command


def test_record_that_expands_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.tokens.transcript.LARGEST_PACKED", 1_000)
    packed = base64.b64encode(zlib.compress(bytes(1_004), 9)).decode()
    for name in ("ids", "logprobs"):
        record: dict[str, Any] = {"ids": base64.b64encode(zlib.compress(b"")).decode(), "logprobs": None, "spans": []}
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            unpacked(record | {name: packed})
    with pytest.raises(ValueError, match="truncated"):
        unpacked(record | {"ids": packed[:100]})


@pytest.mark.parametrize("path", ["/", "..", "/etc", "artifacts/../.."])
def test_artifact_elsewhere_is_not_walked(folder: Path, path: str) -> None:
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    lines[0]["artifacts"] = {"a": {"path": path, "files": 1, "bytes": 1}}
    (run / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = RunRecord(run)
    record.refresh()
    (artifact,) = shown_rollout(record, lines[0]["id"], Screen(1_000, 100_000))["artifacts"]
    assert artifact["files"] == []


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_lock_that_is_not_a_regular_file_is_refused(folder: Path, kind: str) -> None:
    lock = folder / "run" / ".lock"
    lock.unlink(missing_ok=True)
    os.mkfifo(lock) if kind == "pipe" else lock.symlink_to(folder / "made")
    assert "error" in printed(folder, ["regrade", "run", "--trust"])
    assert not (folder / "made").exists()


def test_id_with_half_a_character_is_written_to_a_report(folder: Path) -> None:
    lines = (folder / "run" / "rollouts.jsonl").read_text().splitlines()
    record = json.loads(lines[0]) | {"id": chr(0xD800)}
    (folder / "run" / "rollouts.jsonl").write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    printed(folder, ["report", "run"])


def test_oversized_or_special_artifact_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    for name in ("large", "archive"):
        (tmp_path / "run" / name).mkdir(parents=True)
    os.truncate(os.open(tmp_path / "run" / "large" / "f", os.O_CREAT | os.O_WRONLY), LARGEST + 1)
    os.mkfifo(tmp_path / "run" / "archive" / "pipe")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "secret")
    sparse = tarfile.TarInfo("f")
    sparse.size = LARGEST_DIRECTORY + 1
    (tmp_path / "run" / "archive" / "bomb").write_bytes(sparse.tobuf())
    os.truncate(tmp_path / "run" / "archive" / "bomb", LARGEST_DIRECTORY + 10_240)
    for path, more in (("large", {}), ("link", {}), ("archive", {"archive": "pipe"}), ("archive", {"archive": "bomb"})):
        record = {"a": {"path": path, "target": "f", "sha256": "", **more}}
        with pytest.raises(UserError, match=r"has more than|is a link|a named pipe"):
            kept_artifacts(tmp_path / "run", record, ["a"])


def test_line_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LONGEST_LINE", 1 << 10)
    file = tmp_path / "lines.jsonl"
    for content in (b"\0" * (1 << 11), b'{"a": "' + b"x" * (1 << 11) + b'"}\n'):
        file.write_bytes(b"{}\n" + content)
        lines = journal.Journal(file)
        with pytest.raises(UserError, match=r"lines\.jsonl:2: this line has"):
            list(lines.read())
        if not content.endswith(b"\n"):
            with pytest.raises(UserError, match="last line: this line has"):
                lines.append({})
        lines.close()


VALUES: tuple[Any, ...] = (None, True, 5, -1, 1e308, "text", "", [], [5], [[]], {}, {"a": 5}, {"a": {"b": []}})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values of a value, its own first."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy in which another value stands at a path."""
    if not path:
        return new
    copied = copy.copy(value)
    copied[path[0]] = changed(value[path[0]], path[1:], new)
    return copied


@pytest.mark.generated
@pytest.mark.parametrize(("file", "read", "write"), [
    ("run.json", json.loads, json.dumps), ("spec.yaml", yaml.safe_load, yaml.safe_dump),
])  # fmt: skip
def test_corrupted_run_json_or_spec_is_read_or_raises_a_user_error(
    folder: Path, file: str, read: Callable[[str], Any], write: Callable[[Any], str]
) -> None:
    from hermes_rl.analysis.compare import compare_runs
    from hermes_rl.analysis.overview import overview
    from hermes_rl.analysis.push import prepare
    from hermes_rl.analysis.summary import summarise

    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - repeats a failure
    chance = random.Random(seed)
    whole = read((folder / "run" / file).read_text())
    every = list(places(whole))
    for number in range(400 if THOROUGH else 15):
        path, new = chance.choice(every), chance.choice(VALUES)
        (folder / "run" / file).write_text(write(changed(whole, path, new)))
        (folder / f"published-{number}").mkdir()
        readers = (
            lambda: overview(read_run(folder), "run"),
            lambda: summarise(read_run(folder)),
            lambda: compare_runs(read_run(folder), read_run(folder, "other")),
            lambda: spec_of(read_run(folder)),
            lambda number=number: prepare(folder / "run", "a/b", folder / f"published-{number}", {}),
        )
        for reader in readers:
            try:
                reader()
            except UserError:
                continue
            except Exception as error:
                raise AssertionError(f"{file}: {path} = {new!r}") from error


def read_run(folder: Path, name: str = "run") -> RunRecord:
    record = RunRecord(folder / name)
    record.refresh()
    return record
