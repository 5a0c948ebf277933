"""Implement a trainer for Atropos' trajectory API: a client of `run-api` (atroposlib 0.4.0, `atroposlib.api.server`).

The API returns groups in the order of arrival, and reports the number of this environment's groups in its queue, so a
count of groups shows which of them the trainer has used. The API keeps everything in memory. After a restart, the
groups that the trainer had not used by the step at which it continues are lost, and are sent again.

An error of a proxy or a lost connection says nothing about the API. Only numbers show that the API was restarted: those
that it assigns to environments increase while it runs. After a failed request, the group is searched in the API before
it is sent again, and is then recorded as `repeated`: it may still arrive twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hermes_rl.errors import RunError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog, StepMark, content_of
from hermes_rl.runs.groups import body_of
from hermes_rl.servers.transport import public_url
from hermes_rl.threads import run_in_thread
from hermes_rl.trainers.base import GroupRefused, Registered, Registration, TrainerState

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Number of attempts of a request, with pauses of 1, 2, 4, … seconds between them."""
PAUSE = 1.0
"""Seconds before the second attempt; each further pause is twice as long."""
PATIENCE = 60.0
"""Timeout in seconds of a request, and the longest pause that a server may request."""
LARGEST_ANSWER = 1 << 28
"""Maximum bytes of a response."""
RETRIED = frozenset({408, 413, 425, 429})
"""Statuses below 500 of a proxy or a busy server; they are independent of the content of a request."""
REFUSING = frozenset({400, 422})
"""Statuses with which the API refuses the content of a request."""
REFUSALS = 10
"""Number of consecutive refused groups after which the run stops."""


