"""A named pipe or a device in the place of a file that a spec or an option names is refused, not opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.commands import hermes

SPEC = """
name: special
dataset: {items: [{q: one}, {q: two}]}
prompt: {user: "{{ q }}"}
solution: {turns: [{say: "yes"}]}
process: {group_size: 1, groups: 1}
servers: {policy: {type: scripted}, judge: {type: scripted}}
"""
RIGHT = 'rewards: {right: {fn: exact_match, args: {target: "yes"}}}\n'
JUDGE = 'rewards: {good: {fn: llm_judge, args: {rubric: good, question: "{{ q }}", calibrate: %s}}}\n'
STATE = RIGHT + "state: state.py:World\ntools: [{state: call, schemas: {file: %s}}]\n"
CODE = RIGHT.replace('exact_match, args: {target: "yes"}', "'%s:score'")
RECORDING = RIGHT + "toolsets: {enabled: [web], replay: recorded}\n"
PROCESS = ["run", "spec.yaml", "process", "--out", "run", "--quiet"]
CASES = {
    "grade": (RIGHT, ["grade", "spec.yaml", "--atif", "%s"], "%s cannot be read"),
    "prices": (RIGHT, [*PROCESS, "--dry-run", "--prices", "%s"], "--prices: %s cannot be read"),
    "validate calibrate": (JUDGE, ["validate", "spec.yaml"], "spec.yaml:8:"),
    "run calibrate": (JUDGE, PROCESS, "spec.yaml:8:"),
    "schemas": (STATE, PROCESS, "%s cannot be read as JSON"),
    "validate code": (CODE, ["validate", "spec.yaml"], "spec.yaml:8:"),
    "run code": (CODE, PROCESS, "cannot be read: is "),
    "replay": (RECORDING, PROCESS, "toolsets.replay: "),
    "record": (RECORDING.replace("replay", "record"), PROCESS, "toolsets.record: "),
    "groups": (RIGHT + "atropos: {data_path_to_save_groups: %s}\n", PROCESS, "%s cannot be written"),
    "rows": (
        SPEC[SPEC.index("dataset") :].replace("{items: [{q: one}, {q: two}]}", "{path: %s}") + RIGHT,
        PROCESS,
        "%s",
    ),
}


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
@pytest.mark.parametrize("case", CASES)
def test_special_file_is_refused_at_once(tmp_path: Path, case: str, kind: str) -> None:
    (tmp_path / "recorded").mkdir()
    for path in (tmp_path / "special.json", tmp_path / "special.py", tmp_path / "recorded" / "tools.jsonl"):
        os.mkfifo(path) if kind == "a named pipe" else path.symlink_to("/dev/zero")
    text, arguments, said = CASES[case]
    name = "special.py" if text is CODE else "special.json"
    spec = text if "dataset" in text else SPEC + text
    (tmp_path / "spec.yaml").write_text(spec.replace("%s", name))
    (tmp_path / "state.py").write_text(
        "class World:\n    def __init__(self, item): ...\n    def call(self, name, arguments): ...\n"
    )
    done = hermes(*(word.replace("%s", name) for word in arguments), cwd=tmp_path)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert kind in done.stderr and said.replace("%s", name) in done.stderr, done.stderr
