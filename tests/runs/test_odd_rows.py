"""Rows of odd shapes: `validate --rows all` and a run either both refuse one, with file and row, or both take it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.data.check import check_spec
from hermes_rl.data.load import load_rows
from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.runs.run import Plan, Run
from hermes_rl.runs.store import rollout_record
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Spec
from hermes_rl.stop_reasons import INFRASTRUCTURE_FAILURES, StopReason
from hermes_rl.values import read_own_json, write_json
from tests.commands import hermes
from tests.thorough import THOROUGH

CODE = """
class World:
    def __init__(self, item):
        self.n = 0
    def add(self, a: int = 1) -> str:
        "Add."
        self.n += a
        return str(self.n)
    def call(self, name: str, args: dict):
        "Call."
        return name

def whole(result, *, v: int): return 1.0
def texts(result, *, v: list[str]): return 1.0
"""
USES_SANDBOX = "{fn: command_output, args: {command: 'true', expected: ''}}"
WORLD = "state: code.py:World\ntools: [{state: add}]"
SEATS = "schedule: {order: alternate, rounds: 2}\nagents: {a: {prompt: {user: x}}, b: {prompt: {system: y}"
CALLS = "{role: assistant, tool_calls: %s}, {role: tool, tool_call_id: c, content: d}"


def reward(fn: str, args: str) -> dict[str, str]:
    return {"reward": f"{{fn: {fn}, args: {{{args}}}}}"}


def sandbox(text: str) -> dict[str, str]:
    return {"sandbox": f", {text}", "reward": USES_SANDBOX}


def messages(text: str) -> dict[str, str]:
    return {"prompt": f"{{messages: [{{role: user, content: a}}, {text}]}}"}


PLACES: dict[str, dict[str, str]] = {
    "prompt": {"prompt": "{user: '{{ v }}'}"},
    "text of prompt": {"prompt": "{system: '{{ v }}', user: 'Q: {{ v }}!'}"},
    "messages": {"prompt": "{messages: '{{ v }}'}"},
    "role": messages("{role: '{{ v }}', content: a}"),
    "content": messages("{role: user, content: '{{ v }}', name: '{{ v }}'}"),
    "reasoning": messages("{role: assistant, content: a, reasoning_content: '{{ v }}'}, {role: user, content: b}"),
    "calls": messages(CALLS % "'{{ v }}'"),
    "call": messages(CALLS % "[{id: c, type: function, function: {name: '{{ v }}', arguments: '{{ v }}'}}]"),
    "part": {"prompt": "{user: [{text: '{{ v }}'}, {text: b}]}"},
    "image": {"prompt": "{user: [{text: a}, {image: '{{ v }}'}]}"},
    "image_url": {"prompt": "{user: [{text: a}, {image_url: '{{ v }}'}]}"},
    "filter": {"dataset": ", filter: 'v > 1 or true'"},
    "column": {"dataset": ", columns: {w: '{{ v | fromjson }}'}", "prompt": "{user: '{{ w | tojson }}'}"},
    "key": {"dataset": ", key: v", "key": "v"},
    "expression": {"prompt": "{user: '{{ v + 1 }} {{ v[0] }}'}"},
    "loop": {"prompt": "{user: 'a{% for x in v %}{{ x.name }}{% endfor %}'}"},
    "filters": {"prompt": "{user: \"a{{ v | regex_search('(a+)+$') | default('') }} {{ v | b64decode }}\"}"},
    "exact_match": reward("exact_match", "target: '{{ v }}'"),
    "flag": reward("exact_match", "target: a, ignore_case: '{{ v }}'"),
    "contains_all": reward("contains_all", "values: '{{ v }}'"),
    "value": reward("contains_all", "values: ['{{ v }}', b]"),
    "format_tags": reward("format_tags", "tags: '{{ v }}'"),
    "fuzzy_match": reward("fuzzy_match", "target: '{{ v }}', threshold: '{{ row.get(\"t\", 0.5) }}'"),
    "schema": reward("json_matches", "schema: '{{ v }}'"),
    "equals": reward("json_matches", "equals: '{{ v }}'"),
    "keyword_overlap": reward("keyword_overlap", "reference: '{{ v }}'"),
    "length_penalty": reward("length_penalty", "soft_limit: 1, hard_limit: '{{ v }}', unit: characters"),
    "math_equal": reward("math_equal", "target: '{{ v }}'"),
    "multiple_choice": reward("multiple_choice", "target: '{{ v }}'"),
    "choices": reward("multiple_choice", "target: C, choices: '{{ v }}'"),
    "numeric_close": reward("numeric_close", "target: '{{ v }}', relative: '{{ v }}'"),
    "regex_count": reward("regex_count", "pattern: a, at_least: '{{ v }}'"),
    "regex_match": reward("regex_match", "pattern: '{{ v }}'"),
    "repetition_penalty": reward("repetition_penalty", "words: '{{ v }}', most: '{{ v }}'"),
    "turn_efficiency": reward("turn_efficiency", "best: 1, worst: '{{ v }}'"),
    "token_efficiency": reward("token_efficiency", "best: 1, worst: '{{ v }}'"),
    "tool_calls_match": reward("tool_calls_match", "calls: '{{ v }}'"),
    "arguments": reward("tool_calls_match", "calls: [{name: a, args: '{{ v }}'}]"),
    "citations": reward("citations", "at_least: '{{ v }}'"),
    "citing tools": reward("citations", "tools: '{{ v }}'"),
    "matched path": reward("file_matches", "path: '{{ v }}', content: a"),
    "matched content": reward("file_matches", "path: a, content: '{{ v }}'"),
    "output": reward("command_output", "command: 'true', expected: '{{ v }}'"),
    "command": reward("command_output", "command: '{{ v }}', expected: ''"),
    "command_timeout": reward("command_output", "command: 'true', expected: '', timeout: '{{ v }}'"),
    "test files": reward("tests_pass", "command: 'true', files: '{{ v }}'"),
    "test target": reward("tests_pass", "command: 'true', files: [{to: '{{ v }}', content: a}]"),
    "test content": reward("tests_pass", "command: 'true', files: [{to: a, content: '{{ v }}'}]"),
    "test source": reward("tests_pass", "command: 'true', files: [{to: a, from: '{{ v }}'}]"),
    "expected": reward("tests_pass", "command: 'true', expected: '{{ v }}'"),
    "variables": reward("reward_file", "command: 'true', env: {A: '{{ v }}'}"),
    "reward_folder": reward("reward_file", "command: 'true', folder: '{{ v }}'"),
    "own number": reward("code.py:whole", "v: '{{ v }}'"),
    "own list": reward("code.py:texts", "v: '{{ v }}'"),
    "judge": reward("llm_judge", "rubric: a, question: '{{ v }}', reference: '{{ v }}'") | {"judge": "1"},
    "assertions": reward("llm_judge", "assertions: '{{ v }}'") | {"judge": "1"},
    "scale": reward("llm_judge", "rubric: '{{ v }}', scale: '{{ v }}'") | {"judge": "1"},
    "files": sandbox("files: '{{ v }}'"),
    "target": sandbox("files: [{to: '{{ v }}', content: a}]"),
    "file content": sandbox("files: [{to: a, content: '{{ v }}'}]"),
    "source": sandbox("files: [{to: a, from: '{{ v }}'}]"),
    "base64": sandbox("files: [{to: a, base64: '{{ v }}'}]"),
    "mode": sandbox("files: [{to: a, content: b, mode: '{{ v }}'}]"),
    "two files": sandbox("files: [{to: a, content: b}, {to: '{{ v }}', content: c}]"),
    "setup": sandbox("setup: '{{ v }}'"),
    "setup command": sandbox("setup: ['true {{ v }}']"),
    "env": sandbox("env: '{{ v }}'"),
    "variable": sandbox("env: {A: '{{ v }}'}"),
    "workdir": sandbox("workdir: '{{ v }}'"),
    "artifact path": {"more": "artifacts: {x: {path: '{{ v }}'}}", "reward": USES_SANDBOX},
    "artifact command": {"more": "artifacts: {x: {command: '{{ v }}'}}", "reward": USES_SANDBOX},
    "turns": {"more": "solution: {turns: '{{ v }}'}"},
    "say": {"more": "solution: {turns: [{say: '{{ v }}'}]}"},
    "call arguments": {"more": f"{WORLD}\nsolution: {{turns: [{{tools: [{{name: add, args: '{{{{ v }}}}'}}]}}]}}"},
    "call name": {"more": f"{WORLD}\nsolution: {{turns: [{{tools: [{{name: '{{{{ v }}}}', args: {{}}}}]}}]}}"},
    "patch": {"more": "solution: {patch: '{{ v }}'}\ntoolsets: {enabled: [terminal]}"},
    "schemas": {"more": "state: code.py:World\ntools: [{state: call, schemas: '{{ v }}'}]"},
    "names": {"more": "state: code.py:World\ntools: [{state: add, names: '{{ v }}'}]"},
    "one name": {"more": "state: code.py:World\ntools: [{state: add, names: ['{{ v }}', add]}]"},
    "says": {"more": "user: {turns: '{{ v }}'}"},
    "words": {"more": "user: {turns: [{say: '{{ v }}'}]}"},
    "offered": {"more": "user: {turns: [{say: a, tools: ['{{ v }}']}]}"},
    "user files": {"more": "user: {turns: [{say: a, files: '{{ v }}', setup: '{{ v }}'}]}", "reward": USES_SANDBOX},
    "user source": {
        "more": "user: {turns: [{say: a, files: [{to: a, from: '{{ v }}'}]}]}", "reward": USES_SANDBOX
    },
    "user system": {"more": "user: {system: '{{ v }}', stop: [END], server: user}", "user": "1"},
    "hears": {"prompt": "", "more": SEATS + ", message_template: '{{ v }} {{ text }}'}}"},
    "seat": {"prompt": "", "more": SEATS.replace("y}", "'{{ v }}'}").replace("user: x", "user: '{{ v }}'") + "}}"},
}  # fmt: skip
"""Places of a spec that a row's column `v` is rendered into."""
ELSEWHERE = ("setup command", "the command '", "the command cannot run", "has no end", "is not a number or expression")
"""What only the shell of a sandbox can tell, or the library for mathematics."""


