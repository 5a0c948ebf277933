"""A transformer of 0.6 million parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

WIDTH, LAYERS, HEADS, LONGEST = 128, 3, 4, 1024


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.behind(x))


class Small(nn.Module):
    """Token ids of shape (batch, length), padded at the end, → logits."""

    def __init__(self, vocabulary: int, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def padded(lines: Sequence[Sequence[int]], fill: float = 0) -> torch.Tensor:
    """The lines as one tensor."""
    longest = max(map(len, lines))
    return torch.tensor([[*line, *[fill] * (longest - len(line))] for line in lines])


def logprobs(model: Small, ids: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, given those before it: shape (batch, length - 1)."""
    log_probabilities = functional.log_softmax(model(ids)[:, :-1], -1)
    return log_probabilities.gather(-1, ids[:, 1:, None]).squeeze(-1)
