"""Batches of groups: what their lines say, who gets them, and what goes on while nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.loopback_server import Loopback, completion
from tests.servers.token_policy import TokenPolicy
from tests.service.playing import holds, many, named, policy, served_in, tokenizer
from tests.service.served import PLAYED, Served, raw, spec_in
from tests.waiting import stays, until


def by_group(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({line["group"] for line in lines}) == len(lines)
    return {line["group"]: line for line in lines}


def in_flight(service: Served) -> int:
    return int(service.get("/v1/metrics")["in_flight"]["rollouts"])


@contextlib.asynccontextmanager
async def playing(
    folder: Path, rows: int, *options: str, wrong: float = 0.0, more: str = ""
) -> AsyncIterator[tuple[Served, TokenPolicy, dict[str, Any]]]:
    """A service, the policy that it asks, and the policy as requests name it."""
    model = policy(wrong)
    async with model.running() as url:
        service = await served_in(folder, rows, *options, more=more)
        try:
            yield service, model, named(url)
        finally:
            await asyncio.to_thread(service.__exit__)


def test_credit_per_turn_comes_with_the_tokens_of_each_turn(tmp_path: Path) -> None:
    steps = "from hermes_rl import Score\n\ndef steps(result):\n    return [1.0, 0.0]\n\n"
    steps += "def marks():\n    return Score(1.0, overrides={'set_advantage_to_zero': True})\n"
    (tmp_path / "steps.py").write_text(steps)
    text = PLAYED.replace("{right:", '{steps: {fn: "steps.py:steps"}, marks: {fn: "steps.py:marks"}, right:')
    with Served(spec_in(tmp_path, text)) as service:
        lines, _ = service.batch(rows=service.keys()[:1], n=2, batch="b")
    for rollout in lines[0]["rollouts"]:
        assert rollout["credit"] == [1.0, 0.0]
        assert rollout["overrides"] == {"set_advantage_to_zero": True}
        (sequence,) = rollout["sequences"]
        assert [turn for turn, _, _ in sequence["spans"]] == [0, 1]
        of_turns = {place for _, start, stop in sequence["spans"] for place in range(start, stop)}
        assert of_turns == {place for place, mask in enumerate(sequence["mask"]) if mask}


async def test_batch_records_train_exactly_the_sampled_tokens(tmp_path: Path) -> None:
    async with playing(tmp_path, 6, wrong=0.5) as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        lines, end = await asyncio.to_thread(lambda: service.batch(rows=keys, n=3, policy={**name, "version": 4}))
        assert end == {"end": True, "groups": 6, "dropped": 0}
        trained = []
        for line in lines:
            assert line["dropped"] is None
            assert line["provenance"]["exact"]
            assert line["weights"] == [4, 4]
            for rollout in line["rollouts"]:
                assert rollout["trainable"]
                assert rollout["score"] == (1.0 if rollout["messages"][-1]["content"].startswith("The sum") else 0.0)
                for one in rollout["sequences"]:
                    assert len(one["ids"]) == len(one["mask"]) == len(one["logprobs"])
                    trained += [
                        (token, logprob)
                        for token, mask, logprob in zip(one["ids"], one["mask"], one["logprobs"], strict=True)
                        if mask
                    ]
        sampled = [pair for one in model.log for pair in zip(one.ids, one.logprobs, strict=True)]
        assert sorted(trained) == sorted(sampled)


async def test_a_batch_asked_again_is_answered_from_the_record_also_after_a_kill(tmp_path: Path) -> None:
    async with playing(tmp_path, 12) as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        asked = {"rows": keys, "n": 2, "batch": "step-1", "policy": name}
        first = by_group((await asyncio.to_thread(lambda: service.batch(**asked)))[0])
        calls = len(model.log)
        again = by_group((await asyncio.to_thread(lambda: service.batch(**asked)))[0])
        assert (again, len(model.log)) == (first, calls)
        await asyncio.to_thread(service.kill)
        after = await served_in(tmp_path, 12)
        try:
            assert by_group((await asyncio.to_thread(lambda: after.batch(**asked)))[0]) == first
            assert len(model.log) == calls
            other = by_group((await asyncio.to_thread(lambda: after.batch(**{**asked, "batch": "step-2"})))[0])
            assert not other.keys() & first.keys()
            unnamed = {**asked, "batch": None}
            one = by_group((await asyncio.to_thread(lambda: after.batch(**unnamed)))[0])
            two = by_group((await asyncio.to_thread(lambda: after.batch(**unnamed)))[0])
            assert not one.keys() & two.keys(), "a batch without a name is a new one"
        finally:
            await asyncio.to_thread(after.__exit__)


async def test_batch_requested_concurrently_runs_once(tmp_path: Path) -> None:
    async with playing(tmp_path, 8) as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        asked = {"rows": keys, "n": 2, "batch": "b", "policy": name}
        answers = await asyncio.gather(*(asyncio.to_thread(lambda: service.batch(**asked)) for _ in range(3)))
        lines = [by_group(groups) for groups, _ in answers]
        assert lines[0] == lines[1] == lines[2]
        assert len(model.log) == 8 * 2 * 2, "two turns for each rollout"


async def test_a_reader_that_goes_away_ends_what_it_asked_for(tmp_path: Path) -> None:
    async with playing(tmp_path, 10) as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        model.pause()
        connection = service.connect()
        body = json.dumps({"rows": keys, "n": 4, "policy": name}).encode()
        await asyncio.to_thread(connection.request, "POST", "/v1/rollouts", body, service.headers(body))
        await holds(lambda: len(model.asked) >= 4)
        assert await asyncio.to_thread(in_flight, service) == 40
        connection.close()
        await holds(lambda: in_flight(service) == 0)
        asked = len(model.asked)
        model.resume()
        await until(stays(lambda: len(model.asked)))
        assert len(model.asked) == asked, "no model is called for one who has gone"
        metrics = await asyncio.to_thread(service.get, "/v1/metrics")
        assert metrics["readers_gone"] == 1
        assert metrics["groups"]["handed_out"] == 0


@pytest.mark.slow
async def test_unread_batch_starts_only_a_bounded_number_of_rollouts(tmp_path: Path) -> None:
    rows = 600
    async with playing(tmp_path, rows, more="serve: {concurrency: 8}\n") as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        body = json.dumps({"rows": keys, "n": 1, "policy": name}).encode()
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(reader, ("127.0.0.1", service.port))
            head = f"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            await loop.sock_sendall(reader, (head + "Content-Type: application/json\r\n\r\n").encode() + body)
            await until(lambda: model.asked)
            await until(stays(lambda: len(model.asked), looks=200))  # all is waiting for the reader
            seen = len(model.asked)
            assert 0 < seen < rows, f"{seen} of {2 * rows} calls for a reader that reads nothing"
            assert await asyncio.to_thread(in_flight, service) == rows
            read = b""
            while b'{"end": true' not in read[-200:]:
                async with asyncio.timeout(30):
                    read += await loop.sock_recv(reader, 2**20)
        assert read.count(b'"row_key"') == rows


async def test_logprob_differences_from_the_trainer_are_shown_and_warned_about(tmp_path: Path) -> None:
    async with playing(tmp_path, 1) as (service, _, _):

        def put(version: int, difference: dict[str, float]) -> tuple[int, Any]:
            told = {"version": version, "logprob_difference": difference}
            return service.ask("PUT", "/v1/policy", told).status, service.get("/v1/metrics")["logprob_difference"]

        before = await asyncio.to_thread(service.get, "/v1/metrics")
        assert before["logprob_difference"] == {"mean": None, "largest": None}
        assert await asyncio.to_thread(put, 1, {"mean": 0.01}) == (204, {"mean": 0.01, "largest": None})
        assert await asyncio.to_thread(put, 2, {"mean": 0.75, "largest": 6.0}) == (204, {"mean": 0.75, "largest": 6.0})
        status, _ = await asyncio.to_thread(put, 3, {"mean": -1.0})
        assert status == 422
    assert "differ from the sampled ones by 0.75 on average, at most 6" in service.said


async def test_changed_weights_are_applied_and_stale_groups_are_dropped(tmp_path: Path) -> None:
    async with playing(tmp_path, 3) as (service, model, name):
        keys = await asyncio.to_thread(service.keys)
        model.pause()
        asked = {"rows": keys, "n": 2, "policy": {**name, "version": 1}, "max_staleness": 1, "batch": "b"}
        answering = asyncio.create_task(asyncio.to_thread(lambda: service.batch(**asked)))
        await holds(lambda: len(model.asked) >= 6)
        in_flight_now = (await asyncio.to_thread(service.get, "/v1/metrics"))["in_flight"]
        assert (in_flight_now["batches"], in_flight_now["versions"]) == (1, [1])
        told = await asyncio.to_thread(service.ask, "PUT", "/v1/policy", {"version": 3, "model": "tiny-3"})
        assert told.status == 204
        model.resume()
        lines, end = await answering
        assert end["dropped"] == 3
        for line in lines:
            assert (line["dropped"], line["weights"]) == ("stale", [1, 3])
            assert "version 1" in line["detail"]
            assert all(one["score"] is None and one["sequences"] == [] for one in line["rollouts"])
        assert {one["model"] for one in model.asked} == {"tiny", "tiny-3"}, "calls after it go to the new weights"
        again = {**asked, "policy": {**name, "version": 1}}
        fresh, end = await asyncio.to_thread(lambda: service.batch(**again))
        assert (end["groups"], end["dropped"]) == (3, 0), "what the record has is too old, and is played anew"
        asked_so_far = len(model.asked)
        recorded, _ = await asyncio.to_thread(lambda: service.batch(**again))
        assert {line["group"] for line in recorded} == {line["group"] for line in fresh}
        assert len(model.asked) == asked_so_far, "answered from the record"
        again = {**again, "batch": "c"}
        fresh, end = await asyncio.to_thread(lambda: service.batch(**again))
        assert end["dropped"] == 0
        assert {tuple(line["weights"]) for line in fresh} == {(3, 3)}, "a late word does not take the weights back"
        metrics = await asyncio.to_thread(service.get, "/v1/metrics")
        assert (metrics["groups"]["stale"], metrics["groups"]["handed_out"], metrics["version"]) == (3, 9, 3)


async def test_a_server_tells_its_version_by_its_own_path(tmp_path: Path) -> None:
    async with playing(tmp_path, 2) as (service, model, name):
        model.version = 9
        name = {**name, "weights_path": "/get_weight_version"}
        keys = await asyncio.to_thread(service.keys)
        lines, _ = await asyncio.to_thread(lambda: service.batch(rows=keys, n=2, policy=name, max_staleness=0))
        assert {tuple(line["weights"]) for line in lines} == {(9, 9)}


BROKEN = """
from pathlib import Path


