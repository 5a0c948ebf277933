"""Sending groups to Atropos' trajectory API, so that nothing is lost without a word.

A group leaves whole, finite and within the trainer's length, or it is dropped by name. BaseEnv encodes on the event
loop, and drops a group that the API refuses with a line in a debug log.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from hermes_rl.endings import Ending
from hermes_rl.env.assemble import with_content
from hermes_rl.env.too_long import TooLong
from hermes_rl.runs.directory import Journal
from hermes_rl.runs.encoding import body_of, encoded
from hermes_rl.tokens.sequence import MASKED

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Tries at sending a group, with pauses of 1, 2, 4, … seconds between them."""


class RefusedError(RuntimeError):
    """The API does not take a group, and never will."""


class GroupsWriter:
    """What BaseEnv expects of its JSONL writer, over a journal, which goes on with a file that is there."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    async def keep(self, groups: list[dict[str, Any]]) -> None:
        """Write groups that belong together at once; their JSON is made off the event loop."""
        self.journal.append_lines([await encoded(group) for group in groups])

    def close(self) -> None:
        self.journal.close()


class Sending:
    """Mixin of `HermesAgentBaseEnv`: replaces how BaseEnv posts scored data."""

    config: Any
    _dropped_groups: Counter[str]
    _longest_sent: int | None = None
    """Tokens of the longest sequence that may be sent, where that is less than the trainer takes."""
    jsonl_writer: GroupsWriter | None
    _allow_inexact: bool = True
    """Send groups without a certificate that their tokens are those that were sampled."""
    _max_staleness: int | None = None
    """Versions that the oldest weights of a group may be behind when it is sent."""
    _keep_stale: bool = False
    """Send what is older all the same, counted."""
    _too_long: TooLong

    def _keep_groups(self) -> None:
        """Write every group that is sent to `data_path_to_save_groups`, if there is one."""
        path = self.config.data_path_to_save_groups
        if path is not None and self.jsonl_writer is None:
            self.jsonl_writer = GroupsWriter(Journal(Path(path)))

    def _close_groups(self) -> None:
        """Close the file of groups, if there is one."""
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()
            self.jsonl_writer = None

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Any = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Send the groups that a trainer can use, written down before; the others are counted by cause and said.

        Layers of one group leave together in one call, or not at all. Nothing here holds up the event loop.
        """
        longest = self._longest_allowed() if abort_on_any_max_length_exceeded else None
        given = scored_data if isinstance(scored_data, list) else [scored_data]
        whole = self._too_long.applied(list(map(_completed, filter(None, given))), longest)
        fit = [part for part in whole if self._fits_the_trainer(part, longest)]
        if len(fit) < len(whole) and any("layer" in part for part in whole):
            fit = []  # a part of a rollout is not trained on without the rest
        fit = await self._fresh_enough(fit)
        if not fit:
            return
        for part in fit:
            self.completion_lengths += [_trained(mask) for mask in part["masks"]]  # type: ignore[attr-defined]
            await self.add_rollouts_for_wandb(part, item)  # type: ignore[attr-defined]
        if self.jsonl_writer is not None:
            await self.jsonl_writer.keep(fit)
        if do_send_to_api:
            await self._send_groups(fit if len(fit) > 1 or isinstance(scored_data, list) else fit[0], len(fit), item)

    async def _send_groups(self, data: Any, count: int, item: Any) -> None:
        self.items_sent_this_step += count  # type: ignore[attr-defined]
        try:
            await self._send_scored_data_to_api(data)
        except RefusedError as error:
            logger.error("a group was lost: %s", error)
        except RuntimeError as error:
            if item is None:
                logger.error("a group was lost: %s", error)
                return
            logger.error("a group could not be sent now and is tried again: %s", error)
            self.backlog.append(item)  # type: ignore[attr-defined]

    def _fits_the_trainer(self, group: dict[str, Any], longest: int | None) -> bool:
        size = group["group_overrides"].get("group_size", self.config.group_size)
        fault = next(_faults(group, size, longest, exact=not self._allow_inexact), None)
        if fault is not None:
            self._dropped_groups[fault[0]] += 1
            logger.warning("a group was not sent (%s): %s", *fault)
            return False
        uniform = self.config.ensure_scores_are_not_same and len(set(group["scores"])) == 1
        if uniform:
            self._dropped_groups["uniform"] += 1
            logger.warning("a group was not sent: all of its scores are the same, %s", group["scores"][0])
        return not uniform

    async def _fresh_enough(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those whose weights are not too old now, however long they have waited."""
        if self._max_staleness is None or not groups:
            return groups
        now = await self._weights_now()
        return [group for group in groups if self._young(group, now)]

    def _young(self, group: dict[str, Any], now: int | None) -> bool:
        oldest = (group.get("certificate") or {}).get("oldest")
        if oldest is None or now is None:
            words = "the version of the weights is not known; see weights_path of the server"
        elif now - oldest <= (self._max_staleness or 0):
            return True
        else:
            words = f"its oldest weights are {now - oldest} versions behind, {self._max_staleness} are allowed"
        self._dropped_groups[str(Ending.STALE)] += 1
        logger.warning("a group %s (stale): %s", "was sent all the same" if self._keep_stale else "was not sent", words)
        return self._keep_stale

    async def _weights_now(self) -> int | None:
        """The newest version of the weights that a policy server has; None where none tells it."""
        return None

    def _longest_allowed(self) -> int | None:
        """Tokens of the longest sequence that is of use; a trainer leaves out those that reach its own bound."""
        bounds = [self._longest_sent]
        if self.max_token_len > 0:  # type: ignore[attr-defined]
            bounds.append(self.max_token_len - 1)  # type: ignore[attr-defined]
        return min((bound for bound in bounds if bound is not None), default=None)

    async def get_status(self) -> None:
        """As BaseEnv's; where groups have one member, run-api leaves out those of other environments: count them."""
        await super().get_status()  # type: ignore[misc]
        if self.config.group_size > 1:
            return
        try:
            url = f"{self.config.rollout_server_url}/status"
            async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(url) as answer:
                waiting = (await answer.json())["queue_size"]
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("the length of the queue is not known: %s: %s", type(error).__name__, error)
            return
        self.status_dict["queue_size"] = max(waiting, self.status_dict["queue_size"])  # type: ignore[attr-defined]

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Post a group, or a list of groups; retried on 5xx and broken connections.

        Raises:
            RuntimeError: the API refused the group (4xx), with its reason, or could not be reached.
        """
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            group["env_id"] = getattr(self, "env_id", None)
            if not self.config.include_messages:
                group["messages"] = None  # until here they were there for logs and files
        path = "scored_data_list" if isinstance(scored_data, list) else "scored_data"
        body, headers = await body_of(scored_data)
        await _post(f"{self.config.rollout_server_url}/{path}", body, headers)


def _completed(group: dict[str, Any]) -> dict[str, Any]:
    """A copy with what BaseEnv, the API and trainers take for granted."""
    more = {
        "group_overrides": group.get("group_overrides") or {},
        "inference_logprobs": group.get("inference_logprobs") or [],
    }
    return with_content({**group, **more})


def _trained(mask: list[int]) -> int:
    return len(mask) - mask.count(MASKED)


def _faults(group: dict[str, Any], size: int, longest: int | None, *, exact: bool) -> Iterator[tuple[str, str]]:
    """Why a trainer could not use the group: a cause to count, and words."""
    if group.get("tokens") is None or group.get("masks") is None:
        yield "no_tokens", "the tokens of its rollouts cannot be known"
        return
    sizes = {name: len(group[name]) for name in ("tokens", "masks", "scores")}
    if set(sizes.values()) != {size}:
        yield "wrong_size", f"it has {sizes} instead of {size} members"
    if not all(math.isfinite(score) for score in group["scores"]):
        yield "not_finite", f"its scores are {group['scores']}"
    length = max(map(len, group["tokens"]), default=0)
    if longest is not None and length > longest:
        yield "too_long", f"a sequence has {length} tokens, and the trainer takes up to {longest}"
    if exact:
        certificate = group.get("certificate") or {"problems": ["it has no certificate"]}
        for problem in certificate["problems"][:1]:
            yield "uncertified", problem


async def _post(url: str, body: bytes, headers: dict[str, str]) -> None:
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(2 ** (attempt - 1))
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(url, data=body, headers=headers) as answer,
            ):
                if answer.status < 400:
                    return
                problem = f"status {answer.status}: {(await answer.text())[:300]}"
                if answer.status < 500:
                    raise RefusedError(f"{url} refused a group, {problem}")
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        logger.warning("sending a group failed (attempt %d of %d): %s", attempt + 1, ATTEMPTS, problem)
    raise RuntimeError(f"a group could not be sent to {url}: {problem}")
