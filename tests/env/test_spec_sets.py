"""Several specs in one process feed one trainer: their shares, runs, starts and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hermes_rl.cli.main import status
from hermes_rl.errors import install_command
from tests.cli.test_run import lines, listen_to_ctrl_c
from tests.commands import environment
from tests.env.canned import killed_at_the_end
from tests.env.trainer import free_port, train, trajectory_api
from tests.waiting import until

SPEC = """
dataset: {generator: "rows.py:rows"}
prompt: {user: "Say {{ n }}"}
rewards: {right: {fn: "rows.py:right"}}
solution: {turns: [{say: "{{ n }}"}]}
servers: {policy: {type: scripted, error_rate: 0.5}}
serve: {group_size: 4, total_steps: STEPS, eval_every: 0, api_url: URL}
atropos: {max_batches_offpolicy: 1, min_items_sent_before_logging: 1}
"""
CODE = """
from pathlib import Path

def rows(*, seed, split):
    yield from ({"n": n} for n in range(1000))

def right(item, result):
    if Path(__file__).with_name("broken").exists():
        raise ValueError("the reward is broken")
    return float(result.final_response == str(item["n"]))
"""
BATCH = 16
"""Sequences of a batch: four groups."""


def write(folder: Path, url: str = "http://127.0.0.1:9", steps: int = 8) -> None:
    """Two specs, each with its code in a folder of its own; their rows are the same."""
    for name in ("long", "short"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "rows.py").write_text(CODE)
        text = SPEC.replace("URL", url).replace("STEPS", str(steps)).replace("Say", f"{name}:")
        (folder / name / f"{name}.yaml").write_text(text)


SPECS = ("long/long.yaml", "short/short.yaml")


@asynccontextmanager
async def serving(
    folder: Path, *more: str, python: str = sys.executable, environ: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program as a user starts it; killed at the end where it still runs."""
    process = await asyncio.create_subprocess_exec(
        python, "-m", "hermes_rl.cli.main", "run", *SPECS, "serve", "--out", "run", *more,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
        cwd=folder, env=environ or environment(), preexec_fn=listen_to_ctrl_c,
    )  # fmt: skip
    async with killed_at_the_end(process):
        yield process


async def ended(process: asyncio.subprocess.Process, seconds: float = 60) -> str:
    output, _ = await asyncio.wait_for(process.communicate(), seconds)
    return output.decode()


def rows_of(batches: list[list[dict[str, Any]]]) -> list[tuple[str, int]]:
    """Which environment and row each group of the batches is of, in the order in which they came."""
    texts = [group["messages"][0][-2]["content"] for batch in batches for group in batch]
    return [(name, int(number)) for name, _, number in (text.partition(":") for text in texts)]


async def received(batches: list[Any], count: int) -> None:
    await until(lambda: len(batches) >= count, seconds=300)


@pytest.mark.slow
async def test_batches_follow_spec_weights_and_each_spec_has_a_run_directory(tmp_path: Path) -> None:
    steps = 12
    async with trajectory_api() as url:
        write(tmp_path, url, steps)
        async with serving(tmp_path, "--weight", "long=3", "--weight", "short=1") as process:
            batches = await asyncio.wait_for(train(url, steps=steps, batch_size=BATCH), 90)
            output = await ended(process)
    assert process.returncode == 0, output
    shares = Counter(name for name, _ in rows_of(batches))
    assert shares.total() == steps * 4
    # How many are uniform, and so left out, is up to chance; what is begun is not.
    assert 0.65 <= shares["long"] / shares.total() <= 0.85, shares
    begun = {name: len({one["group"] for one in lines(tmp_path / "run" / name / "rollouts.jsonl")}) for name in shares}
    assert abs(begun["long"] - 3 * begun["short"]) <= 3 + 4, "but for what was cancelled at the end"
    for name in ("long", "short"):
        directory = tmp_path / "run" / name
        assert f"run directory: run/{name}" in output
        assert f"{name}: serving {name} to {url}" in output
        assert json.loads((directory / "run.json").read_text())["name"] == name
        assert (directory / "report.html").is_file()
        of_it = {int(one["messages"][0][-2]["content"].split(":")[1]) for one in lines(directory / "groups.jsonl")}  # type: ignore[index]
        assert {number for of, number in rows_of(batches) if of == name} <= of_it


