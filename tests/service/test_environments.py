"""Several environments behind one address: each below its own name, and what they share at the top."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import hermes
from tests.service.playing import holds, many, named, policy
from tests.service.served import PLAYED, TOKEN, Served, spec_in
from tests.service.test_batches import by_group
from tests.waiting import until_blocking

ODD = "zwei/drei %20 & ü"
"""A name that has to be quoted in an address."""


def another(folder: Path, name: str, text: str = PLAYED) -> str:
    """The small task once more, under another name."""
    file = folder / "another.yaml"
    file.write_text(text.replace("name: sums", f"name: {json.dumps(name)}"))
    return str(file)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service of two environments that differ in what the policy says."""
    folder = tmp_path_factory.mktemp("both")
    wrong = PLAYED.replace("The sum is {{ total }}.}", "I do not know.}").replace(
        '{say: "The sum is {{ total }}."}', '{say: "I do not know."}'
    )
    with Served(spec_in(folder), another(folder, ODD, wrong), "--out", "mixed", token=TOKEN) as service:
        yield service


def paths(service: Served) -> dict[str, str]:
    """Where each environment is, by its name."""
    return {one["name"]: one["path"] for one in service.get("/v1/health")["environments"]}


def keys_below(service: Served, path: str) -> list[str]:
    return [row["key"] for row in service.get(f"{path}/v1/rows")["rows"]]


