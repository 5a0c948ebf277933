"""Run an environment next to a synchronous trainer: rollouts run on an event loop in a separate thread.

This module opens and closes the spec, selects the rows for training, and passes the model calls of rollouts to the
thread that owns the trainer's model.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Self

import hermes_rl
from hermes_rl.errors import UserError

Call = tuple[list[int], hermes_rl.Sampling]
"""One model call: the token ids of its prompt, and its sampling settings."""
Waiting = tuple[Call, concurrent.futures.Future[hermes_rl.Sampled]]
"""A call, and the future that receives its reply."""
Generate = Callable[[Sequence[Call]], Sequence[hermes_rl.Sampled]]
"""A function that samples replies for a batch of calls, in their order."""
BATCH_GAP_SECONDS = 0.005
"""Seconds without another model call after which the waiting calls become one batch."""


class BackgroundEnv:
    """A spec that opens on first use, on an event loop in a separate thread.

    Each start of the trainer writes its own run directory under `record`. A start never reuses rollouts of an earlier
    one: the trainer resumes at its checkpoint, and the weights that sampled them may no longer exist.

    Args:
        spec: a loaded spec, a path, or the name of a shipped spec.
        rows: the number of rows to train on, or their keys; default: all.
        environ: variables used for `${VAR}` and for server keys.
        record: a directory in which every start of the trainer creates a run directory.
        workers: the number of processes that run rollouts.
    """

    def __init__(
        self,
        spec: hermes_rl.Spec | str | Path,
        rows: int | Iterable[str] | None = None,
        environ: Mapping[str, str] | None = None,
        record: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        self._opening, self._workers = (spec, environ), workers
        self._record = None if record is None else Path(record) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._chosen = rows if rows is None or isinstance(rows, int) else list(rows)
        self._splits: dict[str, dict[str, Any]] = {}
        self._stack = ExitStack()

    @cached_property
    def env(self) -> Any:
        """The environment, for code that runs on its event loop."""
        spec, environ = self._opening
        return hermes_rl.open_env(spec, environ=environ, record=self._record, workers=self._workers)

    @cached_property
    def sync(self) -> Any:
        """The open environment, for threads other than the thread of its event loop."""
        return self._stack.enter_context(hermes_rl.sync(self.env))

    def rows(self, split: str) -> dict[str, Any]:
        """Return the rows of a split by key; of the training split, only the selected rows.

        Raises:
            UserError: the spec may have endless rows and no number was given.
        """
        if split not in self._splits:
            rows, chosen = self.sync.rows(split), self._chosen if split == "train" else None
            if chosen is None and rows.length is None:
                raise UserError(
                    "the spec's rows may be without end, and the trainer wants to know how many: say `rows=1000`"
                )
            selected = map(self.sync.row, chosen) if isinstance(chosen, list) else islice(rows, chosen)
            self._splits[split] = {row.key: row for row in selected}
        return self._splits[split]

    def close(self) -> None:
        """Cancel running rollouts and release all resources; may be called twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ModelCalls:
    """Model calls of rollouts on another thread, answered in batches by the thread that owns the model."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()

    async def sample(self, ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
        """Return the reply to a prompt, sampled by the other thread."""
        answer: concurrent.futures.Future[hermes_rl.Sampled] = concurrent.futures.Future()
        self._waiting.put(((ids, sampling), answer))
        return await asyncio.wrap_future(answer)

    def answer_until(self, playing: concurrent.futures.Future[Any], generate: Generate) -> None:
        """Answer calls until `playing` is done; cancel `playing` if an exception ends this method earlier."""
        playing.add_done_callback(lambda _: self._waiting.put(None))
        try:
            while (first := self._waiting.get()) is not None:
                batch, ended = [first], False
                while not ended:
                    try:
                        next_call = self._waiting.get(timeout=BATCH_GAP_SECONDS)
                    except queue.Empty:
                        break
                    ended = next_call is None
                    batch += [next_call] if next_call is not None else []
                self._answer([request for request in batch if request[1].set_running_or_notify_cancel()], generate)
                if ended:
                    return
        except BaseException:  # also on Ctrl-C: the rollouts on the other thread would continue
            playing.cancel()
            raise

    def _answer(self, batch: Sequence[Waiting], generate: Generate) -> None:
        if not batch:
            return
        try:
            answers = list(generate([call for call, _ in batch]))
            if len(answers) != len(batch):
                raise ValueError(f"{len(batch)} calls got {len(answers)} answers")
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - a failed attempt of each rollout that asked
            # A StopIteration would end the waiting coroutine instead of raising in it.
            failed = RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error
            for _, answer in batch:
                answer.set_exception(failed)
            return
        for (_, answer), sampled in zip(batch, answers, strict=True):
            answer.set_result(sampled)


def dataset(**columns: list[Any]) -> Any:
    """Return a `datasets.Dataset` of these columns."""
    from datasets import Dataset

    return Dataset.from_dict(columns)
