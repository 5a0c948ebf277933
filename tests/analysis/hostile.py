"""What an agent, a model or a dataset may write in order to be more than text."""

from __future__ import annotations

from typing import Any

from tests.analysis.recorded import recorded

HACK = "window.hacked=1;alert(1)"
HOSTILE = [
    f"<script>{HACK}</script>",
    f"</script><script>{HACK}</script>",
    f"</SCRIPT ><script>{HACK}</script>",
    f"<script type=module>{HACK}</script>",
    f"<!--<script>{HACK}</script>-->",
    "<!-- <script>",
    f"<img src=x onerror='{HACK}'>",
    f"<svg onload='{HACK}'></svg>",
    f"<svg><script>{HACK}</script></svg>",
    f"<svg><a xlink:href='javascript:{HACK}'><text y=9>x</text></a></svg>",
    f"<math><mtext></mtext><img src=x onerror='{HACK}'></math>",
    f"<iframe srcdoc='<script>parent.{HACK}</script>'></iframe>",
    f"<iframe src='javascript:parent.{HACK}'></iframe>",
    f"<object data='javascript:{HACK}'></object>",
    "<embed src='https://leak.invalid/x.swf'>",
    f"<a href='javascript:{HACK}'>here</a>",
    f"javascript:{HACK}",
    f"[here](javascript:{HACK})",
    f"![](x' onerror='{HACK})",
    "![](https://leak.invalid/x.png)",
    "<link rel=stylesheet href='https://leak.invalid/x.css'>",
    "<style>@import 'https://leak.invalid/x.css';</style>",
    "<meta http-equiv=refresh content='0;url=https://leak.invalid/'>",
    "<base href='https://leak.invalid/'>",
    "<form action='https://leak.invalid/'><button autofocus>x</button></form>",
    f"<details open ontoggle='{HACK}'>x</details>",
    f"<body onload='{HACK}'>",
    f"<video><source onerror='{HACK}'></video>",
    f"\"><img src=x onerror='{HACK}'>",
    f"' autofocus onfocus='{HACK}' x='",
    f"${{{HACK}}} {{{{ {HACK} }}}}",
    f"\u2028{HACK}\u2029",
    "]]></script>",
    "data:text/html,<script>parent.hacked=1</script>",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "\u202egnp.exe\u202c \u2066isolated\u2069",
    "\u200e\u200f\u061c marks",
    "\x00\x01\x08\x7f\x9b31m",
    "\ud800 alone",
    "&lt;script&gt;" + "A" * 3000,
    "\\u003cscript\\u003e \\\"}],",
    "__proto__",
]  # fmt: skip
UNSEEN = (
    "\x00\x01\x07\x08\x1b\x7f\x9b\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
"""Characters that may be nowhere in what a page gets."""


def hostile_line() -> dict[str, Any]:
    """Return a rollout that has all of these, wherever somebody other than us writes."""
    line = recorded("bad", 0, 0.5, text="\n".join(HOSTILE))
    line["row"] = {f"column {text}": text for text in HOSTILE}
    line["error"] = " ".join(HOSTILE)
    line["rewards"] = {text: {"value": 0.5, "reason": text} for text in HOSTILE}
    line["rewards"]["right"] = {"value": 0.5, "metrics": dict.fromkeys(HOSTILE, 1.0)}
    line["stop_reason"] = HOSTILE[0]
    answer = line["messages"][1]
    answer["reasoning"] = "\n".join(HOSTILE)
    answer["tool_calls"] = [
        {"id": f"h{place}", "type": "function", "function": {"name": text, "arguments": text}}
        for place, text in enumerate(HOSTILE)
    ]
    told = [{"role": "tool", "tool_call_id": f"h{place}", "content": text} for place, text in enumerate(HOSTILE)]
    line["messages"][2:3] = told
    line["messages"].append({"role": HOSTILE[1], "content": HOSTILE[2]})
    line["tool_calls"] = [
        {"turn": 1, "id": f"h{place}", "name": text, "seconds": 0.0, "error": text}
        for place, text in enumerate(HOSTILE)
    ]
    line["policy"] = {"type": "openai", "model": HOSTILE[0]}
    line["artifacts"] = {HOSTILE[0]: {"problem": HOSTILE[7]}}
    return line


def strings(value: Any) -> list[str]:
    """Return all texts of a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in strings(one)]
    return [text for one in value for text in strings(one)] if isinstance(value, list) else []
