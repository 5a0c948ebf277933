"""Static checks: code files, rewards and their arguments, names, files, and templates over sample rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hermes_rl.data.check import check_spec
from hermes_rl.data.load import load_rows
from hermes_rl.errors import SpecError, UserError
from hermes_rl.rollouts.sandboxes import sandbox_config
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.spec.model import Spec
from hermes_rl.spec.prompts import messages_of
from hermes_rl.spec.schema import type_of
from hermes_rl.spec.signatures import function

BASE = 'version: 1\ndataset: {items: [{q: one, n: 3, z: null}]}\nprompt: {user: "{{ q }}"}\n'
CODE = '''
"""Code that a spec names."""
NEVER_RUN = 1 / 0

def tool(x: int) -> int:
    """Do it."""

class World:
    def __init__(self, item): ...

async def reward(item, ctx, judge, *, target: str, tolerance: float = 0.5, mode: "str | None" = None) -> float:
    """Compare.

    Args:
        target: what is right,
            in two lines.
        tolerance: how far off it may be.
    """
'''


def test_only_what_a_file_itself_defines_is_offered(tmp_path: Path) -> None:
    text = "import os\nfrom math import *\nLIMIT = 3\ndef score(item): ...\nclass World: ...\n"
    (tmp_path / "own.py").write_text(text)
    problems = found(tmp_path, "rewards: {a: {fn: own.py:nosuch}}\nstate: own.py:Nosuch\n")
    assert [problem.partition(" has no ")[2] for problem in problems] == [
        "function `nosuch`; choices: score",
        "class `Nosuch`; choices: World",
    ]


STATES = """
from email.message import Message as Base
class Desk:
    \'\'\'A desk.\'\'\'
    def __init__(self, item):
        self.drawer, self.lamp = item, None
    def take(self): ...
class Sub(Desk):
    def put(self): ...
class Far(Base): ...
class Any:
    def __init__(self, item): ...
    def __getattr__(self, name): ...
class Set:
    def __init__(self, item):
        for key in item: setattr(self, key, item[key])
