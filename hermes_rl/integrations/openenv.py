"""Integrate with OpenEnv: serve a spec as an environment that OpenEnv clients reset and step over a WebSocket.

This module selects the row of a reset, builds the observation after each step, and ends a session when its client
disconnects. A rollout without a score has the reward None, and the observation contains the reason.
`hermes-rl serve-openenv SPEC` starts the server.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, State
from openenv.core.env_server.types import Observation as BaseObservation
from pydantic import Field

import hermes_rl
from hermes_rl.errors import UserError
from hermes_rl.integrations.common import require_carried, require_no_comparing, require_one_stepped, values_of


class ReplyAction(Action):
    """Action with the model's turn."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    """Tool calls in OpenAI's format."""


class Observation(BaseObservation):
    """Observation with the model's next input or, if `done`, the result of the rollout."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    """New messages: the prompt after a reset; tool results or the simulated user's message after a step."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """Tools that the model may call, as OpenAI schemas."""
    max_tokens: int | None = None
    """Token limit of the next turn; None: no limit."""
    stop_reason: str | None = None
    """Stop reason of the rollout."""
    error: str | None = None
    """Reason why there is no score."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Values of the spec's rewards, which the score (`reward`) combines."""
    trainable: bool = True
    """False if there is no score, or if the spec masks the stop reason, so that only the baseline uses the score."""


class HermesEnvironment(Environment):
    """One client session; OpenEnv runs its calls in a separate thread."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, env: hermes_rl.Env, sync: Any, turns: Callable[[], int]) -> None:
        super().__init__()
        self._env, self._sync, self._turns = env, sync, turns
        self._session: Any = None
        self._delivered_count = 0
        """Number of messages that the client already has, including its own."""
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
        """Start the rollout of a row, selected by `key`, `index` or `seed`; by default the next row.

        Args:
            seed: used as an index, modulo the number of rows.
            episode_id: the client's name for the episode.
            options: `key`, `index`, `split` ("train" or "eval"), and `group`: rollouts with the same group get the same
                tools if the spec draws tools at random.

        Raises:
            UserError: the row does not exist, or an option is unknown.
        """
        self.close()
        split, group = options.pop("split", "train"), options.pop("group", None)
        row = self._row(split, seed, **options)
        self._state, self._delivered_count = State(episode_id=episode_id, key=row.key), 0
        self._session = self._sync.session(row, split=split, group=group)
        return self._observation(self._session.start())

    def step(self, action: ReplyAction, timeout_s: float | None = None, **_: Any) -> Observation:
        """Apply the model's turn and return the next observation; `timeout_s` is ignored, the spec's limits apply."""
        if self._session is None:
            raise UserError("call reset first: no rollout has started")
        message: dict[str, Any] = {"role": "assistant", "content": action.content}
        if action.tool_calls:
            message["tool_calls"] = action.tool_calls
        turn = self._session.step(message)
        self._state.step_count += 1
        return self._observation(turn)

    def close(self) -> None:
        """End the rollout and release its sandbox; OpenEnv calls this when the client disconnects."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def state(self) -> State:
        """Episode id, row key and step count of the current episode."""
        return self._state

    def _row(
        self, split: str, seed: int | None, key: str | None = None, index: int | None = None, **unknown: Any
    ) -> hermes_rl.Row:
        if unknown:
            raise UserError(f"reset knows key, index, seed, split, group and episode_id, not {', '.join(unknown)}")
        for name, value in (("index", index), ("seed", seed)):
            if value is not None and not isinstance(value, int):
                raise UserError(f"reset: {name} is {value!r:.60}; expected a whole number")
        if key is not None:
            return self._env.row(key)
        rows = self._env.rows(split)
        if index is not None and rows.length is not None and not 0 <= index < rows.length:
            raise UserError(f"{split} has {rows.length} rows, and none with the index {index}")
        row_index = index if index is not None else seed if seed is not None else self._turns()
        return rows[row_index if rows.length is None else row_index % rows.length]

    def _observation(self, turn: hermes_rl.SessionTurn | None) -> Observation:
        if turn is not None:
            new, self._delivered_count = turn.messages[self._delivered_count :], len(turn.messages) + 1
            return Observation(messages=new, tools=turn.tools, max_tokens=turn.max_tokens)
        rollout = require_carried(self._session.rollout, "OpenEnv")
        return Observation(
            done=True,
            reward=rollout.score,
            stop_reason=str(rollout.stop_reason),
            error=rollout.error,
            rewards=values_of(rollout),
            trainable=rollout.trainable,
        )

    # Methods of OpenEnv's task API.

    def list_splits(self) -> list[str]:
        """Return the splits that the spec has."""
        return ["train"] if self._env.spec.dataset.eval is None else ["train", "eval"]

    def num_tasks(self, split: str) -> int:
        """Return the number of rows of a split; raise `NotImplementedError` if the rows may be endless."""
        length = self._env.rows(split).length
        if length is None:
            raise NotImplementedError("the rows may be without end")
        return length

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the id (row key) and index of the row at an index."""
        if not 0 <= index < self.num_tasks(split):
            raise IndexError(index)
        return {"id": self._env.rows(split)[index].key, "index": index}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the rows from `start` to `stop` (exclusive), as `get_task` does."""
        return [self.get_task(split, index) for index in range(*slice(start, stop).indices(self.num_tasks(split)))]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all rows of a split, as `get_task` does."""
        return self.get_task_range(split)


def make_app(env: hermes_rl.Env, max_sessions: int) -> Any:
    """Return OpenEnv's application for an open environment, with at most `max_sessions` concurrent sessions.

    Raises:
        UserError: sessions cannot run the spec, such as rewards that compare the members of a group.
    """
    require_no_comparing(env, "OpenEnv")
    require_one_stepped(env, "OpenEnv")
    numbers, sync = count(), hermes_rl.sync(env)
    sync.__enter__()  # the environment is already open, so this opens nothing
    return create_fastapi_app(
        lambda: HermesEnvironment(env, sync, lambda: next(numbers)),
        ReplyAction,
        Observation,
        max_concurrent_envs=max_sessions,
        env_name=env.spec.name,
    )
