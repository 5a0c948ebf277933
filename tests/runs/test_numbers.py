"""Every number that is reported follows from the server's own log and from the records, whatever a run went through.

The formulas here are the definitions; the package computes the same numbers in its own way.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from hermes_rl.analysis.compare import compare_runs
from hermes_rl.analysis.overview import overview
from hermes_rl.analysis.record import RunRecord
from hermes_rl.analysis.sets import SetRun, set_table
from hermes_rl.analysis.summary import summarise
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from tests.commands import started
from tests.runs.counting_server import COST, CountingServer, counting_server
from tests.runs.test_budgets import run, same, write_spec
from tests.waiting import BOUND, until

Line = dict[str, Any]
WORDS = {"whole": 1.0, "half": 0.5, "third": 1 / 3}


class Figures:
    """Compares figures, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def same(self, name: str, reported: Any, expected: Any) -> None:
        self.count += 1
        assert reported == pytest.approx(expected, rel=1e-9, abs=1e-12), name


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_records(figures: Figures, lines: list[Line], server: CountingServer, since: int) -> None:
    """Compare records with the server's log since the start of the run that wrote them."""
    for line in lines:
        for name, count in server.used("policy", line["id"], since).items():
            if name != "unanswered":  # requests that were sent again are counted for the run
                figures.same(f"{line['id']} {name}", line["usage"][name], count)
        words = line["messages"][-1]["content"].split(" ")[0] if line["stop_reason"] == "finished" else ""
        if line["score"] is not None:
            figures.same(f"{line['id']} word", line["rewards"]["word"]["value"], WORDS.get(words, 0.0))
            figures.same(f"{line['id']} score", line["score"], sum(each["value"] for each in line["rewards"].values()))


def pass_at(k: int, scores: list[float], success: float) -> float:
    """Return the share of choices of k rollouts of which one passes, by going through them."""
    return fmean(max(chosen) >= success for chosen in combinations(scores, k))


def check_metrics(figures: Figures, folder: Path, rows: dict[str, list[Line]], rollouts: int) -> None:
    metrics = json.loads((folder / "metrics.json").read_text())["results"]["all"]
    lines = [line for row in rows.values() for line in row]
    graded = [line for line in lines if line["score"] is not None]
    scores = [[line["score"] for line in row if line["score"] is not None] for row in rows.values()]
    expected: dict[str, float] = {
        "eval/rows": len(rows),
        "eval/mean_reward": fmean(line["score"] for line in graded),
        "eval/reward/word": fmean(line["rewards"]["word"]["value"] for line in graded),
        "eval/reward/judged": fmean(line["rewards"]["judged"]["value"] for line in graded),
        "eval/turns": fmean(line["turns"] for line in graded),
        "eval/prompt_tokens": fmean(line["usage"]["prompt_tokens"] for line in graded),
        "eval/completion_tokens": fmean(line["usage"]["completion_tokens"] for line in graded),
        "eval/tool_calls": fmean(len(line["tool_calls"]) for line in graded),
        "eval/cost": fmean(COST * (line["usage"]["calls"] + calls_of_judge(line)) for line in graded),
    }
    for k in (k for k in (1, 2) if k <= rollouts):
        enough = [row for row in scores if len(row) >= k]
        expected[f"eval/pass@{k}"] = fmean(pass_at(k, row, 1.0) for row in enough)
    for name, value in expected.items():
        figures.same(name, metrics[name], value)


def calls_of_judge(line: Line) -> int:
    return int(line["roles"].get("judge", {}).get("calls", 0))