def nested(levels: int, kind: type) -> Any:
    value: Any = "a"
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


def chat(**message: Any) -> list[dict[str, Any]]:
    return [{"role": "user", **message}]


PNG = "data:image/png;base64,iVBORw0KGgo="
NAMED: dict[str, Any] = {"name": "add"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
VALUES: list[Any] = [
    None, True, False, 0, 7, -3, 10**18, 10**25, 10**400, 1.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf"),
    "", " ", "a", "C", "7", "add", "true", "x" * 300, "x" * 5000, "x" * 200_000, "é" * 200, "a\nb\n", "'",
    "\ud800", "a\udfffb", "a\0b", "\u202e\u200b\x1b[31m", "<|im_end|><|im_start|>system", "{{ x }}", "{% raw %}",
    '"; exit 3 #', "[", "(a+)+$", "a{99999}", "(" * 200, "{}", "[]", '{"a": 1}', "[1, 2", "null", "a\ud83d\ude00b",
    [], {}, [None], [[]], [1, "a", None], ["a"], ["add", "b"], {"a": 1}, {"a": None}, {"": ""}, {"a": {"b": "c"}},
    nested(50, list), nested(300, dict), nested(900, list),
    chat(content="hi"), chat(), chat(content=None), chat(content=5), chat(content=["a"]), chat(content="a", extra=1),
    chat(content=[{"type": "text"}]), chat(content=[{"type": "text", "text": "a"}]), chat(content=[{"type": "video"}]),
    chat(content=[{"type": "image_url", "image_url": {"url": PNG}}]), chat(content="a") * 3, chat(content="a")[0],
    [{"role": "human", "content": "a"}], [{"role": "assistant", "content": "a"}], [{"from": "human", "value": "a"}],
    [*chat(content="a"), {"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f", "arguments": {}}}]}],
    [{"role": "tool", "content": "a", "tool_call_id": "c"}], [{"role": "system", "content": "a"}],
    [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}], [{"function": {"name": None}}],
    [{"function": {"name": "f", "arguments": {"a": 1}}}], [{"name": "f"}], [{"type": "x", "function": {"name": "f"}}],
    [NAMED | {"args": {"a": 1}}], [NAMED | {"arguments": '{"a": 1}'}], [NAMED | {"arguments": "{"}],
    [NAMED | {"args": {}, "arguments": {}}], [NAMED | {"args": [1]}], [{"args": {}}],
    [{"say": "a"}], [{"say": 5}], [{"tools": "add"}], [{"user": "a"}], [{"tools": [], "say": None}],
    [{"tools": [NAMED | {"args": {"a": 2}}]}, {"say": "a"}], [{"say": "a", "seat": "nobody"}],
    [{"to": "f", "content": "a"}], [{"to": "f", "content": "a"}] * 2, [{"to": "f"}], [{"to": "", "content": "a"}],
    [{"to": "f", "content": "a", "from": "there.txt"}], [{"to": "../f", "content": "a"}], [{"to": "f", "base64": "!"}],
    [{"to": "/etc/x/f", "content": "a"}], [{"to": "f", "from": "there.txt"}], [{"to": "f", "from": "gone.txt"}],
    [{"to": "f", "content": None, "from": None}], [{"to": "f", "content": "a", "mode": "0755"}],
    [{"to": "f", "content": "a", "mode": 99999}], [{"to": "f", "content": 5}],
    "there.txt", "gone.txt", "../x", "/etc/passwd", "/", ".", "a/../a", "folder", "~", "-x", "YQ==", "YQ=",
    "http://example.org/a.png", PNG, "data:", {"url": "http://example.org"}, {"url": 5}, {"bytes": "abc"},
    {"bytes": None, "path": "there.txt"}, {"type": "object"}, {"type": 5}, {"$ref": "#"}, {"pattern": "("},
    [FUNCTION], [{"type": "function", "function": FUNCTION}], [FUNCTION] * 2, [FUNCTION | {"name": "f f"}],
    [FUNCTION | {"parameters": {"type": "array"}}], ["true"], ["exit 3"], "exit 3", ["a\0"], [["a"]],
    {"A": "b"}, {"A B": "c"}, {"A=": "c"}, {"A": 1}, {"A": ["b"]}, {"A": "a\0"}, {"A": "\ud800"}, [0, 1], [1, 0],
]  # fmt: skip
KEYS: list[Any] = ["", None, "\ud800", "a\0b", "x" * 300, 5, [1], "é/..", 1.5, True, {"a": 1}]
FOUND: dict[str, tuple[str, Any]] = {
    "image_that_is_a_list": ("image", ["a"]),
    "image_that_is_missing": ("image", "gone.txt"),
    "image_with_a_null_byte": ("image_url", "a\0b"),
    "image_that_is_none": ("image", "there.txt"),
    "image_url_that_is_a_number": ("image_url", {"url": 5}),
    "messages_with_no_content": ("calls", None),
    "choice_that_is_not_there": ("choices", ["a"]),
    "limits_in_the_wrong_order": ("length_penalty", 1),
    "turns_in_the_wrong_order": ("turn_efficiency", True),
    "tokens_in_the_wrong_order": ("token_efficiency", 1),
    "judge_without_assertions": ("assertions", None),
    "reference_without_words": ("keyword_overlap", "!"),
    "target_without_a_number": ("math_equal", " "),
    "half_a_character_in_a_matched_file": ("matched content", "\ud800"),
    "half_a_character_in_a_test": ("test content", "\ud800"),
    "null_byte_in_the_path_of_a_test": ("test target", "a\0b"),
    "null_byte_in_a_variable_of_a_reward": ("variables", "a\0b"),
    "null_byte_in_the_folder_of_a_reward": ("reward_folder", "a\0b"),
    "tests_that_are_missing": ("test source", "gone.txt"),
    "tests_of_a_name_that_is_too_long": ("test source", "x" * 300),
    "schema_of_no_tool": ("schemas", [{"tools": "add"}]),
    "schema_that_is_a_mapping": ("schemas", {"A": None}),
    "tools_of_one_name": ("schemas", [FUNCTION] * 2),
    "name_that_no_tool_has": ("one name", "7"),
    "name_that_is_a_mapping": ("names", [{"name": "add"}]),
    "names_that_are_a_mapping": ("names", {}),
    "offered_tool_that_is_not_there": ("offered", "a"),
    "missing_file_of_a_user": ("user source", "gone.txt"),
    "file_without_content_of_a_user": ("user source", None),
    "file_with_two_sources": ("files", [{"to": "f", "content": "a", "from": "there.txt"}]),
    "text_that_is_not_base64": ("base64", "!"),
    "base64_of_other_characters": ("base64", "é"),
    "file_that_is_a_folder": ("target", "."),
    "file_without_a_name": ("target", ""),
    "file_outside_of_the_home": ("target", "../x"),
    "file_of_a_long_name": ("target", "x" * 300),
    "working_directory_outside_of_the_home": ("workdir", "/etc"),
    "working_directory_of_a_long_name": ("workdir", "x" * 300),
    "words_of_a_row_that_are_none": ("hears", None),
    "patch_that_is_a_list": ("patch", ["a"]),
    "patch_that_is_none": ("patch", None),
}
"""Rows of which `validate` said nothing, or a run nothing that helps; by what is wrong."""


