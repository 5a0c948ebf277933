"""The lines of a group: how a group of rollouts looks in `groups.jsonl` and on the way to a trainer.

`group_lines` is the one place where they are made, whoever writes or sends them. A line is a ScoredDataGroup with the
keys that atroposlib 0.4.0 knows (`atroposlib.envs.base.ScoredDataGroup`), and `group`, `row_key`, `run` and
`certificate`, which join it to the rollouts and prove its tokens.

A trajectory API keeps a group whose size is not the registered one for ever, so a rollout of several sequences cannot
make a group larger. Line *b* holds sequence *b* of each rollout and has exactly as many entries as the group; where a
rollout has no such sequence there is a filler: one token that is masked, with the rollout's own score, and an override
that sets its advantage to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.rollouts.credit import token_advantages, turn_advantages
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.tokens.sequence import MASKED, MASKED_LOGPROB, TokenSequence

FILLER_OVERRIDE = {"set_advantage_to_zero": True}
GROUP_KEYS = ("group", "scores")
"""What a line of groups.jsonl has to have, to go on from it."""


def group_lines(group: Group, generation_params: Mapping[str, Any], run: str = "") -> list[dict[str, Any]]:
    """The lines of a group: one where each rollout has one sequence, else one for each sequence of the longest.

    `tokens` and `masks` are None where the tokens of any rollout cannot be known; nothing is invented.
    `inference_logprobs` is an empty list where the server gave none, since trainers take its length. Only the first
    line has the messages and the images of the prompts.

    Args:
        group: a group with its tokens.
        generation_params: how the policy was asked to sample.
        run: fingerprint of the run.
    """
    layers = _token_layers(group)
    keys: dict[str, Any] = {"group": group.id, "row_key": group.row.key, "run": run}
    if group.certificate is not None:
        keys["certificate"] = group.certificate.record()
    messages = [messages_of(rollout) for rollout in group.rollouts]
    seen = [_images(rollout) for rollout in group.rollouts]
    images = seen if any(seen) else None
    return [
        {
            "tokens": layer["tokens"],
            "masks": layer["masks"],
            "scores": group.scores,
            "advantages": layer["advantages"],  # None: the trainer normalises the scores within the group
            "ref_logprobs": None,
            "messages": messages if number == 0 else None,
            "generation_params": dict(generation_params),
            "inference_logprobs": layer["inference_logprobs"],
            "overrides": layer["overrides"],
            "group_overrides": {},  # BaseEnv looks into it
            "images": images if number == 0 else None,
            "distill_token_ids": None,
            "distill_logprobs": None,
            **keys,
            **({"layer": number, "layers": len(layers)} if len(layers) > 1 else {}),
        }
        for number, layer in enumerate(layers)
    ]


def messages_of(rollout: Rollout) -> list[dict[str, Any]]:
    """The conversation; run-api refuses a message without a `content` key."""
    messages = rollout.result.messages if rollout.result else []
    return [{**message, "content": message.get("content")} for message in messages]


def _images(rollout: Rollout) -> list[str]:
    """The images of the prompt in order, each an address or a data URL."""
    prompt = rollout.messages[: rollout.result.prompt_length] if rollout.result is not None else []
    parts = [part for message in prompt if isinstance(message["content"], list) for part in message["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def _token_layers(group: Group) -> list[dict[str, Any]]:
    """The token fields of each layer; one layer without tokens where those of any rollout are not known."""
    if any(not rollout.sequences for rollout in group.rollouts):
        overrides = _overrides([(rollout, False) for rollout in group.rollouts])
        return [{"tokens": None, "masks": None, "inference_logprobs": [], "advantages": None, "overrides": overrides}]
    turns = turn_advantages(group)
    deepest = max(len(rollout.sequences or ()) for rollout in group.rollouts)
    return [_layer(group.rollouts, turns, number) for number in range(deepest)]


def _layer(rollouts: Sequence[Rollout], turns: list[list[float]] | None, number: int) -> dict[str, Any]:
    entries = [(rollout, _at(rollout, number)) for rollout in rollouts]
    lines = [(_line(rollout, sequence)) for rollout, sequence in entries]
    logprobs = [line["logprobs"] for line in lines]
    return {
        "tokens": [line["tokens"] for line in lines],
        "masks": [line["masks"] for line in lines],
        "inference_logprobs": logprobs if all(line is not None for line in logprobs) else [],
        "advantages": None if turns is None else [_advantages(s, t) for (_, s), t in zip(entries, turns, strict=True)],
        "overrides": _overrides([(rollout, sequence is None) for rollout, sequence in entries]),
    }


def _overrides(entries: Sequence[tuple[Rollout, bool]]) -> list[dict[str, Any]] | None:
    """What the trainer is told of each entry, (rollout, it is a filler); None where there is nothing to tell."""
    each = [{**rollout.overrides, **(FILLER_OVERRIDE if filler else {})} for rollout, filler in entries]
    return each if any(each) else None


def _at(rollout: Rollout, number: int) -> TokenSequence | None:
    sequences = rollout.sequences or []
    return sequences[number] if number < len(sequences) else None


def _line(rollout: Rollout, sequence: TokenSequence | None) -> dict[str, Any]:
    """Tokens, masks and log-probabilities of one entry."""
    if sequence is None:
        first = (rollout.sequences or [])[0]
        return {"tokens": first.tokens[:1], "masks": [MASKED], "logprobs": [MASKED_LOGPROB]}
    if rollout.masked:
        size = len(sequence)
        known = sequence.sampled is not None
        return {
            "tokens": sequence.tokens,
            "masks": [MASKED] * size,
            "logprobs": [MASKED_LOGPROB] * size if known else None,
        }
    return {"tokens": sequence.tokens, "masks": sequence.masks, "logprobs": sequence.logprobs}


def _advantages(sequence: TokenSequence | None, turns: list[float]) -> list[float]:
    return [0.0] if sequence is None else token_advantages(sequence, turns)
