"""Sample with a vLLM in this process, as TRL's trainer does: ``python colocated.py MODEL``, in vLLM's environment.

The last line says how far the model's own log-probabilities are, and how the answers ended.
"""

from __future__ import annotations

import json
import sys
from array import array
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM

import hermes_rl
from hermes_rl.integrations.trl import generate_with_vllm

TEMPERATURE = 0.7


def main() -> None:
    name = sys.argv[1]
    # As TRL makes it, but for the size and what a GPU needs.
    llm = LLM(name, max_model_len=1024, logprobs_mode="processed_logprobs", dtype="float32", enforce_eager=True)
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = "<|im_start|>user\nWhat is 3 + 4 * 5?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    calls = [
        (ids, hermes_rl.Sampling(array("i", ids), longest, (end,), temperature=TEMPERATURE, seed=longest))
        for longest in (3, *range(60, 67))
    ]
    trainer = SimpleNamespace(vllm_generation=SimpleNamespace(llm=llm))
    worst, ended = 0.0, []
    for sampled in generate_with_vllm(trainer, calls):
        with torch.no_grad():
            scores = model(torch.tensor([ids + list(sampled.ids)])).logits[0].float() / TEMPERATURE
        own = scores.log_softmax(-1)[len(ids) - 1 :]
        for place, (token, value) in enumerate(zip(sampled.ids, sampled.logprobs, strict=True)):
            worst = max(worst, abs(float(own[place, token]) - value))
        ended.append((sampled.finish, sampled.ids[-1] == end, len(sampled.ids)))
    print(json.dumps({"worst": worst, "ended": ended}))


if __name__ == "__main__":
    main()
