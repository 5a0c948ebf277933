"""Door to OpenEnv: a spec as an environment that OpenEnv's clients reset and step over its WebSocket.

Owns which row a reset begins, what a client hears after each step, and that a session ends with its client. A rollout
without a score has the reward None, and the observation says why. `hermes-rl openenv SPEC` serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

import hermes_rl
from hermes_rl.errors import UserError
from hermes_rl.integrations.opened import require_carried, require_no_comparing, require_one_stepped, values_of


class Say(Action):
    """The model's turn."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    """Calls as OpenAI writes them."""


class Heard(Observation):
    """What the model hears next; with `done`, how the rollout ended."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    """New ones: the prompt after a reset, and answers of tools or of the simulated user after a step."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """OpenAI schemas of what may be called."""
    max_tokens: int | None = None
    """Of the next turn; None: no bound."""
    ending: str | None = None
    error: str | None = None
    """Why there is no score."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """The values that the score, which is `reward`, is made of."""
    trainable: bool = True
    """False where the spec masks the ending: it counts for the baseline, and is not trained on."""


class HermesEnvironment(Environment):
    """One session of a client; OpenEnv runs its calls in a thread of its own."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, env: hermes_rl.Env, sync: Any, turns: Callable[[], int]) -> None:
        super().__init__()
        self._env, self._sync, self._turns = env, sync, turns
        self._session: Any = None
        self._heard = 0
        """Messages that the client knows, its own included."""
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Heard:
        """Begin the rollout of a row: the one with that `key`, at that `index`, or at the seed; else the next one.

        Args:
            seed: stands for an index, over and over through the rows.
            episode_id: the client's name for the episode.
            options: `key`, `index`, `split` ("train" or "eval"), and `group`: rollouts of one group have the same tools
                where the spec draws them.

        Raises:
            UserError: there is no such row, or something else is asked for.
        """
        self.close()
        split, group = options.pop("split", "train"), options.pop("group", None)
        row = self._row(split, seed, **options)
        self._state, self._heard = State(episode_id=episode_id, key=row.key), 0
        self._session = self._sync.session(row, split=split, group=group)
        return self._observation(self._session.start())

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        """Answer with the model's turn; the times are the spec's, whatever `timeout_s` is."""
        if self._session is None:
            raise UserError("call reset first: no rollout has begun")
        message: dict[str, Any] = {"role": "assistant", "content": action.content}
        if action.tool_calls:
            message["tool_calls"] = action.tool_calls
        turn = self._session.step(message)
        self._state.step_count += 1
        return self._observation(turn)

    def close(self) -> None:
        """End the rollout and release its sandbox; OpenEnv calls it when the client has gone."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def state(self) -> State:
        """Which episode it is, of which row, and how many steps it has had."""
        return self._state

    def _row(
        self, split: str, seed: int | None, key: str | None = None, index: int | None = None, **unknown: Any
    ) -> hermes_rl.Row:
        if unknown:
            raise UserError(f"reset knows key, index, seed, split, group and episode_id, not {', '.join(unknown)}")
        for name, value in (("index", index), ("seed", seed)):
            if value is not None and not isinstance(value, int):
                raise UserError(f"reset: {name} is {value!r:.60}, and no whole number")
        if key is not None:
            return self._env.row(key)
        rows = self._env.rows(split)
        if index is not None and rows.length is not None and not 0 <= index < rows.length:
            raise UserError(f"{split} has {rows.length} rows, and none with the index {index}")
        place = index if index is not None else seed if seed is not None else self._turns()
        return rows[place if rows.length is None else place % rows.length]

    def _observation(self, turn: hermes_rl.SessionTurn | None) -> Heard:
        if turn is not None:
            new, self._heard = turn.messages[self._heard :], len(turn.messages) + 1
            return Heard(messages=new, tools=turn.tools, max_tokens=turn.max_tokens)
        rollout = require_carried(self._session.rollout, "OpenEnv")
        return Heard(
            done=True,
            reward=rollout.score,
            ending=str(rollout.ending),
            error=rollout.error,
            rewards=values_of(rollout),
            trainable=rollout.score is not None and not rollout.masked,
        )

    # What OpenEnv's task API lists.

    def list_splits(self) -> list[str]:
        """Return the splits that the spec has."""
        return ["train"] if self._env.spec.dataset.eval is None else ["train", "eval"]

    def num_tasks(self, split: str) -> int:
        """Return how many rows a split has."""
        length = self._env.rows(split).length
        if length is None:
            raise NotImplementedError("the rows may be without end")
        return length

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the row at an index."""
        if not 0 <= index < self.num_tasks(split):
            raise IndexError(index)
        return {"id": self._env.rows(split)[index].key, "index": index}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the rows between two indices."""
        return [self.get_task(split, index) for index in range(*slice(start, stop).indices(self.num_tasks(split)))]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all rows."""
        return self.get_task_range(split)


def make_app(env: hermes_rl.Env, most: int) -> Any:
    """Return OpenEnv's application for an environment that is open, with at `most` so many sessions at a time.
    UserError: rewards compare the members of a group, which sessions are not."""
    require_no_comparing(env, "OpenEnv")
    require_one_stepped(env, "OpenEnv")
    numbers, sync = count(), hermes_rl.sync(env)
    sync.__enter__()  # the environment is open, so this opens nothing
    return create_fastapi_app(
        lambda: HermesEnvironment(env, sync, lambda: next(numbers)),
        Say,
        Heard,
        max_concurrent_envs=most,
        env_name=env.spec.name,
    )
