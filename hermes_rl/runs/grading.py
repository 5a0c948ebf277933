"""How a run's rollouts were graded, so that one file never mixes scores that do not belong together."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.provenance import code_hashes
from hermes_rl.spec.model import Spec, thaw


def grading_of(spec: Spec) -> str:
    """A hash of everything that a score depends on beside the rollout: rewards with their code, weights, endings."""
    parts: dict[str, Any] = {
        "rewards": {name: thaw(reward.model_dump(mode="json")) for name, reward in spec.rewards.items()},
        "code": {name: digest for name, digest in code_hashes(spec).items() if name.startswith("rewards.")},
        "score": spec.score.model_dump(mode="json"),
        "endings": thaw(dict(spec.endings)),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def require_same_grading(directory: RunDirectory, grading: str) -> None:
    """Refuse to go on with rollouts that were graded otherwise.

    Raises:
        UserError: rewards, their code, weights or endings have changed since.
    """
    held = (directory.held or {}).get("grading")
    if directory.has_rollouts and held not in (None, grading):
        raise UserError(
            f"{directory.path} holds rollouts that were graded by other rewards, weights or endings; grading them anew "
            "is not available yet: put the spec back, or start beside them with --fresh"
        )
