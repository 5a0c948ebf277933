"""A teacher: a model that says, of the tokens of a rollout, how probable each is and which it would have preferred.

Owns what is asked of it, and what becomes of its failure: as with a reward's, the rollout failed, and is neither
trained on without the teacher's word nor scored by it. Leaves asking, retries and bounds to the client of the role.
"""

from __future__ import annotations

from hermes_rl.endings import Ending
from hermes_rl.errors import Failure, RunError
from hermes_rl.rollouts.rollout import Rollout
from hermes_rl.servers.base import ContextLengthExceeded
from hermes_rl.servers.client import ModelClient
from hermes_rl.tokens.transcript import ids

PROBE = "probe"


class Teacher:
    """Asks the servers of one role.

    Args:
        role: token-level servers with the tokenizer of the policy.
        top_k: how many of the most probable tokens are asked for at each place.
    """

    def __init__(self, role: ModelClient, top_k: int) -> None:
        self.role, self.top_k = role, top_k

    async def probe(self) -> None:
        """Ask about two tokens, before anything is played for a teacher that never answers what is asked. Raises
        `RunError` where it gives no answer, because it allows fewer most probable tokens for example."""
        try:
            await self.role.scored(ids((0, 0)), self.top_k, PROBE)
        except Failure as failure:
            raise RunError(
                f"distill: the teacher does not say which {self.top_k} tokens are the most probable at a place: "
                f"{failure.detail}"
            ) from failure
        finally:
            self.role.forget(PROBE)

    async def ask(self, rollout: Rollout) -> None:
        """Set `rollout.teacher`, where its tokens are known and nobody has asked yet. Raises `ServerFailure` where a
        sequence got no answer after all retries; `Failure` where one is too long for the teacher. That is the policy's
        doing, so the rollout is not played again."""
        if rollout.sequences is None or rollout.teacher is not None:
            return
        self.role.live_here()
        try:
            rollout.teacher = [
                await self.role.scored(sequence.ids, self.top_k, rollout.id) for sequence in rollout.sequences
            ]
        except ContextLengthExceeded as error:
            longest = max(map(len, rollout.sequences))
            detail = f"a rollout of {longest} tokens does not fit the teacher's context: {error}"
            raise Failure(f"server {self.role.name!r}: {detail}", ending=Ending.TOKEN_BUDGET) from error
        finally:
            self.role.forget(rollout.id)
