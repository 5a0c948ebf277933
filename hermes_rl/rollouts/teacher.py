"""Get a teacher model's log-probabilities and preferred tokens for the tokens of a rollout.

This module owns the requests and the handling of failures: as with a failed reward, the rollout fails, and is neither
trained on nor scored without the teacher. The client of the role owns calls, retries and limits.
"""

from __future__ import annotations

from hermes_rl.errors import Failure, RunError
from hermes_rl.rollouts.rollout import Rollout
from hermes_rl.servers.base import ContextLengthExceeded
from hermes_rl.servers.client import ModelClient
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.transcript import ids

PROBE = "probe"


class Teacher:
    """Call the servers of one role.

    Args:
        role: token-level servers with the tokenizer of the policy.
        top_k: number of most probable tokens requested at each position.
    """

    def __init__(self, role: ModelClient, top_k: int) -> None:
        self.role, self.top_k = role, top_k

    async def probe(self) -> None:
        """Request scores of two tokens before anything runs, to detect a teacher that cannot provide them.

        Raises:
            RunError: the request fails, for example because the server allows fewer most probable tokens.
        """
        try:
            await self.role.scored(ids((0, 0)), self.top_k, PROBE)
        except Failure as failure:
            raise RunError(
                f"distill: the teacher does not report which {self.top_k} tokens are the most probable at a position: "
                f"{failure.detail}"
            ) from failure
        finally:
            self.role.forget(PROBE)

    async def ask(self, rollout: Rollout) -> None:
        """Set `rollout.teacher` if the tokens are known and it is not set yet.

        Raises:
            ServerFailure: the retries for a sequence were exhausted.
            Failure: a sequence is too long for the teacher. The policy caused this, so the rollout is not retried.
        """
        if rollout.sequences is None or rollout.teacher is not None:
            return
        self.role.bind_to_loop()
        try:
            rollout.teacher = [
                await self.role.scored(sequence.ids, self.top_k, rollout.id) for sequence in rollout.sequences
            ]
        except ContextLengthExceeded as error:
            longest = max(map(len, rollout.sequences))
            detail = f"a rollout of {longest} tokens does not fit the teacher's context: {error}"
            raise Failure(f"server {self.role.name!r}: {detail}", stop_reason=StopReason.TOKEN_BUDGET) from error
        finally:
            self.role.forget(rollout.id)
