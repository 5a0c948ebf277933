"""State that all requests of a service share: the environment, its rows, the policies, and the slots for rollouts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any, Self

from hermes_rl import Env, Group, Policy, Row
from hermes_rl.errors import UserError
from hermes_rl.service.bodies import PolicyRequest
from hermes_rl.service.policies import Policies
from hermes_rl.service.refusals import Refused, service_ending, wrong

SEARCHED = 10_000
"""Rows of an endless dataset that can be requested."""
SHOWN = 20
"""Maximum unknown keys that a refusal repeats."""
PAGE = 1000

INEXACT = "inexact"
STALE = "stale"


def unproven(group: Group) -> str | None:
    """Return why a group is not proven token-exact, or None if it is."""
    provenance = group.provenance
    if provenance is not None and provenance.exact:
        return None
    problems = provenance.problems if provenance is not None else ("it has no token provenance",)
    return f"its tokens are not proven to be the sampled tokens: {problems[0]}"


class Metrics:
    """Counts the groups that were sent, and the ones excluded from training."""

    def __init__(self) -> None:
        self.handed_out = self.uniform = 0
        self.dropped: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Rollouts without a score because of infrastructure failures, by stop reason."""
        self.cancelled = 0
        """Responses whose reader disconnected."""

    def count(self, group: Group, dropped: str | None) -> None:
        """Count a group that a reader gets."""
        for rollout in group.rollouts:
            if (
                rollout.error is not None and not rollout.stop_reason.graded
            ):  # an episode of several seats fails as a whole
                self.failures[str(rollout.stop_reason)] += 1
        if dropped is not None:
            self.dropped[dropped] += 1
            return
        self.handed_out += 1
        self.uniform += group.uniform

    def record(self, **more: Any) -> dict[str, Any]:
        """Return the JSON form, with additional entries."""
        return {
            "groups": {
                "handed_out": self.handed_out,
                "dropped": self.dropped.total(),
                "stale": self.dropped[STALE],
                "inexact": self.dropped[INEXACT],
                "by_cause": dict(self.dropped),
            },
            "zero_variance": self.uniform / self.handed_out if self.handed_out else None,
            "failures": dict(self.failures),
            "readers_gone": self.cancelled,
            **more,
        }


class Service:
    """One open environment that is served, with the models that act.

    `most` limits the rollouts of all its requests together; they are recorded at `record`.
    """

    def __init__(self, env: Env, policies: Policies, max_requests: int, record: str) -> None:
        self.env, self.policies, self.max_requests, self.record = env, policies, max_requests, record
        self.metrics = Metrics()
        self.in_flight = 0
        """Number of rollouts requested at the moment."""
        self.batches: set[Any] = set()
        self.draining = asyncio.Event()
        """Set: nothing new starts, and started rollouts run to their end."""
        self.quiet = asyncio.Event()
        """Set while no rollouts are requested."""
        self.quiet.set()
        self.cut = asyncio.Event()
        """Set: rollouts that still run are ended."""
        self._rows: dict[str, list[Row]] = {}
        self._row_indices: dict[str, dict[str, int]] = {}

    async def open(self) -> None:
        """Read through the rows, so that keys are found immediately."""
        for split in ("train", "eval"):
            try:
                rows = self.env.rows(split)
            except UserError:
                continue  # the spec has no rows for evaluation
            rows_read = await asyncio.to_thread(list, islice(rows, SEARCHED if rows.length is None else None))
            self._rows[split] = rows_read
            self._row_indices[split] = {row.key: index for index, row in enumerate(rows_read)}

    def page(self, split: str, after: str | None) -> tuple[list[Row], str | None]:
        """Return the rows after the one with the key `after`, and the key after which the next page starts.

        Raises `Refused` if there is no such key or split.
        """
        indices = self._places_in(split)
        if after is not None and after not in indices:
            raise wrong("unknown_row", "after", f"no row of the split {split!r} has this key", rows=[after])
        start = 0 if after is None else indices[after] + 1
        rows = self._rows[split][start : start + PAGE]
        return rows, rows[-1].key if start + PAGE < len(indices) else None

    def _places_in(self, split: str) -> Mapping[str, int]:
        if split not in self._row_indices:
            raise wrong("no_split", "split", "the spec keeps no rows for evaluation; see dataset.eval")
        return self._row_indices[split]

    def require_rows(self, keys: Sequence[str], split: str, location: str = "rows") -> list[Row]:
        """Return the rows of these keys; raises `Refused` with the unknown ones."""
        indices = self._places_in(split)
        unknown = [key for key in keys if key not in indices]
        if unknown:
            detail = (
                f"{len(unknown)} of {len(keys)} keys are not of the split {split!r}; "
                f"GET /v1/rows?split={split} lists the keys of the split"
            )
            raise wrong("unknown_row", location, detail, rows=unknown[:SHOWN])
        return [self._rows[split][indices[key]] for key in keys]

    async def policy(self, request: PolicyRequest | None) -> Policy:
        """Return the policy that a request names, ready to run; raises `Refused` with the problem if there is one."""
        policy = self.policies.resolve_policy(request, {batch.policy for batch in self.batches})
        while self.policies.forgotten:
            await self.env.release_policy(self.policies.forgotten.pop())
        if not policy.exact and not self.env.spec.serve.allow_inexact:
            raise wrong(
                "inexact",
                "policy.type",
                "a server of messages does not report which tokens it sampled: name a token-level type (vllm, sglang), "
                "or set serve.allow_inexact: true in the service's spec",
            )
        try:
            await policy.prepare()
        except UserError as error:
            raise wrong("policy", "policy", str(error)) from error
        return policy

    def make_reservation(self) -> Place:
        """Return a slot reservation for a request; nothing is reserved yet."""
        return Place(self)


async def first_of(*work: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Return all of it as tasks once one of them is done; the others were cancelled, and have ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


class Place:
    """Rollouts that one request reserves, within the limit of the service.

    An exception that leaves its `with`, a cancellation too, releases them: no other code knows the reservation.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._count = service, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.leave()

    def take(self, count: int) -> None:
        """Reserve `count` rollouts; raises `Refused` if there are not enough left."""
        service = self._service
        if service.draining.is_set():
            raise service_ending()
        if service.in_flight + count > service.max_requests:
            raise Refused(
                429,
                "too_many",
                f"{count} rollouts are asked for, and {service.in_flight} of at most {service.max_requests} are "
                "running: ask for fewer rows, or later",
                most=service.max_requests,
                asked=count,
                taken=service.in_flight,
            )
        service.in_flight += count
        self._count += count
        service.quiet.clear()

    def leave(self) -> None:
        """Release them; may be called twice."""
        self._service.in_flight -= self._count
        self._count = 0
        if not self._service.in_flight:
            self._service.quiet.set()
