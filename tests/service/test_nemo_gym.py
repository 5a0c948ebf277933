"""NeMo Gym's dialect, by the shapes of its documents; tests/real/test_nemo_gym.py has its own collector."""

from __future__ import annotations

import asyncio
import math
import signal
from pathlib import Path
from typing import Any

from hermes_rl.service.nemo_gym import aggregated
from tests.api.summing import TEXT
from tests.service.playing import holds, many, named, policy
from tests.service.served import PLAYED, SPEC, Served, spec_in
from tests.service.test_batches import BROKEN, in_flight


def row(key: str, **more: Any) -> dict[str, Any]:
    """A row as NeMo Gym's collector posts it."""
    params = {"input": [{"role": "user", "content": "…"}], "temperature": 0.5, "max_output_tokens": 100}
    return {"responses_create_params": params, "verifier_metadata": {"row_key": key}, "_ng_task_index": 0, **more}


async def test_a_rollout_is_a_responses_object_with_the_tokens_of_each_turn(tmp_path: Path) -> None:
    model = policy()
    async with model.running() as url:
        name = named(url)
        policy_of_spec = "servers: {policy: {" + ", ".join(f"{k}: '{v}'" for k, v in name.items()) + "}}\n"
        service = await asyncio.to_thread(Served, spec_in(tmp_path, TEXT + policy_of_spec))
        with service:
            key = (await asyncio.to_thread(service.keys))[0]
            answer = await asyncio.to_thread(service.post, "/run", row(key, agent_ref={"name": "a"}))
        assert {one["temperature"] for one in model.asked} == {0.5}
        assert {one["max_tokens"] for one in model.asked} == {100}
        assert (answer["reward"], answer["right"], answer["agent_ref"]) == (1.0, 1.0, {"name": "a"})
        assert "_ng_failure_class" not in answer
        output = answer["response"]["output"]
        assert [one["type"] for one in output] == ["function_call", "function_call_output", "message"]
        assert output[0]["call_id"] == output[1]["call_id"]
        turns = [one for one in output if "generation_token_ids" in one]
        assert [one["generation_token_ids"] for one in turns] == [one.ids for one in model.log]
        assert [one["generation_log_probs"] for one in turns] == [one.logprobs for one in model.log]
        seen: list[int] = []
        for one in turns:
            assert one["prompt_token_ids"][: len(seen)] == seen, "each prompt begins with all that came before"
            seen = one["prompt_token_ids"] + one["generation_token_ids"]


def test_a_failure_is_never_a_reward_that_counts(tmp_path: Path) -> None:
    (tmp_path / "grading.py").write_text(BROKEN)
    spec = spec_in(tmp_path, PLAYED.replace("rewards: {", 'rewards: {steady: {fn: "grading.py:steady"}, '))
    with Served(spec) as service:
        keys = service.keys()
        good = service.post("/run", row(keys[0]))
        (tmp_path / "broken").touch()
        failed = service.post("/run", row(keys[1], _ng_task_index=1))
        assert failed["_ng_failure_class"] == "reward_failure"
        assert "the disk of the grader is full" in failed["error"]
        assert not any("generation_token_ids" in item for item in failed["response"]["output"])
        summed = service.post("/aggregate_metrics", {"verify_responses": [good, failed]})
        assert summed["agent_metrics"]["mean/reward"] == good["reward"] == 2.0
        assert (summed["agent_metrics"]["rollouts"], summed["agent_metrics"]["failures"]) == (1, 1)
        assert [group["_ng_task_index"] for group in summed["group_level_metrics"]] == [0]
        assert service.get("/v1/metrics")["groups"]["by_cause"] == {"reward_failure": 1}


def test_rollout_that_a_row_cannot_represent_is_excluded_from_training(tmp_path: Path) -> None:
    """A row has neither a mask nor several sequences."""
    masked = spec_in(tmp_path, SPEC + "on_stop: {finished: mask}\nsolution: {turns: [{say: no}]}\n")
    with Served(masked) as service:
        answer = service.post("/run", row(service.keys()[0]))
        assert answer["_ng_failure_class"] == "masked"
        assert not any("generation_token_ids" in item for item in answer["response"]["output"])


