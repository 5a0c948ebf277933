"""Programs for OpenEnv's own client: ``openenv_client.py URL PROGRAM``; the last line is the result as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from openenv.core.generic_client import GenericEnvClient

from tests.integrations.doors import SCORES
from tests.real.doors_played import MEMBERS, message_of

URL = sys.argv[1]
TOGETHER = threading.Barrier(8)


def connected() -> Any:
    key = os.environ.get("KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return GenericEnvClient(base_url=URL, headers=headers).sync()


def calling(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"content": "", "tool_calls": [{"id": "call", "type": "function", "function": function}]}


def rollout(number: int) -> dict[str, Any]:
    """Call the tool, call an unknown tool, and answer, every second time wrongly."""
    with connected() as env:
        first = env.reset(index=number % 4).observation
        TOGETHER.wait(60)  # all eight are open now
        a, b = [int(word.strip("?")) for word in first["messages"][-1]["content"].split() if word.strip("?").isdigit()]
        heard = env.step(calling("add", json.dumps({"a": a, "b": b}))).observation
        refused = env.step(calling("nothing", "{")).observation
        ended = env.step({"content": f"The sum is {a + b}." if number % 2 else "I do not know."})
        return {
            "prompt": [message["role"] for message in first["messages"]],
            "tools": [tool["function"]["name"] for tool in first["tools"]],
            "answers": [[message["role"] for message in one["messages"]] for one in (heard, refused)],
            "sum": heard["messages"][0]["content"] == str(a + b),
            "done": ended.done,
            "reward": ended.reward,
            "stop_reason": ended.observation["stop_reason"],
            "rewards": ended.observation["rewards"],
        }


def eight() -> Any:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(rollout, range(8)))


def rows() -> Any:
    """Return the listing of the task API, and resets by key, by seed, by index, and by a missing key."""
    splits = [one["name"] for one in httpx.get(f"{URL}/sums/splits").json()]
    number = httpx.post(f"{URL}/sums/num_tasks", json={"split": "train"}).json()["num_tasks"]
    listed = httpx.post(f"{URL}/sums/tasks", json={"split": "train"}).json()["tasks"]
    found: list[str] = []
    refused = []
    with connected() as env:
        for given in ({"key": listed[2]["id"]}, {"seed": 6}, {}, {}):
            found.append(env.reset(**given).observation["messages"][-1]["content"])
        for given in ({"key": "none"}, {"index": 9}, {"indx": 1}, {"split": "test"}):
            try:
                env.reset(**given)
            except RuntimeError as error:
                refused.append(str(error))
    return {"splits": splits, "number": number, "listed": len(listed), "found": found, "refused": refused}


def broken() -> Any:
    """Run a rollout whose reward fails."""
    with connected() as env:
        env.reset()
        ended = env.step({"content": "The sum is 3."})
        again = None
        try:
            env.step({"content": "Once more."})
        except RuntimeError as error:
            again = str(error)
        return {"done": ended.done, "reward": ended.reward, **ended.observation, "again": again}


def doors() -> Any:
    """Return two rollouts of each row of the integration tests' spec, with the fields that OpenEnv gives a client."""
    found = []
    for key in list(SCORES) * MEMBERS:
        with connected() as env:
            heard = env.reset(key=key)
            messages, names = list(heard.observation["messages"]), set(heard.observation)
            while not heard.done:
                messages.append(message_of(messages))
                said = messages[-1]
                heard = env.step({"content": said["content"], "tool_calls": said.get("tool_calls", [])})
                messages += heard.observation["messages"]
                names |= set(heard.observation)
            found.append(
                {"key": key, "reward": heard.reward, "heard": sorted(names), "rewards": heard.observation["rewards"]}
            )
    return found


def stay() -> None:
    """Start a process in the sandbox, and wait until it ends."""
    with connected() as env:
        env.reset()
        env.step(calling("terminal", json.dumps({"command": f"sleep {sys.argv[3]} & echo begun"})))
        print("begun", flush=True)
        time.sleep(600)


def one() -> Any:
    with connected() as env:
        return env.reset().done


if __name__ == "__main__":
    print("\n" + json.dumps(globals()[sys.argv[2]]()))
