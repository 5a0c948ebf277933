"""What of a group is left to play: one answer for the store, a dry run, sets of runs and every mode."""

from __future__ import annotations

from collections.abc import Mapping

from hermes_rl.rollouts.rollout import RolloutState


def left_to_play(states: Mapping[int, RolloutState], size: int, *, compared: bool) -> list[int]:
    """Return the members of a group that are not played and scored yet, by their index.

    Args:
        states: of the members that are recorded, by their index. An earlier start may have asked for more than `size`
            of them; those beyond it count for nothing.
        size: members that the group is to have.
        compared: whether a reward compares the members. It never does without one that was left out, and then nothing
            is left to do.
    """
    members = [states.get(index) for index in range(size)]
    if compared and RolloutState.LEFT_OUT in members:
        return []
    return [index for index, state in enumerate(members) if state is None or not state.final]


def group_name(row_key: str, at: int, *, repeat: bool) -> str:
    """Return the id of a row's group: of a pass over the rows where they repeat, else of a place where it stands."""
    return f"{row_key}:{at}" if repeat or at else row_key
