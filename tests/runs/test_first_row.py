"""The first row, from which all that rollouts share is started: there may be none, and a stream is opened once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_run import lines
from tests.commands import LIBRARIES, hermes

SPEC = """
name: few
dataset: {DATASET}
prompt: {user: "{{ q }}"}
rewards: {right: {fn: exact_match, args: {target: done}}}
solution: {turns: [{say: done}]}
servers: {policy: {type: scripted}}
process: {groups: 3, group_size: 2}
"""


@pytest.mark.parametrize(
    ("mode", "more", "said"),
    [
        ("process", "", "the dataset has no rows to run; see dataset.filter"),
        ("evaluate", ", eval: only", "the dataset has no rows to evaluate on; see dataset.eval"),
    ],
)
def test_a_filter_that_leaves_no_row_is_said(tmp_path: Path, mode: str, more: str, said: str) -> None:
    dataset = f"items: [{{q: one}}, {{q: two}}], filter: \"q == 'three'\"{more}"
    (tmp_path / "spec.yaml").write_text(SPEC.replace("DATASET", dataset))
    done = hermes("run", "spec.yaml", mode, cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rollout_without_tokens_is_counted_once(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    from tests.env.test_token_exact import tokenizer_folder

    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=True)
    (folder / "chat_template.jinja").write_text(template)
    text = SPEC.replace("DATASET", "items: [{q: one}, {q: two}]").replace("scripted", f"scripted, tokenizer: {folder}")
    (tmp_path / "spec.yaml").write_text(text)
    done = hermes("run", "spec.yaml", "process", "--out", "run", cwd=tmp_path, loaded=LIBRARIES)
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "run" / "rollouts.jsonl")) == 6
    assert "6 rollouts have no tokens" in done.stderr
