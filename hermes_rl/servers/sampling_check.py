"""Test if a token-level server samples from the requested distribution, with thousands of draws of one token.

Every draw is a request as in a rollout, with the seed that a rollout would send. So the draws of `hermes-rl doctor SPEC
--sampling` show the combined effect of the server's settings, the model's own `generation_config.json`, and the request
parameters on the distribution.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hermes_rl.errors import UserError
from hermes_rl.servers.base import ContextLengthExceeded, Sampled, Sampling, drawn_seed
from hermes_rl.servers.exactness import Finding, describe_sampling, sample_all
from hermes_rl.servers.token_level import TokenServer
from hermes_rl.servers.transport import AttemptFailed
from hermes_rl.tokens.tokenizer import TemplateRefused

DRAWS = 2000
"""Number of tokens drawn in one context: half of them as first turns of a rollout, half as second ones."""
VARIATION = 0.02
"""Total variation up to which a significant difference is not an error."""
SIGMAS = 4.0
"""Maximum deviation of a count from its expected value, in standard deviations."""
_WALKS = 8
_STEPS = 32
_UNDECIDED = math.log(0.4)
"""A token with this log-probability is one of several likely ones; draws at its position are most informative about the
model's own distribution.
"""
_LIKELY = math.log(0.8)
"""The same if other parameters shape the distribution: the probability of one of two equally likely tokens is one half
at any temperature, and temperature affects this one most.
"""
_COMMON = 5.0
"""Tokens with a smaller expected count are pooled with the other rare ones."""


@dataclass(frozen=True)
class Distribution:
    """Draws in one context, compared with the log-probabilities that the server returned with them."""

    draws: int
    variation: float
    """Total variation between the two, with rare tokens pooled."""
    noise: float
    """Mean total variation of the same number of draws from the distribution itself."""
    tokens: int
    """Number of distinct tokens that were drawn."""

    @property
    def ok(self) -> bool:
        return self.variation <= max(VARIATION, 3 * self.noise)

    def finding(self, how: str) -> Finding:
        """Return the finding as text; `how` describes the requested sampling."""
        detail = (
            f"{self.draws} draws of one token with {how}: total variation {self.variation:.3f} from the "
            f"log-probabilities that came with them (chance alone: {self.noise:.3f}; {self.tokens} different tokens)"
        )
        remedy = (
            "the server samples from another distribution: look at its sampling options, at the generation_config.json "
            "of the model (vLLM: --generation-config vllm), and at --logprobs-mode where temperature is not 1 or more "
            "is set"
        )
        return Finding(self.ok, detail, None if self.ok else remedy)


async def measure(server: TokenServer, temperature: float, top_p: float | None, draws: int = DRAWS) -> list[Finding]:
    """Measure the server's sampling; a server that does not respond gives one finding."""
    if temperature == 0:
        return [Finding(True, "at temperature 0 nothing is drawn: the most probable token is taken")]
    try:
        renderer = await server.renderer()
        prompt = renderer.first([{"role": "user", "content": "Name a colour, and explain your choice."}], None)
        sampling = Sampling(prompt, 1, renderer.stop_ids, temperature, top_p)
        shaping = describe_sampling(temperature, top_p)
        target_logprob = _LIKELY if shaping else _UNDECIDED
        context, stopped = await _find_context(server, replace(sampling, max_tokens=_STEPS), target_logprob)
        first, second = await _draw_pairs(server, replace(sampling, prompt=context), draws // 2)
        limit = await server.context_length()
        length = (
            f"{limit} tokens" if limit is not None else "not told; a longer conversation ends by the server's error"
        )
        return [
            distribution([*first, *second]).finding(shaping or "temperature 1"),
            *_check_independence(first, second),
            stopped,
            Finding(True, f"longest conversation: {length}"),
        ]
    except (UserError, AttemptFailed, ContextLengthExceeded, TemplateRefused) as error:
        return [Finding(False, str(error), "is it running, and of this type?")]


async def _find_context(server: TokenServer, sampling: Sampling, target_logprob: float) -> tuple[array[int], Finding]:
    """Sample a few replies; return the context whose token came nearest to a log-probability, and a finding.

    The finding reports if every reply that stopped ends with a stop token.
    """
    walks = [await server.sample(replace(sampling, seed=drawn_seed(index, "walk"))) for index in range(_WALKS)]
    candidates = [
        (abs(value - target_logprob), walk.ids[:i]) for walk in walks for i, value in enumerate(walk.logprobs)
    ]
    if not candidates:
        raise AttemptFailed("the server sampled no token")
    _, before = min(candidates, key=lambda place: place[0])
    ended = [walk for walk in walks if walk.finish == "stop"]
    bare = [walk for walk in ended if not walk.ids or walk.ids[-1] not in sampling.stop_ids]
    if bare:
        remedy = "the model's generation_config.json may name other stop tokens than its chat template"
        detail = f"{len(bare)} of {len(ended)} answers that ended do not end with a stop token"
        return sampling.prompt + array(sampling.prompt.typecode, before), Finding(False, detail, remedy)
    detail = f"each of {len(ended)} answers that ended has its stop token" if ended else "no answer ended by itself"
    return sampling.prompt + array(sampling.prompt.typecode, before), Finding(True, detail)


async def _draw_pairs(server: TokenServer, sampling: Sampling, pairs: int) -> tuple[list[Sampled], list[Sampled]]:
    """Draw one token for each of two turns of many rollouts, all in the same context."""
    turns = ((drawn_seed(rollout, "rollout"), turn) for turn in (1, 2) for rollout in range(pairs))
    seeds = (drawn_seed(seed, "turn", turn) for seed, turn in turns)
    answers = await sample_all(server, (replace(sampling, seed=seed) for seed in seeds))
    return answers[:pairs], answers[pairs:]


def distribution(answers: Sequence[Sampled]) -> Distribution:
    """Compare the frequency of each drawn token with its log-probability."""
    drawn = [(answer.ids[0], answer.logprobs[0]) for answer in answers if answer.ids]
    count = len(drawn)
    if not count:
        return Distribution(0, 1.0, 0.0, 0)
    token_counts = Counter(token for token, _ in drawn)
    chance = {token: math.exp(logprob) for token, logprob in drawn}
    common = {token for token, value in chance.items() if value * count >= _COMMON}
    pairs = [(token_counts[token] / count, chance[token]) for token in common]
    pairs.append((1 - sum(share for share, _ in pairs), max(0.0, 1 - sum(value for _, value in pairs))))
    variation = sum(abs(share - value) for share, value in pairs) / 2
    noise = sum(math.sqrt(2 * value * max(0.0, 1 - value) / (math.pi * count)) for _, value in pairs) / 2
    return Distribution(count, variation, noise, len(token_counts))


def _check_independence(first: Sequence[Sampled], second: Sequence[Sampled]) -> list[Finding]:
    """Compare the frequency of equal draws with that of independent draws."""
    turns = [(a.ids[0], b.ids[0]) for a, b in zip(first, second, strict=True) if a.ids and b.ids]
    members = [(a, b) for (a, _), (b, _) in zip(turns[::2], turns[1::2], strict=False)]
    shares = Counter(token for pair in turns for token in pair)
    alike = sum((count / (2 * len(turns))) ** 2 for count in shares.values()) if turns else 1.0
    return [_by_chance("turns of a rollout", turns, alike), _by_chance("members of a group", members, alike)]


def _by_chance(subject: str, pairs: Sequence[tuple[int, int]], alike: float) -> Finding:
    """Return a finding about a count of equal pairs; `alike` is the probability of equal independent draws."""
    equal = sum(a == b for a, b in pairs)
    sigma = math.sqrt(len(pairs) * alike * (1 - alike))
    if sigma < 1:
        return Finding(True, f"{subject}: this model is too certain to show whether their draws are independent")
    off = (equal - len(pairs) * alike) / sigma
    detail = f"{subject} draw independently: {equal} of {len(pairs)} pairs are equal, {off:+.1f} σ from chance"
    if abs(off) <= SIGMAS:
        return Finding(True, detail)
    return Finding(
        False,
        detail.replace("draw independently", "do not draw independently"),
        "the server makes noise from something that these requests share; does it look at `seed`?",
    )
