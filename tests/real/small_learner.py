"""Make a Qwen3 of 0.7 million parameters that calls the tools of the learning example, and is mostly wrong.

Run as ``python small_learner.py FOLDER``; writes `model`, the tokenizer with it, and the spec with its code.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from examples.learning.model import padded
from examples.learning.task import CONTROL, PIECES, TEMPLATE, transcript, write_task, write_tokenizer
from hermes_rl import open_env, sync
from hermes_rl.tokens.chat import chat_tokens
from hermes_rl.tokens.hub import HubTokenizer

STEPS, NOISE = 250, 0.8
TOOLS = "{%- for t in tools or [] -%}"


def main() -> None:
    folder = Path(sys.argv[1])
    write_tokenizer(folder / "tokenizer")
    spec = write_task(folder, "http://127.0.0.1:9/v1", "http://127.0.0.1:9", 100)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=256 + len(CONTROL) + len(PIECES),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            eos_token_id=end,
            pad_token_id=end,
            bos_token_id=None,
        )
    )
    with sync(open_env(spec)) as env:
        tools = env.tools(next(iter(env.rows())))
    ours, chance = HubTokenizer(str(folder / "tokenizer")), random.Random(0)
    lines = [chat_tokens(ours, transcript(chance, NOISE), tools).sequences[0] for _ in range(2000)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    for _ in range(STEPS):
        batch = chance.sample(lines, 64)
        scores = model(input_ids=padded([line.tokens for line in batch])).logits[:, :-1]
        labels = padded([line.masks for line in batch], -100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    # With this template the second turn does not see the names of the tools, so that a rollout is two sequences.
    shutil.copytree(folder / "model", folder / "forgetful")
    shorter = TEMPLATE.strip("\n").replace(TOOLS, "{%- for t in (tools or []) if messages[-1].role != 'tool' -%}")
    assert shorter != TEMPLATE.strip("\n")
    (folder / "forgetful" / "chat_template.jinja").write_text(shorter)


if __name__ == "__main__":
    main()
