"""The typed spec: frozen, comparable, with defaults; demo, fingerprint, resolved form, and the example specs."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from hermes_rl.errors import SpecError, UserError
from hermes_rl.spec.fingerprint import fingerprint
from hermes_rl.spec.load import load_spec, parse_spec, shipped_specs
from hermes_rl.spec.model import Spec
from hermes_rl.spec.section import FrozenDict, parse_duration, parse_size
from hermes_rl.spec.sections.tools import TextFile

SPECS = sorted((Path(__file__).parent / "specs").glob("*.yaml"))
BASE = 'version: 1\ndataset: {items: [{q: a}]}\nprompt: {user: "{{ q }}"}\n'


@pytest.mark.parametrize(
    "text",
    [
        "servers: {policy: {base_url: 'http://a', model: m, headers_env: {Authorization: POLICY_KEY}}}\n",
        "servers: {policy: [{base_url: 'http://a', model: m, headers_env: {Authorization: POLICY_KEY}}]}\n",
        "tools: [{mcp: {name: far, url: 'http://a', headers_env: {Authorization: POLICY_KEY}}}]\n",
        "user: {server: user, tools: [{mcp: {name: far, url: 'http://a', headers_env: {Authorization: POLICY_KEY}}}]}\n"
        "servers: {user: {type: scripted}}\n",
    ],
    ids=["server", "servers", "mcp", "user"],
)
def test_a_header_that_holds_a_secret_names_its_variable(text: str) -> None:
    spec = parse_spec(BASE + text, environ={})
    assert "POLICY_KEY" in json.dumps(spec.resolved(), default=str)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_example_specs_load_and_load_again_as_they_ran(path: Path, tmp_path: Path) -> None:
    spec = load_spec(path, environ={})
    assert spec.name == path.stem
    copied = tmp_path / "spec.yaml"
    copied.write_text(yaml.safe_dump(json.loads(json.dumps(spec.resolved())), sort_keys=False, allow_unicode=True))
    assert load_spec(copied, environ={}, resolved=True) == spec
    assert fingerprint(load_spec(copied, environ={}, resolved=True)) == fingerprint(spec)
    assert load_spec(path, environ={}, demo=True).servers["policy"][0].type == "scripted"


def test_there_are_eight_examples() -> None:
    assert len(SPECS) == 8


def test_details_of_the_examples() -> None:
    specs = {path.stem: load_spec(path, environ={}) for path in SPECS}
    swe = specs["swe-tests"]
    assert swe.sandbox.limits.memory == 2 * 2**30
    assert [server.type for server in swe.servers["policy"]] == ["sglang", "sglang"]
    assert swe.on_stop == {"token_budget": "mask", "timeout": "mask", "max_turns": 0}
    assert swe.solution is not None and swe.solution.patch == "{{ patch }}"
    assert specs["terminal-bench"].dataset.eval is not None and specs["terminal-bench"].dataset.eval.only
    assert specs["gsm8k-hard"].agent.max_turns == 12 and specs["gsm8k-hard"].agent.max_tokens == 1024
    assert list(specs["gsm8k-hard"].rewards) == ["correct", "boxed", "short"]
    assert specs["gsm8k"].servers["policy"][0].base_url == "http://localhost:9001/v1"
    assert specs["web-research"].wandb is not None and specs["web-research"].wandb.mode == "offline"
    assert specs["retail-desk"].rewards["db"].fn == f"{SPECS[0].parent.parent}/rewards/retail.py:db_equal"
    mcp = specs["mcp-inventory"].tools[0].mcp
    assert mcp is not None and mcp.command == ("python3", "inventory.py") and mcp.allow == ("count", "move")


def test_the_shipped_copy_is_the_example() -> None:
    shipped = shipped_specs()["terminal-files"]
    assert shipped.read_bytes() == next(path for path in SPECS if path.stem == "terminal-files").read_bytes()
    assert load_spec("terminal-files") == load_spec(shipped)


def test_a_run_with_the_name_of_a_shipped_spec_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debate").mkdir()
    (tmp_path / "debate/spec.yaml").write_text("name: other\nrewards: {}\n")
    (tmp_path / "debate/run.json").write_text("{}")
    assert load_spec("debate").name == "debate"
    (tmp_path / "debate/run.json").unlink()
    with pytest.raises(SpecError, match=r"debate/spec\.yaml"):
        load_spec("debate")


def test_an_unknown_spec_is_named() -> None:
    with pytest.raises(UserError, match="did you mean `terminal-files`"):
        load_spec("terminal-flies")
    with pytest.raises(UserError, match="no such file"):
        load_spec("/nowhere/at/all.yaml")


def test_defaults() -> None:
    spec = parse_spec(BASE)
    assert (spec.seed, spec.agent.max_turns, spec.agent.temperature) == (0, 30, 1.0)
    assert (spec.process.group_size, spec.process.groups, spec.evaluate.rollouts) == (4, 100, 1)
    assert (spec.sandbox.backend, spec.sandbox.timeout, spec.sandbox.network) == ("bubblewrap", 120, False)
    assert (spec.toolsets.enabled, dict(spec.servers), spec.wandb) == ((), {}, None)
    assert spec.serve.api_url == "http://localhost:8000"
    assert (spec.tool_timeout, spec.command_timeout) == (300, 120)


def test_the_minimum_of_nested_timeouts_wins() -> None:
    spec = parse_spec(BASE + "sandbox: {timeout: 500}\n")
    assert (spec.tool_timeout, spec.command_timeout) == (500, 500)
    spec = parse_spec(BASE + "sandbox: {timeout: 500}\nagent: {tool_timeout: 200, timeout: 100}\n")
    assert (spec.tool_timeout, spec.command_timeout) == (100, 100)


def test_evaluation_is_greedy_for_single_rollouts() -> None:
    assert parse_spec(BASE).agent_for("evaluate").temperature == 0
    assert parse_spec(BASE).agent_for("process").temperature == 1
    assert parse_spec(BASE + "evaluate: {rollouts: 2}\n").agent_for("evaluate").temperature == 1
    spec = parse_spec(BASE + "evaluate: {agent: {temperature: 0.3, max_turns: 2}}\n")
    assert (spec.agent_for("evaluate").temperature, spec.agent_for("evaluate").max_turns) == (0.3, 2)


def test_a_spec_cannot_be_changed() -> None:
    spec = parse_spec(BASE + "rewards: {a: {args: {x: [1, {y: 2}]}}}\nsandbox: {env: {A: b}}\n")
    with pytest.raises(ValidationError):
        spec.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        spec.agent.max_turns = 3  # type: ignore[misc]
    for mapping in (spec.rewards, spec.rewards["a"].args, spec.sandbox.env, spec.rewards["a"].args["x"][1]):
        with pytest.raises(TypeError, match="cannot be changed"):
            mapping["z"] = 1  # type: ignore[index]
    assert spec.rewards["a"].args["x"] == (1, {"y": 2})
    assert pickle.loads(pickle.dumps(spec.sandbox)) == spec.sandbox
    assert copy.deepcopy(FrozenDict({"a": 1})) == {"a": 1}


def test_equal_where_the_keys_are() -> None:
    assert parse_spec(BASE) == parse_spec("\n# moved\n" + BASE, name="other.yaml")
    assert parse_spec(BASE) != parse_spec(BASE + "seed: 1\n")
    assert len({parse_spec(BASE), parse_spec(BASE)}) == 1


def test_other_ways_to_write_a_value() -> None:
    spec = parse_spec(
        BASE
        + "toolsets: [a]\nwandb: p\ntools: [{mcp: {name: m, command: 'python3 -m s \"a b\"'}}]\n"
        + "sandbox: {env: {PORT: 8080, ON: true}, files: [{to: a, content: '', mode: 0755}],"
        + " limits: {memory: 1.5GiB}}\n"
        + "budget: {deadline: 1h30m}\n"
    )
    assert spec.toolsets.enabled == ("a",)
    assert spec.tools[0].mcp is not None and spec.tools[0].mcp.command == ("python3", "-m", "s", "a b")
    assert spec.sandbox.env == {"PORT": "8080", "ON": "true"}
    assert (spec.sandbox.files[0].mode, spec.sandbox.limits.memory) == (0o755, 1610612736)
    assert spec.budget.deadline == 5400


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("2GiB", 2**31), ("2 GB", 2 * 10**9), ("1k", 1000), ("1Ki", 1024)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1h30m", 5400), ("2d", 172800), ("1.5h", 5400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "3 weeks", "m3"])
def test_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


def test_text_files_and_parts() -> None:
    spec = parse_spec(
        "version: 1\ndataset: {items: [{q: a, i: b}]}\n"
        "prompt:\n  system: {file: s.j2}\n  user: [{text: '{{ q }}'}, {image: '{{ i }}'}]\n",
        folder=Path("/f"),
    )
    assert spec.prompt.system == TextFile(file="/f/s.j2")
    assert isinstance(spec.prompt.user, tuple) and spec.prompt.user[1].image == "{{ i }}"
    whole = parse_spec("version: 1\ndataset: {items: [{m: []}]}\nprompt: {messages: '{{ m }}'}\n")
    assert whole.prompt.messages == "{{ m }}"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("written", ["0755", "755", "0o755", "'0755'", "'0o755'"])
def test_permissions_are_octal_however_they_are_written(tmp_path: Path, written: str) -> None:
    spec = parse_spec(BASE + f"sandbox: {{files: [{{to: a, content: '', mode: {written}}}]}}\n")
    assert spec.sandbox.files[0].mode == 0o755
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(spec.resolved()))
    assert load_spec(tmp_path / "again.yaml", resolved=True).sandbox.files[0].mode == 0o755


def test_secrets_are_free_in_rows_and_arguments() -> None:
    spec = parse_spec(
        'version: 1\ndataset: {items: [{password: a, token: b}]}\nprompt: {user: "{{ token }}"}\n'
        "rewards: {r: {args: {password: x}}}\n"
        "solution: {turns: [{tools: [{name: login, args: {password: x}}]}]}\n"
        'sandbox: {env: {PASSWORD: "{{ password }}"}}\n'
    )
    assert spec.rewards["r"].args["password"] == "x"


def test_demo() -> None:
    text = BASE + (
        "sandbox: {backend: docker, image: debian, setup: [ls]}\n"
        "servers: {policy: {type: vllm, base_url: 'http://a', model: m}, judge: {base_url: 'http://b', model: j}}\n"
    )
    path = Path("/tmp") / "unused"
    assert not path.exists()
    spec = parse_spec(text)
    assert not spec.demo
    demo = parse_spec(text, demo=True)
    assert demo.demo
    assert (demo.servers["policy"][0].type, demo.servers["policy"][0].error_rate) == ("scripted", 0.4)
    assert demo.servers["judge"][0].type == "scripted"
    assert (demo.sandbox.backend, demo.sandbox.image, demo.sandbox.setup) == ("bubblewrap", None, ("ls",))
    own = parse_spec(BASE + "servers: {policy: {type: scripted, error_rate: 0.1}}\n", demo=True)
    assert own.servers["policy"][0].error_rate == 0.1


def digits(text: str, folder: Path | None = None, **options: Any) -> str:
    return fingerprint(parse_spec(text, folder=folder, **options))


def test_the_fingerprint_follows_what_defines_a_rollout(tmp_path: Path) -> None:
    text = BASE + "servers: {policy: {base_url: 'http://a', model: m}}\n"
    same = digits(text)
    assert len(same) == 8 and int(same, 16) >= 0
    for more in (
        "rewards: {a: {fn: exact_match}}\n", "process: {groups: 7}\n", "description: x\n", "budget: {max_tokens: 9}\n",
        "sandbox: {timeout: 9}\n", "agent: {tool_timeout: 9}\n", "wandb: x\n",
        "serve: {group_size: 2}\n", "name: other\n",
    ):  # fmt: skip
        assert digits(text + more) == same, more
    assert digits(text.replace("http://a", "http://b")) == same
    assert digits(text.replace("model: m", "model: m, timeout: 5, max_concurrency: 2, api_key_env: K")) == same
    for more in ("agent: {temperature: 0.5}\n", "seed: 3\n", "toolsets: [file]\n", "sandbox: {setup: [ls]}\n"):
        assert digits(text + more) != same, more
    assert digits(text.replace("model: m", "model: n")) != same
    assert digits(text.replace("{q: a}", "{q: b}")) != same


def test_the_fingerprint_follows_the_content_of_files(tmp_path: Path) -> None:
    text = BASE + "tools: [{python: t.py:f}]\nsandbox: {files: [{to: a, from: d}]}\n"
    prints = []
    for folder, code, data in (("a", "1", "x"), ("b", "1", "x"), ("c", "2", "x"), ("d", "1", "y")):
        here = tmp_path / folder
        (here / "d").mkdir(parents=True)
        (here / "t.py").write_text(f"def f(): return {code}\n")
        (here / "d" / "file").write_text(data)
        prints.append(digits(text, here))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_digest_ignores_sandbox_paths_and_row_values(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    text = (
        f"version: 1\ndataset: {{items: [{{q: {place}, path: {place}, tokenizer: {place}}}]}}\n"
        f"prompt: {{user: {place}}}\n"
        f"sandbox: {{workdir: {place}, files: [{{to: {place}, content: x}}], setup: [{place}]}}\n"
    )
    before = digits(text, tmp_path)
    (place / "file").write_text("new")
    assert digits(text, tmp_path) == before
    assert digits(text.replace("workdir: ", "image: "), tmp_path) != before


def test_a_column_named_timeout_counts() -> None:
    assert digits(BASE.replace("q: a", "q: a, timeout: 1")) != digits(BASE.replace("q: a", "q: a, timeout: 2"))


def test_the_fingerprint_follows_each_kind_of_file_that_a_spec_names(tmp_path: Path) -> None:
    files = ("rows.jsonl", "user.txt", "image", "tokenizer/x")
    (tmp_path / "tokenizer").mkdir()
    text = (
        "version: 1\ndataset: {path: json, data_files: rows.jsonl}\nprompt: {user: {file: user.txt}}\n"
        "sandbox: {image: ./image}\n"
        "servers: {policy: [{base_url: 'http://a', model: m, tokenizer: ./tokenizer}]}\n"
    )
    for name in files:
        (tmp_path / name).write_text("{}")
    seen = {digits(text, tmp_path)}
    for name in files:
        (tmp_path / name).write_text("changed")
        seen.add(digits(text, tmp_path))
    assert len(seen) == len(files) + 1


def test_problems_find_their_place() -> None:
    spec = parse_spec(BASE + "rewards:\n  a:\n    args: {x: 1}\n", name="s.yaml")
    assert str(spec.problem(("rewards", "a", "args", "x"), "m")) == "s.yaml:6:15: m"
    assert str(spec.problem(("rewards", "a", "args", "x"), "m", part="key")) == "s.yaml:6:12: m"
    assert str(spec.problem(("rewards", "a", "weight"), "m")) == "s.yaml:5:3: m"
    assert str(spec.problem(("agent",), "m")) == "s.yaml:1:1: m"
    assert spec.is_written(("rewards", "a")) and not spec.is_written(("rewards", "b"))


def test_importing_is_light() -> None:
    code = (
        "import sys, hermes_rl.spec, hermes_rl.spec.check, hermes_rl.data.check, hermes_rl.spec.schema; "
        "print([m for m in ('datasets', 'transformers', 'atroposlib', 'torch', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_class_can_be_built_by_hand() -> None:
    spec = Spec.model_validate({"dataset": {"items": [{"q": "a"}]}, "prompt": {"user": "x"}})
    assert spec.resolved() == {"dataset": {"items": [{"q": "a"}]}, "prompt": {"user": "x"}}
    assert str(spec.problem(("agent",), "m")) == "spec: m"
