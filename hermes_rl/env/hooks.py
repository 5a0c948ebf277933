"""Declare the members of an environment that the modes use, and report mistakes in user-written methods.

The protocol keeps serve and process mode independent of the class, hand-written or compiled from a spec.
`HermesAgentBaseEnv` implements it: some members are its own, the others come from atroposlib's `BaseEnv`. Subclasses
may override the public ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.plugins import place_of
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Encoder
from hermes_rl.runs.training import TrainingMetrics


class ConductedEnv(Protocol):
    """Environment as serve and process mode use it."""

    config: Any
    name: str | None
    curr_step: int
    backlog: list[Any]
    items_sent_this_step: int
    completion_lengths: list[int]
    env_id: int | None
    checkpoint_dir: str | None
    checkpoint_interval: int
    max_token_len: int
    wandb_project: str | None
    wandb_group: str | None
    wandb_prepend: str | None
    _encoder: Encoder
    _training_counts: TrainingMetrics

    @property
    def _rollouts_in_flight(self) -> int: ...
    def _environment(self) -> Environment: ...
    def _generation_params(self) -> dict[str, Any]: ...
    def _begin_tracking(self) -> None: ...
    def _note_step(self) -> None: ...
    def _state_at_step(self) -> Any: ...
    def _restore_state(self, state: Any) -> None: ...

    async def get_next_item(self) -> Any: ...
    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]: ...
    async def postprocess_histories(self, trajectories: Any) -> Any: ...
    async def evaluate(self) -> Any: ...
    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None: ...
    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None: ...
    async def cleanup(self) -> None: ...
    def save_checkpoint(self, step: int, data: Any = None) -> None: ...
    def load_checkpoint(self) -> None: ...


# ----------------------------------------------------------------------------------- Mistakes in user-written methods

LIBRARIES = ("hermes_rl", "atroposlib", "abc", "typing", "builtins")
"""Packages whose code the environment's author has not written."""


def require_not_overridden(cls: type, base: type, instead: Mapping[str, str]) -> None:
    """Raise `UserError` if a class overrides methods of `base` that are never called.

    Args:
        instead: the methods by name, each with the alternative that the message suggests.
    """
    for name, alternative in instead.items():
        if getattr(cls, name) is not getattr(base, name):
            raise UserError(f"{cls.__name__}.{name} is never called: {alternative}")


async def call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user-written method, async or not, and return its result.

    Errors are reported as in `convert_author_errors`.
    """
    with convert_author_errors(method):
        returned = method(*arguments)
        return await returned if inspect.isawaitable(returned) else returned


@contextmanager
def convert_author_errors(method: Callable[..., Any]) -> Iterator[None]:
    """Turn an exception of a user-written method in the block into a one-sentence `UserError` with the failing line.

    Errors of hermes-rl, and exceptions of methods that a library defines, pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, HermesRLError) or method.__module__.partition(".")[0] in LIBRARIES:
            raise
        raise UserError(f"{_method_name(method)} raised {place_of(error, method)}") from error


def author_error(method: Callable[..., Any], problem: str) -> UserError:
    """Return a `UserError` with the method's name, `problem` is wrong, and the location of the method."""
    code = inspect.unwrap(method).__code__
    return UserError(f"{_method_name(method)} {problem} ({code.co_filename}:{code.co_firstlineno})")


def _method_name(method: Callable[..., Any]) -> str:
    return method.__qualname__.rpartition("<locals>.")[2]
