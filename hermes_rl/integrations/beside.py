"""An environment beside a trainer that is synchronous: rollouts play on a loop in a thread of their own.

Owns when the spec opens and closes, which of its rows are trained on, and how the thread that owns the trainer's model
answers the model calls of rollouts that play on another one.
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
"""One model call: the ids of its prompt, and how to sample."""
Waiting = tuple[Call, concurrent.futures.Future[hermes_rl.Sampled]]
"""A call that waits for its answer."""
Generate = Callable[[Sequence[Call]], Sequence[hermes_rl.Sampled]]
"""Answers several calls together."""
GATHERING = 0.005
"""Seconds without a further model call after which those that wait become one batch."""


class Beside:
    """A spec that opens when something of it is first used, on a loop in a thread of its own.

    Each start writes a run directory of its own below `record`. Rollouts of an earlier start are never played into a
    later one: the trainer begins at its checkpoint, and the weights that sampled them may be gone.

    Args:
        spec: a loaded spec, a path, or the name of a shipped one.
        rows: how many rows to train on, or the keys of those; default: all.
        environ: where `${VAR}` and the keys of servers are looked up.
        record: a folder that every start of the trainer writes a run directory into.
        workers: processes that play.
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
        """The environment, for what runs on its loop."""
        spec, environ = self._opening
        return hermes_rl.open_env(spec, environ=environ, record=self._record, workers=self._workers)

    @cached_property
    def sync(self) -> Any:
        """The environment, open, for other threads than that of its loop."""
        return self._stack.enter_context(hermes_rl.sync(self.env))

    def rows(self, split: str) -> dict[str, Any]:
        """Return the rows of a split by their keys: those that were chosen, of the split that is trained on."""
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
        """End what is played and release everything; may be called twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ModelCalls:
    """Model calls of rollouts, which play on another thread; the thread that owns the model answers them in batches."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()

    async def sample(self, ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
        """Wait for the answer of the other thread."""
        answer: concurrent.futures.Future[hermes_rl.Sampled] = concurrent.futures.Future()
        self._waiting.put(((ids, sampling), answer))
        return await asyncio.wrap_future(answer)

    def answer_until(self, playing: concurrent.futures.Future[Any], generate: Generate) -> None:
        """Answer calls until `playing` has ended; what ends this sooner ends `playing` as well."""
        playing.add_done_callback(lambda _: self._waiting.put(None))
        try:
            while (first := self._waiting.get()) is not None:
                batch, ended = [first], False
                while not ended:
                    try:
                        further = self._waiting.get(timeout=GATHERING)
                    except queue.Empty:
                        break
                    ended = further is None
                    batch += [further] if further is not None else []
                self._answer([request for request in batch if request[1].set_running_or_notify_cancel()], generate)
                if ended:
                    return
        except BaseException:  # Ctrl-C too: what is played on another thread would go on
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
            # A StopIteration would end the coroutine that waits.
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
