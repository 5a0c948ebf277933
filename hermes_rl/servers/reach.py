"""Whether anything listens where the servers of a role are said to be: a connection, no request, nothing billed."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import Sequence
from urllib.parse import urlsplit

from hermes_rl.errors import RunError
from hermes_rl.servers.base import ServerConfig

PATIENCE = 10.0
"""Seconds that a connection may take."""


async def require_reachable(role: str, configs: Sequence[ServerConfig]) -> None:
    """Connect to each server once.

    A wrong address would otherwise show only after every rollout's retries; one server that answers is enough.

    Raises:
        RunError: none of them can be reached.
    """
    listening = [config for config in configs if config.base_url is not None and not _behind_proxy(config.base_url)]
    if len(listening) < len(configs):
        return
    problems = await asyncio.gather(*(_connect(str(config.base_url)) for config in listening))
    if all(problems):
        raise RunError(
            f"no server of the role {role!r} can be reached ({'; '.join(filter(None, problems))}). "
            "Is it running, and is its base_url right?"
        )


async def _connect(base_url: str) -> str | None:
    """What went wrong; None where something listens. Credentials in the address are not repeated."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    place = f"{parts.hostname}:{port}"
    try:
        async with asyncio.timeout(PATIENCE):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except TimeoutError:
        return f"{place}: no answer within {PATIENCE:g} s"
    except OSError as error:
        return f"{place}: {error.strerror or type(error).__name__}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


def _behind_proxy(base_url: str) -> bool:
    parts = urlsplit(base_url)
    return parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname or "")
