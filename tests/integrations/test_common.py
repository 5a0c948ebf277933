"""Integrations that open a spec by name share one environment per process and serve a trainer's endpoint."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_rl import Example, StopReason, open_env
from hermes_rl.errors import UserError
from hermes_rl.integrations.base import TrainerAdapter
from hermes_rl.integrations.common import (
    logprobs_of,
    play_at_endpoint,
    require_no_comparing,
    require_one_stepped,
    tasks_of,
    values_of,
)
from hermes_rl.spec.load import parse_spec
from tests.api.summing import CODE, COMPARED, TEXT
from tests.integrations.chat_model import ChatModel

ROOT = Path(__file__).parents[2]


def spec_file(folder: Path, text: str = TEXT) -> str:
    """The path of the spec, with its code beside it."""
    (folder / "code.py").write_text(CODE)
    (folder / "sums.yaml").write_text(text)
    return str(folder / "sums.yaml")


async def test_concurrent_rollouts_each_use_their_endpoint(tmp_path: Path) -> None:
    spec, model = spec_file(tmp_path), ChatModel()
    keys = [key for key, _ in tasks_of(spec, "train", None, "it")]
    async with model.running() as url:
        played = await asyncio.gather(
            *(
                play_at_endpoint(
                    spec, key, base_url=url.replace("/v1", f"/{key}/v1"), model="m", api_key=f"k-{key}", trainer="it"
                )
                for key in keys
            )
        )
    assert [rollout.score for rollout in played] == [1.0] * 4
    assert [values_of(rollout) for rollout in played] == [{"right": 1.0}] * 4
    assert model.keys == {f"Bearer k-{key}" for key in keys}
    assert model.paths == {f"/{key}/v1/chat/completions" for key in keys}
    assert {body["model"] for body in model.asked} == {"m"}
    assert [rollout.examples() for rollout in played] == [[]] * 4  # the tokens are the trainer's


def test_log_probabilities_are_never_made_up() -> None:
    known = Example([1], [2, 3], [0, 1], [0.0, -0.5], (None, None))
    assert logprobs_of(known, "a trainer") == [0.0, -0.5]
    with pytest.raises(
        UserError,
        match=r"a rollout has no log-probabilities, and a trainer trains with the log-probabilities of sampling",
    ):
        logprobs_of(replace(known, logprobs=None), "a trainer")


async def test_endpoint_that_is_down_gives_no_score_after_three_attempts(tmp_path: Path) -> None:
    spec, model = spec_file(tmp_path), ChatModel(down=True)
    ((key, _),) = tasks_of(spec, "train", 1, "it")
    started = time.monotonic()
    async with model.running() as url:
        rollout = await play_at_endpoint(spec, key, base_url=url, model="m", api_key=None, trainer="it")
    assert (rollout.score, rollout.stop_reason) == (None, StopReason.SERVER_FAILURE)
    assert len(model.asked) == 3
    assert time.monotonic() - started < 30


async def test_agent_settings_apply_to_endpoint_rollouts(tmp_path: Path) -> None:
    spec, model = spec_file(tmp_path), ChatModel()
    ((key, _),) = tasks_of(spec, "train", 1, "it")
    async with model.running() as url:
        rollout = await play_at_endpoint(
            spec, key, base_url=url, model="m", api_key=None, trainer="it", sampling={"max_turns": 1}
        )
    assert rollout.stop_reason == StopReason.MAX_TURNS


async def test_rewards_that_compare_are_refused_by_name(tmp_path: Path) -> None:
    spec = spec_file(tmp_path, COMPARED)
    refused = r"rewards.longest compares .* and Some trainer runs each rollout by itself"
    with pytest.raises(UserError, match=refused):
        tasks_of(spec, "train", None, "Some trainer")
    with pytest.raises(UserError, match=refused):
        await play_at_endpoint(
            spec, "a", base_url="http://127.0.0.1:9/v1", model="m", api_key=None, trainer="Some trainer"
        )


def test_endless_rows_need_a_number(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "import itertools\n\n\ndef sums(*, seed, split):\n    return ({'a': n, 'b': 1} for n in itertools.count())\n"
    )
    items = "items: [{a: 1, b: 2}, {a: 3, b: 4}, {a: 5, b: 6}, {a: 7, b: 8}]"
    spec = spec_file(tmp_path, TEXT.replace(items, 'generator: "rows.py:sums"'))
    with pytest.raises(UserError, match="such as rows=1000"):
        tasks_of(spec, "train", None, "it")
    for rows in (-1, "5"):
        with pytest.raises(UserError, match=f"rows is {rows!r}, and not the number of rows"):
            tasks_of(spec, "train", rows, "it")  # type: ignore[arg-type]
    assert len(tasks_of(spec, "train", 5, "it")) == 5


FORK = """
import os, sys
from hermes_rl.errors import UserError
from hermes_rl.integrations.common import shared_environment, tasks_of

