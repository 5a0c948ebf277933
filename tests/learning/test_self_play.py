"""A small policy learns Nim against itself, over the HTTP service, on exactly the tokens that each seat has sampled."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import open_env
from hermes_rl.tokens.hub import HubTokenizer
from tests.learning import nim
from tests.service.served import Served

MOST_STEPS, ROWS, EPISODES = 90, 16, 6
SERVED = """
servers:
  policy: {{type: vllm, base_url: "{policy}", model: small, tokenizer: "{tokenizer}", weights_path: /weights}}
"""


def groups_of(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what is compared, as the trainer of the example takes it."""
    for line in lines:
        assert line["dropped"] is None and line["provenance"]["exact"], line["detail"]
        assert {one["comparison"] for one in line["rollouts"]} == {f"{line['group']}@row"}
        assert [one["seat"] for one in line["rollouts"]] == ["first", "second"] * EPISODES
        made: dict[str, Any] = {"tokens": [], "masks": [], "inference_logprobs": [], "scores": []}
        for rollout in line["rollouts"]:
            for sequence in rollout["sequences"]:
                masks = [token if mask else -100 for token, mask in zip(sequence["ids"], sequence["mask"], strict=True)]
                for name, value in (("tokens", sequence["ids"]), ("masks", masks), ("scores", rollout["score"])):
                    made[name].append(value)
                made["inference_logprobs"].append(sequence["logprobs"])
        yield made


async def wins(spec: Path, games: int) -> float:
    """Return the share of games that the policy wins against one who moves by chance."""
    async with open_env(spec) as env:
        rows = [row for row, _ in zip(env.rows(), range(games), strict=False)]
        async with env.groups(1, rows=rows, concurrency=64) as groups:
            scores = [rollout.score or 0.0 async for group in groups for rollout in group.rollouts]
    return sum(scores) / len(scores)


@pytest.mark.slow
@pytest.mark.by_turns(2, 1)
@pytest.mark.timeout(1200)
async def test_a_policy_learns_a_game_against_itself_on_the_tokens_of_both_seats(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="pip install '.[train]'")
    from examples.learning.model import Small
    from examples.learning.server import PolicyServer
    from examples.learning.task import CONTROL, PIECES, write_tokenizer
    from examples.learning.trainer import Trainer, warm_up

    torch.manual_seed(0)
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = await asyncio.to_thread(HubTokenizer, str(tmp_path / "tokenizer"))
    model = Small(256 + len(CONTROL) + len(PIECES), width=64, layers=2)
    await asyncio.to_thread(warm_up, model, tokenizer, [], steps=400, noise=0.0, written=nim.badly_played)
    policy_server = PolicyServer(model, tokenizer.encode("<|im_end|>")[0])
    shutil.copy(nim.__file__, tmp_path)
    async with policy_server.running() as policy:
        for name, spec in (("self_play", nim.SELF_PLAY), ("rival", nim.RIVAL)):
            server = SERVED.format(policy=policy, tokenizer=tmp_path / "tokenizer")
            (tmp_path / f"{name}.yaml").write_text(spec + server)
        before = await wins(tmp_path / "rival.yaml", 300)
        trainer, chance = Trainer(model, policy_server, lr=5e-4, epochs=4), random.Random(1)
        with await asyncio.to_thread(Served, tmp_path / "self_play.yaml") as service:
            keys = (await asyncio.to_thread(service.keys))[:200]
            for step in range(MOST_STEPS):
                trainer.entropy_bonus = 0.3 * max(0.05, 1 - step / 70)
                asked = {"rows": chance.sample(keys, ROWS), "n": EPISODES, "batch": f"step-{step}"}
                lines, _ = await asyncio.to_thread(partial(service.batch, **asked))
                await trainer.take(list(groups_of(lines)))
                if step >= 40 and step % 5 == 4 and await wins(tmp_path / "rival.yaml", 100) >= 0.95:
                    break
        after = await wins(tmp_path / "rival.yaml", 300)
    print(f"wins: {before:.2f} before, {after:.2f} after {step + 1} steps; {max(trainer.curve.difference):.1e}")  # noqa: T201
    assert before < 0.6
    assert after >= 0.9
    assert max(trainer.curve.difference) < 1e-4, "a token is trained on in the context that its seat sampled it in"