def steady(result) -> bool:
    if Path("broken").exists():
        raise OSError("the disk of the grader is full")
    return True
"""


def test_a_group_that_failed_is_a_line_without_scores_and_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "grading.py").write_text(BROKEN)
    (tmp_path / "broken").touch()
    spec = spec_in(tmp_path, PLAYED.replace("rewards: {", 'rewards: {steady: {fn: "grading.py:steady"}, '))
    with Served(spec) as service:
        asked = {"rows": service.keys()[:1], "n": 2, "batch": "b"}
        (line,), end = service.batch(**asked)
        assert (end["groups"], end["dropped"]) == (1, 1)
        assert line["dropped"] == "reward_failure"
        assert "the disk of the grader is full" in line["detail"]
        assert all(one["score"] is None and not one["trainable"] and not one["sequences"] for one in line["rollouts"])
        (tmp_path / "broken").unlink()
        (again,), end = service.batch(**asked)
        assert (end["dropped"], again["dropped"], again["group"]) == (0, None, line["group"])
        assert [one["score"] for one in again["rollouts"]] == [2.0, 2.0]
        metrics = service.get("/v1/metrics")
        assert metrics["groups"]["by_cause"] == {"reward_failure": 1}
        assert metrics["failures"]["reward_failure"] >= 1


async def test_inexact_tokens_are_returned_if_the_spec_allows_them(tmp_path: Path) -> None:
    """A server of messages does not say which tokens it sampled."""
    server = await Loopback().start()
    server.otherwise = completion("The sum is 0.")
    chat = {"type": "openai", "base_url": server.url, "model": "m", "tokenizer": tokenizer()}
    try:
        service = await served_in(tmp_path, 2, more="serve: {allow_inexact: true}\n")
        try:
            keys = await asyncio.to_thread(service.keys)
            lines, end = await asyncio.to_thread(lambda: service.batch(rows=keys, n=1, policy=chat))
            assert end["dropped"] == 0
            for line in lines:
                assert not line["provenance"]["exact"]
                assert line["rollouts"][0]["sequences"]
        finally:
            await asyncio.to_thread(service.__exit__)
    finally:
        await server.stop()


def test_chunks_of_http_are_lines(served: Served) -> None:
    """A reader that reads chunk by chunk has a whole line each time."""
    body = json.dumps({"rows": served.keys(), "n": 1}).encode()
    head = f"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.token}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    _, _, answer = raw(served.port, head.encode() + body, 30.0).partition(b"\r\n\r\n")
    chunks = []
    while answer:
        size, _, answer = answer.partition(b"\r\n")
        chunks.append(answer[: int(size, 16)])
        answer = answer[int(size, 16) + 2 :]
    assert [json.loads(chunk).get("end") for chunk in chunks[:-1]] == [None] * 4 + [True]
    assert chunks[-1] == b""


def test_a_row_may_be_asked_for_twice_in_a_batch(served: Served) -> None:
    key = served.keys()[0]
    lines, end = served.batch(rows=[key, key], n=1, batch="twice")
    assert end["groups"] == 2
    assert len(by_group(lines)) == 2
    assert by_group(served.batch(rows=[key, key], n=1, batch="twice")[0]) == by_group(lines)


def test_request_without_any_policy_is_refused(tmp_path: Path) -> None:
    with Served(spec_in(tmp_path, many(4))) as service:
        answer = service.ask("POST", "/v1/rollouts", {"rows": service.keys()[:1], "n": 1})
        assert (answer.status, answer.json["error"]) == (422, "no_policy")
        run = {"responses_create_params": {}, "verifier_metadata": {"row_key": service.keys()[0]}}
        assert service.ask("POST", "/run", run).json["error"] == "no_policy"


def test_a_record_of_compared_groups_has_one_size(tmp_path: Path) -> None:
    """Rewards that compare the members of a group mean nothing in another one."""
    spec = spec_in(tmp_path, PLAYED.replace("rewards: {", 'rewards: {longest: {fn: "code.py:longest"}, '))
    with Served(spec) as service:
        keys = service.keys()
        lines, end = service.batch(rows=keys, n=3, batch="b")
        assert (end["dropped"], {one["score"] for line in lines for one in line["rollouts"]}) == (0, {2.0})
        assert by_group(service.batch(rows=keys, n=3, batch="b")[0]) == by_group(lines)
        answer = service.ask("POST", "/v1/rollouts", {"rows": keys, "n": 2})
        assert (answer.status, answer.json["place"]) == (422, "n")
        assert "groups of 3" in answer.json["detail"]
        assert service.ask("POST", "/v1/sessions", {"row": keys[0]}).status == 422
        run = {"responses_create_params": {}, "verifier_metadata": {"row_key": keys[0]}}
        assert service.ask("POST", "/run", run).status == 422
        assert service.get("/v1/metrics")["in_flight"] == {"batches": 0, "rollouts": 0, "sessions": 0, "versions": []}


TWO_POLICIES = """
name: two
dataset: {{items: [{items}]}}
agents: {{white: {{prompt: {{user: Begin.}}}}, black: {{server: other, prompt: {{system: You answer.}}}}}}
schedule: {{order: alternate, rounds: 2}}
rewards: {{length: {{fn: "said.py:length"}}}}
servers:
  policy: {{type: vllm, base_url: "{white}", model: m, tokenizer: "{tokenizer}", weights_path: /get_weight_version}}
  other: {{type: vllm, base_url: "{black}", model: m, tokenizer: "{tokenizer}", weights_path: /get_weight_version}}
