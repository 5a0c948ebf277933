"""POST /v1/rollouts: a batch of groups, a line for each when it ends.

Groups start no faster than lines are read: `Env.groups` starts nothing until the next group is requested, and none is
requested while a line waits to be read.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hermes_rl import Example, Group, Policy, Rollout, attach_provenance
from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.service.bodies import RolloutsRequest
from hermes_rl.service.refusals import wrong
from hermes_rl.service.state import INEXACT, STALE, Place, Service, first_of, unproven
from hermes_rl.values import write_json

STALLED = 3600.0
"""Seconds that a reader may leave a line unread: a trainer's step, or its evaluation, may take that long."""
LAST = 5.0
"""Seconds in which the last lines of an interrupted batch are read."""
ASKING = 10.0
"""Timeout in seconds for a server to report its weights."""

logger = logging.getLogger(__name__)


class Batch:
    """One requested batch. Make it with `requested`; closing `lines` releases all of it."""

    def __init__(self, service: Service, request: RolloutsRequest, policy: Policy, reservation: Place) -> None:
        self._service, self._request, self.policy, self._reservation = service, request, policy, reservation
        self.version: int | None = None
        """Version of the weights when it was requested."""
        rows = service.require_rows(request.rows, request.split)
        members = request.n or service.env.spec.serve.group_size
        reservation.take(len(rows) * members)
        self._groups = service.env.groups(
            members,
            policy,
            rows=(row for row in rows if not service.draining.is_set()),
            concurrency=service.env.spec.serve.concurrency,
            split=request.split,
            sampling=request.sampling,
            batch=request.batch or uuid.uuid4().hex,
        )

    @classmethod
    async def requested(cls, service: Service, request: RolloutsRequest) -> Batch:
        """Return the batch, after all checks of the request.

        Raises `Refused` for an invalid request, or if there is no room.
        """
        policy = await service.policy(request.policy)
        field = "sampling"
        with service.make_reservation() as reservation:
            try:
                batch = cls(service, request, policy, reservation)
                field = "n"  # the record of a spec that compares members has groups of one size
                await batch._open()
            except UserError as error:
                raise wrong("request", field, str(error)) from error
        return batch

    async def _open(self) -> None:
        await self._groups.open()
        others = self._service.env.spec.other_policies
        if self._request.max_staleness is not None and others:
            reason = (
                f"it cannot be checked for {others}, which is trained too; check the `weights` of each rollout instead"
            )
            raise wrong("several_policies", "max_staleness", reason)
        if self._request.max_staleness is not None and await self._current_version() is None:
            raise wrong(
                "no_version",
                "max_staleness",
                "the policy does not report the version of its weights: send `version` with the policy, and PUT "
                "/v1/policy when it changes, or name its `weights_path`",
            )
        self.version = self.policy.version
        self._service.batches.add(self)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines."""
        groups = dropped = 0
        end: dict[str, Any] = {}
        try:
            while (group := await self._next()) is not None:
                cause, detail = await self._dropped(group)
                if cause == STALE and self._groups.play_again(group):
                    continue
                # Readers of lines may end one at other separators than "\n" too, such as U+2028.
                line = await asyncio.to_thread(
                    lambda made: write_json(group_to_record(*made), default=str, ascii_only=True),
                    (group, cause, detail),
                )
                yield line + b"\n"
                groups, dropped = groups + 1, dropped + (cause is not None)
                self._service.metrics.count(group, cause)
        except HermesRLError as error:
            # The response has started, so that no status can report it.
            logger.warning("a batch ended early: %s", error)
            end = {"cut": str(error)}
        await self.close()
        if not end and groups < len(self._request.rows):
            reason = (
                "the service is shutting down" if self._service.draining.is_set() else "a budget of the spec is used up"
            )
            end = {"cut": f"{reason}: ask the same batch again"}
        yield write_json({"end": True, "groups": groups, "dropped": dropped, **end}, ascii_only=True) + b"\n"

    async def close(self) -> None:
        """End the running rollouts, and wait until they are released; may be called twice."""
        try:
            await self._groups.close()
        finally:
            self._service.batches.discard(self)
            self._reservation.leave()

    async def _next(self) -> Group | None:
        """Return the next group that has ended; None at the end, and if the service stops waiting."""
        following, _ = await first_of(self._following(), self._service.cut.wait())
        return None if following.cancelled() else following.result()

    async def _following(self) -> Group | None:
        return await anext(self._groups, None)

    async def _current_version(self) -> int | None:
        try:
            async with asyncio.timeout(ASKING):
                return await self.policy.weights()
        except TimeoutError:
            return None

    async def _dropped(self, group: Group) -> tuple[str | None, str | None]:
        """Return why the group must not be used for training at this moment, or None."""
        if group.dropped is not None:
            return str(group.dropped), group.detail
        provenance, problem = group.provenance, unproven(group)
        if problem is not None and not self._service.env.spec.serve.allow_inexact:
            return INEXACT, problem
        if self._request.max_staleness is None:
            return None, None
        now, oldest = await self._current_version(), provenance.oldest if provenance is not None else None
        if now is None or oldest is None:
            return STALE, "the version of its weights is not known"
        if now - oldest > self._request.max_staleness:
            return STALE, f"its oldest weights are version {oldest}, and the policy's are {now}"
        return None, None


class Lines(Response):
    """A response of consecutive lines. If its reader disconnects, the source of the lines is ended."""

    media_type = "application/x-ndjson"

    def __init__(self, batch: Batch, service: Service) -> None:
        super().__init__(None)
        self._batch, self._service = batch, service
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = None
        try:
            writing, *_ = await first_of(self._write(send), wait_for_disconnect(receive), self._wait_for_reader())
        finally:
            if writing is None or writing.cancelled():
                self._service.metrics.cancelled += 1
            await self._batch.close()
        if not writing.cancelled():
            writing.result()

    async def _wait_for_reader(self) -> None:
        """Wait until the service ends, and then as long as it waits for a slow reader."""
        await self._service.cut.wait()
        await asyncio.sleep(LAST)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._batch.lines()) as lines:
                async for line in lines:
                    async with asyncio.timeout(STALLED):
                        await send({"type": "http.response.body", "body": line, "more_body": True})
        except TimeoutError:
            logger.warning("a reader has not read for %.0f s, and is not waited for any longer", STALLED)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


# ------------------------------------------------------------------------------------------------------ A line


def group_to_record(group: Group, dropped: str | None, detail: str | None) -> dict[str, Any]:
    """Return the line of a group. A group that must not be used for training has neither scores nor tokens."""
    provenance = group.provenance
    return {
        "group": group.id,
        "row_key": group.row.key,
        "dropped": dropped,
        "detail": detail,
        "weights": [provenance.oldest, provenance.newest] if provenance is not None else [None, None],
        "provenance": provenance.record() if provenance is not None else None,
        "rollouts": [
            {
                **_rollout_fields(rollout, counts, usable=dropped is None),
                # For a seat of an episode: its name, the weights that sampled it, and the seats with which it is
                # compared.
                **(_seat_fields(rollout, part) if rollout.seat.name else {}),
            }
            for part in group.compared()
            for rollout, counts in zip(part.rollouts, part.baseline, strict=True)
        ],
    }


def _seat_fields(rollout: Rollout, part: Group) -> dict[str, Any]:
    versions = attach_provenance(Group(part.id, part.row, [rollout]))
    weights = [versions.oldest, versions.newest]
    return {"seat": rollout.seat.name, "server": rollout.seat.role, "weights": weights, "comparison": part.id}


def _rollout_fields(rollout: Rollout, counts: float | None, *, usable: bool) -> dict[str, Any]:
    scored = usable and rollout.error is None
    return {
        "id": rollout.id,
        "score": rollout.score if scored else None,
        "baseline": counts if usable else None,
        "stop_reason": str(rollout.stop_reason),
        "error": rollout.error,
        "trainable": scored and rollout.trainable and bool(rollout.sequences),
        "rewards": {name: reward.value for name, reward in rollout.rewards.items()},
        "credit": rollout.credit if scored else None,
        "overrides": rollout.overrides,
        "turns": rollout.turns,
        "messages": rollout.messages,
        "sequences": list(_sequence_fields(rollout.examples())) if scored else [],
    }


def _sequence_fields(examples: Sequence[Example]) -> Iterator[Mapping[str, Any]]:
    for example in examples:
        before = len(example.prompt_ids)
        yield {
            "ids": example.prompt_ids + example.response_ids,
            "mask": [0] * before + example.mask,
            "logprobs": None if example.logprobs is None else [0.0] * before + example.logprobs,
            "spans": [[span.turn, before + span.start, before + span.stop] for span in example.spans],
        }
