"""Dataset card of a published run: the information for a reader of the hub before loading it.

Texts of specs, models and servers are shown and never interpreted: control characters are escaped, Markdown and HTML in
them are plain text, and each is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hermes_rl import __version__
from hermes_rl.analysis.record import beginning
from hermes_rl.analysis.summary import RunSummary
from hermes_rl.terminal_text import escape_controls

LONGEST, MOST = 300, 50
"""Maximum characters of one text, and maximum number of listed rewards."""
SIZES = (
    (10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
)  # fmt: skip
"""The hub's size categories, each with the number of rows from which it is too small."""
PUBLISHED_FILES = {
    "spec.yaml": "the spec as it ran",
    "run.json": "versions, fingerprints, and how the model was asked",
    "metrics.json": "the numbers of the evaluation",
    "report.html": "the run's numbers and a sample of its rollouts, in one page",
}
"""Files that are published next to the table, if the run has them."""


def dataset_card(
    dataset: str,
    table: str,
    rows: int,
    files: Collection[str],
    summary: RunSummary,
    spec: Mapping[str, Any],
    run_info: Mapping[str, Any],
    weights: Mapping[str, float | None],
) -> str:
    """Return the `README.md` of a dataset called `owner/name` on the hub.

    `table` is the file with the rollouts and `rows` their number. `files` are the published ones of `FILES`,
    `run_info` is the content of `run.json`, and `weights` the weight of each reward, None for a gate.
    """
    size = next((name for bound, name in SIZES if rows < bound), "100M<n<1B")
    lines = ["---", f"pretty_name: {json.dumps(cut(summary.name))}", "tags:", "- hermes-rl", "- reinforcement-learning"]
    lines += ["size_categories:", f"- {size}", "configs:", "- config_name: default", "  data_files:"]
    lines += ["  - split: train", f"    path: {table}", "---", "", f"# {escape_markdown(summary.name)}", ""]
    if spec.get("description"):
        lines += [escape_markdown(spec["description"], 5 * LONGEST), ""]
    if summary.demo:
        lines += ["A demonstration with the scripted policy, without a model.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in _fact_rows(summary, run_info)), ""]
    lines += _reward_lines(summary, weights)
    lines += ["## Load it", "", "```python", "import datasets", ""]
    lines += [f'rollouts = datasets.load_dataset("{dataset}", split="train")', "```", "", "## Files", ""]
    lines += [
        f"- `{table}`: {rows} rows, each a rollout, or one of its token sequences if they are known: messages, "
        "tools, score, a column for each reward, stop reason, tokens with masks and log-probabilities",
        *(f"- `{name}`: {description}" for name, description in PUBLISHED_FILES.items() if name in files),
    ]
    return "\n".join(lines) + "\n"


def _fact_rows(summary: RunSummary, run_info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "spec", escape_markdown(summary.name)
    yield "model", escape_markdown(summary.model)
    yield "mode", escape_markdown(summary.mode)
    yield "rows", str(summary.rows)
    yield "groups", str(summary.groups)
    yield "rollouts", f"{summary.rollouts}, of which {summary.graded} have a score"
    interval = summary.interval
    mean = "not known" if interval.mean is None else f"{interval.mean:.3f}"
    between = "" if interval.low is None else f", 95 % interval {interval.low:.3f} to {interval.high:.3f}"
    yield "mean score", mean + between
    yield "pass", f"{summary.passed} of {summary.graded} score {summary.success:g} or more"
    yield "stop_reasons", ", ".join(f"{escape_markdown(name)} {count}" for name, count in summary.stop_reasons.items())
    yield "played", f"{escape_markdown(summary.started)}, hermes-rl {escape_markdown(run_info.get('hermes_rl') or '?')}"
    yield "published by", f"hermes-rl {__version__}"


def _reward_lines(summary: RunSummary, weights: Mapping[str, float | None]) -> Iterator[str]:
    if not summary.rewards:
        return
    yield from ("## Rewards", "", "| reward | weight | mean | lowest | highest | graded |", "|---|---|---|---|---|---|")
    for name, spread in list(summary.rewards.items())[:MOST]:
        weight = weights.get(name, 0)
        counts = "gate" if weight is None else f"{weight:g}"
        values = f"{spread.mean:.3f} | {spread.least:g} | {spread.most:g} | {spread.count}"
        yield f"| {escape_markdown(name)} | {counts} | {values} |"
    if len(summary.rewards) > MOST:
        yield f"\nand {len(summary.rewards) - MOST} more"
    yield ""


def escape_markdown(text: object, longest: int = LONGEST) -> str:
    """Return any text on one line, escaped so that Markdown shows it unchanged."""
    escaped_text = cut(text, longest).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", escaped_text)


def cut(text: object, longest: int = LONGEST) -> str:
    """Return any text on one line of at most `longest` characters, with control characters escaped."""
    return beginning(escape_controls(str(text)), longest)
