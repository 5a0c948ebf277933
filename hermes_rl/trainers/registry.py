"""Find the trainer that a spec serves: Atropos' trajectory API, or a class that implements the interface.

A package publishes such a class as an entry point: a callable that takes the spec and returns a `Trainer`.
"""

from __future__ import annotations

from typing import cast

from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.plugins import did_you_mean, load_object, load_published, published
from hermes_rl.spec.model import Spec
from hermes_rl.trainers.base import Trainer

ATROPOS = "atropos"
TRAINERS = "hermes_rl.trainers"
"""Group of entry points for packages with their own trainer."""


def own_trainer(spec: Spec) -> Trainer | None:
    """Return the trainer that `serve.trainer` names, or None for Atropos' trajectory API.

    Raises:
        UserError: it is not a trainer, or cannot be loaded.
    """
    reference = spec.serve.trainer
    if reference == ATROPOS:
        return None
    try:
        trainer = _load_trainer(reference)(spec)
    except HermesRLError:
        raise
    except Exception as error:
        raise UserError(f"serve.trainer: {reference} raised {type(error).__name__}: {error}") from error
    lacking = [name for name in ("name", "register", "state", "send", "close") if not hasattr(trainer, name)]
    if lacking:
        raise UserError(f"serve.trainer: {reference} gives no trainer: it has no {lacking[0]!r} (see docs/trainers.md)")
    if not isinstance(trainer.name, str):
        raise UserError(f"serve.trainer: {reference} has the name {trainer.name!r:.60}; expected a text")
    return cast(Trainer, trainer)


def _load_trainer(reference: str) -> type:
    if ":" in reference:
        return cast(type, load_object(reference))
    points = published(TRAINERS, "trainer", (ATROPOS,))
    if reference not in points:
        trainer_names = [ATROPOS, *points]
        raise UserError(
            f"serve.trainer: no trainer is named {reference!r}{did_you_mean(reference, trainer_names)} (there are "
            f"{', '.join(trainer_names)}; your own: file.py:Class)"
        )
    return cast(type, load_published(points[reference], "trainer"))
