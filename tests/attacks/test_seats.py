"""Schedules and seats that do what they like: each episode is graded, and costs nobody else anything."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import open_env
from hermes_rl.rollouts.rollout import attach_provenance
from tests.rollouts.test_seats import played, spec_of

pytestmark = pytest.mark.slow

CODE = """
import asyncio, json, os, sys, threading, time, textwrap


class Odd(BaseException): pass


class World:
    def __init__(self, item):
        self.answer, self.asked = item["answer"], 0

    def turn(self, said):
        self.asked += 1
        return eval(self.answer) if self.asked == 2 else {"white": "x"} if self.asked == 1 else None


async def play(seats, row):
    white, black = seats.values()
    await white.say("hello")
    scope = dict(globals())
    exec("async def rest(white, black):\\n" + textwrap.indent(row["code"], "    "), scope)
    return await scope["rest"](white, black)


def texts(result): return len(result.texts)
"""
FAILS, ENDS = "environment_error", "environment_done"
SCHEDULES: dict[str, str] = {
    "raise StopIteration": FAILS,
    "raise StopAsyncIteration": FAILS,
    "raise KeyboardInterrupt": FAILS,
    "raise SystemExit(0)": FAILS,
    "raise asyncio.CancelledError": FAILS,
    "raise GeneratorExit": FAILS,
    "raise Odd": FAILS,
    "os._exit(0)": FAILS,
    "os.closerange(3, 100)": FAILS,
    "for fd in range(3, 50):\n    try: os.write(fd, b'{\"returned\": 1}')\n    except OSError: pass": FAILS,
    "white._object_id = 12345; await white.say('x')": FAILS,
    "await black.say(b'x')": FAILS,
    "return 'x' * 50_000_000": FAILS,
    "value = []\nfor _ in range(100_000): value = [value]\nreturn value": FAILS,
    "await asyncio.gather(*[white.say(str(n)) for n in range(5)])": ENDS,
    "try: await asyncio.wait_for(black.say('x'), 0.001)\nexcept TimeoutError: pass\nawait black.say('y')": ENDS,
    "task = asyncio.ensure_future(black.say('x')); await asyncio.sleep(0); task.cancel(); await white.say('y')": ENDS,
    "return float('nan'), {1, 2}, object(), '\\ud800'": ENDS,
    "white.name = 'black'; await white.say('x')": ENDS,
    "try: await white._ask_here('leave')\nexcept Exception: await black.say('x')": ENDS,
    "threading.Thread(target=time.sleep, args=(60,), daemon=False).start()": ENDS,
    "os.fork()": ENDS,
    "os.write(1, 100_000 * b'x')": ENDS,
}
"""What a schedule does after its first turn, and how the seat ends that has had it."""
STATES: dict[str, str] = {
    **dict.fromkeys(["['white']", "'white'", "True", "{'white': 1}", "{'w' * 100_000: 'x'}", "{1: 'x'}"], FAILS),
    **dict.fromkeys(["sys.exit(3)", "{'white': {'role': 'assistant', 'content': 'x'}}", "1 / 0"], FAILS),
    **dict.fromkeys(["0", "{}", "{'white': ''}", "{'white': '\\ud800'}", "{'white': None, 'black': None}"], ENDS),
}
"""What a state says comes second, and how the seat ends that has spoken."""


@pytest.mark.parametrize(("code", "stop_reason"), [*SCHEDULES.items(), *STATES.items()])
async def test_episode_is_graded_whatever_its_schedule_does(tmp_path: Path, code: str, stop_reason: str) -> None:
    play = {"state": "turn"} if code in STATES else {"fn": "odd.py:play"}
    black = {"prompt": {"system": "You answer.", "user": "Well?"}}
    spec = spec_of(
        tmp_path,
        dataset={"items": [{"code": code, "answer": code}]},
        agents={"white": {}, "black": black},
        schedule=play,
        rewards={"texts": {"fn": "odd.py:texts", "range": [0, 9]}},
        agent={"tool_timeout": 20},
        **({"state": "odd.py:World"} if code in STATES else {}),
    )
    (tmp_path / "odd.py").write_text(textwrap.dedent(CODE))
    async with open_env(spec) as env:
        group = await env.run_group(next(iter(env.rows())), 1)
    seats = group.rollouts[0].seats
    assert (group.dropped, str(seats[0].stop_reason)) == (None, stop_reason)
    assert all(seat.score is not None for seat in seats)
    assert attach_provenance(group).exact


WIN = {"fn": "code.py:win"}
UNPAID: dict[str, dict[str, Any]] = {
    "A13 paid by none": {"win": {**WIN, "seats": {"white": 1}}},
    "A13 paid without a weight": {"win": {**WIN, "seats": {"white": 1}}, "more": {**WIN, "weight": 0}},
    "A13 paid nothing": {"win": {**WIN, "seats": {"white": 1, "black": 0}}},
    "A13 the other paid twice": {"win": {**WIN, "seats": {"white": 1}}, "more": {**WIN, "seats": {"white": 1}}},
}


@pytest.mark.parametrize("name", UNPAID)
@pytest.mark.parametrize("baseline", ["row", "group"])
async def test_seat_that_no_reward_pays_is_not_trained(tmp_path: Path, name: str, baseline: str) -> None:
    agents = dict.fromkeys(("white", "black"), {"baseline": baseline} if baseline == "row" else {})
    group = await played(tmp_path, agents=agents, rewards=UNPAID[name])
    assert {seat.seat.name: seat.seat.trained for seat in group.rollouts[0].seats} == {"white": True, "black": False}
    assert {each.seat.name for part in group.compared() for each in part.rollouts} == {"white"}


@pytest.mark.parametrize(
    ("own", "act", "look", "seen"),
    [
        (False, "setsid nohup sleep 600 >/dev/null 2>&1 &", "pgrep -c sleep; true", "0"),
        (False, "echo 'echo taken; exit 7' > ~/.bashrc; cp ~/.bashrc ~/.bash_env", "echo mine", "mine"),
        (False, "kill -9 -1", "echo mine", "mine"),
        (True, "kill -9 -1", "echo mine", "mine"),
        (True, "echo a secret > /tmp/x; cp /tmp/x /dev/shm/x", "cat /tmp/x /dev/shm/x 2>/dev/null; echo mine", "mine"),
    ],
)
async def test_seat_does_not_act_in_the_turn_of_another(
    tmp_path: Path, own: bool, act: str, look: str, seen: str
) -> None:
    turns = [
        {"tools": [{"name": "terminal", "args": {"command": act}}]}, {"say": "1"},
        {"seat": "black", "tools": [{"name": "terminal", "args": {"command": look}}]}, {"seat": "black", "say": "2"},
    ]  # fmt: skip
    seat = {"sandbox": "own"} if own else {}
    agents = {"white": seat, "black": {**seat, "prompt": {"system": "You answer."}}}
    rewards = {"texts": {"fn": "code.py:texts", "range": [0, 9]}}
    parts = {"toolsets": ["terminal"], "agents": agents, "schedule": {"order": "alternate", "rounds": 1}}
    group = await played(tmp_path, 1, solution={"turns": turns}, rewards=rewards, **parts)
    heard = [message["content"] for message in group.rollouts[0].seats[1].messages if message["role"] == "tool"]
    assert f'"output": "{seen}"' in heard[0]
