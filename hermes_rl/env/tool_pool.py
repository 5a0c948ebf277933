"""The reference design's pool of threads for tools, under the names that its environments use.

Tools need no such pool here. Environments resize it, shut it down at the end of an evaluation, or run code of their own
in it: with these names they do so after a change of their imports alone, and no tool is affected.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


class ToolPool(ThreadPoolExecutor):
    """Threads for an environment's own code; they start when something is submitted, and end with the process."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept the call: the environment's next evaluation in this process may submit again."""


_tool_executor = ToolPool()


def resize_tool_pool(max_workers: int) -> None:
    """Accept the call: there is no pool of threads that tools have to share."""


def apply_patches() -> None:
    """Accept the call: nothing has to be patched."""
