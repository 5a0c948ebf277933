"""The numbers of an evaluation, by the names under which they are reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.runs.statistics import bounds, clustered_stderr, ks, mean, pass_at_k, pass_hat_k


def metrics_of(
    groups: Sequence[Group], rollouts_per_row: int, success: float, span: tuple[float, float]
) -> dict[str, float]:
    """All metrics; means are over graded rollouts, `eval/ungraded` says how many there were not.

    Where some were not graded, `eval/mean_reward_lower` and `_upper` bound the mean that grading them could give.
    pass@k and pass^k are means over the rows all of whose rollouts were graded.
    """
    played = [rollout for group in groups for rollout in group.rollouts]
    # An ending that the spec drops is no failure: such rollouts are left out of every mean.
    rollouts = [rollout for rollout in played if rollout.score is not None or not rollout.ending.graded]
    graded = [rollout for rollout in rollouts if rollout.score is not None]
    scores = [score for group in groups for score in group.scores]
    low, high = bounds(scores, len(rollouts) - len(graded), span)
    found: dict[str, float | None] = {
        "eval/mean_reward": mean(scores),
        "eval/mean_reward_stderr": clustered_stderr([group.scores for group in groups]),
        "eval/mean_reward_lower": low,
        "eval/mean_reward_upper": high,
        "eval/rows": float(len(groups)),
        "eval/rollouts": float(len(rollouts)),
        "eval/ungraded": float(len(rollouts) - len(graded)),
    }
    found |= _passes(groups, rollouts_per_row, success)
    found |= _rewards(graded)
    found |= _endings(played)
    if len(rollouts) < len(played):
        found["eval/dropped"] = float(len(played) - len(rollouts))
    found |= _usage(graded)
    return {name: value for name, value in found.items() if value is not None}


def _passes(groups: Sequence[Group], size: int, success: float) -> dict[str, float]:
    whole = [group.scores for group in groups if len(group.scores) == size]
    if not whole:
        return {}
    wins = [sum(score >= success for score in scores) for scores in whole]
    found = {}
    for k in ks(size):
        found[f"eval/pass@{k}"] = mean([pass_at_k(size, won, k) for won in wins])
        found[f"eval/pass^{k}"] = mean([pass_hat_k(size, won, k) for won in wins])
    return found


def _rewards(graded: Sequence[Rollout]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rollout in graded:
        for name, reward in rollout.rewards.items():
            numbers = {
                name: reward.value,
                **{f"{name}/{key}": value for key, value in reward.metrics.items()},
            }
            for key, value in numbers.items():
                if value is not None:
                    values.setdefault(key, []).append(value)
    return {f"eval/reward/{name}": mean(found) for name, found in values.items()}


def _endings(rollouts: Sequence[Rollout]) -> dict[str, float]:
    counts = Counter(str(rollout.ending) for rollout in rollouts)
    return {f"eval/ending/{ending}": count / len(rollouts) for ending, count in sorted(counts.items())}


def _usage(graded: Sequence[Rollout]) -> dict[str, float]:
    results = [rollout.result for rollout in graded if rollout.result is not None]
    if not results:
        return {}
    calls = sum(len(result.tool_calls) for result in results)
    errors = sum(len(result.tool_errors) for result in results)
    return {
        "eval/turns": mean([float(result.turns_used) for result in results]),
        "eval/tool_calls": calls / len(results),
        "eval/tool_error_rate": errors / calls if calls else 0.0,
        "eval/prompt_tokens": mean([float(result.usage.prompt_tokens) for result in results]),
        "eval/completion_tokens": mean([float(result.usage.completion_tokens) for result in results]),
    }