@pytest.mark.slow
async def test_kills_lose_and_repeat_no_group_of_either(tmp_path: Path) -> None:
    steps, batches = 12, []  # type: ignore[var-annotated]
    async with trajectory_api() as url:
        write(tmp_path, url, steps)
        trainer = asyncio.create_task(train(url, steps=steps, batch_size=BATCH, pause=0.1, batches=batches))
        for until in (2, 5):
            async with serving(tmp_path):  # killed at its end
                await asyncio.wait_for(received(batches, until), 90)
        async with serving(tmp_path) as process:
            await asyncio.wait_for(trainer, 90)
            output = await ended(process)
    assert process.returncode == 0, output
    assert "long: resuming at step" in output and "short: resuming at step" in output
    got = rows_of(batches)
    assert len(set(got)) == len(got) == steps * 4, "no group twice"
    for name in ("long", "short"):
        of_it = {number for of, number in got if of == name}
        uniform = {line["group"] for line in lines(tmp_path / "run" / name / "rollouts.jsonl")}
        # Groups end in another order than they begin; the last ones may still be in the queue.
        played = [line["group"] for line in lines(tmp_path / "run" / name / "groups.jsonl")]
        assert len(set(played)) == len(played) >= len(of_it) and set(played) <= uniform
        sent = [
            int(one["messages"][0][-2]["content"].split(":")[1])
            for one in lines(tmp_path / "run" / name / "groups.jsonl")
        ]  # type: ignore[index]
        assert set(sent[: len(sent) - 8]) <= of_it, "no group is missing"
        ids = [line["id"] for line in lines(tmp_path / "run" / name / "rollouts.jsonl")]
        assert len(set(ids)) == len(ids), "nothing was played twice"


@pytest.mark.slow
async def test_failing_spec_stops_all_and_the_same_command_resumes(tmp_path: Path) -> None:
    batches: list[Any] = []
    async with trajectory_api() as url:
        write(tmp_path, url, 8)
        trainer = asyncio.create_task(train(url, steps=8, batch_size=BATCH, batches=batches))
        async with serving(tmp_path, "--set", "budget.max_failures=0") as process:
            await asyncio.wait_for(received(batches, 1), 60)
            (tmp_path / "short" / "broken").touch()
            output = await ended(process)
        assert process.returncode == 1, output
        assert "error: short: 1 groups failed" in output and "the reward is broken" in output
        assert "Traceback" not in output
        assert "the reward is broken" in (tmp_path / "run" / "short" / "run.log").read_text()
        of_the_other = tmp_path / "run" / "long" / "run.log"
        assert not of_the_other.exists() or "the reward is broken" not in of_the_other.read_text()
        (tmp_path / "short" / "broken").unlink()
        async with serving(tmp_path, "--set", "budget.max_failures=0") as process:
            await asyncio.wait_for(trainer, 60)
            output = await ended(process)
        assert process.returncode == 0, output
    got = rows_of(batches)
    assert len(set(got)) == len(got)


@pytest.mark.slow
async def test_one_whose_budget_is_used_up_ends_alone(tmp_path: Path) -> None:
    async with trajectory_api() as url:
        write(tmp_path, url, 4)
        spec = tmp_path / "short" / "short.yaml"
        spec.write_text(spec.read_text() + "budget: {max_tokens: 1}\n")
        async with serving(tmp_path) as process:
            batches = await asyncio.wait_for(train(url, steps=4, batch_size=BATCH), 60)
            output = await ended(process)
    assert process.returncode == 1, output
    assert "short: ended early: budget.max_tokens (1) is used up" in output
    assert "the trainer has had its 4 steps" in output
    assert Counter(name for name, _ in rows_of(batches))["long"] >= 8


@pytest.mark.slow
async def test_ctrl_c_once_ends_all_with_130(tmp_path: Path) -> None:
    async with trajectory_api() as url:
        write(tmp_path, url, 1000)
        async with serving(tmp_path) as process:
            await asyncio.wait_for(train(url, steps=2, batch_size=BATCH), 60)
            process.send_signal(signal.SIGINT)
            output = await ended(process, 30)
    assert process.returncode == 130, output
    assert output.count("interrupted") == 1 and "Traceback" not in output
    for name in ("long", "short"):
        assert (tmp_path / "run" / name / "report.html").is_file(), "an interrupted run has its report too"


