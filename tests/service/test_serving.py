"""The process: where it listens, what it demands of whoever starts it, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.commands import hermes
from tests.service.playing import holds, named, policy, served_in
from tests.service.served import Served, spec_in
from tests.service.test_batches import by_group, in_flight
from tests.service.test_sessions import waits, with_slow_tool
from tests.waiting import stays, until, until_blocking

REFUSED = [
    (("--listen", "0.0.0.0:0"), "--token-env NAME"),
    (("--listen", "[::]:0"), "--token-env NAME"),
    (("--listen", "0.0.0.0:0", "--token-env", "SHORT"), "a token of 16 characters or more"),
    (("--listen", "8600"), "give HOST:PORT"),
    (("--listen", "127.0.0.1:99999"), "give HOST:PORT"),
    (("--listen", "no.such.host.invalid:1"), "there is no such address"),
    (("--token-env", "NOT_SET"), "the variable NOT_SET is not set"),
    (("--token-env", "SPACED"), "cannot be sent as a header"),
    (("--set", "colour=1"), "colour"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_is_wrong_with_the_command_is_status_2(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = hermes("serve-http", str(spec_in(tmp_path)), *options, cwd=tmp_path, env={"SPACED": "a b", "SHORT": "x"})
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_is_reported(tmp_path: Path) -> None:
    with Served(spec_in(tmp_path), "--demo") as service:
        assert "demo: a scripted policy runs" in service.said


def test_an_address_and_a_record_belong_to_one_service(tmp_path: Path) -> None:
    with Served(spec_in(tmp_path)) as service:
        for address, said in (
            (f"127.0.0.1:{service.port}", "choose another address"),
            ("127.0.0.1:0", "another --out"),
        ):
            done = hermes("serve-http", "sums.yaml", "--listen", address, cwd=tmp_path)
            assert done.returncode == 2
            assert said in done.stderr
        with Served(tmp_path / "sums.yaml", "--fresh") as other:
            assert other.get("/v1/health")["record"].endswith("rollouts-2")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_an_idle_service_ends_at_once(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with Served(spec_in(tmp_path)) as service:
        service.post("/run", {"responses_create_params": {}, "verifier_metadata": {"row_key": service.keys()[0]}})
        service.process.send_signal(number)
        assert service.process.wait(30) == status
        assert service.said == "starting sums; its rollouts are recorded in outputs/sums/rollouts\n"
    record = tmp_path / "outputs" / "sums" / "rollouts"
    assert "recording rollouts of sums" in (record / "run.log").read_text()
    assert "<!doctype html>" in (record / "report.html").read_text().lower()


async def test_shutdown_completes_started_groups_and_starts_no_others(tmp_path: Path) -> None:
    model = policy()
    async with model.running() as url:
        service = await served_in(tmp_path, 40, more="serve: {concurrency: 4}\n")
        with service:
            keys = await asyncio.to_thread(service.keys)
            model.pause()
            asked: dict[str, Any] = {"rows": keys, "n": 2, "batch": "b", "policy": named(url)}
            answering = asyncio.create_task(asyncio.to_thread(lambda: service.batch(**asked)))
            await holds(lambda: len(model.asked) >= 4)
            service.process.send_signal(signal.SIGTERM)

            def ends() -> bool:
                answer = service.ask("GET", "/v1/health")
                return answer.status == 503 and int(answer.headers["retry-after"]) > 0

            await holds(ends)
            assert (await asyncio.to_thread(service.ask, "POST", "/v1/rollouts", asked)).status == 503
            assert (await asyncio.to_thread(service.ask, "GET", "/v1/metrics")).status == 200
            model.resume()
            lines, end = await answering
            assert 0 < len(lines) < 40, "what was begun is read to its end, and the rest is not begun"
            assert end["groups"] == len(lines)
            assert "the service is shutting down" in end["cut"]
            assert await asyncio.to_thread(service.process.wait, 30) == 0
        after = await served_in(tmp_path, 40, more="serve: {concurrency: 4}\n")
        with after:
            calls = len(model.log)
            again, end = await asyncio.to_thread(lambda: after.batch(**asked))
            assert (end["groups"], end.get("cut")) == (40, None)
            assert by_group(lines).items() <= by_group(again).items()
            assert len(model.log) <= 40 * 2 * 2, "nothing was played twice"
            assert len(model.log) > calls


async def test_batch_that_exceeds_the_drain_time_is_cut_with_a_notice(tmp_path: Path) -> None:
    model = policy()
    async with model.running() as url:
        service = await served_in(tmp_path, 4, "--drain", "0.5")
        with service:
            keys = await asyncio.to_thread(service.keys)
            model.pause()
            answering = asyncio.create_task(asyncio.to_thread(lambda: service.batch(rows=keys, n=2, policy=named(url))))
            await holds(lambda: len(model.asked) >= 4)
            assert await asyncio.to_thread(service.terminate) == 0
            lines, end = await answering
            assert (lines, end["groups"]) == ([], 0)
            assert "the service is shutting down" in end["cut"]
            asked = len(model.asked)
            model.resume()
            await until(stays(lambda: len(model.asked)))
            assert len(model.asked) == asked


def test_sessions_and_runs_that_do_not_end_are_ended_too(tmp_path: Path) -> None:
    with Served(with_slow_tool(tmp_path), "--drain", "0.5") as service:
        key = service.keys()[0]
        path = f"/v1/sessions/{service.post('/v1/sessions', {'row': key})['id']}"
        answers: list[Any] = []
        step = threading.Thread(
            target=lambda: answers.append(service.ask("POST", f"{path}/step", {"message": waits(60)}))
        )
        step.start()
        until_blocking(lambda: service.ask("POST", f"{path}/step", {}).status == 409)
        assert in_flight(service) == 1
        assert service.terminate() == 0
        step.join(10)
        assert answers[0].status in (404, 503)
        assert "Traceback" not in service.said


@pytest.mark.slow
async def test_slow_reader_does_not_prevent_shutdown(tmp_path: Path) -> None:
    model = policy()
    async with model.running() as url:
        service = await served_in(tmp_path, 600, "--drain", "0.5", more="serve: {concurrency: 8}\n")
        with service:
            keys = await asyncio.to_thread(service.keys)
            with socket.socket() as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.connect(("127.0.0.1", service.port))
                body = json.dumps({"rows": keys, "n": 1, "policy": named(url)}).encode()
                head = f"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                await asyncio.to_thread(
                    reader.sendall, (head + "Content-Type: application/json\r\n\r\n").encode() + body
                )
                await until(lambda: model.asked)
                await until(stays(lambda: len(model.asked), looks=200))
                assert await asyncio.to_thread(service.terminate) == 0
        assert "Traceback" not in service.said
