"""Which release of an inference engine stands behind an address, for a run's record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.transport import Transport

PATIENCE = 5.0
"""Seconds that an answer may take; a record is not worth waiting longer for."""
_PATHS = ("/version", "/get_server_info")
"""vLLM (``{"version": …}``), and SGLang, whose answer has ``version`` among much else."""


async def engines(configs: Sequence[ServerConfig]) -> list[str | None]:
    """The version that each server tells, in order; None where it tells none, as hosted models do."""
    return list(await asyncio.gather(*map(_engine, configs)))


async def _engine(config: ServerConfig) -> str | None:
    if config.base_url is None:
        return None
    transport = Transport(config)
    try:
        for path in _PATHS:
            status, data = await transport.get_json(path, PATIENCE)
            version = data.get("version") if status == 200 and isinstance(data, dict) else None
            if isinstance(version, str):
                return version
        return None
    finally:
        await transport.close()