@pytest.mark.slow
async def test_no_environment_registers_if_one_fails_to_open(tmp_path: Path) -> None:
    async with trajectory_api() as url:
        write(tmp_path, url)
        rows = tmp_path / "short" / "rows.py"
        rows.write_text(rows.read_text().replace("range(1000)", "[]"))
        trainer = asyncio.create_task(train(url, steps=1, batch_size=BATCH))
        async with serving(tmp_path) as process:
            output = await ended(process)
        trainer.cancel()
        assert process.returncode == 1, output
        assert "short: the dataset has no rows to run" in output and "long:" in output
        async with aiohttp.ClientSession() as session, session.get(f"{url}/status-env", json={"env_id": 0}) as answer:
            assert answer.status == 500, "no environment is registered"
    assert lines(tmp_path / "run" / "long" / "rollouts.jsonl") == [], "nothing was played"


@pytest.mark.slow
async def test_missing_ray_is_reported_once_for_all_specs(tmp_path: Path) -> None:
    async with trajectory_api() as url:
        write(tmp_path, url)
        async with serving(tmp_path, "--ray") as process:
            output = await ended(process)
    assert process.returncode == 2, output
    assert output.count(install_command("ray")) == 1 and "Traceback" not in output
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------- what is refused at once


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path, f"http://127.0.0.1:{free_port()}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert status(["run", *command]) == 2
    assert not Path("run").exists() and not Path("outputs").exists(), "nothing began"
    return capsys.readouterr().err


def test_errors_of_all_specs_are_reported_before_any_starts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, before, after in (("long", "group_size", "group_sice"), ("short", "rows.py:right", "rows.py:rigth")):
        path = folder / name / f"{name}.yaml"
        path.write_text(path.read_text().replace(before, after))
    said = refused(capsys, *SPECS, "serve", "--out", "run")
    assert "long.yaml" in said and "group_size" in said
    assert "short.yaml" in said and "rigth" in said


def test_specs_with_the_same_name_are_refused_with_a_hint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "long.yaml").write_text((folder / "long" / "long.yaml").read_text())
    (folder / "other" / "rows.py").write_text(CODE)
    said = refused(capsys, *SPECS, "other/long.yaml", "serve")
    assert "other/long.yaml: this spec and long/long.yaml have the same name, long" in said
    assert "write another `name:`" in said


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([*SPECS, "process"], "process takes one spec, and only serve several. To evaluate several, write a set"),
        ([*SPECS, "evaluate"], "hermes-rl run set.yaml evaluate"),
        ([*SPECS, "serve", "--weight", "long"], "--weight long: it is NAME=NUMBER"),
        ([*SPECS, "serve", "--weight", "long=0"], "a number above 0"),
        ([*SPECS, "serve", "--weight", "long=1", "--weight", "long=2"], "--weight long is given twice"),
        ([*SPECS, "serve", "--weight", "lang=2"], "did you mean `long`?"),
        ([SPECS[0], "serve", "--weight", "long=2"], "--weight is about several specs"),
        ([*SPECS, "serves"], "did you mean `serve`?"),
        (["serve"], "no spec is named: hermes-rl run SPEC serve"),
        (list(SPECS), "the last argument must be the mode: hermes-rl run SPEC serve|process|evaluate"),
        ([SPECS[0], "serve", SPECS[1]], f"serve must follow all specs: hermes-rl run {SPECS[0]} {SPECS[1]} serve"),
        ([SPECS[0], "serve", "process"], "one mode is expected, and there are 2: serve, process"),
        ([*SPECS, "serve", "--set", "atropos.data_path_to_save_groups=all.jsonl"], "would both write"),
        ([*SPECS, "serve"], "start one with `run-api`"),
    ],
)
def test_what_cannot_be_served_together_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str], words: str
) -> None:
    assert words in refused(capsys, *command)


def test_what_is_wrong_with_the_command_line_is_said_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *SPECS, "serve", "--no.such", "1").count("there is no such option") == 1


def test_specs_of_different_trainers_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "short" / "short.yaml"
    path.write_text(path.read_text().replace("total_steps: 8", "total_steps: 9"))
    said = refused(capsys, *SPECS, "serve")
    assert "serve.total_steps: 8 in long/long.yaml, 9 in short/short.yaml" in said
    assert "--set serve.total_steps=…" in said


def test_out_of_several_specs_must_not_be_a_run_directory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "there").mkdir()
    (folder / "there" / "rollouts.jsonl").write_text("{}\n")
    assert "--out there: this is a run directory" in refused(capsys, *SPECS, "serve", "--out", "there")


def test_a_dry_run_says_it_of_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["run", *SPECS, "serve", "--dry-run", "--out", "run", "--weight", "long=3"]) == 0
    said = capsys.readouterr().out
    assert "run/long" in said and "run/short" in said
    assert not Path("run").exists()
