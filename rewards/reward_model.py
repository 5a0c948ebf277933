"""Score the answer with a reward model."""

from __future__ import annotations

from typing import Any, Literal

from hermes_rl import Score
from hermes_rl.errors import UserError
from hermes_rl.scoring.reward_value import in_runner, value_range


@in_runner
@value_range(-100, 100)
async def reward_model(
    result: Any,
    roles: Any,
    *,
    server: str = "reward_model",
    where: Literal["final", "conversation"] = "final",
    index: int | None = None,
) -> Score:
    """Return the number that a reward model gives for the prompt and the policy's response.

    A server failure fails the rollout. An answer that the server refuses although it accepts another one, such as one
    longer than its context, gets the low end of the reward's `range`: set this to the range of the model's numbers.

    Args:
        server: the server role, of type vllm-score, vllm-classify or vllm-pooling.
        where: rate the prompt with the final response, or the complete conversation.
        index: index of the number that counts, from 0, if the model returns several.
    """
    if server not in roles:
        raise UserError(f"reward_model: the spec has no servers.{server}; there are {', '.join(sorted(roles))}")
    model, answer = roles[server], {"role": "assistant", "content": result.final_response}
    if model.scripted:
        return Score(float(bool(result.final_response.strip())), reason="scripted reward model: is there an answer?")
    messages = [*result.messages[: result.prompt_length], answer] if where == "final" else result.messages
    messages = [message for message in messages if not message.get("context")]  # an agent program has made that up
    numbers = await model.rate(messages)
    if index is None and len(numbers) > 1:
        raise UserError(f"reward_model: servers.{server} gives {len(numbers)} numbers; say with `index` which counts")
    if not -len(numbers) <= (index or 0) < len(numbers):
        raise UserError(f"reward_model: servers.{server} gives {len(numbers)} numbers, and `index` is {index}")
    return Score(numbers[index or 0], metrics={f"number_{position}": value for position, value in enumerate(numbers)})