def spec_text(place: str) -> str:
    part = PLACES[place]
    key = "" if "key" in part else ", key: id"
    roles = "".join(f", {role}: {{type: scripted}}" for role in ("judge", "user") if role in part)
    prompt = part.get("prompt", "{user: go}")
    lines = [
        f"dataset: {{path: json, data_files: rows.jsonl{key}{part.get('dataset', '')}}}",
        f"prompt: {prompt}" if prompt else "",
        f"rewards: {{r: {part.get('reward', '{fn: contains_all, args: {values: []}}')}}}",
        f"sandbox: {{backend: none{part.get('sandbox', '')}}}",
        f"servers: {{policy: {{type: scripted}}{roles}}}",
        part.get("more", ""),
    ]
    return "\n".join(lines) + "\n"


class Folder:
    """A folder with a spec for each place, which all read one file of rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, Spec] = {}
        (path / "code.py").write_text(CODE)
        (path / "there.txt").write_text("x")
        (path / "folder").mkdir()
        (path / "folder" / "f").write_text("y")

    def spec(self, place: str) -> Spec:
        if place not in self.specs:
            path = self.path / f"{place.replace(' ', '_')}.yaml"
            path.write_text(spec_text(place))
            self.specs[place] = load_spec(path)
        return self.specs[place]

    def write(self, *rows: dict[str, Any]) -> None:
        (self.path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def refusal(spec: Spec) -> str | None:
    """Return why a run refuses a row, or does not grade it; None if all rows are graded."""
    try:
        rows = list(load_rows(spec, "train", notify=lambda _: None))
        if not rows:
            raise UserError("no row is left")
        async with CompiledSpec(spec, {}) as compiled:
            await compiled.open(rows[0])
            run = Run(compiled, rows, Plan(size=1, split="train", repeat=False, require_complete=False, retries=0))
            async for group in run.groups():
                for rollout in group.rollouts:
                    read_own_json(write_json(rollout_record(rollout)))
                    if (
                        rollout.stop_reason in INFRASTRUCTURE_FAILURES
                        or rollout.stop_reason is StopReason.ENVIRONMENT_ERROR
                    ):
                        return f"(row {rollout.key.row.key}) {rollout.stop_reason}: {rollout.error}"
    except HermesRLError as error:
        return str(error)
    return None


def is_told_elsewhere(place: str, said: str | None) -> bool:
    if said is None:
        return False
    return any(text in said for text in ELSEWHERE) or (place == "user files" and "environment_error" in said)


def drawn(chance: random.Random) -> tuple[dict[str, Any], ...]:
    row = {"id": "seven", "v": chance.choice(VALUES)}
    kind = chance.random()
    if kind < 0.06:
        del row["v"]
    elif kind < 0.09:
        return row, dict(row)
    elif kind < 0.12:
        row["id"] = chance.choice(KEYS)
    elif kind < 0.2:
        return row, {"id": "eight", "v": chance.choice(VALUES)}
    return (row,)


@pytest.mark.generated
@pytest.mark.timeout(900)
def test_validate_and_a_run_agree_about_odd_rows(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    chance = random.Random(seed)
    folder = Folder(tmp_path)
    places = list(PLACES) * 36 if THOROUGH else chance.sample(list(PLACES), 60)
    for place in places:
        rows = drawn(chance)
        folder.write(*rows)
        spec, where = folder.spec(place), f"seed {seed}, {place}: {json.dumps(rows)[:300]}"
        problems = [str(problem) for problem in check_spec(spec, count="all")[0]]
        said = asyncio.run(refusal(spec))
        if problems:
            assert said is not None, f"{where}: only validate refuses it: {problems}"
            for told in (problems[0], said):
                of_all = any(text in told for text in ("rows.jsonl:", "dataset.key", "no row is left"))
                assert of_all or any(f"(row {key})" in told for key in keys(rows)), f"{where}: {told}"
                places = (str(tmp_path), "dataset.key", "no row is left", "the prompt of the row is refused")
                assert any(text in told for text in places), f"{where}: {told}"
        else:
            assert said is None or is_told_elsewhere(place, said), f"{where}: only a run refuses it: {said}"


def keys(rows: tuple[dict[str, Any], ...]) -> list[str]:
    named = [str(row.get(column)) for row in rows for column in ("id", "v")]
    return [*named, *(str(number) for number in range(1, len(rows) + 1))]


@pytest.mark.parametrize("case", FOUND)
def test_row_is_refused_in_the_same_words(tmp_path: Path, case: str) -> None:
    place, value = FOUND[case]
    folder = Folder(tmp_path)
    folder.write({"id": "seven", "v": value})
    problems = [str(problem) for problem in check_spec(folder.spec(place), count="all")[0]]
    said = asyncio.run(refusal(folder.spec(place)))
    assert said is not None and said.endswith("(row seven)")
    assert said.startswith(f"{folder.path / place.replace(' ', '_')}.yaml:")
    assert said in problems or (case == "name_that_no_tool_has" and len(problems) == 1)


@pytest.mark.parametrize(("value", "status"), [("a", 0), ("gone.txt", 2)])
def test_commands_agree_about_a_row(tmp_path: Path, value: str, status: int) -> None:
    folder = Folder(tmp_path)
    folder.write({"id": "seven", "v": PNG if status == 0 else value})
    name = f"{folder.spec('image').name}.yaml"
    checked = hermes("validate", name, "--rows", "all", cwd=tmp_path)
    few = ("--set", "process.groups=1", "--set", "process.group_size=1")
    ran = hermes("run", name, "process", "--quiet", *few, cwd=tmp_path)
    assert (checked.returncode, ran.returncode) == (status, status), (checked.stderr, ran.stderr)
    for command in (checked, ran) if status else ():
        assert "image.yaml:2:" in command.stderr and "(row seven)" in command.stderr
        assert "Traceback" not in command.stderr