"""


@pytest.mark.parametrize(
    ("name", "tool", "problem", "warning"),
    [
        ("Desk", "drawer", "", ""),
        ("Desk", "take", "", ""),
        ("Sub", "lamp", "", ""),
        ("Sub", "put", "", ""),
        ("Sub", "lamb", "s.yaml:4:17: the state Sub has no `lamb`; did you mean `lamp`?", ""),
        ("Far", "lamp", "", "not certain without running"),
        ("Any", "lamp", "", "not certain without running"),
        ("Set", "lamp", "", "not certain without running"),
        ("Base", "lamp", "", "was not checked"),
    ],
)
def test_tools_of_the_state(tmp_path: Path, name: str, tool: str, problem: str, warning: str) -> None:
    (tmp_path / "own.py").write_text(STATES)
    problems, warnings = check_spec(spec_of(tmp_path, f"tools: [{{state: {tool}}}]\nstate: own.py:{name}\n"))
    assert [str(each).removeprefix(f"{tmp_path}/").partition(" Choices")[0] for each in problems] == [problem] * bool(
        problem
    )
    assert any(warning in str(each) and ":4:17" in str(each) for each in warnings) == bool(warning)


def spec_of(folder: Path, text: str) -> Spec:
    (folder / "code.py").write_text(CODE)
    path = folder / "s.yaml"
    path.write_text(BASE + text)
    return load_spec(path)


def found(folder: Path, text: str) -> list[str]:
    problems, _ = check_spec(spec_of(folder, text), known_toolsets=["terminal", "file"], known_distributions=["dev"])
    return [str(problem).removeprefix(f"{folder}/") for problem in problems]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tools: [{python: code.py:tool}]\nstate: code.py:World\n", None),
        ("tools: [{python: code.py:tol}]\n", "s.yaml:4:18: code.py has no function `tol`; did you mean `tool`?"),
        ("tools: [{python: cod.py:tool}]\n", "s.yaml:4:18: there is no file "),
        ("state: code.py:Word\n", "s.yaml:4:8: code.py has no class `Word`; did you mean `World`?"),
        ("tools: [{python: s.yaml.py:f}]\n", "s.yaml:4:18: there is no file"),
        ("rewards: {exact_mach: {}}\n", "s.yaml:4:11: there is no reward `exact_mach`; did you mean `exact_match`?"),
        ("rewards: {a: {fn: exact_mach}}\n", "s.yaml:4:19: there is no reward `exact_mach`"),
        ("rewards: {a: {fn: code.py:rewrd}}\n", "s.yaml:4:19: code.py has no function `rewrd`; did you mean `reward`?"),
        ("rewards: {a: {fn: no.py:reward}}\n", "s.yaml:4:19: there is no file"),
        (
            "servers: {judge: {type: scripted}}\nrewards: {a: {fn: code.py:reward, args: {target: x}}}\n",
            None,
        ),
        (
            "rewards: {a: {fn: code.py:reward, args: {target: x}}}\n",
            "s.yaml:4:11: `reward` needs `judge`, as an argument or as a server role",
        ),
        (
            "servers: {judge: {type: scripted}}\nrewards: {a: {fn: code.py:reward, args: {target: x, tarket: x}}}\n",
            "s.yaml:5:53: `reward` has no argument `tarket`; did you mean `target`?",
        ),
        (
            "servers: {judge: {type: scripted}}\n"
            "rewards: {a: {fn: code.py:reward, args: {target: x, tolerance: lots}}}\n",
            "s.yaml:5:64: `reward` takes float here",
        ),
        (
            "servers: {judge: {type: scripted}}\nrewards: {a: {fn: code.py:reward, args: {target: '{{ z }}'}}}\n",
            "s.yaml:5:50: column `z` is None, which cannot be text",
        ),
        (
            "servers: {judge: {type: scripted}}\n"
            "rewards: {a: {fn: code.py:reward, args: {target: x, tolerance: '{{ q }}'}}}\n",
            "s.yaml:5:64: the template gives a value that does not fit",
        ),
        ("toolsets: [terminl]\n", "s.yaml:4:12: there is no toolset `terminl`; did you mean `terminal`?"),
        ("toolsets: {distribution: {fil: 0.5}}\n", "s.yaml:4:27: there is no toolset `fil`; did you mean `file`?"),
        ("toolsets: {distribution: deev}\n", "s.yaml:4:26: there is no distribution `deev`; did you mean `dev`?"),
        ("user: {server: u, system: {file: u.j2}}\nservers: {u: {type: scripted}}\n", "s.yaml:4:34: there is no file"),
        ("sandbox: {files: [{to: a, from: nothing}]}\n", "s.yaml:4:33: there is no file or directory"),
        ("sandbox: {image: rootfs}\n", "s.yaml:4:18: there is no folder or archive"),
        ("sandbox: {backend: docker, image: ./i}\n", "s.yaml:4:35: there is no folder ./i with a Dockerfile"),
        (
            "sandbox: {backend: docker, image: i, services: {a: {image: ./i}}}\n",
            "s.yaml:4:60: there is no folder ./i with a Dockerfile",
        ),
        ("sandbox: {env: {A: '{{ qq }}'}}\n", "s.yaml:4:20: there is no column `qq`; did you mean `q`?"),
        ("sandbox: {limits: {processes: '{{ q }}'}}\n", "s.yaml:4:31: the template gives a value that does not fit"),
        ("sandbox: {limits: {processes: '{{ n }}'}}\n", None),
        (
            "solution:\n  turns:\n    - say: |\n        Fine.\n        Not {{ quux }}.\n",
            "s.yaml:8:13: there is no column `quux`",
        ),
        (
            "solution:\n  turns:\n    - say: >\n"
            "        Folded {{ q }}\n        text and {{ quux }}\n        and more.\n",
            "s.yaml:8:18: there is no column `quux`",
        ),
        ("artifacts: {a: {command: 'git diff {{ base }}'}}\n", "s.yaml:4:26: there is no column `base`"),
    ],
)
def test_findings(tmp_path: Path, text: str, expected: str | None) -> None:
    problems = found(tmp_path, text)
    if expected is None:
        assert not problems
    else:
        assert len(problems) == 1, problems
        assert problems[0].startswith(expected)


def write(folder: Path, text: str) -> Path:
    path = folder / "s.yaml"
    path.write_text(text)
    return path


def test_columns_and_filter_name_their_line(tmp_path: Path) -> None:
    text = (
        'version: 1\ndataset:\n  items: [{q: a}]\n  columns:\n    a: "{{ q }}"\n    b: |-\n'
        "      {{ a }}\n      {{ c }}\n"
        'prompt: {user: "{{ b }}"}\n'
    )
    problems, _ = check_spec(load_spec(write(tmp_path, text)))
    assert str(problems[0]).endswith("s.yaml:8:7: there is no column `c` (row 1)")
    text = 'version: 1\ndataset: {items: [{q: a}], filter: "qq == 1"}\nprompt: {user: "{{ q }}"}\n'
    problems, _ = check_spec(load_spec(write(tmp_path, text)))
    assert ":2:36: there is no column `qq`; did you mean `q`?" in str(problems[0])


def test_template_files_are_named_themselves(tmp_path: Path) -> None:
    (tmp_path / "p.j2").write_text("Hello\n{{ nme }}\n")
    text = "version: 1\ndataset: {items: [{name: a}]}\nprompt: {user: {file: p.j2}}\n"
    problems, _ = check_spec(load_spec(write(tmp_path, text)))
    assert str(problems[0]) == f"{tmp_path}/p.j2:2:1: there is no column `nme`; did you mean `name`? (row 1)"


def test_local_data_is_read(tmp_path: Path) -> None:
    text = "version: 1\ndataset: {path: json, data_files: d.jsonl, key: id}\nprompt: {user: '{{ q }}'}\n"
    path = write(tmp_path, text)
    problems, _ = check_spec(load_spec(path))
    assert str(problems[0]).endswith("d.jsonl: no such file") and ":2:" in str(problems[0])
    (tmp_path / "d.jsonl").write_text('{"q": "a", "id": 1}\n{"q": "b", "id": 1}\n')
    problems, _ = check_spec(load_spec(path))
    assert ":2:49: dataset.key: `1` of row 2 occurs twice" in str(problems[0])
    (tmp_path / "d.jsonl").write_text('{"q": "a", "id": 1}\n{"q": oops}\n')
    problems, _ = check_spec(load_spec(path))
    assert "d.jsonl:2: is not JSON" in str(problems[0])
    (tmp_path / "d.jsonl").write_text("")
    problems, _ = check_spec(load_spec(path))
    assert "no row is left" in str(problems[0])


def test_what_only_a_hub_could_tell_is_a_warning(tmp_path: Path) -> None:
    text = "version: 1\ndataset: {path: org/data}\nprompt: {user: '{{ q }}'}\nsandbox: {backend: docker, image: x}\n"
    problems, warnings = check_spec(load_spec(write(tmp_path, text)))
    assert not problems
    messages = "\n".join(warning.message for warning in warnings)
    assert "on the hub" in messages and "docker" in messages and "no rewards" in messages


def test_a_fallback_is_checked(tmp_path: Path) -> None:
    text = "version: 1\ndataset: {path: org/data, fallback: {items: [{p: a}]}}\nprompt: {user: '{{ q }}'}\n"
    problems, _ = check_spec(load_spec(write(tmp_path, text)))
    assert "there is no column `q`" in str(problems[0])


@pytest.mark.parametrize(
    "dataset",
    ["{path: json, data_files: 'https://a.example/x.json'}", "{path: 'https://a.example/x.parquet'}", "{path: org/x}"],
)
def test_nothing_is_fetched(tmp_path: Path, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    problems, warnings = check_spec(
        load_spec(write(tmp_path, f"version: 1\ndataset: {dataset}\nprompt: {{user: '{{{{ q }}}}'}}\n"))
    )
    assert not problems
    assert any("not checked" in warning.message for warning in warnings)


def test_weights_of_zero_are_a_warning(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "rewards: {exact_match: {weight: 0, args: {target: x}}}\n")
    _, warnings = check_spec(spec)
    assert [warning.message for warning in warnings] == ["every weight is 0, so every rollout scores the same"]


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "specs").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_specs_have_only_expected_problems(path: Path) -> None:
    spec = load_spec(path, environ={})
    names = ["terminal", "file", "code_execution", "web"]
    problems, _ = check_spec(spec, known_toolsets=names)
    later = ("there is no reward", "there is no file or directory 'tests/bench'")
    assert all(any(text in problem.message for text in later) for problem in problems), problems


def test_signatures_are_read_without_running(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    signature = function(tmp_path / "code.py", "reward")
    assert signature is not None and signature.help == "Compare."
    by_name = {one.name: one for one in signature.arguments()}
    assert list(by_name) == ["judge", "target", "tolerance", "mode"]
    assert by_name["target"].help == "what is right, in two lines." and by_name["target"].required
    assert (by_name["tolerance"].default, by_name["mode"].annotation) == (0.5, "str | None")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("int", int),
        ("list[str]", list[str]),
        ("int | None", int | None),
        ("dict[str, list[int]] | None", dict[str, list[int]] | None),
        ("tuple[int, ...]", tuple[int, ...]),
        ("'float'", float),
        ("MyClass", None),
        ("", None),
        ("a b", None),
        ("list[MyClass]", None),
    ],
)
def test_annotations(text: str, kind: object) -> None:
    assert type_of(text) == kind


def test_errors_of_columns_are_spec_errors_when_rows_are_loaded(tmp_path: Path) -> None:
    from hermes_rl.data.load import load_rows

    text = 'version: 1\ndataset: {items: [{q: a}], columns: {b: "{{ qq }}"}}\nprompt: {user: "{{ b }}"}\n'
    with pytest.raises(SpecError, match=r"s\.yaml:2:41: there is no column `qq`"):
        load_rows(load_spec(write(tmp_path, text)), "train", notify=print)


CALLED = """
def good(*, seed, split): ...
def positional(seed, split, more=3): ...
def rest(**given): ...
def none(): ...
def half(seed): ...
def most(seed, split, path): ...
def only(seed, split, /): ...
async def later(*, seed, split): ...
@decorated
def unknown(): ...
class Row:
    def __init__(self, item, more=1): ...
