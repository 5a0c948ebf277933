"""The page of runs in a real browser: use by a person, and rollouts that attack it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from hermes_rl.analysis.report import write_report
from tests.analysis.hostile import HOSTILE, hostile_line
from tests.analysis.recorded import recorded, write_run
from tests.real.environments import HERE, axe_script, browser_python
from tests.view.viewed import Viewed

COMPONENT = "Chromium, with Playwright and axe-core: the pages of view and report.html"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(600)]
MAKES_MORE = {"script", "img", "iframe", "object", "embed", "style", "base", "math", "video"}
SHOTS = os.environ.get("HERMES_RL_SHOTS", "")
"""A folder for pictures of the pages, for whoever changes how they look."""


def step(name: str, **given: Any) -> Any:
    program = shutil.which("chromium")
    assert program is not None, "the tests of a real browser need chromium (apt-get install chromium)"
    command = [str(browser_python()), str(HERE / "browser_steps.py"), name, json.dumps({"program": program, **given})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("viewed")
    command = [sys.executable, "-m", "hermes_rl.cli.main", "run", "terminal-files", "process", "--out", "played"]
    subprocess.run([*command, "--set", "process.groups=8"], cwd=made, check=True, capture_output=True, timeout=120)
    again = [*command[:-1], "again", "--set", "process.groups=8", "--set", "servers.policy.error_rate=0.9"]
    subprocess.run(again, cwd=made, check=True, capture_output=True, timeout=120)
    return made


@pytest.fixture
def viewed(folder: Path) -> Iterator[Viewed]:
    with Viewed(folder) as viewer:
        yield viewer


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_a_person_finds_a_rollout_and_sends_its_link(viewed: Viewed, scheme: str, width: int) -> None:
    url = f"{viewed.url}?token={viewed.token}"
    asked = {"url": url, "origin": viewed.url, "folder": "played", "axe": str(axe_script())}
    found = step("walk", **asked, scheme=scheme, width=width, shots=SHOTS)
    assert found["address"] == viewed.url, "an address that is copied does not give the token away"
    looked = ["list", "run", "rows", "spec", "rollouts", "filters", "filtered", "rollout", "tokens", "record", "group"]
    looked += ["compare"]
    assert {name: found[name] for name in looked} == {name: [] for name in looked}
    assert "file_matches is below 0.2 in" in found["summary"] and "Is it good?" in found["summary"]
    assert "read these first" in found["summary"].lower()
    assert found["squares"] == 32
    assert "rows graded in both" in found["compared"] and "fixed" in found["compared"]
    assert set(found["scores"]) == {"✓ 1.00"}
    assert found["sorted"].startswith("Tokens")
    assert "Why 1.00" in found["why"] and "Timeline" in found["why"]
    assert "write_file" in found["trained"] and "You are a careful engineer" not in found["trained"]
    assert "log-probability 0; model call 1" in found["told"]
    assert "You are a careful engineer" in found["prompt"]
    assert found["members"] == 4
    assert found["sent"].startswith("Create the file")
    assert "its token is missing" in found["stranger"]
    assert found["wrong"] == [] and found["outside"] == []


def test_runs_that_cannot_be_compared_are_named_with_the_reason(tmp_path: Path) -> None:
    for folder, question in (("one/run", "a"), ("two/run", "b")):
        spec = f"""
            name: small
            dataset: {{items: [{{question: {question}}}]}}
            prompt: {{user: "{{{{ question }}}}"}}
            servers: {{policy: {{type: scripted, prices: {{prompt: 0.1, completion: 0.1}}}}}}
            rewards: {{few: {{fn: turn_efficiency, args: {{best: 1, worst: 3}}}}}}
            process: {{groups: 1, group_size: 2}}
        """
        (tmp_path / "small.yaml").write_text(dedent(spec))
        command = [sys.executable, "-m", "hermes_rl.cli.main", "run", "small.yaml", "process", "--out", folder]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    shutil.copytree(tmp_path / "one", tmp_path / "three")
    with Viewed(tmp_path) as viewer:
        found = step("refused", url=f"{viewer.url}?token={viewer.token}", origin=viewer.url)
    assert set(found["choices"]) == {"Compare one/run", "Compare two/run", "Compare three/run"}
    assert found["heading"] == "These two runs cannot be compared"
    assert "the runs have no row in common" in found["why"]
    assert found["links"] == 2
    assert found["back"] == "Runs"
    assert "is given twice: a run does not differ from itself" in found["itself"]
    assert "1 row graded in both" in found["copy"]
    assert found["copy"].count("in both") > 3, "what is equal is said in words"


def test_a_keyboard_is_enough(viewed: Viewed) -> None:
    found = step("keyboard", url=f"{viewed.url}?token={viewed.token}", origin=viewed.url, folder="played")
    assert found["unseen"] == []
    assert "log-probability" in found["told"]
    assert found["wrong"] == [] and found["outside"] == []


@pytest.mark.parametrize("width", [400, 1400])
def test_single_keys_lead_through_a_run_and_back_to_its_place(viewed: Viewed, width: int) -> None:
    found = step("keys", url=f"{viewed.url}?token={viewed.token}", origin=viewed.url, width=width)
    assert found["used"]["compare"] == 5 and found["used"]["failed"] == 7
    assert {found["used"][task] for task in ("next failed", "back", "end")} == {1}
    assert found["listed"][0]["top"] < 300, "the list begins at the top"
    assert all(row["right"] <= width and "." in row["score"] for row in found["listed"]), "each score is in sight"
    assert found["listed"][0]["question"].startswith("Create the file")
    assert [found["failed"].index(address) for address in found["seen"]] == [2, 3], "the next failed ones of the list"
    assert found["returned"]["entry"] == found["seen"][-1]
    assert 0 <= found["returned"]["top"] < 500, "it is in sight"
    assert found["followed"] == found["matches"] and len(found["matches"]) > 1
    assert "terminal-files" not in found["crumbs"], "a wrong address leaves nothing of the page before it"
    assert found["wrong"] == [] and found["outside"] == []


def test_a_hostile_rollout_is_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "bad", [hostile_line(), recorded("good")], name=HOSTILE[0])
    report = write_report(run).as_uri()
    with Viewed(tmp_path) as viewed:
        (name,) = viewed.names()
        views = ("", "/rollouts", "/rows", "/spec", "/bad%3A0-0/record", "/bad%3A0-0")
        pages = [f"?token={viewed.token}", *(f"#{name}{view}" for view in views)]
        pages = [f"{viewed.url}{page}" for page in pages]
        found = step("hostile", pages=pages, origin=viewed.url)
        filed = step("hostile", pages=[report, *(f"{report}#bad{view}" for view in views[1:])], origin="file://")
    for told in (found, filed):
        assert told["wrong"] == [] and told["outside"] == []
        assert told["refused"] is True and told["cookie"] == ""
        for one in told["seen"]:
            assert one["hacked"] is None
            assert not MAKES_MORE & set(one["elements"])
            assert [link for link in one["links"] if not link.startswith("#")] == []
            assert one["handlers"] == []
        assert "\\u202egnp.exe" in told["seen"][-1]["text"]
        assert "<script>window.hacked=1" in told["seen"][-1]["text"]


def test_a_run_that_grows_is_seen_to_grow(tmp_path: Path) -> None:
    run = write_run(tmp_path / "grows", [recorded("a"), recorded("b")])
    line = json.dumps(recorded("c")) + "\n"
    with Viewed(tmp_path) as viewed:
        url = f"{viewed.url}?token={viewed.token}"
        file = str(run / "rollouts.jsonl")
        found = step("growing", url=url, origin=viewed.url, folder="grows", file=file, line=line)
    assert found["focus"] == "A"
    assert found["wrong"] == [] and found["outside"] == []


def test_runs_that_are_not_read_yet_are_listed_and_filled_in_later(tmp_path: Path) -> None:
    for index in range(12):
        write_run(tmp_path / f"run{index}", [recorded("a"), recorded("b")])
    with Viewed(tmp_path) as viewed:
        found = step("unread", url=f"{viewed.url}?token={viewed.token}", origin=viewed.url)
    assert found["left"] == 0
    assert found["wrong"] == [] and found["outside"] == []


def resident(viewed: Viewed) -> int:
    """Return the viewer's memory in bytes."""
    pages = int(Path(f"/proc/{viewed.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_view_of_100000_rollouts_opens_fast_with_bounded_memory(tmp_path: Path) -> None:
    chance = random.Random(7)
    run = write_run(tmp_path / "large", [])
    with (run / "rollouts.jsonl").open("w") as file:
        line = json.dumps(recorded("ROW", 0, 0.125, size=8))
        for place in range(100_000):
            own = line.replace("ROW", f"row {place // 8}").replace(":0-0", f":0-{place % 8}")
            own = own.replace('"index": 0', f'"index": {place % 8}').replace("0.125", str(chance.randrange(9) / 8))
            file.write(own + "\n")
    with Viewed(run) as viewed:
        url = f"{viewed.url}?token={viewed.token}"
        (name,) = viewed.names()
        found = step("large", url=url, origin=viewed.url, run=name)
        assert found["first"] < max(2.0, found["whole"] / 4), found  # other work makes both slower
        assert found["wrong"] == [] and found["outside"] == []
        assert max(found["elements"]) < 1.1 * min(found["elements"])
        assert viewed.read(name)["rollouts"] == 100_000
        queries: list[dict[str, Any]] = [{}, {"sort": "score", "descending": "1"}, {"least": "0.5"}]

        def pages(count: int) -> None:
            for query in queries:
                cursor = ""
                for _ in range(count):
                    page = viewed.get("runs", name, "rollouts", cursor=cursor, **query)
                    assert len(page["rollouts"]) == 50
                    viewed.get("runs", name, "rollouts", page["rollouts"][0]["id"])
                    cursor = page["cursor"]

        pages(10)
        before = resident(viewed)
        pages(67)  # 201 pages, and as many rollouts
        grown = resident(viewed) - before
        assert grown < 5 * 2**20, f"{grown / 2**20:.1f} MiB more than {before / 2**20:.0f} MiB"
        assert before < 400 * 2**20


def test_first_paint_of_many_rollouts_and_runs_is_fast(tmp_path: Path) -> None:
    chance = random.Random(7)
    lines = []
    for place in range(10_000):
        line = recorded(f"row {place // 8 % 250}", place % 8, chance.randrange(9) / 8, size=8)
        epoch = place // 2_000
        lines.append({**line, "id": f"{line['row_key']}:{epoch}-{place % 8}", "group": f"{line['row_key']}:{epoch}"})
        lines[-1]["epoch"] = epoch
    write_run(tmp_path / "many" / "rollouts", lines)
    for place in range(199):
        own = [recorded(f"row {row}", 0, chance.random()) for row in range(20)]
        write_run(tmp_path / "runs" / f"run-{place:03}", own, started=f"2026-11-01T10:{place % 60:02}:00.000Z")
    with Viewed(tmp_path) as viewed:
        url = f"{viewed.url}?token={viewed.token}"
        name = next(name for name in viewed.names() if name.startswith("rollouts-"))
        viewed.read(name)
        pages = {
            "runs": ["", "tbody a[data-entry]"],
            "summary": [f"#{name}", ".find"],
            "rows": [f"#{name}/rows", ".squares a"],
            "rollouts": [f"#{name}/rollouts", "tr[data-rollout]"],
        }
        seconds = step("paints", url=url, origin=viewed.url, pages=pages, times=10)
    medians = {page: sorted(times)[len(times) // 2] for page, times in seconds.items()}
    assert max(medians.values()) < 4.0, medians  # a second, on a machine without other work
