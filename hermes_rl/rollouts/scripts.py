"""A spec's `solution` as scripts: what a scripted policy plays, and what a scripted user answers.

Owns the rendering over a row and which members of a group go wrong.
"""

from __future__ import annotations

from random import Random
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import RolloutKey
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.scripted import Script, Turn, deviate_script, deviations
from hermes_rl.spec.model import Spec, is_template
from hermes_rl.spec.templates import render


def policy_script(spec: Spec, server: ServerConfig, key: RolloutKey, prior: int) -> Script:
    """What a scripted policy plays in a key; `prior` is the number of assistant messages in the prompt."""
    turns = gold_turns(spec, key.row)
    if key.index in deviations(key.size, server.deviate, server.seed, key.group):
        turns = deviate_script(turns, Random(f"{server.seed}:{key.group}-{key.index}"))
    return Script(turns, prior)


def has_solution(spec: Spec) -> bool:
    """Whether the spec says what a perfect agent would do."""
    return spec.solution is not None and (spec.solution.turns is not None or spec.solution.patch is not None)


def patch_turns(patch: str) -> list[dict[str, Any]]:
    """A solution that is a patch, as turns: it is applied in the terminal."""
    command = f"git apply - <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH"
    return [{"tools": [{"name": "terminal", "args": {"command": command}}]}, {"say": "The patch is applied."}]


def gold_turns(spec: Spec, row: Row) -> tuple[Turn, ...]:
    """The policy's turns of the solution for a row; none where the spec has no solution."""
    return tuple(Turn.of(turn) for turn in _turns(spec, row) if turn.get("say") is not None or turn.get("tools"))


def user_script(spec: Spec, row: Row, prior: int) -> Script:
    """What a scripted user says: each `user` of the solution's turns in order, then the first stop phrase."""
    said = [str(turn["user"]) for turn in _turns(spec, row) if turn.get("user") is not None]
    stop = spec.user.stop[:1] if spec.user is not None else ()
    return Script(tuple(Turn(say=text) for text in (*said, *stop)), prior)


def _turns(spec: Spec, row: Row) -> list[dict[str, Any]]:
    solution = spec.solution
    if solution is None or not has_solution(spec):
        return []
    turns = solution.turns if solution.turns is not None else patch_turns(str(solution.patch))
    plain: Any = (
        turns
        if is_template(turns)
        else [turn if isinstance(turn, dict) else turn.model_dump(exclude_none=True) for turn in turns]
    )
    rendered: list[dict[str, Any]] = render(plain, row.columns, where="solution.turns", key=row.key)
    return rendered
