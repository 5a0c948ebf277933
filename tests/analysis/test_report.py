"""Every run directory has a page that can be opened, kept and sent: one file, small, in which nothing but ours runs."""

from __future__ import annotations

import hashlib
import json
import re
import time
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.analysis import report as report_module
from hermes_rl.analysis.record import RunRecord
from hermes_rl.analysis.report import NAME, asset, embedded, report, sample, write_report
from hermes_rl.rollouts.rollout import RolloutState
from tests.analysis.hostile import HOSTILE, UNSEEN, hostile_line, strings
from tests.analysis.recorded import recorded, write_run
from tests.commands import hermes


class Parts(HTMLParser):
    """The elements of a page, as a browser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inner: list[str] = []
        self.within = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inner.append("")
        self.within = True

    def handle_endtag(self, tag: str) -> None:
        self.within = False

    def handle_data(self, data: str) -> None:
        if self.within:
            self.inner[-1] += data

    def content(self, tag: str, **attributes: str) -> str:
        (found,) = [
            inner
            for (name, given), inner in zip(self.tags, self.inner, strict=True)
            if name == tag and attributes.items() <= given.items()
        ]
        return found


def data_of(page: str) -> Any:
    return json.loads(Parts(page).content("script", type="application/json"))


def read(run: Path) -> RunRecord:
    record = RunRecord(run)
    record.refresh()
    return record


def test_a_report_loads_nothing_and_runs_its_own_script_alone(tmp_path: Path) -> None:
    page = report(read(write_run(tmp_path / "run", [recorded("a"), recorded("b", score=None)])))
    parts = Parts(page)
    policy = next(given["content"] for tag, given in parts.tags if given.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; ")
    for kind, inner in (("script-src", parts.content("script", type="module")), ("style-src", parts.content("style"))):
        allowed = b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{kind} 'sha256-{allowed}'" in policy
    assert not [given for tag, given in parts.tags if given.get("src") or (tag == "link" and given["href"] != "data:,")]
    assert "unsafe" not in policy


def test_a_report_tells_of_the_whole_run_and_shows_a_sample(tmp_path: Path) -> None:
    lines = [recorded(f"row {row}", index, float(index == 0), size=4) for row in range(100) for index in range(4)]
    found = data_of(report(read(write_run(tmp_path / "run", [*lines, recorded("odd", score=None)]))))
    assert (found["overview"]["rollouts"], found["overview"]["failed"]) == (401, 1)
    assert found["overview"]["mean"] == 0.25
    assert found["overview"]["uneven"] == [100, 100]
    listed = {one["id"] for one in found["rollouts"]}
    shown = set(found["details"])
    assert len(listed) == 401 and len(shown) == 60 and shown < listed
    assert "odd:0-0" in shown
    assert f"the conversations of {len(shown)} of the run's rollouts" in found["overview"]["sampled"]
    assert (found["rows"]["total"], len(found["rows"]["rows"])) == (101, 101)


def test_report_of_500_rollouts_is_below_one_megabyte(tmp_path: Path) -> None:
    lines = [recorded(f"row {row}", index, float(index == 0), size=5) for row in range(100) for index in range(5)]
    page = write_report(write_run(tmp_path / "run", lines))
    assert page.stat().st_size < 1_000_000


def test_report_history_has_earlier_runs_of_the_same_spec_mode_and_rows(tmp_path: Path) -> None:
    same = {"started": "2026-11-01T10:00:00.000Z", "score": {"mean": 0.5, "low": 0.25, "high": 0.75}}
    write_run(tmp_path / "before", [recorded("a")], **same)
    write_run(tmp_path / "other mode", [recorded("a")], **{**same, "mode": "process"})
    write_run(tmp_path / "other rows", [recorded("a")], **same, dataset={"fingerprint": "other"})
    write_run(tmp_path / "without", [recorded("a")], started=same["started"])
    write_run(tmp_path / "after", [recorded("a")], **{**same, "started": "2026-11-03T10:00:00.000Z"})
    run = write_run(tmp_path / "run", [recorded("a")], started="2026-11-02T10:00:00.000Z")
    (earlier,) = data_of(report(read(run)))["overview"]["history"]
    assert (earlier["label"], earlier["mean"], earlier["low"]) == ("before", 0.5, 0.25)


def test_report_sample_covers_failures_extremes_and_stop_reasons(tmp_path: Path) -> None:
    lines = [recorded(f"{place}", 0, place / 1000) for place in range(500)]
    lines[250]["stop_reason"] = "max_turns"
    lines[300:310] = [recorded(f"{place}", score=None) for place in range(300, 310)]
    rollouts = read(write_run(tmp_path / "run", lines)).rollouts
    chosen = sample(rollouts)
    assert len(chosen) == 60
    assert {one.stop_reason for one in chosen} == {one.stop_reason for one in rollouts}
    assert sum(one.state == "failed" for one in chosen) >= 8
    scores = [one.score for one in chosen if one.score is not None]
    assert min(scores) == 0.0 and max(scores) == 0.499
    assert [one.begin for one in chosen] == sorted(one.begin for one in chosen)


def test_a_report_stays_small_whatever_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "ROOM", report_module.ROOM // 10)
    lines = []
    for place, filling in enumerate(["<&>", "\u202e", '"\\', "\U0001f600", "x"] * 2):
        line = recorded(f"{place}", text=filling * 60_000)
        line["messages"] += [{"role": "user", "content": ""} for _ in range(5_000)]
        lines.append(line)
    page = write_report(write_run(tmp_path / "run", lines))
    assert page.stat().st_size < 2_000_000
    found = data_of(page.read_text("utf-8"))
    assert any("more characters are in rollouts.jsonl" in text for text in strings(found["details"]))
    assert any(one["cut"] for one in found["details"].values())


def test_nothing_hostile_is_more_than_text(tmp_path: Path) -> None:
    page = report(read(write_run(tmp_path / "run", [hostile_line(), recorded("good")], name=HOSTILE[0])))
    assert not set(UNSEEN) & set(page)
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "link",
        "style",
        "body",
        "button",
        "header",
        "a",
        "nav",
        "ol",
        "p",
        "main",
        "noscript",
        "div",
        "h1",
        "kbd",
    }
    assert {tag for tag, _ in Parts(page).tags} == allowed | {"script"}
    found = data_of(page)
    assert not [text for text in strings(found) if set(UNSEEN) & set(text)]
    assert [text for text in strings(found["details"]) if HOSTILE[0] in text], "it is shown as text"


@pytest.mark.parametrize("text", HOSTILE)
def test_embedded_data_ends_nowhere(text: str) -> None:
    made = embedded([text])
    assert not set("<>&\u2028\u2029") & set(made)
    assert json.loads(made) == [text]


def test_the_page_filters_by_every_state() -> None:
    choice = re.findall(r'choice\("State", "state", \[(.*?)\]', asset("view.js"))
    assert [set(json.loads(f"[{states}]")) for states in choice] == [set(RolloutState)]


def test_the_page_makes_no_element_of_a_string() -> None:
    script = asset("view.js")
    forbidden = "innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|srcdoc"
    forbidden += r"|document\.write|\beval\b|new Function"
    assert re.findall(forbidden, script) == []
    assert "style=" not in asset("view.html")


@pytest.mark.parametrize("mode", ["process", "evaluate"])
def test_a_run_ends_with_its_report(tmp_path: Path, mode: str) -> None:
    done = hermes(
        "run", "terminal-files", mode, "--demo", "--out", "run", "--quiet", "--set", "process.groups=2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = data_of((tmp_path / "run" / NAME).read_text("utf-8"))
    assert found["overview"]["mode"] == mode
    assert len(found["rollouts"]) == {"process": 8, "evaluate": 2}[mode]
    if mode == "process":
        shown = next(iter(found["details"].values()))
        assert "Create the file" in shown["prompt_text"]
        assert any(turn >= 0 for _, turn, _ in shown["tokens"][0]["tokens"])


def test_a_run_that_fails_has_a_report_of_its_failures(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def broken(result):\n    raise OSError('the disk is gone')\n")
    (tmp_path / "spec.yaml").write_text(
        "name: failing\ndataset: {items: [{q: a}]}\nprompt: {user: '{{ q }}'}\n"
        "rewards: {broken: {fn: 'broken.py:broken'}}\n"
        "solution: {turns: [{say: b}]}\nprocess: {groups: 1, group_size: 2}\n"
    )
    done = hermes("run", "spec.yaml", "process", "--demo", "--out", "run", cwd=tmp_path)
    assert done.returncode == 1
    (cause,) = data_of((tmp_path / "run" / NAME).read_text("utf-8"))["overview"]["failures"]
    assert cause["name"] == "reward_failure"
    assert "the disk is gone" in cause["last"]


def test_a_report_that_cannot_be_written_is_said_and_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "run" / NAME).mkdir(parents=True)
    done = hermes("run", "terminal-files", "evaluate", "--demo", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "report.html was not written" in done.stderr
    assert "hermes-rl report run" in done.stderr


def test_regrade_and_report_rewrite_the_report(tmp_path: Path) -> None:
    assert hermes("run", "terminal-files", "evaluate", "--demo", "--out", "run", cwd=tmp_path).returncode == 0
    place = tmp_path / "run" / NAME
    before = data_of(place.read_text("utf-8"))["overview"]["mean"]
    graded = hermes("regrade", "run", "--set", "rewards.concise.weight=3", cwd=tmp_path)
    assert graded.returncode == 0, graded.stderr
    assert data_of(place.read_text("utf-8"))["overview"]["mean"] != before
    place.unlink()
    done = hermes("report", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"run/{NAME}\n")
    assert place.is_file()
    assert hermes("report", "nowhere", cwd=tmp_path).returncode == 2


@pytest.mark.slow
def test_a_report_of_a_large_run_is_made_in_seconds(tmp_path: Path) -> None:
    line = json.dumps(recorded("row"))
    run = write_run(tmp_path / "run", [])
    (run / "rollouts.jsonl").write_text(
        "".join(line.replace("row:0-0", f"row:0-{place}") + "\n" for place in range(20_000))
    )
    began = time.monotonic()
    page = write_report(run)
    assert time.monotonic() - began < 20
    assert page.stat().st_size < 1_000_000