def check_pages(figures: Figures, folder: Path, counting: list[Line], lines: list[Line], usage: Any) -> None:
    """Compare what every page says with the records and with run.json, which was compared with the server."""
    record = RunRecord(folder)
    record.refresh()
    page, summary = overview(record, "run"), summarise(record)
    cell = set_table("set", [SetRun("s", "m", "", folder)]).players[0].cells[0]
    graded = [line for line in counting if line["score"] is not None]
    excluded = [line for line in counting if line["state"] == "excluded"]
    mean, rows = fmean(line["score"] for line in graded), {line["row_key"] for line in counting}
    tokens = usage["policy"]["prompt_tokens"] + usage["policy"]["completion_tokens"]
    cost = sum(used["cost"] for used in usage.values())
    copy = RunRecord(Path(shutil.copytree(folder, folder.parent / f"copy {len(lines)} {len(counting)}")))
    copy.refresh()
    same_run = compare_runs(record, copy).found
    assert summary.score is not None and cell.score is not None
    for name, reported, expected in (
        ("page rollouts", page["rollouts"], len(counting)),
        ("page rows", page["rows"], len(rows)),
        ("page scored", page["scored"], len(graded)),
        ("page attempts", page["attempts"], len(lines)),
        ("page mean", page["mean"], mean),
        ("page tokens", page["tokens"], tokens),
        ("page cost", page["cost"], cost),
        ("show rollouts", summary.rollouts, len(counting)),
        ("show graded", summary.graded, len(graded)),
        ("show rows", summary.rows, len(rows)),
        ("show mean", summary.score.mean, mean),
        ("show turns", summary.counts["turns"].mean, fmean(line["turns"] for line in graded)),
        ("show prompt", summary.counts["prompt tokens"].mean, fmean(line["usage"]["prompt_tokens"] for line in graded)),
        ("show word", summary.rewards["word"].mean, fmean(line["rewards"]["word"]["value"] for line in graded)),
        ("set mean", cell.score.value, mean),
        ("set rows", cell.rows, len(rows)),
        ("set ungraded", cell.ungraded, len(counting) - len(graded) - len(excluded)),
        ("set tokens", cell.prompt_tokens + cell.completion_tokens, tokens),
        ("set cost", cell.cost, cost),
        ("compare rows", same_run.score.rows, len({line["row_key"] for line in graded})),
        ("compare mean", same_run.score.a, fmean(fmean_by_row(graded))),
        ("compare change", same_run.score.difference, 0.0),
    ):
        figures.same(name, reported, expected)
    for stop_reason in {line["stop_reason"] for line in counting}:
        shown = sum(each["count"] for each in page["stop_reasons"] if each["name"] == stop_reason)
        figures.same(f"page {stop_reason}", shown, sum(line["stop_reason"] == stop_reason for line in counting))
        figures.same(
            f"show {stop_reason}",
            summary.stop_reasons[stop_reason],
            sum(line["stop_reason"] == stop_reason for line in counting),
        )


