"""What all requests of a service share: the environment, its rows, the policies, and the places for rollouts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any, Self

from hermes_rl import Env, Group, Policy, Row
from hermes_rl.errors import UserError
from hermes_rl.service.bodies import PolicyAsked
from hermes_rl.service.policies import Policies
from hermes_rl.service.refusals import Refused, ending, wrong

SEARCHED = 10_000
"""Rows of an endless dataset that can be asked for."""
SHOWN = 20
"""Unknown keys that a refusal repeats."""
PAGE = 1000

INEXACT = "inexact"
STALE = "stale"


def unproven(group: Group) -> str | None:
    """Why the tokens of a group are not proven to be those that were sampled; None where they are."""
    certificate = group.certificate
    if certificate is not None and certificate.exact:
        return None
    problems = certificate.problems if certificate is not None else ("it has no certificate",)
    return f"its tokens are not proven to be those that were sampled: {problems[0]}"


class Metrics:
    """Counts what was handed out, and what was not to be trained on."""

    def __init__(self) -> None:
        self.handed_out = self.uniform = 0
        self.dropped: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Rollouts that were not scored for a reason of ours, by how they ended."""
        self.cancelled = 0
        """Answers whose reader went away."""

    def count(self, group: Group, dropped: str | None) -> None:
        """Take a group into account that a reader gets."""
        for rollout in group.rollouts:
            if rollout.error is not None and not rollout.ending.graded:  # an episode of several seats fails as a whole
                self.failures[str(rollout.ending)] += 1
        if dropped is not None:
            self.dropped[dropped] += 1
            return
        self.handed_out += 1
        self.uniform += group.uniform

    def record(self, **more: Any) -> dict[str, Any]:
        """Return it as JSON has it, with what others know."""
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
    """One environment that is served, open, with the models that act.

    At `most` so many rollouts may be asked for at a time, by all of its requests together; `record` says where they
    are.
    """

    def __init__(self, env: Env, policies: Policies, most: int, record: str) -> None:
        self.env, self.policies, self.most, self.record = env, policies, most, record
        self.metrics = Metrics()
        self.in_flight = 0
        """Rollouts that are asked for now."""
        self.batches: set[Any] = set()
        self.draining = asyncio.Event()
        """Set: nothing new begins, and what was begun is played to its end."""
        self.quiet = asyncio.Event()
        """Set while nothing is asked for."""
        self.quiet.set()
        self.cut = asyncio.Event()
        """Set: what is still being played is ended."""
        self._rows: dict[str, list[Row]] = {}
        self._places: dict[str, dict[str, int]] = {}

    async def open(self) -> None:
        """Look through the rows, so that keys are found at once."""
        for split in ("train", "eval"):
            try:
                rows = self.env.rows(split)
            except UserError:
                continue  # the spec keeps none for evaluation
            rows_read = await asyncio.to_thread(list, islice(rows, SEARCHED if rows.length is None else None))
            self._rows[split] = rows_read
            self._places[split] = {row.key: place for place, row in enumerate(rows_read)}

    def page(self, split: str, after: str | None) -> tuple[list[Row], str | None]:
        """Return rows behind the one with the key `after`, and the key after which the next page begins; Refused where
        there is no such key or split."""
        places = self._places_in(split)
        if after is not None and after not in places:
            raise wrong("unknown_row", "after", f"no row of the split {split!r} has this key", rows=[after])
        start = 0 if after is None else places[after] + 1
        rows = self._rows[split][start : start + PAGE]
        return rows, rows[-1].key if start + PAGE < len(places) else None

    def _places_in(self, split: str) -> Mapping[str, int]:
        if split not in self._places:
            raise wrong("no_split", "split", "the spec keeps no rows for evaluation; see dataset.eval")
        return self._places[split]

    def require_rows(self, keys: Sequence[str], split: str, place: str = "rows") -> list[Row]:
        """Return the rows of these keys; raises Refused with those that are unknown."""
        places = self._places_in(split)
        unknown = [key for key in keys if key not in places]
        if unknown:
            detail = (
                f"{len(unknown)} of {len(keys)} keys are not of the split {split!r}; "
                f"GET /v1/rows?split={split} has those that are"
            )
            raise wrong("unknown_row", place, detail, rows=unknown[:SHOWN])
        return [self._rows[split][places[key]] for key in keys]

    async def policy(self, request: PolicyAsked | None) -> Policy:
        """Return the policy that a request names, ready to play; Refused says what is wrong with it."""
        policy = self.policies.named(request, {batch.policy for batch in self.batches})
        while self.policies.forgotten:
            await self.env.forget(self.policies.forgotten.pop())
        if not policy.exact and not self.env.spec.serve.allow_inexact:
            raise wrong(
                "inexact",
                "policy.type",
                "a server of messages does not say which tokens it sampled: name a token-level type (vllm, sglang), or "
                "set serve.allow_inexact: true in the service's spec",
            )
        try:
            await policy.prepare()
        except UserError as error:
            raise wrong("policy", "policy", str(error)) from error
        return policy

    def place(self) -> Place:
        """Return a place for what a request asks for; nothing is taken yet."""
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
    """Rollouts that one request asks for, among those that may be asked for at a time.

    What leaves its `with` by an exception, a cancellation too, gives them back: nobody else knows of the place.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._count = service, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.leave()

    def take(self, count: int) -> None:
        """Take so many; raises Refused where there are not as many left."""
        service = self._service
        if service.draining.is_set():
            raise ending()
        if service.in_flight + count > service.most:
            raise Refused(
                429,
                "too_many",
                f"{count} rollouts are asked for, and {service.in_flight} of at most {service.most} are being played: "
                "ask for fewer rows, or later",
                most=service.most,
                asked=count,
                taken=service.in_flight,
            )
        service.in_flight += count
        self._count += count
        service.quiet.clear()

    def leave(self) -> None:
        """Give them back; may be called twice."""
        self._service.in_flight -= self._count
        self._count = 0
        if not self._service.in_flight:
            self._service.quiet.set()
