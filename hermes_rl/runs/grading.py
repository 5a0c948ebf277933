"""How rollouts of a run are graded, and what a change of it means for those that are there already.

Every reward's value is recorded, so other weights, a clamp or a treatment of endings need no new rollouts: what is
there is scored anew. Another reward has no recorded values; then the run is refused.
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
from hermes_rl.scoring.value import RewardValue
from hermes_rl.spec.model import Spec
from hermes_rl.spec.model.base import thaw

POLICY = "policy"


@dataclass(frozen=True)
class Grading:
    """`rewards` are hashes of what gives a reward its value, by name; the rest makes a score of the values.

    `roles` are the models that rewards may ask. `compared` is how many rollouts group-level rewards compare.
    """

    rewards: Mapping[str, str] = field(default_factory=dict)
    weightings: Sequence[Weighting] = ()
    clamp: tuple[float, float] | None = None
    endings: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    compared: int | None = None

    @classmethod
    def of(cls, spec: Spec, compared: int | None = None) -> Grading:
        """The grading that the spec asks for."""
        code = code_hashes(spec)
        return cls(
            rewards={
                name: _hash(_material(reward, code.get(f"rewards.{name}"))) for name, reward in spec.rewards.items()
            },
            weightings=[Weighting(name, reward.weight, reward.gate) for name, reward in spec.rewards.items()],
            clamp=spec.score.clamp,
            endings=thaw(spec.endings),
            roles={
                role: _hash([[server.type, server.model] for server in servers])
                for role, servers in spec.servers.items()
                if role != POLICY
            },
            compared=compared,
        )

    def record(self) -> dict[str, Any]:
        """The `grading` entry of run.json."""
        return {
            "rewards": dict(self.rewards),
            "roles": dict(self.roles),
            "compared": self.compared,
            "scoring": self.scoring(),
        }

    def scoring(self) -> dict[str, Any]:
        """What a score is made of its rewards' values with, as JSON."""
        weightings = sorted(map(asdict, self.weightings), key=lambda weighting: str(weighting["name"]))
        clamp = list(self.clamp) if self.clamp else None
        return {"weightings": weightings, "clamp": clamp, "endings": dict(self.endings)}

    def require_same_rewards(self, before: Mapping[str, Any], since: str) -> None:
        """Refuse to go on with rollouts that other rewards have graded.

        Raises:
            UserError: which rewards have changed, and the way out.
        """
        old = before.get("rewards") or {}
        changed = sorted(name for name in {*old, *self.rewards} if old.get(name) != self.rewards.get(name))
        asked = before.get("roles") or {}
        changed += sorted(f"servers.{role}" for role in {*asked} & {*self.roles} if asked[role] != self.roles[role])
        if changed:
            raise UserError(
                f"the rewards have changed since {since} ({', '.join(changed)}); grading kept rollouts again is not "
                "available yet: --fresh starts beside them"
            )
        if before.get("compared") != self.compared:
            raise UserError(
                f"rollouts of a row were compared with each other in groups of {before.get('compared')}, now of "
                f"{self.compared}; set the old number, or use --fresh to start beside them"
            )

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
            values = {name: RewardValue(reward["value"]) for name, reward in line["rewards"].items()}
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


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
