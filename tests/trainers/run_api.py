"""A model of Atropos' `run-api` in this process, a trainer that pulls batches, and a network that loses messages.

The model follows `atroposlib.api.server` 0.4.0 for environments whose groups are complete. `FaultyTrainer` is the
client of the product, whose requests reach the model through the network.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from hermes_rl.trainers.atropos import AtroposTrainer

JSON = {"Content-Type": "application/json"}
Answer = tuple[int, Mapping[str, str], bytes]


class RunApi:
    """The state of a `run-api` to which a trainer has registered.

    Args:
        step: at which the trainer starts.
        batch_size: sequences of a batch.
    """

    def __init__(self, step: int = 0, batch_size: int = 4) -> None:
        self.step, self.batch_size = step, batch_size
        self.environments: list[dict[str, Any]] = []
        self.queue: list[dict[str, Any]] = []
        self.latest: dict[str, Any] = {"tokens": [], "scores": []}

    def batch(self) -> list[dict[str, Any]]:
        """Return the groups of the next batch, as a trainer takes them; empty where the queue has too few."""
        taken: list[dict[str, Any]] = []
        for group in self.queue:
            taken.append(group)
            if sum(len(each["tokens"]) for each in taken) == self.batch_size:
                del self.queue[: len(taken)]
                self.step += 1
                return taken
        return []

    def __call__(self, path: str, body: dict[str, Any]) -> Answer:
        """Answer a request."""
        handler = getattr(self, f"_{path.replace('-', '_')}")
        try:
            return 200, JSON, json.dumps(handler(body)).encode()
        except LookupError:
            return 500, {"Content-Type": "text/plain"}, b"Internal Server Error"

    def _register_env(self, body: dict[str, Any]) -> dict[str, Any]:
        number = len(self.environments)
        same = sum(each["desired_name"] == body["desired_name"] for each in self.environments)
        self.environments.append({**body, "connected": True})
        return {
            "status": "success", "env_id": number, "wandb_name": f"{body['desired_name']}_{same}", "checkpoint_dir": "",
            "starting_step": self.step, "checkpoint_interval": -1, "num_steps": 1000,
        }  # fmt: skip

    def _disconnect_env(self, body: dict[str, Any]) -> dict[str, Any]:
        self.environments[body["env_id"]]["connected"] = False
        return {"status": "success"}

    def _info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "max_token_len": 64}

    def _wandb_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"group": "g", "project": "p"}

    def _status_env(self, body: dict[str, Any]) -> dict[str, Any]:
        own = self.environments[body["env_id"]]
        size = own["group_size"]
        total = sum(each["max_token_length"] * each["weight"] for each in self.environments if each["connected"])
        queued = sum(len(each["tokens"]) for each in self.queue if each["env_id"] == body["env_id"])
        return {
            "current_step": self.step, "queue_size": sum(len(each["tokens"]) for each in self.queue) // size,
            "unallocated_fraction": 1.0, "self_queue_size": queued // size, "max_group_size": size,
            "env_weight": max(0.01, own["max_token_length"] * own["weight"] / total) if total else [][0],
        }  # fmt: skip

    def _latest_example(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.latest

    def _scored_data(self, body: dict[str, Any]) -> dict[str, Any]:
        self.queue.append(body)
        self.latest = body
        return {"status": "received"}


class Network:
    """What lies between the client and the API: it loses, delays and answers messages itself.

    Args:
        api: where requests arrive; it may be replaced, as by a restart.
        chance: draws the faults.
        share: of the requests that meet a fault.
    """

    def __init__(self, api: RunApi, chance: random.Random, share: float) -> None:
        self.api, self.chance, self.share = api, chance, share
        self.late: list[Callable[[], object]] = []
        """Requests that are on their way, though their client has had an answer."""

    def request(self, path: str, body: dict[str, Any]) -> Answer:
        """Carry a request and its answer."""
        if self.late and self.chance.random() < 0.5:
            self.late.pop(0)()
        if self.chance.random() >= self.share:
            return self.api(path, body)
        arrives = self.chance.choice(("never", "now", "later"))
        if arrives == "now":
            self.api(path, body)
        elif arrives == "later" and path == "scored_data":
            api = self.api  # what was on its way to an API that has ended is lost with it
            self.late.append(lambda: api(path, body))
        match self.chance.choice(("status", "html", "dropped", "silent", "busy" if arrives == "never" else "status")):
            case "status":
                return self.chance.choice((500, 502, 503, 504)), {"Content-Type": "text/html"}, b"<html>Bad gateway"
            case "busy":
                return self.chance.choice((408, 425, 429)), {"Retry-After": "0"}, b""
            case "html":
                return 200, {"Content-Type": "text/html"}, b"<html>welcome"
            case "dropped":
                raise aiohttp.ServerDisconnectedError
            case _:
                raise TimeoutError


class FaultyTrainer(AtroposTrainer):
    """The client, whose requests go through a network of this process."""

    network: Network

    async def _exchange(self, method: str, url: str, **more: Any) -> Answer:
        body = more.get("json") or {}
        if "data" in more:
            data = more["data"]
            body = json.loads(data if isinstance(data, bytes | str) else bytes(data))
        return self.network.request(url.rpartition("/")[2], body)
