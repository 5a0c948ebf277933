"""A spec's `solution` as scripts: the turns of a scripted policy, and the replies of a scripted user.

This module owns rendering the solution for a row, and selecting the members of a group that deviate.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import RolloutKey
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.scripted.play import Script, ScriptedTurn, deviate_script, deviations
from hermes_rl.spec.argument_types import GoldTurn
from hermes_rl.spec.model import Spec
from hermes_rl.spec.section import is_template
from hermes_rl.spec.templates import coerce, render, render_text


def policy_script(spec: Spec, server: ServerConfig, key: RolloutKey, prior: int, seat: str = "") -> Script:
    """Return the turns of a scripted policy for a key, for this seat if there are several.

    `prior` is the number of assistant messages in the prompt.
    """
    turns = gold_turns(spec, key.row, seat)
    if key.index in deviations(key.size, server.error_rate, server.seed, key.group):
        turns = deviate_script(turns, Random(f"{server.seed}:{key.group}-{key.index}"))
    return Script(turns, prior)


def has_solution(spec: Spec) -> bool:
    """Return True if the spec describes the actions of a perfect agent."""
    return spec.solution is not None and (spec.solution.turns is not None or spec.solution.patch is not None)


def gold_turns(spec: Spec, row: Row, seat: str = "") -> tuple[ScriptedTurn, ...]:
    """Return the policy's turns of the solution for a row; empty if the spec has no solution.

    Args:
        seat: the seat whose turns are returned if there are several; default: the first.
    """
    first = next(iter(spec.agents), "")
    return tuple(
        ScriptedTurn.from_spec(turn)
        for turn in solution_turns(spec, row)
        if (turn.get("say") is not None or turn.get("tools")) and turn.get("seat", first) == (seat or first)
    )


def user_script(spec: Spec, row: Row, prior: int) -> Script:
    """Return the script of a scripted user: `user_tools` and `user` of each turn, then the first stop phrase."""
    stop = [{"user": phrase} for phrase in spec.user.stop[:1]] if spec.user is not None else []
    script: list[dict[str, Any]] = []
    for turn in (*solution_turns(spec, row), *stop):
        script += [{"tools": turn["user_tools"]}] if turn.get("user_tools") else []
        script += [{"say": turn["user"]}] if turn.get("user") is not None else []
    return Script.from_turns(script, prior)


def solution_turns(spec: Spec, row: Row) -> list[dict[str, Any]]:
    """Return all turns of the solution for a row, the user's included; an empty list if the spec has none."""
    solution = spec.solution
    if solution is None or not has_solution(spec):
        return []
    turns: Any = solution.turns
    if turns is None:  # a patch is applied in the terminal
        patch = render_text(str(solution.patch), row.columns, location="solution.patch", key=row.key)
        command = f"git apply - <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH"
        return [{"tools": [{"name": "terminal", "args": {"command": command}}]}, {"say": "The patch is applied."}]
    if not is_template(turns):
        turns = [turn.model_dump(exclude_none=True) for turn in turns]
    location = "solution.turns"
    rendered = render(turns, row.columns, location=location, key=row.key)
    checked: list[dict[str, Any]] = coerce(rendered, list[GoldTurn], location=location, key=row.key)
    return checked


def last_words(turns: tuple[ScriptedTurn, ...]) -> str:
    """Return the last message of a solution."""
    return next((turn.say for turn in reversed(turns) if turn.say), "")


def trial_row(item: Mapping[str, Any]) -> Row:
    """Return the columns of a row as a row for a trial, which belongs to no rollout."""
    return Row("trial", item, 0, "")