"""


@pytest.mark.slow
async def test_concurrent_trainers_of_two_policies_each_receive_their_tokens(tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text("def length(result):\n    return len(result.final_response)\n")
    models = {"white": policy(), "black": policy()}
    for model in models.values():
        model.write = lambda text, chance: f"{chance.randrange(10**9)}<|im_end|>"
    taken: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], list[int]]]] = {name: [] for name in models}

    async def train(service: Served, name: str, keys: list[str], increment: int) -> None:
        """Take the same batches as the other trainer, and of them what one's own policy has sampled."""
        for step in range(6):
            rows = keys[2 * step : 2 * step + 2]
            lines, _ = await asyncio.to_thread(service.batch, rows=rows, n=3, batch=f"step-{step}")
            assert all(line["dropped"] is None and line["provenance"]["exact"] for line in lines)
            role = {"white": "policy", "black": "other"}[name]
            own = [one for line in lines for one in line["rollouts"] if one["server"] == role]
            assert len(own) == 6 and {one["seat"] for one in own} == {name}
            for one in own:
                for ids, spans in ((sequence["ids"], sequence["spans"]) for sequence in one["sequences"]):
                    taken[name] += [(tuple(ids[:a]), tuple(ids[a:b]), one["weights"]) for _, a, b in spans]
            models[name].version += increment  # while the other one's rollouts may be under way

    async with models["white"].running() as white, models["black"].running() as black:
        items = ", ".join(f"{{n: {number}}}" for number in range(12))
        spec = TWO_POLICIES.format(white=white, black=black, tokenizer=tokenizer(), items=items)
        service = await asyncio.to_thread(Served, spec_in(tmp_path, spec))
        try:
            keys = await asyncio.to_thread(service.keys)
            await asyncio.gather(train(service, "white", keys, 1), train(service, "black", keys, 100))
            refused = {
                "/v1/rollouts": ({"rows": keys[:1], "n": 2, "max_staleness": 1}, "several_policies"),
                "/run": (
                    {"responses_create_params": {"input": []}, "verifier_metadata": {"row_key": keys[0]}},
                    "several_agents",
                ),
            }
            for path, (body, error) in refused.items():
                answer = await asyncio.to_thread(service.ask, "POST", path, body)
                assert (answer.status, answer.json["error"]) == (422, error)
        finally:
            await asyncio.to_thread(service.__exit__)
    for name, model in models.items():
        versions = {(tuple(one.prompt), tuple(one.ids)): one.version for one in model.log}
        assert len(taken[name]) == len(model.log) == len(versions) == 6 * 6 * 2, "each token once, by its own trainer"
        for prompt, ids, (oldest, newest) in taken[name]:
            assert oldest <= versions[prompt, ids] <= newest
    assert (
        max(newest for *_, (_, newest) in taken["white"]) <= 6 < 100 <= max(one.version for one in models["black"].log)
    )
