"""Provide the names of the reference design's thread pool for tools.

Tools do not need a pool here. Environments of the reference design resize it, shut it down after an evaluation, or run
their own code in it. With these names they need to change only their imports; tools are not affected.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


class ToolPool(ThreadPoolExecutor):
    """Threads for an environment's own code; they start when work is submitted, and end with the process."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ignore the call: the environment's next evaluation in this process may submit work again."""


_tool_executor = ToolPool()


def resize_tool_pool(max_workers: int) -> None:
    """Ignore the call: tools do not share a thread pool here."""


def apply_patches() -> None:
    """Ignore the call: no patches are needed here."""
