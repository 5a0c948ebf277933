"""Chat templates of nine shapes over a small tokenizer that has their control tokens, and what their models write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine

from hermes_rl.tokens.families import FamilyRenderer, family_renderer
from hermes_rl.tokens.rendering import RendererSettings
from hermes_rl.tokens.tokenizer import SmallTokenizer, _environment, small_tokenizer_path

Call = tuple[str, dict[str, Any]]
Write = Callable[[str, str | None, Sequence[Call]], str]
"""Text, reasoning and calls → what the model samples, without the token that ends its turn."""

CHATML_CALLS = """
{%- for c in m.tool_calls or [] -%}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- if not loop.last %}{{ '\n' }}{% endif -%}
{%- endfor -%}
"""
TOOLS_IN_SYSTEM = """
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content ~ '\n' }}{% endif %}# Tools
{%- for t in tools %}{{ '\n' ~ (t | tojson) }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
"""
QWEN3 = (
    TOOLS_IN_SYSTEM
    + """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' -%}
<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{% endif %}
{{- m.content or '' }}{% if m.content and m.tool_calls %}{{ '\n' }}{% endif %}"""
    + CHATML_CALLS
    + """<|im_end|>
{% elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|im_end|>
{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
)
# The last turn has a block of thinking even where the model has not thought.
QWEN3_HYBRID = QWEN3.replace(
    """{% if m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{% endif %}""",
    """{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}
{{ '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' }}{% endif %}""",
)
HERMES = (
    TOOLS_IN_SYSTEM
    + """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|im_start|>assistant
{% if m.reasoning_content %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{% endif %}
{{- m.content or '' }}{% if m.content and m.tool_calls %}{{ '\n' }}{% endif %}"""
    + CHATML_CALLS
    + """<|im_end|>
{% elif m.role == 'tool' -%}
<|im_start|>tool
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role != 'system' -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
)
CODER = (
    TOOLS_IN_SYSTEM
    + """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|im_start|>assistant
{{ m.content or '' }}{% if m.content and m.tool_calls %}{{ '\n' }}{% endif %}
{%- for c in m.tool_calls or [] -%}
<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() -%}
<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor -%}
</function>
</tool_call>
{%- if not loop.last %}{{ '\n' }}{% endif -%}
{%- endfor -%}<|im_end|>
{% elif m.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role != 'system' -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
)
LLAMA3 = """<|begin_of_text|>
{%- for m in messages -%}
<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>{{ '\n\n' }}
{%- if m.role == 'user' and tools and loop.index0 <= 1 -%}
{%- for t in tools %}{{ (t | tojson) ~ '\n' }}{% endfor -%}
{%- endif -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
{%- elif m.role == 'tool' -%}
{{ m.content | tojson }}
{%- else -%}
{{ m.content or '' }}
{%- endif -%}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif -%}
"""
MISTRAL = """<s>
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.index0 == ns.last -%}
[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif -%}
[INST] {% if loop.index0 == ns.last and messages[0].role == 'system' %}{{ messages[0].content ~ '\n\n' }}{% endif %}
{{- m.content }}[/INST]
{%- elif m.tool_calls -%}
[TOOL_CALLS] [
{%- for c in m.tool_calls -%}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{%- if not loop.last %}, {% endif -%}
{%- endfor -%}]</s>
{%- elif m.role == 'assistant' -%}
{{ ' ' ~ (m.content or '') }}</s>
{%- elif m.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif -%}
{%- endfor -%}
"""
GLM = """[gMASK]<sop>
{%- if tools -%}<|system|>
# Tools
{%- for t in tools %}{{ '\n' ~ (t | tojson) }}{% endfor -%}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- elif m.role == 'assistant' -%}
<|assistant|>
{% if m.content %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] -%}
{{ '\n' if m.content or not loop.first }}<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>
{%- endfor -%}
{%- else -%}
<|{{ m.role }}|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}
"""
DEEPSEEK = """<｜begin▁of▁sentence｜>
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor -%}
{%- for t in tools or [] %}{{ '\n' ~ (t | tojson) }}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<｜User｜>{{ m.content }}<｜Assistant｜>
{%- elif m.role == 'assistant' -%}
{%- if messages[loop.index0 - 1].role == 'tool' %}<｜tool▁outputs▁end｜>{% endif -%}
{{ m.content or '' }}
{%- if m.tool_calls -%}
<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls -%}
<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}
```json
{{ c.function.arguments | tojson }}
```<｜tool▁call▁end｜>
{%- endfor -%}<｜tool▁calls▁end｜>
{%- endif -%}<｜end▁of▁sentence｜>
{%- elif m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif -%}
<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role == 'tool' %}<｜tool▁outputs▁end｜>{% endif -%}
"""
KIMI = """
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>
{%- elif m.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>{{ m.content or '' }}
{%- if m.tool_calls -%}<|tool_calls_section_begin|>
{%- for c in m.tool_calls -%}
<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>
{{- c.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>
{%- endif -%}<|im_end|>
{%- else -%}<|im_system|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif -%}
"""
GPT_OSS = """<|start|>system<|message|>You are a model.<|end|>
{%- for t in tools or [] -%}<|start|>developer<|message|>{{ t | tojson }}<|end|>{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- for c in m.tool_calls or [] -%}
<|start|>assistant<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>
{{- c.function.arguments | tojson }}<|call|>
{%- endfor -%}
{%- if not m.tool_calls -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content or '' }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- endif -%}
{%- elif m.role == 'tool' -%}
<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _thought(reasoning: str | None) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""


def write_hermes(said: str, reasoning: str | None, calls: Sequence[Call]) -> str:
    blocks = [f'<tool_call>\n{{"name": "{n}", "arguments": {_json(a)}}}\n</tool_call>' for n, a in calls]
    return _thought(reasoning) + "\n".join([*([said] if said else []), *blocks])


def write_coder(said: str, reasoning: str | None, calls: Sequence[Call]) -> str:
    blocks = []
    for name, args in calls:
        values = [f"<parameter={k}>\n{v if isinstance(v, str) else _json(v)}\n</parameter>\n" for k, v in args.items()]
        blocks.append(f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>")
    return "\n".join([*([said] if said else []), *blocks])


def write_llama3(said: str, reasoning: str | None, calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {_json(a)}}}' for n, a in calls) if calls else said


def write_mistral(said: str, reasoning: str | None, calls: Sequence[Call]) -> str:
    listed = [f'{{"name": "{n}", "arguments": {_json(a)}, "id": "c0000000{i}"}}' for i, (n, a) in enumerate(calls)]
    return f"[TOOL_CALLS] [{', '.join(listed)}]" if calls else f" {said}"


def write_glm(said: str, reasoning: str | None, calls: Sequence[Call]) -> str:
    blocks = []
    for name, args in calls:
        pairs = [
            f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else _json(v)}</arg_value>\n"
            for k, v in args.items()
        ]
        blocks.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join([*([said] if said else []), *blocks])


def write_deepseek(said: str, reasoning: str | None, calls: Sequence[Call]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    ]
    return said + (f"<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>" if calls else "")


def write_kimi(said: str, reasoning: str | None, calls: Sequence[Call]) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    ]
    return said + (f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>" if calls else "")


def write_gpt_oss(said: str, reasoning: str | None, calls: Sequence[Call]) -> str:
    if not calls:
        return f"<|channel|>final<|message|>{said}"
    name, args = calls[0]
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(args)}"


@dataclass(frozen=True)
class Family:
    """A template, its tokens, and how its model writes and ends a turn (`stop`; after calls `call_stop`)."""

    template: str
    control: tuple[str, ...]
    write: Write
    stop: str
    parser: str | None
    markup: tuple[str, ...] = ()
    call_stop: str | None = None
    most_calls: int = 2
    keeps: frozenset[str] = frozenset({"thinking", "text_with_calls"})
    """What the template renders of an assistant message."""

    def stop_reason(self, called: bool) -> str:
        return self.call_stop if called and self.call_stop else self.stop


_CHATML = ("<|im_start|>", "<|im_end|>")
_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_MARKUP = (*_MARKUP, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_KIMI = (
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip
_GPT_OSS = ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|constrain|>")

_PLAIN = frozenset({"text_with_calls"})
_NOTHING: frozenset[str] = frozenset()
FAMILIES = {
    "qwen3": Family(QWEN3, _CHATML, write_hermes, "<|im_end|>", None, _MARKUP),
    "qwen3 hybrid": Family(QWEN3_HYBRID, _CHATML, write_hermes, "<|im_end|>", None, _MARKUP),
    "hermes": Family(HERMES, _CHATML, write_hermes, "<|im_end|>", None, _MARKUP),
    "qwen3_coder": Family(CODER, _CHATML, write_coder, "<|im_end|>", None, _MARKUP, keeps=_PLAIN),
    "llama3": Family(LLAMA3, _LLAMA, write_llama3, "<|eot_id|>", None, most_calls=1, keeps=_NOTHING),
    "mistral": Family(MISTRAL, _MISTRAL, write_mistral, "</s>", None, keeps=_NOTHING),
    "glm": Family(
        GLM, _GLM, write_glm, "<|user|>", None, _GLM_MARKUP, call_stop="<|observation|>", keeps=_PLAIN
    ),
    "deepseek": Family(DEEPSEEK, _DEEPSEEK, write_deepseek, "<｜end▁of▁sentence｜>", None, keeps=_PLAIN),
    "kimi": Family(KIMI, _KIMI, write_kimi, "<|im_end|>", None, keeps=_PLAIN),
    "gpt-oss": Family(
        GPT_OSS, _GPT_OSS, write_gpt_oss, "<|return|>", "hermes", call_stop="<|call|>", most_calls=1, keeps=_NOTHING
    ),
}  # fmt: skip
"""By the model whose template has the shape."""


class FamilyTokenizer(SmallTokenizer):
    """The small tokenizer with the tokens and the template of a family."""

    def __init__(self, name: str, family: Family) -> None:
        engine = Engine.from_file(str(small_tokenizer_path() / "tokenizer.json"))
        engine.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in family.control])
        engine.add_tokens([AddedToken(token, normalized=False, special=False) for token in family.markup])
        super().__init__(engine, _environment().from_string(family.template.strip("\n")))
        self.name = f"hermes-rl/test-{name}"
        self.control = frozenset((*family.control, "<|endoftext|>", *_CHATML))
        self.markup = frozenset((*family.markup, *_MARKUP))


@cache
def tokenizer_of(name: str) -> FamilyTokenizer:
    """The tokenizer of a family; it holds no state."""
    return FamilyTokenizer(name, FAMILIES[name])


def adder(x: str = "string") -> list[dict[str, Any]]:
    """The tools that the models of these tests call."""
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}, "text": {"type": x}}
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": properties}}
    return [{"type": "function", "function": function}]


_QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "</think>", "<tool_call>", "</tool_call>")
_RESPONSES = ("<think>", "<tool_response>", "</tool_response>")
_DSML = (
    "begin▁of▁sentence",
    "end▁of▁sentence",
    "User",
    "Assistant",
    "action",
    "authority",
    "domain",
    "query",
)
MARKS_OF = {
    "qwen3": (*_QWEN, *_RESPONSES),
    "qwen3.5": (
        *_QWEN,
        *_RESPONSES,
        "<|image_pad|>",
        "<|video_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
    ),
    "kimi-k2": (
        *("<|im_assistant|>", "<|im_end|>", "<|im_middle|>", "<|im_system|>", "<|im_user|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "laguna-xs.2": ("〈|EOS|〉", "<assistant>", "</assistant>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "deepseek-v4": (
        *(f"<｜{name}｜>" for name in (*_DSML, "latest_reminder", "read_url", "title")),
        *("<think>", "</think>", "｜DSML｜"),
    ),
}
"""Families of the package renderers, each with the tokens that it needs."""


@cache
def renderer_of(name: str) -> FamilyRenderer:
    """The renderer of one of these families over the small tokenizer, which has their tokens; it holds no state."""
    engine = Engine.from_file(str(small_tokenizer_path() / "tokenizer.json"))
    engine.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS_OF[name]])
    return family_renderer(name, SmallTokenizer(engine, _environment().from_string("")), RendererSettings())
