"""Back-pressure from the trainer's queue: fewer groups begin, and what has begun is never cancelled.

BaseEnv cancels every group in flight when the queue is full, and some of them when it is nearly so: minutes of
generation that were almost done.
"""

from __future__ import annotations

from typing import Any

from atroposlib.envs.base import EvalHandlingEnum

from hermes_rl.rollouts.admission import Admission


class Pressure:
    """Mixin of `HermesAgentBaseEnv`: replaces how BaseEnv reacts to a full queue."""

    # BaseEnv's own
    config: Any
    workers: set[Any]
    eval_runner: Any
    max_num_workers: int
    derived_batch_size: int
    status_dict: dict[str, Any]

    _queue_is_full = False
    _admission: Admission | None = None
    """Decides how many rollouts are open, where their number is not fixed; None: as many as `max_num_workers` says."""

    async def get_status(self) -> None:
        """As BaseEnv's; of a full queue BaseEnv is told that one place is left, so that it cancels nothing.

        At the end of training nothing more is needed: then it is told the truth.
        """
        await super().get_status()  # type: ignore[misc]
        status, config = self.status_dict, self.config
        self._queue_is_full = False
        if self._admission is not None:
            self.max_num_workers = self._carried(self._admission)
        if config.inference_weight >= 0:
            # The API says which share of the model server is this environment's, by the weights of all that it knows.
            self.max_num_workers = max(1, round(self.max_num_workers * status.get("env_weight", 1.0)))
        if config.batch_size <= 0 or config.max_batches_offpolicy <= 0 or config.min_batch_allocation is not None:
            return
        full = -(-config.max_batches_offpolicy * config.batch_size // config.group_size)
        ahead = status["queue_size"] * config.group_size // config.batch_size
        if status["queue_size"] >= full and status["current_step"] + ahead <= config.total_steps:
            self._queue_is_full = True
            status["queue_size"] = full - 1

    async def add_train_workers(self) -> None:
        """As BaseEnv's, where there is room for more groups than are in flight."""
        if self._queue_is_full or self._room_for_groups() <= len(self.workers):
            return
        await super().add_train_workers()  # type: ignore[misc]

    def _carried(self, admission: Admission) -> int:
        """Groups that may be open; never fewer than are."""
        groups = len(self.workers)
        while admission.admits(groups * self.config.group_size):
            groups += 1
        return max(1, groups)

    def _room_for_groups(self) -> int:
        """Groups that may be in flight: workers, and what the queue still takes."""
        config, workers = self.config, self.max_num_workers
        evaluating = self.eval_runner is not None and not self.eval_runner.done()
        if evaluating and config.eval_handling == EvalHandlingEnum.LIMIT_TRAIN:
            workers = int(workers * config.eval_limit_ratio)
        if config.min_batch_allocation is not None:
            return workers
        wanted: int = config.max_batches_offpolicy * self.derived_batch_size // config.group_size
        return min(workers, wanted - int(self.status_dict["queue_size"]))
