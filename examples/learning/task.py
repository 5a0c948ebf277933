"""The task: two digits and an operator; call the right tool, then say what it answered."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<|im_end|>", "<|user|>", "<|assistant|>", "<|tool|>")
PIECES = (
    "<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"a": ', ', "b": ', "}}", "add", "multiply",
)  # fmt: skip
TEMPLATE = """
{%- for t in tools or [] -%}{{ t.function.name }} {% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|assistant|>{{ m.content or '' }}
{%- for c in m.tool_calls or [] -%}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{%- else -%}<|{{ m.role }}|>{{ m.content }}
{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
SPEC = """
name: learning
dataset: {{generator: "tools.py:rows"}}
prompt: {{user: "{{{{ a }}}}{{{{ op }}}}{{{{ b }}}}"}}
tools: [{{python: "tools.py:add"}}, {{python: "tools.py:multiply"}}]
agent: {{max_turns: 2, max_tokens: 24}}
rewards: {{right: {{fn: "tools.py:right"}}}}
servers:
  policy: {{type: vllm, base_url: "{policy}", model: small, tokenizer: "{tokenizer}", weights_path: /weights}}
serve: {{group_size: 8, total_steps: {steps}, eval_every: 0, api_url: "{api}", drop_uniform: false, concurrency: 64}}
atropos: {{max_batches_offpolicy: 1}}
"""
TOOLS = '''
import random


def rows(*, seed, split):
    chance = random.Random(seed)
    while True:
        yield {"a": chance.randrange(10), "b": chance.randrange(10), "op": chance.choice("+*")}


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


def right(item, result):
    a, b = item["a"], item["b"]
    wanted = ("add", a + b) if item["op"] == "+" else ("multiply", a * b)
    called = [call.name for call in result.tool_calls]
    return called == [wanted[0]] and result.final_response == str(wanted[1])
'''


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes and a few pieces, as transformers loads it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    engine.add_tokens([AddedToken(token, special=False, normalized=False) for token in PIECES])
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE.strip("\n"))


def transcript(chance: random.Random, noise: float) -> list[dict[str, Any]]:
    """A scripted conversation; with the chance `noise` its arguments or its answer are wrong."""
    a, b, op = chance.randrange(10), chance.randrange(10), chance.choice("+*")
    wrong = chance.random() < noise
    x = chance.randrange(10) if wrong and chance.random() < 0.5 else a
    name, result = ("add", x + b) if op == "+" else ("multiply", x * b)
    answer = chance.randrange(82) if wrong and x == a else result
    call = {"id": "c00000000", "type": "function", "function": {"name": name, "arguments": {"a": x, "b": b}}}
    return [
        {"role": "user", "content": f"{a}{op}{b}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c00000000", "content": str(result)},
        {"role": "assistant", "content": str(answer)},
    ]


def write_task(folder: Path, policy: str, api: str, steps: int) -> Path:
    """The spec and what it names; returns the spec's path."""
    (folder / "tools.py").write_text(TOOLS)
    spec = folder / "learning.yaml"
    spec.write_text(SPEC.format(policy=policy, api=api, steps=steps, tokenizer=folder / "tokenizer"))
    return spec
