"""Sending groups to Atropos' trajectory API, so that nothing is lost without a word.

A group leaves whole, finite and within the trainer's length, or it is dropped by name. BaseEnv encodes on the event
loop, and drops a group that the API refuses with a line in a debug log.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from hermes_rl.env.assemble import with_content
from hermes_rl.runs.directory import Journal

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Tries at sending a group, with pauses of 1, 2, 4, … seconds between them."""
COMPRESS_FROM = 1024
"""Bytes from which a body is compressed."""


class GroupsWriter:
    """What BaseEnv expects of its JSONL writer, over a journal, which goes on with a file that is there."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def write(self, group: dict[str, Any]) -> None:
        self.journal.append(group)

    def close(self) -> None:
        self.journal.close()


class Sending:
    """Mixin of `HermesAgentBaseEnv`: replaces how BaseEnv posts scored data."""

    config: Any
    dropped: Any
    longest_sent: int | None = None
    """Tokens of the longest sequence that may be sent, where that is less than the trainer takes."""
    jsonl_writer: GroupsWriter | None

    def keep_groups(self) -> None:
        """Write every group that is sent to `data_path_to_save_groups`, if there is one."""
        path = self.config.data_path_to_save_groups
        if path is not None and self.jsonl_writer is None:
            self.jsonl_writer = GroupsWriter(Journal(Path(path)))

    def close_groups(self) -> None:
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
        """As BaseEnv's, for the groups that a trainer can use; the others are counted by cause and said."""
        given = scored_data if isinstance(scored_data, list) else [scored_data]
        fit = [group for group in map(_completed, filter(None, given)) if self._fit(group)]
        if not fit:
            return
        await super().handle_send_to_api(  # type: ignore[misc]
            fit if isinstance(scored_data, list) else fit[0],
            item,
            do_send_to_api=do_send_to_api,
            abort_on_any_max_length_exceeded=abort_on_any_max_length_exceeded,
        )

    def _fit(self, group: dict[str, Any]) -> bool:
        size = group["group_overrides"].get("group_size", self.config.group_size)
        for cause, words in _faults(group, size, self._longest()):
            self.dropped[cause] += 1
            logger.warning("a group was not sent (%s): %s", cause, words)
            return False
        return True

    def _longest(self) -> int | None:
        """Tokens of the longest sequence that is of use; a trainer leaves out those that reach its own bound."""
        bounds = [self.longest_sent]
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
        body, headers = await asyncio.to_thread(_encode, scored_data)
        await _post(f"{self.config.rollout_server_url}/{path}", body, headers)


def _completed(group: dict[str, Any]) -> dict[str, Any]:
    """A copy with what BaseEnv, the API and trainers take for granted."""
    more = {
        "group_overrides": group.get("group_overrides") or {},
        "inference_logprobs": group.get("inference_logprobs") or [],
    }
    return with_content({**group, **more})


def _faults(group: dict[str, Any], size: int, longest: int | None) -> Iterator[tuple[str, str]]:
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
                    raise RuntimeError(f"{url} refused a group, {problem}")
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        logger.warning("sending a group failed (attempt %d of %d): %s", attempt + 1, ATTEMPTS, problem)
    raise RuntimeError(f"a group could not be sent to {url}: {problem}")


def _encode(scored_data: Any) -> tuple[bytes, dict[str, str]]:
    """The body and its headers. Runs in a thread: encoding a long group takes most of a second."""
    body = json.dumps(scored_data, allow_nan=False).encode()
    headers = {"Content-Type": "application/json"}
    if len(body) < COMPRESS_FROM:
        return body, headers
    return gzip.compress(body, compresslevel=1), {**headers, "Content-Encoding": "gzip"}
