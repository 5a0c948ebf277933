"""Recompute the log-probabilities of the tokens that a run trained on; needs torch and transformers.

    python recompute.py MODEL[,MODEL…] groups.jsonl

Prints JSON: how many trained tokens there are, the mean and the largest distance between their recorded and their
recomputed log-probability, how many no model explains within 1e-3, what is wrong with masks, and, for the first two
turns of each rollout: how often both or neither began with a thought, how often that was to be expected from the
model's own probabilities, and the variance of that. With several models, version v of the weights is the v-th of them,
and a token has to be explained by one within the versions of its group's certificate.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MASKED = -100


def main() -> None:
    folders = sys.argv[1].split(",")
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    tokens = AutoTokenizer.from_pretrained(folders[0])
    think = tokens.convert_tokens_to_ids("<think>")
    found: dict[str, Any] = {"tokens": 0, "sum": 0.0, "max": 0.0, "unexplained": 0, "turns": 0, "agree": 0}
    found |= {"expected": 0.0, "variance": 0.0, "sequences": 0}
    problems: Counter[str] = Counter()
    for line in open(sys.argv[2], encoding="utf-8"):  # noqa: PTH123, SIM115
        group = json.loads(line)
        allowed = models
        if len(models) > 1:
            oldest, newest = (int(group["provenance"][key]) for key in ("oldest", "newest"))
            allowed = [models[version - 1] for version in range(oldest, newest + 1)]
        for ids, mask, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            if not len(ids) == len(mask) == len(logprobs):
                problems["lists of several lengths"] += 1
                continue
            found["sequences"] += 1
            with torch.no_grad():
                given = [
                    torch.log_softmax(one(input_ids=torch.tensor([ids])).logits[0].double(), -1) for one in allowed
                ]
            begins = [i for i in range(1, len(ids)) if mask[i] != MASKED and mask[i - 1] == MASKED]
            for i in (i for i, one in enumerate(mask) if one != MASKED):
                problems["mask is not the token"] += mask[i] != ids[i]
                distance = min(abs(float(one[i - 1, ids[i]]) - logprobs[i]) for one in given)
                found["tokens"] += 1
                found["sum"] += distance
                found["max"] = max(found["max"], distance)
                found["unexplained"] += distance > 1e-3
            for i in begins:
                behind = tokens.decode(ids[max(0, i - 3) : i])
                problems[f"a turn begins behind {behind!r}"] += not behind.endswith("<|im_start|>assistant\n")
            if len(begins) >= 2:
                chances = [float(given[0][i - 1, think].exp()) for i in begins[:2]]
                thought = [ids[i] == think for i in begins[:2]]
                share = chances[1] if thought[0] else 1 - chances[1]
                found["turns"] += 1
                found["agree"] += thought[0] == thought[1]
                found["expected"] += share
                found["variance"] += share * (1 - share)
    found["problems"] = {name: count for name, count in problems.items() if count}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