def test_mistakes_in_rows_are_422(served: Served) -> None:
    key = served.keys()[0]
    wrong: list[tuple[Any, str]] = [
        ({}, "responses_create_params"),
        ({"responses_create_params": {}}, "verifier_metadata"),
        ({"responses_create_params": {}, "verifier_metadata": {}}, "verifier_metadata"),
        ({"responses_create_params": {}, "verifier_metadata": {"row_key": 7}}, "verifier_metadata"),
        (row("none"), "verifier_metadata.row_key"),
        ({**row(key), "responses_create_params": {"temperature": "hot"}}, "responses_create_params"),
        ({"responses_create_params": {}, "verifier_metadata": {"row_key": key, "split": []}}, "verifier_metadata"),
        ([], "body"),
    ]
    for body, place in wrong:
        answer = served.ask("POST", "/run", body)
        assert (answer.status, answer.json["place"]) == (422, place), answer.body
    for body in ({}, [], {"verify_responses": {}}, {"verify_responses": [1]}, None, b"[" * 100_000):
        assert served.ask("POST", "/aggregate_metrics", body).status == 422, body
    odd = {"verify_responses": [{"reward": True, "_ng_task_index": [1]}, {"reward": 1e308}, {"reward": None}, {}]}
    assert served.ask("POST", "/aggregate_metrics", odd).status == 200
    assert served.post("/aggregate_metrics", {"verify_responses": []})["group_level_metrics"] == []


def test_service_does_not_parse_the_rows_that_it_sums_up(served: Served) -> None:
    """Parsing millions of values would block its event loop for seconds, and take its memory."""

    def peak() -> int:
        status = Path(f"/proc/{served.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) >> 10

    before = peak()
    many = b'{"verify_responses": [' + b"[]," * 2_000_000 + b"[]]}"
    assert served.ask("POST", "/aggregate_metrics", many).status == 422
    assert peak() - before < 100, "MiB"


async def test_who_goes_away_or_a_service_that_ends_releases_a_run(tmp_path: Path) -> None:
    model = policy()
    async with model.running() as url:
        name = named(url)
        policy_of_spec = "servers: {policy: {" + ", ".join(f"{k}: '{v}'" for k, v in name.items()) + "}}\n"
        spec = spec_in(tmp_path, many(4) + policy_of_spec)
        service = await asyncio.to_thread(Served, spec, "--drain", "0.5")
        with service:
            key = (await asyncio.to_thread(service.keys))[0]
            model.pause()
            connection = service.connect()
            body = b'{"responses_create_params": {}, "verifier_metadata": {"row_key": "%s"}}' % key.encode()
            await asyncio.to_thread(connection.request, "POST", "/run", body, service.headers(body))
            await holds(lambda: in_flight(service) == 1 and len(model.asked) == 1)
            connection.close()
            await holds(lambda: in_flight(service) == 0)
            answering = asyncio.create_task(asyncio.to_thread(service.ask, "POST", "/run", row(key)))
            await holds(lambda: in_flight(service) == 1)
            service.process.send_signal(signal.SIGTERM)
            answer = await answering
            assert (answer.status, answer.json["error"]) == (503, "ending")
            assert await asyncio.to_thread(service.process.wait, 30) == 0
            assert service.said == "starting sums; its rollouts are recorded in outputs/sums/rollouts\n"


def test_means_are_of_numbers_that_can_be_summed() -> None:
    odd: list[object] = [10**400, 1.7e308, -1.7e308, math.nan, math.inf, True, "1"]
    answers = [{"reward": value, "turns": value} for value in (0.5, 1.0, *odd)]
    said = aggregated({"verify_responses": answers})["agent_metrics"]
    assert said == {"mean/reward": 0.75, "mean/turns": 0.75, "std/reward": 0.25, "rollouts": 9, "failures": 0}
