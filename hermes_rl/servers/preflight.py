"""The questions that a run asks its servers before it begins: does anything listen, and which release is the engine.

Owns questions that cost nothing: a connection without a request, and an engine's own page about its version. Leaves
whether a server's answers are exact to `exactness`.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import Sequence
from urllib.parse import urlsplit

from hermes_rl.errors import RunError
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.transport import Transport

CONNECT_SECONDS = 10.0
"""How long a connection may take."""
ANSWER_SECONDS = 5.0
"""How long an engine may take to tell its version; a run's record is not worth a longer wait."""
_PATHS = ("/version", "/get_server_info")
"""vLLM answers the first with ``{"version": …}``; SGLang's answer to the second has ``version`` among much else."""


async def require_reachable(role: str, configs: Sequence[ServerConfig]) -> None:
    """Connect to each server once; one that answers is enough.

    Without this check a wrong address would show only after all retries of the first rollouts.

    Raises:
        RunError: none of the servers can be reached.
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
    """Connect and return what went wrong; None where something listens. The text holds no credentials."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    place = f"{parts.hostname}:{port}"
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except TimeoutError:
        return f"{place}: no answer within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return f"{place}: {error.strerror or type(error).__name__}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


def _behind_proxy(base_url: str) -> bool:
    parts = urlsplit(base_url)
    return parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname or "")


async def engines(configs: Sequence[ServerConfig]) -> list[str | None]:
    """Ask each server for its version, in order; None stands for a server that tells none, as hosted models do."""
    return list(await asyncio.gather(*map(_engine, configs)))


async def _engine(config: ServerConfig) -> str | None:
    if config.base_url is None:
        return None
    transport = Transport(config)
    try:
        for path in _PATHS:
            status, data = await transport.get_json(path, ANSWER_SECONDS)
            version = data.get("version") if status == 200 and isinstance(data, dict) else None
            if isinstance(version, str):
                return version
        return None
    finally:
        await transport.close()
