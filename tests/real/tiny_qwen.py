"""Make a tiny Qwen3 that solves ``a + b * c`` with two tools: tokenizer, weights, and short training on examples.

    python tiny_qwen.py FOLDER        → FOLDER/trained, FOLDER/trained-2, FOLDER/trained-3 and FOLDER/random

It runs in the environment of vLLM, which has torch and transformers. The model makes mistakes and thinks only now and
then, so that rollouts differ. The second and third have other norms, and are what the weights become while an engine
runs (it can take norms in place on processors, and no matrices). The vocabulary is padded as the real Qwen3's is: some
ids stand for no token.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

STEPS = 130
LENGTH = 448
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def schema(name: str, does: str) -> dict[str, object]:
    """Return a tool in a run's form and order: a prompt unlike those of its training confuses the model."""
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    parameters = {"additionalProperties": False, "properties": numbers, "required": ["a", "b"], "type": "object"}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": parameters}}


TOOLS = [schema("add", "Add two numbers."), schema("multiply", "Multiply two numbers.")]


def example(chance: random.Random) -> tuple[str, list[tuple[str, str | None]]]:
    """Return a question and turns with the tool result of each; a few turns are wrong on purpose."""
    a, b, c = (chance.randrange(10) for _ in range(3))

    def thought(words: str) -> str:
        return f"<think>\n{words}\n</think>\n\n" if chance.random() < 0.45 else ""

    def call(name: str, x: int, y: int) -> str:
        arguments = json.dumps({"a": x, "b": y})
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    if chance.random() < 0.1:
        return f"What is {a} + {b} * {c}?", [(f"The answer is {chance.randrange(90)}.", None)]
    first = (b, c) if chance.random() < 0.7 else (a, b)
    product = first[0] * first[1]
    turns: list[tuple[str, str | None]] = [(thought("First the product.") + call("multiply", *first), str(product))]
    turns.append((thought("Now the sum.") + call("add", a, product), str(a + product)))
    turns.append((thought("That is it.") + f"The answer is {a + product}.", None))
    return f"What is {a} + {b} * {c}?", turns


def tokenizer(template: str, chance: random.Random) -> PreTrainedTokenizerFast:
    texts = [template + json.dumps(TOOLS)] * 100
    for _ in range(2000):
        question, turns = example(chance)
        texts += [question, *(f"assistant\n{said}" for said, _ in turns), *(f"\n{answer}" for _, answer in turns)]
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    found = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    found.chat_template = template
    return found


def encoded(tokens: PreTrainedTokenizerFast, chance: random.Random) -> tuple[list[int], list[int]]:
    """Return the ids of an example, and a flag for each id that the model must learn."""

    def ids_of(text: str) -> list[int]:
        return list(tokens.encode(text, add_special_tokens=False))

    question, turns = example(chance)
    messages = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": question}]
    prompt = tokens.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    ids = ids_of(str(prompt))
    learnt = [0] * len(ids)
    for said, answer in turns:
        turn = ids_of(said + "<|im_end|>")
        between = ids_of(
            f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        ids += turn + (between if answer is not None else [])
        learnt += [1] * len(turn) + [0] * (len(between) if answer is not None else 0)
    return ids, learnt


def model(tokens: PreTrainedTokenizerFast, width: int, layers: int) -> Qwen3ForCausalLM:
    vocabulary = (len(tokens) + 63) // 64 * 64 + 64
    end = tokens.convert_tokens_to_ids("<|im_end|>")
    made = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=end,
            pad_token_id=tokens.convert_tokens_to_ids("<|endoftext|>"),
        )
    )
    made.generation_config.eos_token_id = end
    return made


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    chance = random.Random(0)
    tokens = tokenizer(Path(__file__).with_name("qwen.jinja").read_text("utf-8"), chance)
    for name, trained in (("random", False), ("trained", True)):
        made = model(tokens, 128 if trained else 64, 3 if trained else 2)
        if trained:
            train(made, tokens, chance)
        made.save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
    for version in (2, 3):
        with torch.no_grad():
            for parameter in (weight for name, weight in made.named_parameters() if "norm" in name):
                parameter *= 1 + 0.3 * torch.rand_like(parameter)
        made.save_pretrained(folder / f"trained-{version}")
        tokens.save_pretrained(folder / f"trained-{version}")


def train(made: Qwen3ForCausalLM, tokens: PreTrainedTokenizerFast, chance: random.Random) -> None:
    data = [encoded(tokens, chance) for _ in range(3000)]
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1 - 0.95 * step / STEPS)
        ids = torch.zeros(16, LENGTH, dtype=torch.long)
        labels = torch.full((16, LENGTH), -100)
        for line in range(16):
            tokens_of, learnt = data[chance.randrange(len(data))]
            ids[line, : len(tokens_of)] = torch.tensor(tokens_of[:LENGTH])
            wanted = [one if learn else -100 for one, learn in zip(tokens_of, learnt, strict=True)]
            labels[line, : len(wanted)] = torch.tensor(wanted[:LENGTH])
        scores = made(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
    sys.stdout.write(f"trained {STEPS} steps, loss {float(loss):.3f}, longest example {max(len(i) for i, _ in data)}\n")


if __name__ == "__main__":
    main()
