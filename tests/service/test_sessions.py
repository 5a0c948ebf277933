"""Sessions: rollouts whose turns come from the client."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.service.served import Served, spec_in
from tests.waiting import until_blocking

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
}
SLOW = '''
import time


def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"
'''


SLOW_STATE = """
import time


class Slow:
    def __init__(self, item):
        time.sleep(4)
"""


def waits(seconds: float) -> dict[str, Any]:
    function = {"name": "wait", "arguments": f'{{"seconds": {seconds}}}'}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def with_slow_tool(folder: Path) -> Path:
    (folder / "slow.py").write_text(SLOW)
    spec = spec_in(folder)
    spec.write_text(spec.read_text().replace('"code.py:add"}', '"code.py:add"}, {python: "slow.py:wait"}'))
    return spec


def test_a_session_is_stepped_by_messages_to_its_score(served: Served) -> None:
    turn = served.post("/v1/sessions", {"row": served.keys()[0]})
    assert [tool["function"]["name"] for tool in turn["tools"]] == ["add"]
    path = f"/v1/sessions/{turn['id']}"
    turn = served.post(f"{path}/step", {"message": CALL})
    assert turn["messages"][-1] == {"role": "tool", "tool_call_id": "1", "content": "3"}
    assert served.get(path) == turn, "what was answered may be asked for again"
    ended = served.post(f"{path}/step", {"message": "The sum is 3."})
    assert (ended["done"], ended["score"], ended["stop_reason"], ended["error"]) == (True, 1.0, "finished", None)
    assert served.ask("POST", f"{path}/step", {"message": "more"}).json["error"] == "ended"
    assert served.get("/v1/metrics")["in_flight"]["rollouts"] == 0
    assert served.ask("DELETE", path).status == 204
    assert served.ask("DELETE", path).status == 404


def test_a_session_is_stepped_by_token_ids(served: Served) -> None:
    from tests.api.summing import END, TOKENIZER

    turn = served.post("/v1/sessions", {"row": served.keys()[0]})
    assert TOKENIZER.decode(turn["prompt_ids"]).endswith("assistant\n")
    ids = TOKENIZER.encode("The sum is 3." + END)
    path = f"/v1/sessions/{turn['id']}"
    ended = served.post(f"{path}/step", {"ids": ids, "logprobs": [-0.5] * len(ids), "version": 3})
    assert (ended["done"], ended["score"]) == (True, 1.0)
    served.ask("DELETE", path)


def test_invalid_step_gets_status_422_and_the_session_continues(served: Served) -> None:
    turn = served.post("/v1/sessions", {"row": served.keys()[0]})
    path = f"/v1/sessions/{turn['id']}"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "message"),
        ({"message": "a", "ids": [1]}, "message"),
        ({"message": "a", "logprobs": [0.0]}, "logprobs"),
        ({"ids": []}, "ids"),
        ({"ids": [-1]}, "ids.0"),
        ({"ids": [1.5]}, "ids.0"),
        ({"ids": [1, 2], "logprobs": [0.0]}, "ids"),
        ({"ids": [2_000_000_000]}, "ids"),
        ({"ids": [1] * 2600}, "ids"),
        ({"message": {"role": "tool", "content": "1"}}, "message.role"),
        ({"message": {"role": "assistant", "tool_calls": "?"}}, "message.tool_calls"),
        ({"message": {"content": [1]}}, "message.content"),
        ({"message": {}}, "message"),
        ({"message": 7}, "message"),
    ]
    for step, place in wrong:
        answer = served.ask("POST", f"{path}/step", step)
        assert (answer.status, answer.json.get("place")) == (422, place), (step, answer.body)
    assert served.post(f"{path}/step", {"message": "The sum is 3."})["score"] == 1.0
    served.ask("DELETE", path)


def test_invalid_session_request_is_refused_before_it_starts(served: Served) -> None:
    key = served.keys()[0]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"row": "none"}, "row"),
        ({"row": key, "sampling": {"colour": 1}}, "sampling"),
        ({"row": key, "tokenizer": "/nowhere/at/all"}, "tokenizer"),
        ({"row": key, "split": "eval"}, "split"),
    ]
    for asked, place in wrong:
        answer = served.ask("POST", "/v1/sessions", asked)
        assert (answer.status, answer.json["place"]) == (422, place), answer.body
    metrics = served.get("/v1/metrics")["in_flight"]
    assert (metrics["rollouts"], metrics["sessions"]) == (0, 0)


def test_idle_session_ends(tmp_path: Path) -> None:
    with Served(spec_in(tmp_path), "--idle", "1") as service:
        turn = service.post("/v1/sessions", {"row": service.keys()[0]})
        assert service.get("/v1/metrics")["in_flight"]["rollouts"] == 1
        until_blocking(lambda: service.get("/v1/metrics")["in_flight"]["sessions"] == 0)
        assert service.get("/v1/metrics")["in_flight"]["rollouts"] == 0
        assert service.ask("GET", f"/v1/sessions/{turn['id']}").json["error"] == "no_session"


@pytest.mark.slow
def test_a_session_that_takes_long_to_start_is_not_idle(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_STATE)
    spec = spec_in(tmp_path)
    spec.write_text(spec.read_text() + '\nstate: {python: "slow.py:Slow", isolate: process}\n')
    with Served(spec, "--idle", "1") as service:
        turn = service.post("/v1/sessions", {"row": service.keys()[0]})
        assert turn["messages"]
        assert service.post(f"/v1/sessions/{turn['id']}/step", {"message": "The sum is 3."})["done"]


def test_one_step_at_a_time_and_a_step_may_be_ended(tmp_path: Path) -> None:
    with Served(with_slow_tool(tmp_path)) as service:
        path = f"/v1/sessions/{service.post('/v1/sessions', {'row': service.keys()[0]})['id']}"
        answers: list[Any] = []
        step = threading.Thread(
            target=lambda: answers.append(service.ask("POST", f"{path}/step", {"message": waits(30)}))
        )
        step.start()
        until_blocking(lambda: service.ask("POST", f"{path}/step", {}).status == 409)
        started = time.monotonic()
        assert service.ask("DELETE", path).status == 204
        step.join(20)
        assert time.monotonic() - started < 20
        assert (answers[0].status, answers[0].json["error"]) == (404, "no_session")
        assert service.get("/v1/metrics")["in_flight"]["rollouts"] == 0
        assert "Traceback" not in service.said


async def test_sessions_count_among_the_rollouts_at_a_time(tmp_path: Path) -> None:
    service = await asyncio.to_thread(Served, spec_in(tmp_path), "--max-requests", "2")
    with service:
        key = (await asyncio.to_thread(service.keys))[0]
        for status in (200, 200, 429):
            assert (await asyncio.to_thread(service.ask, "POST", "/v1/sessions", {"row": key})).status == status


SEATS = """
name: seats
dataset: {items: [{a: 1}]}
prompt: {user: Say a number.}
agents: {white: {}, black: {prompt: {system: You answer.}}}
schedule: {order: alternate, rounds: 1}
rewards: {exact_match: {args: {target: "1"}}}
servers: {policy: {type: scripted}}
"""


def test_session_of_several_seats_reports_the_turn_and_each_result(tmp_path: Path) -> None:
    with Served(spec_in(tmp_path, SEATS)) as served:
        described = served.get("/openapi.json")
        turn = served.post("/v1/sessions", {"row": served.keys()[0]})
        assert (turn["seat"], turn["messages"]) == ("white", [{"role": "user", "content": "Say a number."}])
        path = f"/v1/sessions/{turn['id']}/step"
        turn = served.post(path, {"message": "1"})
        assert (turn["seat"], [message["content"] for message in turn["messages"]]) == ("black", ["You answer.", "1"])
        ended = served.post(path, {"message": "2"})
        answer = described["paths"]["/v1/sessions/{session_id}/step"]["post"]["responses"]["200"]
        schema = {**answer["content"]["application/json"]["schema"], "components": described["components"]}
        for told in (turn, ended):
            jsonschema.Draft202012Validator(schema).validate(told)
    assert (ended["done"], ended["score"]) == (True, 1.0)
    assert {name: (seat["score"], seat["stop_reason"]) for name, seat in ended["seats"].items()} == {
        "white": (1.0, "environment_done"), "black": (0.0, "environment_done"),
    }  # fmt: skip
    assert [message["content"] for message in ended["seats"]["black"]["messages"]] == ["You answer.", "1", "2"]
