"""Who is answered by `hermes-rl view`, with what, and what is never given away."""

from __future__ import annotations

import fcntl
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest

from hermes_rl.view.server import SAFE
from tests.analysis.hostile import HOSTILE, UNSEEN, hostile_line, strings
from tests.analysis.recorded import recorded, write_run
from tests.commands import hermes
from tests.view.viewed import Viewed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("viewed")
    lines = [recorded(f"row {place // 4}", place % 4, (place % 5) / 4, size=4) for place in range(120)]
    lines[7] = recorded("row 1", 3, score=None, size=4)
    write_run(made / "runs" / "many", lines)
    bad = hostile_line()
    bad["artifacts"]["patch"] = {"path": "artifacts/bad/patch", "target": "/p", "files": 3, "bytes": 9, "sha256": "0"}
    bad["artifacts"]["other"] = {"path": "../secret.txt", "target": "/o", "files": 1, "bytes": 9, "sha256": "0"}
    run = write_run(made / "runs" / "bad", [bad])
    kept = run / "artifacts" / "bad" / "patch"
    (kept / "deep").mkdir(parents=True)
    (kept / "page.html").write_text(HOSTILE[0])
    (kept / "deep" / "naïve \r\n.txt").write_text("deep")
    (made / "runs" / "secret.txt").write_text("secret")
    (kept / "link").symlink_to(made / "runs" / "secret.txt")
    return made


@pytest.fixture(scope="module")
def viewed(folder: Path) -> Iterator[Viewed]:
    with Viewed(folder / "runs") as viewer:
        yield viewer


def run_of(viewed: Viewed, folder: str) -> str:
    return next(name for name in viewed.names() if name.startswith(f"{folder}-"))


PATHS = ["/", "/view.js", "/view.css", "/api/runs", "/api/nowhere", "/nowhere", "/api/runs/none/rollouts/x"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [True, False])
def test_every_response_has_security_headers(viewed: Viewed, path: str, token: bool) -> None:
    _, headers, _ = viewed.ask(path, token=token)
    assert {name: headers.get(name.lower()) for name in SAFE} == SAFE
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]


def test_the_page_is_given_to_everybody_and_holds_no_data(viewed: Viewed, folder: Path) -> None:
    for path in ("/", "/view.js", "/view.css"):
        status, _, body = viewed.ask(path, token=False)
        assert status == 200
        assert str(folder).encode() not in body
        assert viewed.token.encode() not in body


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic dG9rZW4="},
        {"Authorization": "Bearer \xff"},
        {"Cookie": "hermes_rl_view=wrong"},
        {"Cookie": "=;=; \x01"},
    ],
)
@pytest.mark.parametrize("path", ["/api/runs", "/api/nowhere", "/openapi.json", "/docs"])
def test_requests_without_the_token_are_refused(viewed: Viewed, path: str, headers: dict[str, str]) -> None:
    status, _, body = viewed.ask(path, headers, token=False)
    assert status == 401
    assert b"has printed" in body


def test_the_address_gives_a_cookie_that_no_script_and_no_other_site_uses(viewed: Viewed) -> None:
    status, headers, _ = viewed.ask(f"/?token={viewed.token}", token=False)
    assert status == 200
    cookie, *rules = [part.strip() for part in headers["set-cookie"].split(";")]
    assert set(rules) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert cookie.startswith(f"hermes_rl_view_{viewed.port}=")
    assert viewed.ask("/api/runs", {"Cookie": f"a=b; {cookie}"}, token=False)[0] == 200
    assert viewed.ask(f"/api/runs?token={viewed.token}", token=False)[0] == 401
    for wrong in ("", "wrong", viewed.token[:-1], viewed.token + "x", "%00", "%ff"):
        assert "set-cookie" not in viewed.ask(f"/?token={wrong}", token=False)[1]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::1", "a b"]
)
def test_requests_for_an_unknown_host_are_refused(viewed: Viewed, host: str) -> None:
    for path in ("/", "/api/runs"):
        status, _, body = viewed.ask(path, {"Host": host})
        assert status == 403
        assert b"foreign_host" in body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8080", "192.168.3.4"])
def test_addresses_are_answered(viewed: Viewed, host: str) -> None:
    assert viewed.ask("/api/runs", {"Host": host})[0] == 200