class Any:
    def __init__(self, *items): ...
class Empty:
    def __init__(self): ...
class Pair:
    def __init__(self, a, b): ...
class Named:
    def __init__(self, item, *, name): ...
@decorated
class Made:
    def __init__(self): ...
class Bare: ...
class Inherits(Row): ...
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("good", None),
        ("positional", None),
        ("rest", None),
        ("unknown", None),
        ("none", "generator `none` does not take `seed` and `split`; it is called as none(seed=…, split=…)"),
        ("half", "does not take `split`"),
        ("only", "does not take `seed` and `split`"),
        ("most", "requires `path`, but generators are called only with seed and split"),
        ("later", "is `async`"),
    ],
)
def test_a_generator_takes_what_it_is_called_with(tmp_path: Path, name: str, said: str | None) -> None:
    (tmp_path / "own.py").write_text(CALLED)
    text = f'dataset: {{generator: "own.py:{name}"}}\nprompt: {{user: hi}}\n'
    (tmp_path / "spec.yaml").write_text(text)
    problems, _ = check_spec(load_spec(tmp_path / "spec.yaml"))
    assert [problem.line for problem in problems] == ([] if said is None else [1])
    assert said is None or said in problems[0].message


@pytest.mark.parametrize("name", ["Row", "Any", "Made", "Inherits", "Empty", "Pair", "Named", "Bare"])
@pytest.mark.parametrize(("key", "what"), [("state: {}", "the row"), ("serve: {{trainer: {}}}", "the spec")])
def test_check_reports_classes_that_cannot_be_constructed(tmp_path: Path, name: str, key: str, what: str) -> None:
    (tmp_path / "own.py").write_text(CALLED)
    problems = found(tmp_path, key.format(f"own.py:{name}") + "\n")
    bad = name in ("Empty", "Pair", "Named", "Bare")
    words = "has no `__init__` that takes" if name == "Bare" else "cannot be made of"
    assert [f"{words} {what}" in problem for problem in problems] == [True] * bad


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import numpy.nothing, not_there.deep",
            "needs the package `not_there` (line 1), which is not installed here: install it, or",
        ),
        ("from not_there import x", "needs the package `not_there`"),
        (
            "from . import helpers",
            "uses a relative import (line 1), but is a single file: import without the leading dots",
        ),
        ("import sys\nsys.exit(3)", "ends the program while it is imported (line 2)"),
        ("raise RuntimeError('no')", "raises while it is imported (line 1)"),
        ("import beside, json.decoder, os.path as p\nfrom inner import x\nfrom __future__ import annotations", None),
        ("try:\n    import not_there\nexcept ImportError: pass", None),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import not_there", None),
        ("def later():\n    import not_there, sys\n    sys.exit(1)", None),
    ],
)
def test_unimportable_file_is_reported_without_running_it(tmp_path: Path, text: str, said: str | None) -> None:
    """Fault 35."""
    (tmp_path / "own.py").write_text(f"{text}\ndef mine(item): ...\n")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "inner").mkdir()
    problems = found(tmp_path, "rewards: {a: {fn: own.py:mine}}\n")
    assert len(problems) == (said is not None)
    assert said is None or f"s.yaml:4:19: own.py {said}" in problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{a: {fn: regex_match, args: {pattern: '('}}}",
            "4:48: `regex_match` takes Pattern here: invalid regular expression: missing ), unterminated",
        ),
        ("{regex_count: {args: {pattern: '[', at_least: 2}}}", "invalid regular expression: unterminated character"),
        ("{regex_match: {args: {pattern: '{{ q }}'}}}", None),
        ("{regex_match: {args: {pattern: '{{ q }}('}}}", "invalid regular expression: missing ), unterminated"),
        ("{regex_match: {args: {pattern: '(a)'}}}", None),
        ("{json_matches: {args: {schema: {type: strnig}}}}", "invalid JSON Schema: $.type: 'strnig' is not valid"),
        ("{json_matches: {args: {schema: {type: string}}}}", None),
    ],
)
def test_patterns_and_schemas_of_shipped_rewards_are_read(tmp_path: Path, text: str, said: str | None) -> None:
    """Fault 35."""
    problems = found(tmp_path, f"rewards: {text}\n")
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]


