"""Toolset ``todo``: a task list for the model, one per rollout."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hermes_rl.tools.base import Tool, ToolInputError, ToolRuntime, Toolset, arguments, as_json, typed

STATUSES = ("pending", "in_progress", "completed", "cancelled")
MAX_ITEMS = 256
MAX_CONTENT = 4000
"""Maximum characters of one item."""


class Todo(Tool):
    """Write or read the list; every call returns the complete list."""

    name = "todo"
    parallel = False

    description = (
        "Keep a task list for work with several steps. Call it without parameters to read the list. "
        "With todos, merge=false (the default) replaces the list, and merge=true updates items by id and "
        "adds new ones. Order is priority; have at most one item in_progress, and mark items completed "
        "immediately after finishing them. The answer is always the whole list."
    )
    parameters = arguments(
        todos={
            "type": "array",
            "description": "Items to write. Leave out to read the list.",
            "items": arguments(
                ("id", "content", "status"),
                id=typed("string", "Unique id of the item"),
                content=typed("string", "The work to do"),
                status=typed("string", "Where it stands", *STATUSES),
            ),
        },
        merge=typed("boolean", "true: update by id and add; false (default): replace the list", default=False),
    )

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        if "todos" in args:
            runtime.todos = _written(runtime.todos if args.get("merge") else [], args["todos"])
        counts = Counter(item["status"] for item in runtime.todos)
        summary = {"total": len(runtime.todos), **{status: counts[status] for status in STATUSES}}
        return as_json({"todos": runtime.todos, "summary": summary})


def _written(existing: list[dict[str, str]], items: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the list after writing: an item with a known id takes its place, the last of equal ids wins."""
    if any(len(item["content"]) > MAX_CONTENT for item in items):
        raise ToolInputError(f"the content of an item may have {MAX_CONTENT} characters at most")
    by_id = {item["id"]: item for item in existing} | {item["id"]: dict(item) for item in items}
    if len(by_id) > MAX_ITEMS:
        raise ToolInputError(f"the list may have {MAX_ITEMS} items at most, this would be {len(by_id)}")
    return list(by_id.values())


TOOLSET = Toolset("todo", "A task list that the model keeps for itself.", (Todo(),))