def fmean_by_row(lines: list[Line]) -> list[float]:
    rows: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        rows[line["row_key"]].append(line["score"])
    return [fmean(scores) for scores in rows.values()]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_metrics_stay_correct_when_an_evaluation_is_resized_and_resumed(tmp_path: Path, workers: int) -> None:
    figures, out, since, written = Figures(), tmp_path / "out", 0, 0
    starts: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"rollouts": 2}, {"max_cost": 0.6}),
        ({"rollouts": 2}, {}),
        ({"rollouts": 3}, {}),
        ({"rollouts": 3, "limit": 12}, {}),
        ({"rollouts": 2}, {}),
    )
    async with counting_server(fails=0.05) as server:
        for evaluate, budget in starts:
            sections = {"evaluate": {"concurrency": 8, "workers": workers, **evaluate}, "budget": budget}
            usage = (await run(tmp_path, server, "evaluate", **sections))["usage"]
            lines = lines_of(out / "rollouts.jsonl")
            same(dict(usage), server)
            check_records(figures, lines[written:], server, since)
            since, written = len(server.calls), len(lines)
            rows: dict[str, list[Line]] = defaultdict(list)
            for line in lines:
                if line["index"] < evaluate["rollouts"]:
                    rows[line["row_key"]].append(line)
            order = [sample["row_key"] for sample in lines_of(out / "samples.jsonl")]
            whole = {key: row for key, row in rows.items() if len(row) == evaluate["rollouts"] and key in order}
            assert len(whole) == evaluate.get("limit", 20) or budget
            check_metrics(figures, out, whole, evaluate["rollouts"])
            check_pages(figures, out, [line for row in whole.values() for line in row], lines, usage)
    assert figures.count >= 400


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_calls_of_starts_that_ctrl_c_ends_are_counted(tmp_path: Path, workers: int) -> None:
    figures, out, written = Figures(), tmp_path / "out", 0
    sections = {"evaluate": {"concurrency": 8, "workers": workers, "rollouts": 3}}
    async with counting_server(fails=0.05) as server:
        write_spec(tmp_path, server, **sections)
        for is_last in (False, False, True):
            since = len(server.calls)
            if is_last:
                usage = (await run(tmp_path, server, "evaluate", **sections))["usage"]
            else:
                start = started("run", "spec.yaml", "evaluate", "--out", "out", "--quiet", cwd=tmp_path)
                await until(lambda since=since: len(server.calls) >= since + 60 and server.in_flight)
                start.send_signal(signal.SIGINT)
                assert await asyncio.to_thread(start.wait, BOUND) == 130, start.said()
                await until(lambda: not server.in_flight)
                usage = json.loads((out / "run.json").read_text())["usage"]
            lines = lines_of(out / "rollouts.jsonl")
            same(dict(usage), server)
            check_records(figures, lines[written:], server, since)
            assert len(lines) > written
            written = len(lines)
        rows: dict[str, list[Line]] = defaultdict(list)
        for line in lines:
            rows[line["row_key"]].append(line)
        assert [len(row) for row in rows.values()] == [3] * 20
        answered = sum(line["usage"]["calls"] for line in lines)
        assert usage["policy"]["calls"] > answered, "calls of rollouts that Ctrl-C has ended are in no record"
        check_metrics(figures, out, rows, 3)
        check_pages(figures, out, lines, lines, usage)
    assert figures.count >= 400


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_groups_that_were_dropped_masked_and_retried(tmp_path: Path, workers: int) -> None:
    figures, out = Figures(), tmp_path / "out"
    async with counting_server(fails=0.05) as server:
        since = written = 0
        for groups in (4, 9):
            settings = {"groups": groups, "group_size": 4, "concurrency": 8, "workers": workers}
            usage = (await run(tmp_path, server, "process", process=settings))["usage"]
            same(dict(usage), server)
            lines = lines_of(out / "rollouts.jsonl")
            check_records(figures, lines[written:], server, since)
            since, written = len(server.calls), len(lines)
        by_group: dict[str, list[Line]] = defaultdict(list)
        for line in lines:
            by_group[line["group"]].append(line)
        made = lines_of(out / "groups.jsonl")
        figures.same("groups", len(made), 9)
        for group in made:
            members = sorted(by_group[group["group"]], key=lambda line: line["index"])
            assert len(members) == 4 and {line["state"] for line in members} == {"scored"}
            figures.same(f"{group['group']} scores", group["scores"], [line["score"] for line in members])
            masked = [override.get("set_advantage_to_zero", False) for override in group["overrides"] or [{}] * 4]
            figures.same(f"{group['group']} masked", masked, [line["stop_reason"] == "max_turns" for line in members])
    record = RunRecord(out)
    record.refresh()
    page = overview(record, "run")
    figures.same("tokens", page["tokens"], usage["policy"]["prompt_tokens"] + usage["policy"]["completion_tokens"])
    figures.same("cost", page["cost"], sum(used["cost"] for used in usage.values()))


SEEDED = """
dataset: {items: [ITEMS]}
prompt: {user: "Say {{ word }}"}
rewards:
  said: {fn: "code.py:said"}
  steps: {fn: "code.py:steps", weight: 0.5}
  fragile: {fn: "code.py:fragile", weight: -0.5}
solution: {turns: [{say: "{{ word }} and more of it"}]}
servers: {policy: {type: scripted, error_rate: 0.7}}
process: {groups: 12, group_size: 4}
"""
SEEDED_CODE = """
def said(result):
    return len(set(result.final_response)) / 30

def steps(result):
    return [len(text) / 100 for text in result.texts]

def fragile(result):
    return 0.1 / (len(result.final_response) % 3)
"""


