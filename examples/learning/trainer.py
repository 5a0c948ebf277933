"""Two ways to train: on scripted transcripts, and with GRPO on the batches of a trajectory API."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import aiohttp
import torch

from examples.learning.model import Small, logprobs, padded
from examples.learning.server import PolicyServer
from examples.learning.task import transcript
from hermes_rl.tokens.chat import chat_tokens
from hermes_rl.tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MASKED = -100
MOST_NATS = 2.0


def warm_up(
    model: Small,
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]],
    *,
    steps: int,
    noise: float,
    written: Callable[[random.Random, float], list[dict[str, Any]]] = transcript,
) -> float:
    """Supervised training on scripted transcripts, those of the task or others; returns the last loss."""
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    lines = []
    for _ in range(2000):
        (line,) = chat_tokens(tokenizer, written(chance, noise), tools).sequences or ()
        lines.append(line)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        batch = chance.sample(lines, 64)
        ids, labels = padded([line.tokens for line in batch]), padded([line.masks for line in batch], MASKED)
        mask = (labels[:, 1:] != MASKED).float()
        loss = -(logprobs(model, ids) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss.detach())


@dataclass
class Curve:
    """What was seen while learning: one entry per step."""

    reward: list[float] = field(default_factory=list)
    difference: list[float] = field(default_factory=list)
    """Largest |logprob(trainer) − logprob(server)| of any trained token of the step."""
    parameters: int = 0
    version: list[int] = field(default_factory=list)
    """Newest version of the weights that sampled a token of the step."""


class Trainer:
    """GRPO: group-normalised advantages, clipped ratios, `epochs` optimiser steps per batch.

    `entropy_bonus` is what a token gains for each nat that it was unlikely, up to `MOST_NATS` of them: it keeps the
    policy from settling early.
    """

    def __init__(
        self,
        model: Small,
        server: PolicyServer,
        *,
        lr: float = 4e-4,
        epochs: int = 1,
        entropy_bonus: float = 0.0,
    ) -> None:
        self.model, self.server, self.epochs, self.entropy_bonus = model, server, epochs, entropy_bonus
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        self.snapshots = {0: copy.deepcopy(model)}
        self.curve = Curve(parameters=sum(parameter.numel() for parameter in model.parameters()))

    async def run(
        self, api: str, *, steps: int, batch: int, measured: int = 0, on_step: Callable[[int], None] = lambda step: None
    ) -> None:
        """Register, and take `steps` batches; the first `measured` of them only show what the policy earns as it is."""
        async for step_index, groups in _batches(api, steps, batch):
            await self.take(groups, train=step_index >= measured)
            logger.info(
                "step %d: reward %.3f, difference %.1e", step_index, self.curve.reward[-1], self.curve.difference[-1]
            )
            on_step(step_index)

    async def take(self, groups: list[dict[str, Any]], *, train: bool = True) -> None:
        """Note what a batch earns and how exact it is, and take a step on it."""
        await asyncio.to_thread(self._compare, groups)
        self.curve.reward.append(fmean(score for group in groups for score in group["scores"]))
        if train:
            await self._train(groups)

    async def _train(self, groups: list[dict[str, Any]]) -> None:
        async with self.server.lock:
            await asyncio.to_thread(self._step, groups)
            self.server.version += 1
        self.snapshots[self.server.version] = copy.deepcopy(self.model)
        self.snapshots.pop(self.server.version - 24, None)

    @torch.no_grad()
    def _compare(self, groups: list[dict[str, Any]]) -> None:
        """Each sampled stretch against the weights that sampled it."""
        worst, newest = 0.0, 0
        for group in groups:
            for tokens, masks, inference_logprobs in zip(
                group["tokens"], group["masks"], group["inference_logprobs"], strict=True
            ):
                for start, stop in _stretches(masks):
                    sampled = self.server.log.get((tuple(tokens[:start]), tuple(inference_logprobs[start:stop])))
                    assert sampled is not None, "sampled in another context"
                    assert list(sampled.ids) == tokens[start:stop], "other tokens than were sampled"
                    recomputed_logprobs = logprobs(self.snapshots[sampled.version], torch.tensor([tokens[:stop]]))[
                        0, start - 1 :
                    ]
                    worst = max(worst, float((recomputed_logprobs - torch.tensor(sampled.logprobs)).abs().max()))
                    newest = max(newest, sampled.version)
        self.curve.difference.append(worst)
        self.curve.version.append(newest)

    def _step(self, groups: list[dict[str, Any]]) -> None:
        lines = [(t, m, p, a) for group in groups for t, m, p, a in _lines(group)]
        ids, labels = padded([line[0] for line in lines]), padded([line[1] for line in lines], MASKED)[:, 1:]
        before = padded([line[2] for line in lines], 1.0)[:, 1:]
        advantage = torch.tensor([line[3] for line in lines])[:, None]
        advantage = advantage - self.entropy_bonus * before.clamp(min=-MOST_NATS)
        mask = (labels != MASKED).float()
        for _ in range(self.epochs):
            ratio = torch.exp((logprobs(self.model, ids) - before) * mask)
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.25) * advantage)
            loss = -(gain * mask).sum() / mask.sum()
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


def _lines(group: dict[str, Any]) -> list[tuple[list[int], list[int], list[float], float]]:
    scores = group["scores"]
    mean, spread = fmean(scores), pstdev(scores) or 1.0
    columns = zip(group["tokens"], group["masks"], group["inference_logprobs"], scores, strict=True)
    return [
        (tokens, masks, inference_logprobs, (score - mean) / spread)
        for tokens, masks, inference_logprobs, score in columns
    ]


def _stretches(masks: list[int]) -> list[tuple[int, int]]:
    spans, start = [], None
    for position, mask in enumerate([*masks, MASKED]):
        if mask != MASKED and start is None:
            start = position
        elif mask == MASKED and start is not None:
            spans.append((start, position))
            start = None
    return spans


async def _batches(api: str, steps: int, batch: int) -> AsyncIterator[tuple[int, list[dict[str, Any]]]]:
    registration = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": batch, "max_token_len": 1024, "checkpoint_dir": "",
        "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": steps,
    }  # fmt: skip
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"{api}/register", json=registration):
            pass
        step = 0
        while step < steps:
            async with session.get(f"{api}/batch") as answer:
                groups = (await answer.json())["batch"]
            if groups is None:
                await asyncio.sleep(0.02)
                continue
            yield step, groups
            step += 1