@pytest.mark.parametrize(
    ("calls", "column", "said"),
    [
        (
            '"{{ c }}"',
            "[{name: f, parameters: {}}]",
            "(at 0.parameters): there is no key `parameters` here (row second)",
        ),
        ("[{name: f, args: '{{ c }}'}]", "'{oops'", "(at 0.args): expected a JSON object"),
        ("[{name: f, args: '{{ c }}'}]", "{a: 1}", None),
        ("[{name: f, args: '{{ d }}'}]", "{}", "there is no column `d`"),
    ],
)
def test_arguments_from_rows_are_checked_as_a_whole(tmp_path: Path, calls: str, column: str, said: str | None) -> None:
    text = (
        f"dataset: {{key: id, items: [{{id: first, c: []}}, {{id: second, c: {column}}}]}}\nprompt: {{user: go}}\n"
        f"rewards: {{a: {{fn: tool_calls_match, args: {{calls: {calls}}}}}}}\n"
    ).replace("c: []", "c: {}" if "args" in calls else "c: []")
    problems, _ = check_spec(load_spec(write(tmp_path, text)))
    assert len(problems) == (said is not None)
    assert said is None or said in str(problems[0])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("[{role: user, content: hi}]", None),
        ("[{role: user, content: [{type: text, text: hi}], name: null}]", None),
        ("[{role: assistant, content: hi, tool_calls: []}]", None),
        ("[{role: assistant, tool_calls: [{function: {name: f, arguments: {a: 1}}}]}]", None),
        ("[{from: human, value: hi}]", "a message of ShareGPT's form, {from, value}; a message is {role, content}"),
        ("[{content: hi}]", "(at 0.role): field required"),
        ("[{role: human, content: hi}]", "(at 0.role): input should be 'system', 'user', 'assistant' or 'tool'"),
        ("[{role: user, content: true}]", "(at 0.content"),
        ("[{role: user, content: {text: hi}}]", "(at 0.content"),
        ("[{role: user}]", "a message has `content`, or calls of tools"),
        ("[{role: user, content: hi, weight: 1}]", "(at 0.weight): there is no key `weight` here"),
        ("[{role: assistant, tool_calls: [{name: f, arguments: {}}]}]", "(at 0.tool_calls.0.function): field required"),
        ("[hi]", "(at 0)"),
        ("[]", "at least 1 item"),
        ("hi", "input should be a valid list"),
    ],
)
def test_messages_from_rows_are_checked_as_a_run_checks_them(tmp_path: Path, messages: str, said: str | None) -> None:
    text = (
        f"dataset: {{key: id, items: [{{id: seven, m: {messages}}}]}}\nprompt: {{messages: '{{{{ m }}}}'}}\n"
        "rewards: {a: {fn: contains_all, args: {values: []}}}\n"
    )
    spec = load_spec(write(tmp_path, text))
    problems, _ = check_spec(spec)
    assert len(problems) == (said is not None)
    (row,) = load_rows(spec, "train", notify=print)
    if said is None:
        assert messages_of(spec.prompt, row)[0]["role"] in ("user", "assistant")
        return
    assert said in str(problems[0]) and "(row seven)" in str(problems[0])
    with pytest.raises(UserError, match=r"prompt\.messages, row seven: ") as caught:
        messages_of(spec.prompt, row)
    assert said in str(caught.value)