def test_pages_of_other_sites_are_not_answered(viewed: Viewed) -> None:
    for site in ("cross-site", "same-site"):
        assert viewed.ask("/api/runs", {"Sec-Fetch-Site": site})[0] == 403
    _, headers, _ = viewed.ask("/api/runs", {"Origin": "https://evil.example"})
    assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(viewed: Viewed, method: str) -> None:
    assert viewed.ask("/api/runs", method=method)[0] == 405


def test_pages_follow_each_other_without_gap(viewed: Viewed) -> None:
    run = run_of(viewed, "many")
    seen: list[str] = []
    sizes, cursor = [], ""
    while True:
        found = viewed.get("runs", run, "rollouts", cursor=cursor)
        seen += [one["id"] for one in found["rollouts"]]
        sizes.append(len(found["rollouts"]))
        if (cursor := found["cursor"]) is None:
            break
    assert sizes == [50, 50, 20]
    assert len(set(seen)) == 120 == found["fit"] == found["total"]


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"state": "failed"}, 1),
        ({"stop_reason": "sandbox_failure"}, 1),
        ({"where": "question=What is row 3?"}, 4),
        ({"unsolved": "1"}, 24),
        ({"first_epoch": "1"}, 0),
        ({"row": "row 3"}, 4),
        ({"group": "row 3:0"}, 4),
        ({"tool": "terminal"}, 120),
        ({"tool": "browser"}, 0),
        ({"tool_errors": "1"}, 0),
        ({"least": "1"}, 24),
        ({"least": "0.2", "most": "0.3"}, 24),
        ({"reward": "right", "most": "0"}, 24),
        ({"reward": "nothing"}, 0),
        ({"text": "wHAT IS ROW 29"}, 4),
        ({"text": "as expected"}, 24),
        ({"text": "there was no room"}, 1),
        ({"text": "nowhere in there"}, 0),
        ({"state": "scored", "row": "row 1", "sort": "score"}, 3),
    ],
)
def test_rollouts_are_filtered(viewed: Viewed, query: dict[str, str], count: int) -> None:
    found = viewed.get("runs", run_of(viewed, "many"), "rollouts", **query)
    assert len(found["rollouts"]) == min(count, 50)
    if "text" not in query:
        assert found["fit"] == count


@pytest.mark.parametrize("sort", ["score", "reward:right"])
@pytest.mark.parametrize("descending", ["", "1"])
def test_rollouts_are_sorted_and_those_without_a_number_come_last(viewed: Viewed, sort: str, descending: str) -> None:
    run = run_of(viewed, "many")
    scores, cursor = [], ""
    while cursor is not None:
        found = viewed.get("runs", run, "rollouts", sort=sort, descending=descending, cursor=cursor)
        scores += [one["score"] for one in found["rollouts"]]
        cursor = found["cursor"]
    assert scores[-1] is None
    assert scores[:-1] == sorted(scores[:-1], reverse=bool(descending))


@pytest.mark.parametrize(
    "query",
    [
        "sort=colour",
        "colour=1",
        "least=x",
        "least=nan",
        "most=inf",
        "cursor=x",
        "cursor=1-2",
        "cursor=-1-2-3",
        "cursor=٣-1-1",
    ],
)
def test_invalid_filter_is_refused_with_its_name(viewed: Viewed, query: str) -> None:
    status, _, body = viewed.ask(f"/api/runs/{run_of(viewed, 'many')}/rollouts?{quote(query, safe='=&')}")
    assert status == 422
    assert json.loads(body)["place"] == query.partition("=")[0]


@pytest.mark.parametrize(
    "path", ["none", "none/rollouts", "none/rollouts/x", "none/tokens/x", "RUN/rollouts/none", "RUN/tokens/none"]
)
def test_missing_resource_gets_status_404_with_its_name(viewed: Viewed, path: str) -> None:
    status, _, body = viewed.ask(f"/api/runs/{path.replace('RUN', run_of(viewed, 'many'))}")
    assert status == 404
    assert "none" in json.loads(body)["detail"]


