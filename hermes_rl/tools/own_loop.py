"""An event loop in a thread of its own, for machines that code written by hand uses from the main loop.

An `evaluate` written by hand calls ``ctx.terminal(…)`` without await on the event loop's own thread. Were the sandbox
on that loop, the call would wait for itself for ever; on this one it holds up the caller and nobody else's sandbox.
"""

from __future__ import annotations

import asyncio
import functools
import threading


@functools.cache
def own_loop() -> asyncio.AbstractEventLoop:
    """The loop, started on first use; it ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="hermes-rl-machines", daemon=True).start()
    return loop