@pytest.mark.parametrize("prompt", ["{user: '{{ m }}'}", "{messages: [{role: user, content: '{{ m }}'}]}"])
def test_text_that_row_gives_as_list_is_refused(tmp_path: Path, prompt: str) -> None:
    text = "dataset: {items: [{m: [a, b]}]}\nrewards: {contains_all: {args: {values: []}}}\n"
    (problem,) = check_spec(load_spec(write(tmp_path, f"{text}prompt: {prompt}\n")))[0]
    assert "the template gives a list, and this is text; write it as text, such as by `| tojson`" in str(problem)


def test_rendering_of_sample_rows_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.spec.check.SAMPLING_SECONDS", -1.0)
    monkeypatch.setattr("hermes_rl.data.check.READING_SECONDS", -1.0)
    monkeypatch.setattr("hermes_rl.data.check.ROW_SECONDS", -1.0)
    text = "dataset: {items: [{q: a}, {q: b}, {q: c}]}\nprompt: {user: '{{ q }}'}\n"
    text += "rewards: {a: {fn: environment_rewards}}\n"
    problems, warnings = check_spec(load_spec(write(tmp_path, text)))
    assert problems == []
    assert "only the first 1 were checked; see `columns` and `filter`" in str(warnings[0])
    assert any("only 0 of 1 sample rows were rendered" in str(each) for each in warnings)