spec, before = sys.argv[1:]
tasks = tasks_of(spec, "train", None, "it")
if before == "opened":
    assert shared_environment(spec) is shared_environment(spec)
if os.fork() == 0:
    try:
        print("forked", len(list(shared_environment(spec)[0].rows())), flush=True)
    except UserError as error:
        print(error, flush=True)
else:
    print("status", os.wait()[1], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "says"), [("closed", "forked 4"), ("opened", "this process was forked from a process that runs")]
)
def test_trainer_may_fork_before_but_not_after_the_first_rollout(tmp_path: Path, before: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, spec_file(tmp_path), before],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert says in done.stdout, done.stderr
    assert "status 0" in done.stdout
    assert "Traceback" not in done.stderr


SEATS = """
dataset: {{items: [{{a: 1}}]}}
prompt: {{user: Say a number.}}
agents: {{white: {white}, black: {black}}}
schedule: alternate
rewards: {{exact_match: {{args: {{target: "1"}}}}}}
servers: {{policy: {{type: scripted}}, other: {{type: scripted}}}}
"""


@pytest.mark.parametrize(
    ("white", "black", "problem"),
    [
        ("{train: false}", "{train: false}", "no seat is trained .* so it would get nothing"),
        ("{}", "{}", "2 seats are trained, and it has one rollout for each place"),
        ("{}", "{server: other}", "black by `other` is trained, and it trains one policy"),
        ("{train: false}", "{server: other}", "black by `other` is trained, and it trains one policy"),
        ("{}", "{server: other, train: false}", None),
    ],
)
async def test_integrations_require_exactly_one_trained_seat(white: str, black: str, problem: str | None) -> None:
    env = open_env(parse_spec(SEATS.format(white=white, black=black)))
    pull = TrainerAdapter("it", env)
    try:
        if problem is None:
            assert await pull.open() is env
            require_no_comparing(env, "it")
        else:
            with pytest.raises(UserError, match=problem):
                await pull.open()
            with pytest.raises(UserError, match=problem):
                require_no_comparing(env, "it")
    finally:
        await pull.close()


@pytest.mark.parametrize(
    ("white", "black", "problem"),
    [
        ("{}", "{train: false}", "white, black use the server `policy`, and it answers for the trained seat alone"),
        ("{}", "{opponents: [policy, other], train: false}", "white, black use the server `policy`"),
        ("{server: other}", "{train: false}", "black use the server `policy`"),
        ("{}", "{server: other, train: false}", None),
    ],
)
async def test_stepping_integration_lets_only_the_trained_seat_use_the_policy(
    white: str, black: str, problem: str | None
) -> None:
    env = open_env(parse_spec(SEATS.format(white=white, black=black)))
    if problem is None:
        require_one_stepped(env, "it")
        return
    with pytest.raises(UserError, match=problem):
        require_one_stepped(env, "it")
