"""How rollouts of a run are graded, and what a change of it means for those that are there already.

Every reward's value is recorded, so other weights, a clamp or a treatment of endings need no new rollouts: what is
there is scored anew (`rescore`). Another reward is called for what was kept (`rejudge`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hermes_rl.errors import RewardFailure, UserError
from hermes_rl.runs.provenance import code_hashes
from hermes_rl.scoring.combine import Weighting, combine
from hermes_rl.scoring.grader import GradedReward, Grader
from hermes_rl.scoring.value import RewardValue
from hermes_rl.spec.model import Spec
from hermes_rl.spec.model.base import thaw


@dataclass(frozen=True)
class Grading:
    """`rewards` are hashes of what gives a reward its value, by name; the rest makes a score of the values."""

    rewards: Mapping[str, str] = field(default_factory=dict)
    weightings: Sequence[Weighting] = ()
    clamp: tuple[float, float] | None = None
    endings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: Spec, grader: Grader, size: int) -> Grading:
        """The grading that the spec asks for, of groups of this size."""
        code = code_hashes(spec)
        return cls(
            rewards={
                reward.name: _hash(
                    _material(spec.rewards[reward.name], code.get(f"rewards.{reward.name}"))
                    | _asked(spec, reward)
                    | _not_laid(spec, reward)
                    | ({"compared": size} if reward.function.group_level else {})
                )
                for reward in grader.rewards
            },
            weightings=[reward.weighting for reward in grader.rewards],
            clamp=spec.score.clamp,
            endings=thaw(spec.endings),
        )

    def record(self) -> dict[str, Any]:
        """The `grading` entry of run.json."""
        return {"rewards": dict(self.rewards), "scoring": self.scoring()}

    def scoring(self) -> dict[str, Any]:
        """What a score is made of its rewards' values with, as JSON."""
        weightings = sorted(map(asdict, self.weightings), key=lambda weighting: str(weighting["name"]))
        clamp = list(self.clamp) if self.clamp else None
        return {"weightings": weightings, "clamp": clamp, "endings": dict(self.endings)}

    def changed(self, before: Mapping[str, Any]) -> set[str]:
        """The rewards that have another value than they had, or are new."""
        old = before.get("rewards") or {}
        return {name for name, digest in self.rewards.items() if old.get(name) != digest}

    def score(self, line: Mapping[str, Any]) -> tuple[float | None, str | None]:
        """The score of a graded rollout from its line in rollouts.jsonl, or why there is none."""
        treatment = self.endings.get(line["ending"], "grade")
        if treatment == "drop":
            return None, f"the spec drops rollouts that end with {line['ending']}"
        if not isinstance(treatment, str):
            return float(treatment), None
        if self.weightings and not line["rewards"]:
            return None, "it was left out before it was graded"
        try:
            values = {
                weighting.name: RewardValue(line["rewards"][weighting.name]["value"]) for weighting in self.weightings
            }
            return combine(self.weightings, values, self.clamp), None
        except RewardFailure as failure:
            return None, f"cannot be scored anew: {failure}"
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"rollout {line.get('id')} has no value of every reward ({error}), so it cannot be scored anew; "
                "use --fresh to start beside it"
            ) from error


def _material(reward: Any, code: str | None) -> dict[str, Any]:
    """What a reward's value depends on; a file is its content, so that a spec may move."""
    fn = f"{code}:{reward.fn.rpartition(':')[2]}" if code is not None else reward.fn
    return {"fn": fn, "args": thaw(reward.args), "sandbox": reward.sandbox}


def _not_laid(spec: Spec, reward: GradedReward) -> dict[str, Any]:
    """Artifacts that the reward's fresh sandbox does not get, where there are any."""
    names = sorted(name for name, artifact in spec.artifacts.items() if not artifact.lay)
    return {"not laid": names} if reward.fresh and names else {}


def _asked(spec: Spec, reward: GradedReward) -> dict[str, Any]:
    """The models that a reward may ask: another judge is another reward.

    One that takes `roles` may ask any of them. The policy stands apart: with another one, the run is another.
    """
    takes = reward.function.parameters
    roles = [role for role in spec.servers if role in takes or ("roles" in takes and role != "policy")]
    return {"roles": {role: [[server.type, server.model] for server in spec.servers[role]] for role in roles}}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