@pytest.mark.parametrize(
    ("file", "value"),
    [("{to: f, from: '{{ v }}'}", value) for value in ("none.txt", "../s.yaml", "x" * 300, "a\0b", None)]
    + [("{to: f, content: '{{ v }}'}", None), ("{to: '{{ v }}', content: x}", "a\0b")],
)  # fmt: skip
def test_files_of_rows_are_refused_by_validate_and_by_a_run(tmp_path: Path, file: str, value: str | None) -> None:
    (tmp_path / "in").mkdir()
    text = (
        f"dataset: {{key: id, items: [{{id: seven, v: {json.dumps(value)}}}]}}\nprompt: {{user: go}}\n"
        f"sandbox: {{files: [{file}]}}\nrewards: {{contains_all: {{args: {{values: []}}}}}}\n"
    )
    spec = load_spec(write(tmp_path / "in", text))
    (problem,) = check_spec(spec)[0]
    assert "(row seven)" in str(problem)
    (row,) = load_rows(spec, "train", notify=print)
    with pytest.raises(UserError):
        sandbox_config(spec, row, {})


def test_typed_dicts_of_a_reward_are_types_of_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from typing import NotRequired, TypedDict\n"
        "class Call(TypedDict):\n    name: str\n    times: NotRequired[int]\n"
        "Calls = list[Call]\n"
        "def mine(item, *, calls: Calls): ...\n"
    )
    start = "prompt: {user: go}\nrewards: {a: {fn: own.py:mine, args: {calls: '{{ c }}'}}}\n"
    for column, said in (
        ("[{name: f, times: '2'}]", None),
        ("[{name: f, args: {}}]", "(at 0.args): there is no key `args` here"),
        ("[{times: 2}]", "(at 0.name): field required"),
        ("[{name: f, times: many}]", "(at 0.times)"),
    ):
        problems, _ = check_spec(load_spec(write(tmp_path, f"{start}dataset: {{items: [{{c: {column}}}]}}\n")))
        assert len(problems) == (said is not None)
        assert said is None or said in str(problems[0])


@pytest.mark.parametrize("turns", ['"{{ t }}"', "[{tools: '{{ t[0].tools }}'}]"])
def test_turns_of_a_solution_that_come_from_rows_are_checked(tmp_path: Path, turns: str) -> None:
    text = (
        "dataset: {items: [{t: [{tools: [{name: f, arguments: {a: 1}}]}]}]}\nprompt: {user: go}\n"
        f"rewards: {{a: {{fn: contains_all, args: {{values: []}}}}}}\nsolution: {{turns: {turns}}}\n"
    )
    (problem,) = check_spec(load_spec(write(tmp_path, text)))[0]
    assert "(at 0.tools.0.arguments): there is no key `arguments` here (row 1)" in str(problem)


@pytest.mark.parametrize("items", ["[{q: one}]", "[{q: one}, {q: one}]"])
def test_a_fraction_needs_rows_to_divide(tmp_path: Path, items: str) -> None:
    """Fault 35: evaluation had no rows then, and validate said valid."""
    text = f'dataset: {{items: {items}, eval: {{fraction: 0.5}}}}\nprompt: {{user: "{{{{ q }}}}"}}\n'
    (problem,) = check_spec(load_spec(write(tmp_path, text)))[0]
    assert "a fraction of one row leaves none for evaluation: write `eval: only`, or add rows" in str(problem)
    assert not check_spec(load_spec(write(tmp_path, text.replace("one}]", "two}, {q: three}]"))))[0]


def test_a_reference_that_is_the_solution_needs_one() -> None:
    spec = "rewards: {own: {fn: tests_pass, args: {command: x, files: [], reference: solution}}}\n"
    for solution in ("{patch: p}", "{turns: [{say: p}]}"):
        parse_spec(BASE + spec + f"solution: {solution}")
    for without in ("", "solution: {notes: p}"):
        with pytest.raises(SpecError, match="the spec has no `solution` with `turns` or a `patch`"):
            parse_spec(BASE + spec + without)


def test_unknown_artifact_in_apply_is_reported_by_the_parser() -> None:
    spec = "artifacts: {patch: {path: p}}\nrewards: {own: {fn: tests_pass, args: {command: x, files: [], apply: NAME}}}"
    for name in ("patch", '"{{ q }}"'):
        parse_spec(BASE + spec.replace("NAME", name))
    with pytest.raises(SpecError, match="there is no artifact `ptach`; did you mean `patch`"):
        parse_spec(BASE + spec.replace("NAME", "ptach"))


