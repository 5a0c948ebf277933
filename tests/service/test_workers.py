"""The service with workers: one address and one record, whatever becomes of the processes behind it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.summing import CODE
from tests.runs.processes import workers_of
from tests.servers.token_policy import TokenPolicy
from tests.service.playing import holds, many, named, policy, served_in
from tests.service.served import PLAYED, Served, spec_in
from tests.waiting import BOUND

SECRET = "sk-that-nobody-may-read"


@asynccontextmanager
async def playing(
    folder: Path, rows: int, *options: str, more: str = ""
) -> AsyncIterator[tuple[Served, TokenPolicy, dict[str, Any]]]:
    """A service with two workers, the policy that it asks, and the policy as requests name it."""
    model = policy()
    async with model.running() as url:
        service = await served_in(folder, rows, "--workers", "2", *options, more=more)
        try:
            yield service, model, named(url)
        finally:
            await asyncio.to_thread(service.__exit__)


def told(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return {line["group"]: line for line in lines}


def test_a_service_with_workers_answers_what_one_process_answers(tmp_path: Path) -> None:
    answers = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = PLAYED.replace("scripted}", "scripted, error_rate: 0.5}") + f"serve: {{workers: {number}}}\n"
        with Served(spec_in(folder, text)) as service:
            assert len(workers_of(service.process.pid)) == (0 if number == 1 else 2)
            lines, end = service.batch(rows=service.keys(), n=3, batch="b", sampling={"max_turns": 3})
            assert end == {"end": True, "groups": 4, "dropped": 0}
            again, _ = service.batch(rows=service.keys(), n=3, batch="b")
            assert told(again) == told(lines)
            run = {"responses_create_params": {}, "verifier_metadata": {"row_key": service.keys()[0]}}
            assert service.post("/run", run)["reward"] == 1.0
            turn = service.post("/v1/sessions", {"row": service.keys()[0]})
            assert turn["messages"][-1]["role"] == "user"
            assert service.ask("DELETE", f"/v1/sessions/{turn['id']}").status == 204
            metrics = service.get("/v1/metrics")
            alone = None if number == 1 else {"ready": 2, "died": 0, "rollouts_lost": 0}
            assert (metrics["workers"], metrics["retries"]) == (alone, {})
            answers.append(told(lines))
            assert service.terminate() == 0
    assert answers[0] == answers[1]
    assert {one["score"] for line in answers[0].values() for one in line["rollouts"]} == {0.0, 1.0}


@pytest.mark.slow
async def test_a_worker_that_is_killed_in_a_batch_costs_only_what_it_had(tmp_path: Path) -> None:
    async with playing(tmp_path, 8) as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        model.pause()
        asked = {"rows": keys, "n": 2, "batch": "b", "policy": {**name, "version": 1}}
        answering = asyncio.create_task(asyncio.to_thread(lambda: service.batch(**asked)))
        await holds(lambda: len(model.asked) == 16)
        os.kill(workers_of(service.process.pid)[0], signal.SIGKILL)
        await holds(lambda: service.get("/v1/metrics")["workers"]["died"] == 1)
        model.resume()
        lines, end = await answering
        assert end == {"end": True, "groups": 8, "dropped": 0}
        assert all(line["provenance"]["exact"] and line["weights"] == [1, 1] for line in lines)
        assert {one["score"] for line in lines for one in line["rollouts"]} == {1.0}
        metrics = await asyncio.to_thread(service.get, "/v1/metrics")
        assert 0 < metrics["workers"]["rollouts_lost"] < 16
        assert (metrics["groups"]["handed_out"], metrics["in_flight"]["rollouts"]) == (8, 0)
        assert "worker 1 of 2, which died" in service.said or "worker 2 of 2, which died" in service.said
        recorded = tmp_path / "outputs" / "sums" / "rollouts" / "rollouts.jsonl"
        scored = [one for one in map(json.loads, recorded.read_text().splitlines()) if one["state"] == "scored"]
        assert len(scored) == len({(one["group"], one["index"]) for one in scored}) == 16


async def test_weights_updated_in_flight_apply_to_every_later_call(tmp_path: Path) -> None:
    async with playing(tmp_path, 4) as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        model.pause()
        asked = {"rows": keys, "n": 2, "policy": {**name, "version": 1}}
        answering = asyncio.create_task(asyncio.to_thread(lambda: service.batch(**asked)))
        await holds(lambda: len(model.asked) == 8)
        told = await asyncio.to_thread(service.ask, "PUT", "/v1/policy", {"version": 3, "model": "tiny-3"})
        assert told.status == 204
        model.resume()
        lines, _ = await answering
        assert {tuple(line["weights"]) for line in lines} == {(1, 3)}
        assert [one["model"] for one in model.asked] == ["tiny"] * 8 + ["tiny-3"] * 8


async def test_disconnected_reader_cancels_its_rollouts_in_workers(tmp_path: Path) -> None:
    async with playing(tmp_path, 6) as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        model.pause()
        connection = service.connect()
        body = json.dumps({"rows": keys, "n": 2, "policy": name}).encode()
        await asyncio.to_thread(connection.request, "POST", "/v1/rollouts", body, service.headers(body))
        await holds(lambda: len(model.asked) == 12)
        await holds(lambda: service.get("/v1/metrics")["phases"] == {"model": 12})
        connection.close()
        await holds(lambda: service.get("/v1/metrics")["in_flight"]["rollouts"] == 0)
        await holds(lambda: service.get("/v1/metrics")["phases"] == {})
        model.resume()
        lines, _ = await asyncio.to_thread(lambda: service.batch(rows=keys[:1], n=1, policy=name))
        assert [one["score"] for one in lines[0]["rollouts"]] == [1.0]
        assert len(model.asked) == 12 + 2, "no model is called for one who has gone"
        metrics = await asyncio.to_thread(service.get, "/v1/metrics")
        assert (metrics["readers_gone"], metrics["workers"]["died"]) == (1, 0)


async def test_sigterm_lets_workers_finish_and_leaves_no_process(tmp_path: Path) -> None:
    async with playing(tmp_path, 4) as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        processes = workers_of(service.process.pid)
        model.pause()
        asked = {"rows": keys, "n": 2, "policy": name}
        answering = asyncio.create_task(asyncio.to_thread(lambda: service.batch(**asked)))
        await holds(lambda: len(model.asked) == 8)
        service.process.send_signal(signal.SIGTERM)
        await holds(lambda: service.ask("POST", "/v1/rollouts", asked).status == 503)
        model.resume()
        lines, end = await answering
        assert (end["groups"], len(lines)) == (4, 4)
        assert await asyncio.to_thread(service.process.wait, BOUND) == 0
        await holds(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()])


async def test_what_is_not_finished_in_time_is_cut_in_workers_too(tmp_path: Path) -> None:
    async with playing(tmp_path, 2, "--drain", "0.5") as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        processes = workers_of(service.process.pid)
        model.pause()
        answering = asyncio.create_task(asyncio.to_thread(lambda: service.batch(rows=keys, n=2, policy=name)))
        await holds(lambda: len(model.asked) == 4)
        service.process.send_signal(signal.SIGTERM)
        lines, end = await answering
        assert (lines, "the service is shutting down" in end["cut"]) == ([], True)
        assert await asyncio.to_thread(service.process.wait, BOUND) == 0
        await holds(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()])


@pytest.mark.slow
def test_service_stops_with_the_reason_if_its_workers_keep_dying(tmp_path: Path) -> None:
    """Whoever keeps it alive starts it anew; one that goes on would refuse every batch for ever."""
    spec = spec_in(tmp_path, PLAYED + "serve: {workers: 2}\n")
    broken = 'import os, sys\nif sys.argv[0] == "-c" and os.path.exists("broken"):\n    os._exit(3)\n'
    (tmp_path / "code.py").write_text(broken + CODE)
    with Served(spec) as service:
        assert service.batch(rows=service.keys(), n=1)[1]["dropped"] == 0
        (tmp_path / "broken").touch()
        for pid in workers_of(service.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert service.process.wait(60) == 1
        assert "workers ended one after the other before they had finished a rollout" in service.said
        assert "Traceback" not in service.said


async def test_a_key_that_a_request_names_is_in_no_file_and_no_log(tmp_path: Path) -> None:
    def stumble(body: Any) -> None:
        raise OSError("the server stumbles")

    model = policy()
    model.faults.append(stumble)
    async with model.running() as url:
        folder = tmp_path / "service"
        folder.mkdir()
        options = ("--workers", "2", "--key-env", "POLICY_KEY", "--verbose")
        service = await asyncio.to_thread(Served, spec_in(folder, many(2)), *options, environ={"POLICY_KEY": SECRET})
        try:
            keys = await asyncio.to_thread(service.keys)
            name = named(url, api_key_env="POLICY_KEY")
            _, end = await asyncio.to_thread(lambda: service.batch(rows=keys, n=1, policy=name))
            assert (end["groups"], end["dropped"]) == (2, 0)
            assert (await asyncio.to_thread(service.get, "/v1/metrics"))["retries"] == {"policy": 1}
            assert "attempt 1 failed" in service.said
            for pid in workers_of(service.process.pid):
                assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert await asyncio.to_thread(service.terminate) == 0
        finally:
            await asyncio.to_thread(service.__exit__)
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 4
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
