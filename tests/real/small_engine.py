"""Sample with a small model as a trainer's engine does, and measure how exact the returned values are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM


class SmallEngine:
    """Sample ids with their log-probabilities from token ids, one call after another."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM.from_pretrained(folder).eval()
        self.calls: list[tuple[list[int], list[int]]] = []
        self._lock = asyncio.Lock()

    async def sample(self, prompt: Sequence[int], most: int, stop: Sequence[int]) -> tuple[list[int], list[float]]:
        async with self._lock:
            found = await asyncio.to_thread(self._sample, list(prompt), most, list(stop))
        self.calls.append((list(prompt), found[0]))
        return found

    def _sample(self, prompt: list[int], most: int, stop: list[int]) -> tuple[list[int], list[float]]:
        with torch.no_grad():
            out = self.model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=most,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=stop,
                pad_token_id=stop[0],
                return_dict_in_generate=True,
                output_scores=True,
            )
        ids = out.sequences[0, len(prompt) :].tolist()
        logs = torch.cat(out.scores).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        return ids, [min(0.0, value) for value in logs.tolist()]

    def difference(
        self, prompt: Sequence[int], response: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]
    ) -> float:
        """Return the largest difference between the log-probabilities of a sequence and those of one forward pass."""
        with torch.no_grad():
            scores = self.model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
        own = scores[len(prompt) - 1 : -1].gather(-1, torch.tensor([*response])[:, None])[:, 0].tolist()
        return max((abs(a - b) for a, b, kept in zip(own, logprobs, mask, strict=True) if kept), default=0.0)

    @property
    def sampled(self) -> int:
        return sum(len(ids) for _, ids in self.calls)