def test_pairs_of_groups_of_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"4:36: `format: dpo` pairs two rollouts of a group: write 2 or more"):
        spec_of(tmp_path, "process: {format: dpo, group_size: 1}\n")
    spec_of(tmp_path, "process: {format: dpo, group_size: 2}\n")
    with pytest.raises(SpecError, match=r"4:24: `min_score` chooses rollouts for formats other than `dpo`"):
        spec_of(tmp_path, "process: {format: dpo, min_score: 1}\n")
    spec_of(tmp_path, "process: {format: sft, min_score: 1, keep_best: 2}\n")
    spec_of(tmp_path, "process: {format: sft, group_size: 1}\n")


@pytest.mark.parametrize(
    ("program", "warned"),
    [
        ("{command: [mine]}", True),
        ("{command: [mine, '{{ endpoint }}/v1']}", False),
        ("{command: [mine], env: {URL: '{{ endpoint }}'}}", False),
        ("{command: [mine], files: [{to: config, content: 'at {{ endpoint }}'}]}", False),
        ("{command: [mine, 'http://127.0.0.1:8181']}", False),
        ("{python: 'code.py:solve'}", False),
    ],
)
def test_program_without_the_endpoint_address_is_a_warning(tmp_path: Path, program: str, warned: bool) -> None:
    _, warnings = check_spec(spec_of(tmp_path, f"agent: {{program: {program}}}\n"))
    assert any("how does it find the model?" in str(warning) for warning in warnings) == warned


@pytest.mark.parametrize(("sizes", "warned"), [((1, 4), ["process"]), ((4, 1), ["serve"]), ((4, 2), [])])
def test_an_order_by_differences_warns_of_groups_of_one(
    tmp_path: Path, sizes: tuple[int, int], warned: list[str]
) -> None:
    (tmp_path / "s.yaml").write_text(
        BASE.replace("dataset: {", "dataset: {row_selection: skip_uniform, ")
        + f"process: {{group_size: {sizes[0]}}}\nserve: {{group_size: {sizes[1]}}}\n"
    )
    _, warnings = check_spec(load_spec(tmp_path / "s.yaml"))
    told = [warning.message for warning in warnings if "skip_uniform" in warning.message]
    assert told == [
        f"`row_selection: skip_uniform` does nothing in {mode}, whose groups of one rollout never differ"
        for mode in warned
    ]


def test_template_that_fails_names_the_row_by_its_key() -> None:
    items = '[{id: first, n: "1"}, {id: second}]'
    spec = parse_spec(f'dataset: {{key: id, items: {items}}}\nprompt: {{user: "{{{{ n }}}}"}}\n', environ={})
    (problem,) = check_spec(spec)[0]
    assert problem.message == "there is no column `n` (row second)"


SEATS = """
dataset: {items: [{n: 1}]}
prompt: PROMPT
agents:
  ann: {prompt: {system: "It is worth 5 to you."}}
  bob: {}
schedule: PLAY
servers: {policy: {type: scripted}}
"""


@pytest.mark.parametrize(
    ("prompt", "play", "fault"),
    [
        ("{user: Your bid?}", "{order: simultaneous, rounds: 1}", "it replaces the spec's `prompt` completely"),
        ("{user: Your bid?}", "{order: alternate, rounds: 1}", "it replaces the spec's `prompt` completely"),
        ("{user: Your bid?}", "call", "it replaces the spec's `prompt` completely"),
        ("{system: Bid.}", "{order: simultaneous, rounds: 1}", "would be asked without a user message"),
        ("{system: Bid.}", "{order: alternate, rounds: 1}", "would be asked without a user message"),
    ],
)
def test_seat_that_is_asked_without_a_user_message_is_refused(
    tmp_path: Path, prompt: str, play: str, fault: str
) -> None:
    text = SEATS.replace("PROMPT", prompt).replace("PLAY", play)
    path = write(tmp_path, text)
    try:
        problems = check_spec(load_spec(path))[0]
    except SpecError as error:
        problems = list(error.problems)
    assert any(fault in problem.message and problem.line == 5 for problem in problems), problems
    whole = text.replace("to you.", "to you., user: Your bid?").replace(
        'you., user: Your bid?"', 'you.", user: Your bid?'
    )
    others = whole.replace("bob: {}", "bob: {prompt: {user: Yours?}}")
    assert check_spec(load_spec(write(tmp_path, others)))[0] == []


def test_seat_that_hears_others_first_needs_no_user_message(tmp_path: Path) -> None:
    text = SEATS.replace("PROMPT", "{user: Ask them.}").replace("PLAY", "call")
    text = text.replace("ann:", "xx:").replace("bob: {}", "ann: {}").replace("xx:", "bob:")
    lines = text.splitlines()
    lines[4], lines[5] = lines[5], lines[4]
    assert check_spec(load_spec(write(tmp_path, "\n".join(lines))))[0] == []