def test_cost_of_a_run_is_unknown_if_one_call_has_none(tmp_path: Path) -> None:
    lines = [recorded(f"row {place}") for place in range(100)]
    for place, line in enumerate(lines[:80]):
        line["usage"]["cost"] = 0.25 + place % 2 * 0.5
    write_run(tmp_path / "known", lines[:80])
    write_run(tmp_path / "partly", lines)  # the server tells nothing of the other ones
    with Viewed(tmp_path) as viewed:
        known, partly = (viewed.read(run_of(viewed, name)) for name in ("known", "partly"))
        listed = {Path(run["path"]).name: run["cost"] for run in viewed.get("runs")["runs"]}
    assert (known["cost"], partly["cost"]) == (40.0, None)
    assert listed == {"known": 40.0, "partly": None}
    assert (known["spent"]["cost"], known["spent"]["per_solved"]) == (40.0, 0.5)
    assert (partly["spent"]["cost"], partly["spent"]["per_solved"]) == (None, None)


def test_two_runs_are_compared(tmp_path: Path) -> None:
    # Row 0 is broken, row 1 fixed, and the other ones pass in both.
    before = [recorded(f"row {row}", score=float(row != 1)) for row in range(8)]
    after = [recorded(f"row {row}", score=float(row != 0)) for row in range(8)]
    write_run(tmp_path / "before", before)
    write_run(tmp_path / "after", after)
    with Viewed(tmp_path) as viewed:
        a, b = run_of(viewed, "before"), run_of(viewed, "after")
        with ThreadPoolExecutor(8) as asking:
            pairs = [(a, b), (b, a)] * 8
            both = list(asking.map(lambda pair: viewed.get("compare", a=pair[0], b=pair[1]), pairs))
        status, _, body = viewed.ask(f"/api/compare?a={a}&b=nothing")
    told = both[0]
    assert (told["a"], told["b"]) == (str(tmp_path / "before"), str(tmp_path / "after"))
    assert (told["fixed"], told["broken"]) == (1, 1)
    changes = [(row["row_key"], row["label"], row["change"], row["passed"]) for row in told["rows"]]
    assert changes[0] == ("row 0", "row 0", "broken", [1, 0])
    assert changes[-1] == ("row 1", "row 1", "fixed", [0, 1])
    assert {change for _, _, change, _ in changes[1:-1]} == {"same"} and told["graded"] == 8
    assert told["verdict"] == "no difference beyond chance"
    assert [one["fixed"] for one in both] == [1] * 16 and both[1]["rows"][-1]["row_key"] == "row 0"
    assert status == 404 and b"there is no run 'nothing'" in body


def test_rows_have_their_rollouts(viewed: Viewed) -> None:
    run = run_of(viewed, "many")
    page = viewed.get("runs", run, "rows")
    assert (page["total"], page["fit"], page["unsolved"], page["next"]) == (30, 30, 6, None)
    first = page["rows"][0]
    assert (first["passed"], first["graded"], len(first["epochs"][0][1])) == (0, 4, 4)
    assert first["epochs"][0][1][0][0] == f"{first['row_key']}:0-0"
    assert first["reason"][0].startswith("right: it is another") and first["label"] == first["row_key"]
    assert viewed.get("runs", run, "rows", unsolved="1")["fit"] == 6
    assert viewed.get("runs", run, "rows", where="question=What is row 3?")["rows"][0]["row_key"] == "row 3"
    assert viewed.get("runs", run, "rows", sort="name")["rows"][0]["row_key"] == "row 0"
    assert len(viewed.get("runs", run, "rows", start="25")["rows"]) == 5
    for query in ("sort=colour", "colour=1", "start=x", "start=-1"):
        status, _, _ = viewed.ask(f"/api/runs/{run}/rows?{query}")
        assert status in (404, 422)