def batch_below(service: Served, path: str, **asked: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    answer = service.ask("POST", f"{path}/v1/rollouts", asked)
    assert answer.status == 200, answer.body
    *lines, end = map(json.loads, answer.body.splitlines())
    return lines, end


def test_each_environment_offers_the_complete_service_below_its_name(both: Served, tmp_path: Path) -> None:
    with Served(spec_in(tmp_path)) as alone:
        lines, _ = alone.batch(rows=alone.keys(), n=2, batch="b")
        described = alone.get("/openapi.json")
    found = paths(both)
    assert found == {"sums": "/sums", ODD: "/zwei%2Fdrei%20%2520%20%26%20%C3%BC"}
    ours, end = batch_below(both, found["sums"], rows=keys_below(both, found["sums"]), n=2, batch="b")
    assert (end["groups"], end["dropped"]) == (4, 0)
    assert by_group(ours) == by_group(lines)
    others, _ = batch_below(both, found[ODD], rows=keys_below(both, found[ODD]), n=2, batch="b")
    assert {rollout["score"] for line in others for rollout in line["rollouts"]} == {0.0}
    for path in found.values():
        below = both.get(f"{path}/openapi.json")
        assert below["servers"] == [{"url": path}]
        assert below["paths"] == described["paths"]
        turn = both.post(f"{path}/v1/sessions", {"row": keys_below(both, path)[0]})
        assert both.ask("DELETE", f"{path}/v1/sessions/{turn['id']}").status == 204
    assert both.get("/v1/metrics")[ODD]["groups"]["handed_out"] == 4
    records = [Path(one["record"]) for one in both.get("/v1/health")["environments"]]
    assert records == [Path("mixed/sums"), Path("mixed") / ODD]
    folder = both.log.parent
    assert [len((folder / record / "rollouts.jsonl").read_text().splitlines()) for record in records] == [8, 8]


def test_names_may_be_like_paths_and_like_each_other(tmp_path: Path) -> None:
    with Served(spec_in(tmp_path, PLAYED.replace("name: sums", "name: v1")), another(tmp_path, "v1/v1")) as service:
        assert paths(service) == {"v1": "/v1", "v1/v1": "/v1%2Fv1"}
        for name, path in paths(service).items():
            assert service.get(f"{path}/v1/health")["name"] == name
            assert batch_below(service, path, rows=keys_below(service, path), n=1)[1]["groups"] == 4


def test_unknown_paths_and_wrong_tokens_are_refused(both: Served) -> None:
    for path in ("/v1/rows", "/nobody/v1/rows", "/sums", "/sumsv1/rows"):
        missing = both.ask("GET", path)
        assert missing.status == 404, path
        assert "below its name: /sums, /zwei" in missing.json["detail"]
    assert "see /sums/openapi.json" in both.ask("GET", "/sums/v1/nothing").json["detail"]
    for path in ("/v1/health", "/sums/v1/rows"):
        assert both.ask("GET", path, headers={"Authorization": "Bearer other"}).status == 401
    refused = both.ask("POST", "/sums/v1/rollouts", {"rows": ["x"]}).json
    assert (refused["error"], refused["place"]) == ("unknown_row", "rows")
    described = both.get("/openapi.json")
    assert set(described["paths"]) == {"/v1/health", "/v1/metrics", "/v1/policy", "/run", "/aggregate_metrics"}
    assert described["security"] == [{"token": []}]


def test_new_weights_apply_to_all_environments_or_to_none(both: Served) -> None:
    for path in paths(both).values():
        batch_below(both, path, rows=keys_below(both, path)[:1], n=1)  # its policy is known then

    def versions() -> list[int | None]:
        return [one["version"] for one in both.get("/v1/metrics").values()]

    assert both.ask("PUT", "/v1/policy", {"version": 3}).status == 204
    assert versions() == [3, 3]
    assert both.ask("PUT", "/sums/v1/policy", {"version": 5}).status == 204
    fallen = both.ask("PUT", "/v1/policy", {"version": 4})
    assert (fallen.status, fallen.json["error"]) == (422, "version_falls")
    assert versions() == [5, 3]
    assert both.ask("PUT", "/v1/policy", {"version": 6}).status == 204
    assert versions() == [6, 6]


def test_nemo_gym_names_the_environment_in_the_row(both: Served) -> None:
    def row(**named: str) -> dict[str, Any]:
        key = keys_below(both, "/sums")[0]
        return {"responses_create_params": {}, "verifier_metadata": {"row_key": key, **named}, "_ng_task_index": 0}

    played = [both.post("/run", row(environment=name)) for name in paths(both)]
    assert [one["reward"] for one in played] == [1.0, 0.0]
    assert both.post("/aggregate_metrics", {"verify_responses": played})["agent_metrics"]["mean/reward"] == 0.5
    for wrong in (row(), row(environment="nobody")):
        refused = both.ask("POST", "/run", wrong)
        assert (refused.status, refused.json["place"]) == (422, "verifier_metadata.environment")
        assert "sums" in refused.json["detail"]


async def test_shutdown_completes_started_batches_of_all_environments(tmp_path: Path) -> None:
    model = policy()
    async with model.running() as url:
        service = await asyncio.to_thread(Served, spec_in(tmp_path, many(4)), another(tmp_path, "other", many(4)))
        with service:
            found = await asyncio.to_thread(paths, service)
            model.pause()
            asked = {"n": 2, "policy": named(url)}

            def answers(path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
                return batch_below(service, path, rows=keys_below(service, path), **asked)

            answering = [asyncio.create_task(asyncio.to_thread(answers, path)) for path in found.values()]
            await holds(lambda: len(model.asked) >= 16)
            service.process.send_signal(signal.SIGTERM)
            for path in ("", *found.values()):
                await holds(lambda path=path: service.ask("GET", f"{path}/v1/health").status == 503)
            model.resume()
            assert [end["groups"] for _, end in await asyncio.gather(*answering)] == [4, 4]
            assert await asyncio.to_thread(service.process.wait, 30) == 0


def test_errors_of_all_specs_are_reported_before_the_service_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("colour: 1\nname: bad\n")
    (tmp_path / "gone.yaml").write_text(PLAYED.replace("name: sums", "name: gone").replace("items: [", "lost: ["))
    spec_in(tmp_path)
    same = another(tmp_path, "sums")

    def refused(*words: str) -> str:
        done = hermes("serve-http", *words, "--listen", "127.0.0.1:0", cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    said = refused("sums.yaml", "bad.yaml", "gone.yaml")
    assert "bad.yaml" in said and "gone.yaml" in said
    assert "have the same name, sums" in refused("sums.yaml", same)
    empty = another(
        tmp_path,
        "empty",
        PLAYED.replace("items: [{a: 1, b: 2}, {a: 3, b: 4}, {a: 5, b: 6}, {a: 7, b: 8}]", "path: rows.jsonl"),
    )
    (tmp_path / "rows.jsonl").write_text("no JSON\n")
    assert "empty: " in refused("sums.yaml", empty)
    assert not (tmp_path / "outputs").exists() or not list((tmp_path / "outputs").rglob("rollouts.jsonl"))


def test_demo_notices_and_warnings_name_the_environment(tmp_path: Path) -> None:
    with Served(spec_in(tmp_path), another(tmp_path, "other"), "--demo") as service:
        assert "sums: demo: " in service.said and "other: demo: " in service.said
        assert service.terminate() == 0


@pytest.mark.slow
def test_workers_run_for_each_environment(tmp_path: Path) -> None:
    with Served(spec_in(tmp_path), another(tmp_path, "other"), "--workers", "2") as service:
        for path in paths(service).values():
            lines, _ = batch_below(service, path, rows=keys_below(service, path), n=2)
            assert {rollout["score"] for line in lines for rollout in line["rollouts"]} == {1.0}
        until_blocking(lambda: [one["workers"]["ready"] for one in service.get("/v1/metrics").values()] == [2, 2])
        assert service.terminate() == 0