def test_names_of_a_row_are_not_compared_with_schemas_that_the_state_has(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(
        "class World:\n    def __init__(self, item): self.all = []\n    def call(self): ...\n"
    )
    text = (
        "dataset: {items: [{v: [f]}, {v: null}]}\nprompt: {user: a}\nstate: world.py:World\n"
        "tools: [{state: call, schemas: SCHEMAS, names: '{{ v }}'}]\n"
    )
    assert check_spec(load_spec(write(tmp_path, text.replace("SCHEMAS", "all"))))[0] == []
    given = '\'{{ [{"name": "g", "parameters": {}}] }}\''
    (problem,) = check_spec(load_spec(write(tmp_path, text.replace("SCHEMAS", given))))[0]
    assert "there is no tool 'f'" in str(problem) and "(row 1)" in str(problem)


def test_base_class_of_a_state_is_read_in_the_file_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "class Shop:\n    def __init__(self, item): self.sold = 0\n    def count(self): ...\n"
    )
    (tmp_path / "world.py").write_text(
        "from shop import Shop as Base\n\nclass World(Base):\n    def sell(self, name: str): ...\n"
    )
    text = "dataset: {items: [{q: a}]}\nprompt: {user: a}\nstate: world.py:World\ntools: [{state: NAME}]\n"
    for name in ("sell", "count"):
        assert check_spec(load_spec(write(tmp_path, text.replace("NAME", name))))[0] == []
    (problem,) = check_spec(load_spec(write(tmp_path, text.replace("NAME", "sel"))))[0]
    assert "the state World has no `sel`; did you mean `sell`?" in str(problem)
    (tmp_path / "shop.py").write_text("class Shop\n")
    (problem,) = check_spec(load_spec(write(tmp_path, text.replace("NAME", "sell"))))[0]
    assert "world.py imports shop.py (line 1), which cannot be read as Python" in str(problem)


EXECUTING = """
import os, pickle, re
import subprocess as sp
from sympy.parsing.sympy_parser import parse_expr as value_of
class Desk:
    def __init__(self, item): self.model = item
    def look(self) -> str:
        self.model.eval()
        return helper("x")
    def other(self, state): ...
def helper(text): return sp.run(text)
def plain(item): return len(re.compile("x").pattern + os.path.join("a", "b"))
def solved(result): return value_of(result.final_response) == 4
def of_state(result, state): return state.model
def unpickled(text: str) -> str: return pickle.loads(text)
def pickled(text: str) -> str: return str(pickle.dumps(text))
def generator(): return eval("[]")
"""


@pytest.mark.parametrize(
    ("text", "recommended"),
    [
        ("rewards: {r: {fn: own.py:plain}}", ()),
        ("rewards: {r: {fn: own.py:solved}}", ("sympy.parsing.sympy_parser.parse_expr",)),
        ("rewards: {r: {fn: own.py:solved, isolate: process}}", ()),
        ("rewards: {r: {fn: own.py:plain}}\nstate: own.py:Desk", ("subprocess.run",)),
        ("rewards: {r: {fn: own.py:of_state}}\nstate: {python: own.py:Desk, isolate: reuse}", ()),
        ("rewards: {r: {fn: own.py:plain}}\ntools: [{python: own.py:unpickled}]", ("pickle.loads",)),
        ("rewards: {r: {fn: own.py:plain}}\ntools: [{python: own.py:pickled}]", ()),
    ],
)
def test_a_sandbox_is_recommended_for_code_that_executes_text(
    tmp_path: Path, text: str, recommended: tuple[str, ...]
) -> None:
    (tmp_path / "own.py").write_text(EXECUTING)
    _, warnings = check_spec(parse_spec(BASE + text + "\n", folder=tmp_path))
    said = [warning.message for warning in warnings if "isolate: sandbox" in warning.message]
    assert [re.search("calls `(.*?)` .line [0-9]+.: ", message)[1] for message in said] == list(recommended)  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tools: [{python: own.py:pickled}]", None),
        ("tools: [{python: own.py:pickled, isolate: process}]", "4 MB, and what its state and tools keep: 0.4 GB for"),
        (
            "state: own.py:Desk\nprocess: {concurrency: 500}",
            "2 GB with process.concurrency 500, 0.4 GB for each hundred",
        ),
        ("state: {python: own.py:Desk, isolate: none}", None),
    ],
)
def test_memory_of_processes_of_rollouts_is_named(tmp_path: Path, text: str, said: str | None) -> None:
    (tmp_path / "own.py").write_text(EXECUTING)
    described = parse_spec(BASE + text + "\n", folder=tmp_path).describe_processes("process", "evaluate")
    assert described is None if said is None else said in str(described)