def test_overview_has_the_composition_of_the_mean(tmp_path: Path) -> None:
    lines = [recorded(f"row {place % 10}", place // 10, float(place % 2), size=4) for place in range(40)]
    for place, line in enumerate(lines):
        line["rewards"] = {"right": {"value": float(place % 2)}, "open": {"value": float(place != 1)}}
        line["score"] = line["rewards"]["right"]["value"] * line["rewards"]["open"]["value"]
        line |= {"stop_reason": "max_turns" if place % 4 == 0 else "finished"}
    weightings = [{"name": "right", "weight": 1.0, "gate": False}, {"name": "open", "weight": 1.0, "gate": True}]
    write_run(tmp_path / "run", lines, grading={"scoring": {"weightings": weightings}})
    with Viewed(tmp_path) as viewed:
        run = viewed.read(run_of(viewed, "run"))
    assert run["composition"]["parts"] == [
        {"name": "right", "weight": 1.0, "mean": 0.5}, {"name": "open", "weight": None, "mean": 0.975},
    ]  # fmt: skip
    assert run["composition"]["taken"] == pytest.approx(0.025)
    assert run["weights"] == {"right": 1.0, "open": None} and run["combine"] == "sum"
    assert [(each["name"], each["count"], each["natural"]) for each in run["stop_reasons"]] == [
        ("finished", 30, True), ("max_turns", 10, False),
    ]  # fmt: skip
    assert run["findings"][0]["kind"] == "gate" and run["findings"][0]["filter"] == {"reward": "open", "most": "0"}
    assert run["read_first"][0]["score"] == 0.0 and run["flight"] is None
    assert [step["count"] for step in run["steps"]] == [4] * 10 and len(run["dots"]) == 40


def test_overview_counts_rollouts_in_flight(tmp_path: Path) -> None:
    lines = []
    for place in range(8):
        line = recorded(f"row {place}")
        head = {"id": line["id"], "started_at": 1000.0 + place % 4}
        lines.append({**head, **line, "timings": {"total": 4.0, "generation": 3.0, "tools": 1.0}})
    write_run(tmp_path / "run", lines)
    with Viewed(tmp_path) as viewed:
        flight = viewed.read(run_of(viewed, "run"))["flight"]
    assert (flight["seconds"], round(flight["most"])) == (7.0, 8)
    middle = flight["bins"][len(flight["bins"]) // 2]
    assert middle[1] == pytest.approx(3 * middle[2])


def test_run_list_has_labels(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [recorded("a")])
    (run / "label.json").write_text(json.dumps({"name": HOSTILE[34], "tags": ["best", 7, "x" * 99], "note": 3}))
    write_run(tmp_path / "broken", [recorded("a")])
    (tmp_path / "broken" / "label.json").write_text("[1")
    with Viewed(tmp_path) as viewed:
        labels = {Path(each["path"]).name: each["label"] for each in viewed.get("runs")["runs"]}
    assert labels["broken"] == {"name": "", "tags": [], "note": ""}
    assert labels["run"]["tags"] == ["best", "7", "x" * 40] and labels["run"]["note"] == ""
    assert not set(UNSEEN) & set(labels["run"]["name"])


def test_hostile_texts_come_without_controls(viewed: Viewed) -> None:
    run = run_of(viewed, "bad")
    (one,) = viewed.get("runs", run, "rollouts")["rollouts"]
    answers = [viewed.get("runs"), viewed.get("runs", run), one, viewed.get("runs", run, "rollouts", one["id"])]
    for found in answers:
        assert not [text for text in strings(found) if set(UNSEEN) & set(text)]
    shown = answers[-1]
    assert shown["messages"][1]["calls"][0]["name"] == HOSTILE[0]
    assert len(shown["messages"][1]["calls"]) == len(HOSTILE)
    assert "\\u202egnp.exe" in shown["messages"][1]["reasoning"]


def test_artifacts_are_attachments_of_the_run_alone(viewed: Viewed) -> None:
    run, rollout = run_of(viewed, "bad"), "bad:0-0"
    shown = viewed.get("runs", run, "rollouts", rollout)
    files = {one["name"]: one["files"] for one in shown["artifacts"]}
    assert files["other"] == []
    assert [file.rsplit("/", 1)[1][:5] for file in files["patch"]] == ["naïve", "page."]

    def asked(file: str) -> tuple[int, dict[str, str], bytes]:
        return viewed.ask(f"/api/runs/{run}/artifacts/{rollout}?file={quote(file)}")

    status, headers, body = asked("artifacts/bad/patch/page.html")
    assert (status, body.decode()) == (200, HOSTILE[0])
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"] == "attachment; filename*=UTF-8''page.html"
    assert {name: headers.get(name.lower()) for name in SAFE} == SAFE
    status, headers, body = asked("artifacts/bad/patch/deep/naïve \r\n.txt")
    assert (status, body) == (200, b"deep")
    assert headers["content-disposition"].endswith("na%C3%AFve%20%0D%0A.txt")
    for file in (
        "artifacts/bad/patch/link",
        "artifacts/bad/patch/../../../run.json",
        "../secret.txt",
        "run.json",
        "/etc/passwd",
        "artifacts/bad/patch",
        "artifacts/bad/patch/none",
        "",
    ):
        status, _, body = asked(file)
        assert status == 404, file
        assert b"secret" not in body.replace(b"secret.txt", b"")


def test_a_run_that_grows_is_read_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [recorded(f"{place}") for place in range(60)])
    with Viewed(run) as viewed:
        (name,) = viewed.names()
        status, headers, body = viewed.ask(f"/api/runs/{name}")
        assert (status, json.loads(body)["rollouts"]) == (200, 60)
        version = {"If-None-Match": headers["etag"]}
        assert viewed.ask(f"/api/runs/{name}", version)[0] == 304
        page = viewed.get("runs", name, "rollouts", sort="score")
        with (run / "rollouts.jsonl").open("a") as file:
            file.write('{"torn": \n')
            file.write("".join(json.dumps(recorded(f"new {place}", 0, 0.0)) + "\n" for place in range(30)))
            file.write(json.dumps(recorded("half"))[:50])
            file.flush()
            # The numbers of a run that grows are made again after a moment.
            while (answer := viewed.ask(f"/api/runs/{name}", version))[0] == 304:
                pass
            found = json.loads(answer[2])
            assert (found["rollouts"], found["torn"]) == (90, 1)
            rest = viewed.get("runs", name, "rollouts", sort="score", cursor=page["cursor"])
            assert len(rest["rollouts"]) == 10, "the next page is of what was there when the first one was asked for"
            assert viewed.get("runs", name, "rollouts", sort="score")["total"] == 90


def test_regraded_run_is_read_again(tmp_path: Path) -> None:
    lines = [recorded(f"{place}") for place in range(60)]
    run = write_run(tmp_path / "run", lines)
    with Viewed(run) as viewed:
        (name,) = viewed.names()
        before = viewed.get("runs", name)
        page = viewed.get("runs", name, "rollouts")
        other = tmp_path / "other"
        other.write_text("".join(json.dumps({**line, "score": 0.25}) + "\n" for line in lines))
        other.replace(run / "rollouts.jsonl")
        again = viewed.get("runs", name, "rollouts", cursor=page["cursor"])
        assert [one["id"] for one in again["rollouts"]] == [one["id"] for one in page["rollouts"]]
        assert again["rollouts"][0]["score"] == 0.25
        while (found := viewed.get("runs", name))["generation"] == before["generation"]:
            pass
        assert (found["mean"], found["rollouts"]) == (0.25, 60)
        assert viewed.get("runs", name, "rollouts", "3:0-0")["score"] == 0.25


def test_view_shows_whether_a_run_is_running(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "first", [recorded("a")])
    with (run / ".lock").open("w") as lock, Viewed(tmp_path / "runs") as viewed:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (found,) = viewed.get("runs")["runs"]
        assert found["running"] is True
        fcntl.flock(lock, fcntl.LOCK_UN)
        (found,) = viewed.get("runs")["runs"]
        assert found["running"] is False


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_server_ends_on_a_signal(folder: Path, number: int, status: int) -> None:
    with Viewed(folder / "runs") as viewed:
        assert viewed.url.startswith("http://127.0.0.1:")
        assert viewed.end(number) == status


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "hermes-rl view RUN"),
        (("nowhere",), "holds no run"),
        (("run", "--listen", "8600"), "give HOST:PORT"),
        (("empty",), "holds no run"),
    ],
)
def test_what_is_wrong_with_the_command_is_status_2(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    write_run(tmp_path / "run" / "one", [])
    (tmp_path / "empty").mkdir()
    done = hermes("view", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_without_a_run_those_below_outputs_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs" / "asking" / "evaluate-1", [recorded("a")])
    with Viewed(cwd=tmp_path) as viewed:
        assert [name.rpartition("-")[0] for name in viewed.names()] == ["evaluate-1"]