class _Answer(BaseModel):
    """A response of the API; the fields have the names of `atroposlib.api.server`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Registered(_Answer):
    status: str
    env_id: Count = 0
    wandb_name: str | None = None
    checkpoint_dir: str | None = None
    starting_step: Count = 0
    checkpoint_interval: int | None = None
    num_steps: int = -1

    def follows(self, numbers: Collection[int], name: str | None) -> bool:
        """Return True if the API has been running since it assigned earlier numbers, and an earlier name.

        It numbers all environments, and the environments of one name. A restart resets both to 0.
        """
        before, now = _number_of(name), _number_of(self.wandb_name)
        return max(numbers) < self.env_id and (before is None or now is None or before < now)


class _Info(_Answer):
    batch_size: int
    max_token_len: int


class _Names(_Answer):
    group: str | None = None
    project: str | None = None


class _Status(_Answer):
    current_step: Count
    queue_size: Count = 0
    self_queue_size: Count = 0
    env_weight: float = Field(1.0, ge=0)
    unallocated_fraction: float = Field(1.0, ge=0, le=1)


class _Received(_Answer):
    status: Literal["received", "buffered"]


class _Group(_Answer):
    env_id: int | None = None
    tokens: list[list[int]] = []
    scores: list[float] = []


A = TypeVar("A", bound=_Answer)


class _FailedRequestError(Exception):
    """A request got no response of the API.

    Attributes:
        unclear: True if the API may have processed the request.
        wait: seconds to wait before the next request, as requested by the server.
    """

    def __init__(self, problem: str, unclear: bool = True, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.unclear, self.wait = unclear, wait


def _number_of(name: str | None) -> int | None:
    """Return the number in the name of an environment, `NAME_0` for the first of its name."""
    suffix = (name or "").rpartition("_")[2]
    return int(suffix) if suffix.isascii() and suffix.isdigit() else None


@dataclass
class AtroposTrainer:
    """The trainers that pull their batches from one trajectory API.

    Attributes:
        url: address of the API.
        total_steps: training steps after which the trainer needs no more groups; -1: the API's value.
        batches_ahead: maximum number of batches waiting in the queue (`max_batches_offpolicy`); 0 or less: no limit.
        batch_size: sequences of a batch, if the API does not report it.
        min_batch_allocation: minimum fraction of each batch for this environment; None: no minimum.
        include_messages: send the conversations too.
        say: called with messages while waiting for a trainer.
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
        self._shown_url = public_url(self.url)
        """The address for messages, which never contain a password."""
        self._session: aiohttp.ClientSession | None = None
        self._group_size = 1
        self._weighted = False
        self._numbers = [0]
        """Current number of the environment in the API, and its numbers at earlier starts whose groups are queued."""
        self._log = DeliveryLog(None, self.name)
        self._step = 0
        self._refused = 0
        """Number of consecutive groups that the API has refused."""

    async def register(self, registration: Registration, log: DeliveryLog) -> Registered:
        self._group_size, self._weighted, self._log = registration.group_size, registration.weight >= 0, log
        unanswered = log.unanswered
        log.registering()
        answer = await self._join(registration)
        if self.total_steps == -1:
            self.total_steps = answer.num_steps
        info = await self._get_json("info", _Info)
        if info.batch_size != -1:
            self.batch_size = info.batch_size
        if self.batch_size != -1 and self._group_size > self.batch_size:
            raise RunError(
                f"a group of {self._group_size} rollouts does not fit into the trainer's batch of {self.batch_size} "
                "sequences: make the group smaller, or the batch larger"
            )
        names = await self._get_json("wandb_info", _Names)
        lost_groups, arrived = await self._lost_groups(log, answer, unanswered)
        return Registered(
            session={"numbers": self._numbers, "name": answer.wandb_name},
            number=answer.env_id,
            lost=tuple(lost_groups),
            arrived=tuple(arrived),
            # Trainers drop sequences that reach their limit.
            longest=info.max_token_len - 1 if info.max_token_len > 0 else None,
            project=names.project,
            run_group=names.group,
            run_name=answer.wandb_name,
            checkpoint_folder=answer.checkpoint_dir,
            checkpoint_every=answer.checkpoint_interval,
        )

    async def _join(self, registration: Registration) -> _Registered:
        """Return the API's response after a trainer has registered with it too."""
        body = {
            "max_token_length": registration.max_token_length,
            "desired_name": registration.name,
            "weight": registration.weight,
            "min_batch_allocation": self.min_batch_allocation,
            "group_size": registration.group_size,
        }
        waited = False
        while True:
            # Each successful registration is another environment for the API, so this is never retried.
            answer = await self._request("POST", "register-env", _Registered, attempts=1, json=body)
            if answer.status == "success":
                return answer
            if not waited:
                self.say(f"the trajectory API at {self._shown_url} waits for a trainer")
            waited = True
            await asyncio.sleep(1)

    async def _lost_groups(
        self, log: DeliveryLog, answer: _Registered, unanswered: bool
    ) -> tuple[list[str], list[str]]:
        """Return the groups of the log that the API has lost with its queue, and the groups in doubt that it has.

        An `unanswered` registration may follow the one in the log in an API that was restarted: then only the latest
        group of the API proves that it was not.
        """
        session: dict[str, Any] = log.session if isinstance(log.session, dict) else {"numbers": [log.session]}
        former = [env_id for env_id in session["numbers"] if env_id is not None]
        self._numbers = [answer.env_id]
        step, queued = answer.starting_step, None
        unproven = False
        if former and answer.follows(former, session.get("name")):
            unproven = unanswered and bool(log.delivered) and not await self._latest_is(former, log.contents.values())
            if not unproven:
                status, queued = await self._status(former)
                step = status.current_step  # at the same moment as the queue, because a batch may be taken at any time
        if queue_was_lost(log, step, None if queued is None else sum(queued.values())):
            step_mark = log.mark_at(step)
            lost_groups = log.delivered[step_mark.groups_taken :]
            # Without a mark of this exact step, or if the queue held a group twice, the trainer may have used some.
            log.repeat([*(lost_groups if step_mark.step < step or log.doubled or unproven else ()), *log.doubtful])
            return lost_groups, []
        for env_id in former if queued is not None else ():
            self._numbers.append(env_id)
            # So that trainers do not wait for more groups of it.
            await self._request("POST", "disconnect-env", _Answer, json={"env_id": env_id})
        if queued is not None and log.doubtful and await self._has_arrived(former):
            return [], log.doubtful[-1:]
        log.repeat(log.doubtful)
        return [], []

    async def _has_arrived(self, env_ids: Collection[int]) -> bool:
        """Return True if the group in doubt is the latest that the API has received, and one of `env_ids`.

        This process sends one group at a time for all its environments. So a group that has arrived is missed only if
        an environment of another process has sent one since, or if it equals the one before it.
        """
        content = self._log.content_in_doubt
        return content is not None and await self._latest_is(env_ids, [content])

    async def _latest_is(self, env_ids: Collection[int], contents: Collection[str]) -> bool:
        """Return True if one of `env_ids` has sent the latest group of the API, with one of these contents."""
        latest = await self._get_json("latest_example", _Group)
        return latest.env_id in env_ids and content_of(latest.tokens, latest.scores) in contents

    async def state(self) -> TrainerState:
        status, groups = await self._status(self._numbers)
        if status.current_step >= self.total_steps:  # one wrong answer does not end the run
            status, groups = await self._status(self._numbers)
        self._numbers[1:] = [env_id for env_id in self._numbers[1:] if groups[env_id]]
        step, queue, queued = status.current_step, status.queue_size, sum(groups.values())
        if step < self._step:
            raise self._connection_error(f"it was restarted at step {step}")
        self._step = step
        if self._group_size == 1:
            # For groups of one the API omits groups of other environments: count them.
            queue = max(queue, (await self._get_json("status", _Status)).queue_size)
        # Groups of other environments may not fill a batch without this one's, so only its own count.
        ahead = queued * self._group_size // self.batch_size if self.batch_size > 0 else 0
        return TrainerState(
            step=step,
            wants=0 if step + ahead >= self.total_steps else self._compute_capacity(status, queue, queued),
            queued=queued,
            finished=step >= self.total_steps,
            share=status.env_weight if self._weighted else 1.0,
        )

    def _compute_capacity(self, status: _Status, queue: int, queued: int) -> int:
        """Return the number of groups that the queue still accepts."""
        if self.batch_size <= 0:
            return 0  # the batch size is unknown
        if self.batches_ahead <= 0:
            return 1 << 30
        min_share = self.min_batch_allocation
        fraction = status.unallocated_fraction + (min_share or 0.0)
        capacity = self.batches_ahead * int(self.batch_size * fraction) // self._group_size - queue
        if min_share is None:
            return capacity
        # This environment's fraction is filled regardless of other environments.
        share = -(-self.batches_ahead * self.batch_size * min_share // self._group_size)
        return max(capacity, int(share) - queued)

    async def send(self, group: Group, lines: list[dict[str, Any]]) -> None:
        parts = [{**line, "env_id": self._numbers[0]} for line in lines]
        if not self.include_messages:
            parts = [{**part, "messages": None} for part in parts]
        single = len(parts) == 1
        body, headers = await body_of(parts[0] if single else parts)
        path = "scored_data" if single else "scored_data_list"
        for attempt in range(ATTEMPTS):
            try:
                await self._request_once("POST", path, _Received, data=body, headers=headers)
                break
            except GroupRefused as refused:
                self._refused += 1
                if self._refused < REFUSALS:
                    raise
                raise RunError(f"the trajectory API refused {REFUSALS} groups in a row: {refused.detail}") from refused
            except _FailedRequestError as error:
                await self._pause(error, path, attempt)
                if error.unclear and await self._has_arrived(self._numbers):
                    break
                # fails if the API was restarted: the group does not belong to the new one
                await self._status(self._numbers)
                if error.unclear:
                    self._log.repeat([group.id])
        else:
            raise self._connection_error(f"{path} failed {ATTEMPTS} times")
        self._refused = 0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ------------------------------------------------------------------ requests

    async def _status(self, numbers: Sequence[int]) -> tuple[_Status, dict[int, int]]:
        """Return the status of the first of these environments, and the queued groups of each, all at one step."""
        while True:
            answers = [await self._request("GET", "status-env", _Status, json={"env_id": each}) for each in numbers]
            if len({status.current_step for status in answers}) == 1:
                queued = (status.self_queue_size for status in answers)
                return answers[0], dict(zip(numbers, queued, strict=True))

    async def _get_json(self, path: str, form: type[A]) -> A:
        return await self._request("GET", path, form)

    async def _request(self, method: str, path: str, form: type[A], *, attempts: int = ATTEMPTS, **more: Any) -> A:
        """Return the response to a request that may be retried.

        Raises:
            RunError: the API did not respond in `attempts` attempts, or its response has another form.
        """
        attempt = 0
        while True:
            try:
                return await self._request_once(method, path, form, **more)
            except GroupRefused as refused:
                raise RunError(refused.detail) from refused
            except _FailedRequestError as error:
                attempt += 1
                if attempt >= attempts:
                    raise self._connection_error(error) from error
                await self._pause(error, path, attempt - 1)

    async def _request_once(self, method: str, path: str, form: type[A], **more: Any) -> A:
        """Return the response to one request.

        Raises:
            GroupRefused: the API refuses the content of the request.
            RunError: it refuses every request, or the response has another form.
            _FailedRequestError: there is no response of the API.
        """
        url = f"{self._shown_url}/{path}"
        try:
            status, headers, body = await self._exchange(method, f"{self.url}/{path}", **more)
        except TimeoutError as error:
            raise _FailedRequestError(f"no answer to {path} in {PATIENCE:g} s") from error
        except aiohttp.ClientError as error:
            unclear = not isinstance(error, aiohttp.ClientConnectorError)
            raise _FailedRequestError(f"{type(error).__name__}: {error}", unclear) from error
        problem = f"status {status}: {body[:300].decode(errors='replace')}"
        if status in REFUSING:
            raise GroupRefused("refused", f"{url} answered with {problem}")
        if status >= 500 or status in RETRIED:
            wait = headers.get("Retry-After", "")
            seconds = float(wait) if wait.isascii() and wait.isdigit() else 0.0
            raise _FailedRequestError(problem, status >= 500, seconds)
        if status >= 400:
            raise RunError(f"{url} answered with {problem}")
        if "json" not in headers.get("Content-Type", ""):
            raise _FailedRequestError(f"an answer that is not JSON, as the API's are: {body[:300]!r}")
        try:
            return await run_in_thread(lambda: form.model_validate_json(body))
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(map(str, first["loc"])) or "the answer"
            problem = f"{location}: {first['msg']}, got {first['input']!r:.60}"
            if first["type"] in ("json_invalid", "missing"):  # cut off, or of a proxy that answers in JSON too
                raise _FailedRequestError(f"{path}: {problem}") from error
            raise RunError(f"{url}: {problem}") from error

    async def _exchange(self, method: str, url: str, **more: Any) -> tuple[int, Mapping[str, str], bytes]:
        """Return the status, headers and body of the response to a request."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE))
        body = bytearray()
        async with self._session.request(method, url, **more) as answer:
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > LARGEST_ANSWER:
                    raise RunError(f"{public_url(url)} answered with more than {LARGEST_ANSWER >> 20} MiB")
            return answer.status, answer.headers, bytes(body)

    async def _pause(self, error: _FailedRequestError, path: str, attempt: int) -> None:
        logger.warning("%s/%s failed (attempt %d of %d): %s", self._shown_url, path, attempt + 1, ATTEMPTS, error)
        await asyncio.sleep(min(PATIENCE, max(PAUSE * 2**attempt, error.wait)))

    def _connection_error(self, problem: object) -> RunError:
        return RunError(
            f"the trajectory API at {self._shown_url} was lost: {problem}. Run the same command again when it is back"
        )


def queue_was_lost(log: DeliveryLog, step: int, queued: int | None) -> bool:
    """Return True if the API has lost the groups that it received.

    Args:
        step: step at which the trainer continues.
        queued: this environment's groups in its queue; None: it was restarted.
    """
    if queued is None:
        return bool(log.delivered)
    last = log.marks[-1] if log.marks else StepMark(step, 0, {})
    # Steps of an API never decrease, and while the step is unchanged its queue is retained.
    return step < last.step or (queued == 0 and step == last.step and len(log.delivered) > last.groups_taken)
