"""The policy used the tools that the task asks for."""

from __future__ import annotations

from typing import Any, Literal

from hermes_rl import Score


def tool_usage(
    result: Any,
    *,
    any_of: list[str] | None = None,
    all_of: list[str] | None = None,
    none_of: list[str] | None = None,
    at_least: int = 1,
    calls: Literal["hermes_rl", "program"] = "hermes_rl",
) -> Score:
    """Return 1 if every condition that is set holds, else 0. Calls that ended in a tool error do not count.

    Args:
        any_of: these tools together were called `at_least` times; without any list, all tools together.
        all_of: each of these was called `at_least` times.
        none_of: none of these was called.
        at_least: minimum number of calls.
        calls: hermes_rl: calls of the spec's tools, which hermes-rl executed; program: also calls of an agent program's
            own tools, as the program reports them.
    """
    relevant_calls = [call for call in result.tool_calls if calls == "program" or call.executed_by == calls]
    called = [call.name for call in relevant_calls if call.error is None]
    counted = called if any_of is None else [name for name in called if name in any_of]
    failed = []
    if (any_of is not None or (all_of is None and none_of is None)) and len(counted) < at_least:
        failed.append(f"{len(counted)} of {at_least} calls of {', '.join(any_of or ['any tool'])}")
    failed += [f"{name} was not called {at_least} times" for name in all_of or [] if called.count(name) < at_least]
    failed += [f"{name} was called" for name in none_of or [] if name in called]
    return Score(not failed, reason="; ".join(failed) or None, metrics={"calls": len(called)})
