"""Sending groups to Atropos' trajectory API, so that nothing is lost without a word.

BaseEnv encodes on the event loop, and drops a group that the API refuses with a line in a debug log.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Tries at sending a group, with pauses of 1, 2, 4, … seconds between them."""
COMPRESS_FROM = 1024
"""Bytes from which a body is compressed."""


class Sending:
    """Mixin of `HermesAgentBaseEnv`: replaces how BaseEnv posts scored data."""

    config: Any

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