def without_times(rewards: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    times = ("started_at", "seconds")
    return {name: {key: value for key, value in reward.items() if key not in times} for name, reward in rewards.items()}


async def test_one_seed_gives_equal_results_at_any_concurrency(tmp_path: Path) -> None:
    items = ", ".join(f"{{word: {'ab' * number}}}" for number in range(1, 13))
    (tmp_path / "code.py").write_text(SEEDED_CODE)
    (tmp_path / "spec.yaml").write_text(SEEDED.replace("ITEMS", items))
    played = []
    for concurrency, workers in ((1, 1), (8, 1), (64, 1), (64, 2)):
        spec = load_spec(tmp_path / "spec.yaml", mode="process", environ={})
        process = spec.process.model_copy(update={"concurrency": concurrency, "workers": workers})
        out = tmp_path / f"{concurrency} {workers}"
        launch = RunOptions("process", out, progress=Progress(quiet=True))
        await run_process(spec.model_copy(update={"process": process}), launch)
        lines = sorted(lines_of(out / "rollouts.jsonl"), key=lambda line: (line["group"], line["index"]))
        groups = sorted(lines_of(out / "groups.jsonl"), key=lambda group: group["group"])
        played.append(
            (
                [(line["id"], line["score"], without_times(line["rewards"]), line["error"]) for line in lines],
                [
                    {key: group[key] for key in ("group", "tokens", "scores", "advantages", "overrides")}
                    for group in groups
                ],
            )
        )
    rollouts, groups = played[0]
    assert len(rollouts) == 48 and len(groups) == 12
    blamed = [
        rewards["fragile"]["value"] for _, _, rewards, _ in rollouts if "ZeroDivisionError" in str(rewards["fragile"])
    ]
    assert blamed and set(blamed) == {1.0}, "the policy's failure gets the end of the range that lowers the score"
    assert any(group["advantages"] for group in groups)
    for other in played[1:]:
        assert other == played[0]


SEATS = """
dataset: {items: [ITEMS], eval: {fraction: 0.5}}
prompt: {system: "You talk.", user: "Row {{ n }}."}
agents: {asker: {}, teller: {server: other, train: false}}
schedule: {order: alternate, rounds: 2}
rewards:
  word: {fn: "code.py:word"}
  judged: {fn: llm_judge, args: {rubric: "It is kind."}}
agent: {max_turns: 4}
on_stop: {length: drop}
servers:
  policy: {type: openai, base_url: "URL/policy/v1", model: m}
  other: {type: openai, base_url: "URL/other/v1", model: o}
  judge: {type: openai, base_url: "URL/judge/v1", model: m}
evaluate: {rollouts: 2, concurrency: 8}
"""


async def test_usage_of_seats_with_two_models_is_counted_separately(tmp_path: Path) -> None:
    figures, out = Figures(), tmp_path / "out"
    async with counting_server(fails=0.05) as server:
        usage = (await run(tmp_path, server, "evaluate", spec=SEATS))["usage"]
        same(dict(usage), server)
    assert set(usage) == {"policy", "other", "judge"}
    lines = lines_of(out / "rollouts.jsonl")
    for line in lines:
        role, seat = line["seat"]["role"], line["seat"]["name"]
        called = f"{line['seat']['of']}-{line['index']}@{seat}"
        for name, count in server.used(role, called).items():
            if name != "unanswered":
                figures.same(f"{called} {name}", line["usage"][name], count)
    record = RunRecord(out)
    record.refresh()
    page, summary = overview(record, "run"), summarise(record)
    first = [line for line in lines if line["seat"]["name"] == "asker"]
    graded = [line for line in first if line["score"] is not None]
    figures.same("rollouts", page["rollouts"], len(first))
    figures.same("tokens", page["tokens"], usage["policy"]["prompt_tokens"] + usage["policy"]["completion_tokens"])
    figures.same("cost", page["cost"], sum(used["cost"] for used in usage.values()))
    figures.same("page mean", page["mean"], fmean(line["score"] for line in graded))
    assert summary.score is not None
    figures.same("show mean", summary.score.mean, fmean(line["score"] for line in graded))
    metrics = json.loads((out / "metrics.json").read_text())["results"]["all"]
    figures.same("metrics mean", metrics["eval/mean_reward"], fmean(line["score"] for line in graded))
    for seat in ("asker", "teller"):
        own = [line for line in lines if line["seat"]["name"] == seat and line["score"] is not None]
        name = f"eval/seat/{seat}/mean_reward"
        figures.same(name, metrics[name], fmean(line["score"] for line in own))
