"""From the rewards of a spec to its grader: the functions, where each runs, and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.rollouts.model_handle import ModelHandle
from hermes_rl.rollouts.sandboxes import reward_args, state_source
from hermes_rl.rollouts.solutions import gold_turns, has_solution, last_words, trial_row
from hermes_rl.sandbox.user_code import CONFINED
from hermes_rl.scoring.grader import GradedReward, Grader, Trial
from hermes_rl.scoring.reward_function import RewardFunction, find_reward
from hermes_rl.scoring.reward_value import Weighting
from hermes_rl.servers.client import ModelClient
from hermes_rl.spec.model import Spec
from hermes_rl.spec.reward_rules import in_process, unisolated
from hermes_rl.spec.section import to_plain
from hermes_rl.spec.sections.rewards import Reward
from hermes_rl.user_code.pool import POOL


def grader_of(spec: Spec, roles: Mapping[str, ModelClient], trial: Trial) -> Grader:
    """Return the grader of a spec; raises `UserError` if a reward cannot be loaded, or run where the spec says."""
    return Grader(
        rewards=tuple(
            GradedReward(
                _reward_function(spec, name, reward),
                Weighting(name, reward.weight, reward.gate),
                _reward_arguments(spec, reward),
                fresh=reward.sandbox == "fresh",
                seats=None if reward.seats is None else tuple(reward.seats),
                shares=reward.seats if isinstance(reward.seats, Mapping) else None,
                steps=reward.per_step,
                range=reward.range,
            )
            for name, reward in spec.rewards.items()
        ),
        render=partial(reward_args, spec.folder),
        clamp=spec.score.clamp,
        combine=spec.score.combine,
        trial=trial,
        solution=(lambda item: last_words(gold_turns(spec, trial_row(item)))) if has_solution(spec) else None,
        roles={name: ModelHandle(role) for name, role in roles.items()},
    )


def _reward_function(spec: Spec, name: str, reward: Reward) -> RewardFunction:
    reward_function = find_reward(name, reward.fn, [other for other in spec.rewards if other != name])
    takes_state, movable = "state" in reward_function.parameters, reward_function.code is not None
    if (problem := unisolated(spec, name, reward, takes_state=takes_state, movable=movable)) is not None:
        raise UserError(problem)
    own_state = takes_state and spec.state is not None and spec.state_apart
    pool = CONFINED if reward.isolate == "sandbox" and not own_state else POOL
    code = reward_function.code if in_process(spec, reward, takes_state=takes_state, movable=movable) else None
    return replace(reward_function, code=code, timeout=reward.timeout, pool=pool)


def _reward_arguments(spec: Spec, reward: Reward) -> Mapping[str, Any]:
    """Return the arguments of a reward.

    The `reference` of `tests_pass` may be the spec's own solution, and `state_matches` runs it with the spec's tools of
    the state.
    """
    solution = {} if spec.solution is None else to_plain(spec.solution.model_dump(exclude_none=True))
    if reward.fn == "tests_pass" and reward.args.get("reference") == "solution" and solution:
        return {**reward.args, "reference": solution.get("turns") or solution.get("patch")}
    if reward.fn == "state_matches" and spec.state is not None:
        tools = {"tools": spec.tools, "user_tools": spec.user.tools if spec.user is not None else ()}
        sources = {
            key: [state_source(tool) for tool in tool_entries if tool.state] for key, tool_entries in tools.items()
        }
        return {"gold": solution.get("turns"), "sources": sources, "close": spec.state.close, **reward.args}
    return reward.args
