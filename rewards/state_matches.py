"""The state has become what the gold solution makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hermes_rl import Score
from hermes_rl.tools.base import Tool, ToolRuntime
from hermes_rl.tools.python_tools import tools_of_state
from hermes_rl.tools.rollout_process import query_state

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import GoldTurn

Sources = list[dict[str, Any]]


async def state_matches(
    item: dict[str, Any],
    state: Any,
    *,
    compare: list[str] | None = None,
    gold: list[GoldTurn] | None = None,
    sources: dict[str, Sources] | None = None,
    close: str | None = None,
) -> Score:
    """Return 1 if the state equals a fresh state of the row after the calls of the gold turns, else 0.

    Only calls of the state's tools are made; messages of gold are ignored. A gold call that raises keeps the
    changes it made until then, as during a rollout; the metric `failed` counts such calls.

    Args:
        compare: attributes of the state, or methods without arguments, whose values must be equal; default: all
            attributes without a leading underscore. The metrics contain each result.
        gold: turns with `tools` and `user_tools`; default: the turns of the spec's solution.
        sources: the spec's tools of the state by caller, `tools` or `user_tools`; filled in by the run.
        close: the method that releases the resources of a state; filled in by the run.
    """
    fresh = type(state)(item)
    try:
        by = {
            turn_key: {tool.name: tool for source in tool_sources for tool in tools_of_state(fresh, **source)}
            for turn_key, tool_sources in (sources or {}).items()
        }
        failed = 0
        for turn in gold or ():
            for turn_key in ("user_tools", "tools"):
                for call in turn.get(turn_key) or ():
                    failed += not await _make_gold_call(
                        by.get(turn_key, {}).get(call["name"]), call.get("args") or {}, fresh
                    )
        names = compare or [name for name in vars(fresh) if not name.startswith("_")]
        equal = {name: bool(query_state(state, name, ()) == query_state(fresh, name, ())) for name in names}
    finally:
        if close is not None:
            query_state(fresh, close, ())
    others = ", ".join(name for name, is_equal in equal.items() if not is_equal)
    reason = f"gold leaves another {others}" if others else None
    return Score(
        not others,
        reason=reason,
        metrics={**{name: float(is_equal) for name, is_equal in equal.items()}, "failed": failed},
    )


async def _make_gold_call(tool: Tool | None, args: dict[str, Any], state: object) -> bool:
    """Make a gold call; return False if it raises, which gold may do."""
    if tool is None:
        return True
    try:
        await tool.call(args, cast("ToolRuntime", SimpleNamespace(state=state)))
    except Exception:  # noqa: BLE001 - code of the spec raises whatever it likes
        return False
    return True
