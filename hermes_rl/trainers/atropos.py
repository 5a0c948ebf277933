"""Atropos' trajectory API as a trainer: a client of `run-api` (atroposlib 0.4.0, `atroposlib.api.server`).

The API gives out groups in the order in which it got them, and says how many of ours are in its queue. So a number of
groups tells which of them the trainer has had. It keeps everything in memory: where it was started again, the groups
that the trainer had not received by the step at which it goes on are lost, and are sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from hermes_rl.errors import RunError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog, StepMark, content_of
from hermes_rl.runs.groups import body_of
from hermes_rl.trainers.base import GroupRefused, Registered, Registration, TrainerState

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Tries at a request, with pauses of 1, 2, 4, … seconds between them."""
PATIENCE = 60.0
"""Seconds that a request may take."""


@dataclass
class AtroposTrainer:
    """The trainers that pull their batches from one trajectory API.

    Attributes:
        url: of the API.
        total_steps: of training, after which the trainer needs no more groups; -1: what the API says.
        batches_ahead: batches that may be waiting in the queue (`max_batches_offpolicy`); 0 or less: no bound.
        batch_size: sequences of a batch, where the API does not say.
        min_batch_allocation: the share of each batch that is this environment's at least; None: no such share.
        include_messages: send the conversations along.
        say: told while a trainer is waited for.
    """

    url: str
    total_steps: int
    batches_ahead: int = 1
    batch_size: int = -1
    min_batch_allocation: float | None = None
    include_messages: bool = True
    say: Callable[[str], None] = field(default=logger.info)

    name = "atropos"

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._group_size = 1
        self._weighted = False
        self._env_id: int | None = None
        self._former: int | None = None
        """What the API called the environment before, while groups of that time may be in its queue."""

    async def register(self, registration: Registration, log: DeliveryLog) -> Registered:
        self._group_size, self._weighted = registration.group_size, registration.weight >= 0
        answer = await self._registered(registration)
        if self.total_steps == -1:
            self.total_steps = int(answer["num_steps"])
        info = await self._get("info")
        if int(info["batch_size"]) != -1:
            self.batch_size = int(info["batch_size"])
        if self.batch_size != -1 and self._group_size > self.batch_size:
            raise RunError(
                f"a group of {self._group_size} rollouts does not fit into the trainer's batch of {self.batch_size} "
                "sequences: make the group smaller, or the batch larger"
            )
        names = await self._get("wandb_info")
        lost, arrived = await self._compared(log, int(answer["starting_step"]))
        self._env_id = int(answer["env_id"])
        longest = int(info["max_token_len"])
        return Registered(
            session=self._env_id,
            lost=tuple(lost),
            arrived=tuple(arrived),
            # Trainers leave out sequences that reach their bound.
            longest=longest - 1 if longest > 0 else None,
            project=names.get("project"),
            run_group=names.get("group"),
            run_name=answer.get("wandb_name"),
            checkpoint_folder=answer.get("checkpoint_dir"),
            checkpoint_every=answer.get("checkpoint_interval"),
        )

    async def _registered(self, registration: Registration) -> dict[str, Any]:
        """Return the API's answer, once a trainer has registered with it too."""
        body = {
            "max_token_length": registration.max_token_length,
            "desired_name": registration.name,
            "weight": registration.weight,
            "min_batch_allocation": self.min_batch_allocation,
            "group_size": registration.group_size,
        }
        waited = False
        while True:
            # Each registration that succeeds is another environment to the API, so this is never tried twice.
            answer = await self._request("POST", "register-env", json=body)
            if answer.get("status") == "success":
                return answer
            if not waited:
                self.say(f"the trajectory API at {self.url} waits for a trainer")
            waited = True
            await asyncio.sleep(1)

    async def _compared(self, log: DeliveryLog, step: int) -> tuple[list[str], list[str]]:
        """Which groups of the log the API has lost with its queue, and which in doubt it has after all."""
        known = await self._status(log.session) if log.session is not None else None
        queued = None if known is None else int(known.get("self_queue_size", 0))
        if queue_was_lost(log, step, queued):
            return log.delivered[log.at(step).taken :], []
        self._former = log.session  # its groups may still be in the queue, and nobody is to wait for more of it
        if queued is not None:
            await self._request("POST", "disconnect-env", json={"env_id": log.session})
        if log.doubtful and queued is not None and await self._arrived(log):
            return [], log.doubtful[-1:]
        return [], []

    async def _arrived(self, log: DeliveryLog) -> bool:
        """Whether the group in doubt is the last that the API has taken from anybody.

        Only one group of this process is ever under way, whatever the number of its environments; so this is wrong only
        where an environment of another process has sent one since: then ours is sent again.
        """
        latest = await self._get("latest_example")
        if log.content_in_doubt is None or latest.get("env_id") != log.session:
            return False
        return content_of(latest["tokens"], latest["scores"]) == log.content_in_doubt

    async def state(self) -> TrainerState:
        status = await self._status(self._env_id)
        if status is None:
            raise RunError(
                f"the trajectory API at {self.url} no longer knows this environment: it was started again. The same "
                "command goes on with it"
            )
        step, queue = int(status["current_step"]), int(status.get("queue_size", 0))
        if self._group_size == 1:
            # For groups of one the API leaves out those of other environments: count them.
            queue = max(queue, int((await self._get("status"))["queue_size"]))
        queued = int(status.get("self_queue_size", 0))
        if self._former is not None:
            former = await self._status(self._former) or {}
            queued += int(former.get("self_queue_size", 0))
            self._former = self._former if former.get("self_queue_size") else None
        # Groups of other environments may fill no batch without ours, so that only our own count as enough.
        ahead = queued * self._group_size // self.batch_size if self.batch_size > 0 else 0
        return TrainerState(
            step=step,
            wants=0 if step + ahead >= self.total_steps else self._wanted(status, queue, queued),
            queued=queued,
            finished=step >= self.total_steps,
            share=float(status.get("env_weight", 1.0)) if self._weighted else 1.0,
        )

    def _wanted(self, status: dict[str, Any], queue: int, queued: int) -> int:
        """Return how many groups the queue still takes."""
        if self.batch_size <= 0:
            return 0  # nobody has said how large a batch is
        if self.batches_ahead <= 0:
            return 1 << 30
        least = self.min_batch_allocation
        fraction = float(status.get("unallocated_fraction", 1.0)) + (least or 0.0)
        wanted = self.batches_ahead * int(self.batch_size * fraction) // self._group_size - queue
        if least is None:
            return wanted
        # The share that is ours is filled whatever other environments have sent.
        share = -(-self.batches_ahead * self.batch_size * least // self._group_size)
        return max(wanted, int(share) - queued)

    async def send(self, group: Group, lines: list[dict[str, Any]]) -> None:
        parts = [{**line, "env_id": self._env_id} for line in lines]
        if not self.include_messages:
            parts = [{**part, "messages": None} for part in parts]
        single = len(parts) == 1
        body, headers = await body_of(parts[0] if single else parts)
        path = "scored_data" if single else "scored_data_list"
        await self._request("POST", path, attempts=ATTEMPTS, data=body, headers=headers)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ------------------------------------------------------------------ requests

    async def _status(self, env_id: int | None) -> dict[str, Any] | None:
        """Return what the API says of an environment; None where it does not know it."""
        try:
            return await self._request("GET", "status-env", attempts=3, json={"env_id": env_id})
        except (GroupRefused, _UnknownEnvironmentError):
            return None

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._request("GET", path, attempts=3)

    async def _request(self, method: str, path: str, *, attempts: int = 1, **more: Any) -> dict[str, Any]:
        """Return the answer to a request; tried again where the API failed or could not be reached.

        A POST that got no answer is not tried again, since the API may have taken what it held.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE))
        problem = ""
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(2 ** (attempt - 1))
            try:
                async with self._session.request(method, f"{self.url}/{path}", **more) as answer:
                    if answer.status < 400:
                        body: dict[str, Any] = await answer.json()
                        return body
                    problem = f"status {answer.status}: {(await answer.text())[:300]}"
                    if answer.status < 500:
                        raise GroupRefused("refused", f"{self.url}/{path} answered with {problem}")
                    if path == "status-env":
                        raise _UnknownEnvironmentError  # run-api fails on a number that it has not given
            except TimeoutError as error:
                raise self._lost(f"no answer to {path} in {PATIENCE:.0f} s") from error
            except (aiohttp.ClientError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
                if method == "POST" and not isinstance(error, aiohttp.ClientConnectorError):
                    raise self._lost(problem) from error
            logger.warning("%s/%s failed (attempt %d of %d): %s", self.url, path, attempt + 1, attempts, problem)
        raise self._lost(problem)

    def _lost(self, problem: str) -> RunError:
        return RunError(
            f"the trajectory API at {self.url} was lost: {problem}. The same command goes on when it is back"
        )


class _UnknownEnvironmentError(Exception):
    """The API was started again, and has not given the number that it is asked about."""


def queue_was_lost(log: DeliveryLog, step: int, queued: int | None) -> bool:
    """Whether the API has forgotten what it was sent: the trainer goes on at `step`, and so many of our groups are
    `queued` there now (None: it does not know us)."""
    if queued is None:
        return bool(log.delivered)
    last = log.marks[-1] if log.marks else StepMark(step, 0, {})
    # Steps of an API never fall, and while they stay what was in its queue stays there.
    return step < last.step or (queued == 0 and step == last.step and len(log.delivered) > last.taken)
