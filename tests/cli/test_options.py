"""`validate` and `doctor` take the options of `run`, and `validate` says what `run` would refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_rl.cli.main import status, with_address
from hermes_rl.cli.options import split_flags, with_policy
from hermes_rl.errors import UserError
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Spec
from hermes_rl.spec.overrides import parse_extra_args
from hermes_rl.tokens.parsers.table import load_parser
from hermes_rl.tools.python_tools import python_tool, state_tools
from tests.cli.test_other_commands import Keeper
from tests.http_servers import serving

SPEC = "dataset: {items: [{q: hi}]}\nprompt: {user: '{{ q }}'}\nrewards: {nonempty: {fn: reward.py:r}}\n"
TOOLS = '''
def typed(x: int, y: str = "a") -> int:
    """Do something."""
    return x

def untyped(x, y: int) -> int:
    """Do something."""
    return y

def many(*names: str) -> int:
    """Do something."""
    return 0

def silent(x: int) -> int:
    return x

class World:
    def __init__(self, item): ...
    def move(self, where):
        """Move."""
'''


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text("def r(result):\n    return 1.0\n")
    (tmp_path / "tools.py").write_text(TOOLS)
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def address() -> Iterator[str]:
    with serving(Keeper) as server:
        yield f"{server}/v1"


def test_words_are_specs_or_flags_with_their_values() -> None:
    words = ["a.yaml", "--openai.model_name", "m", "b.yaml", "--env.x=1", "c.yaml", "--env.use_wandb", "--env.y", "-1"]
    specs, flags = split_flags(words)
    assert specs == ["a.yaml", "b.yaml", "c.yaml"]
    assert flags == ("--openai.model_name", "m", "--env.x=1", "--env.use_wandb", "--env.y", "-1")


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        ("--ray", "--ray=local"),
        ("--ray --workers 2", "--ray=local --workers 2"),
        ("--ray 10.0.0.1:6379 --quiet", "--ray 10.0.0.1:6379 --quiet"),
        ("--ray auto", "--ray auto"),
        ("--ray=head:1", "--ray=head:1"),
        ("--ray spec.yaml process", "--ray=local spec.yaml process"),
    ],
)
def test_ray_address_is_optional(typed: str, taken: str) -> None:
    assert with_address(typed.split()) == taken.split()


def test_validate_takes_the_options_of_run(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["validate", str(spec), "--set", "agent.max_turns=3", "--openai.model_name", "m"]) == 2
    assert "--openai.model_name: missing key `base_url`" in capsys.readouterr().err
    good = ["--openai.model_name", "m", "--openai.base_url", "http://localhost:1/v1"]
    assert status(["validate", str(spec), *good, "--env.group_size", "4"]) == 0
    assert status(["validate", str(spec), "--set", "agent.max_turns=no"]) == 2
    assert "--set agent.max_turns" in capsys.readouterr().err
    assert status(["validate", str(spec), "--openai.modell", "m"]) == 2
    assert "did you mean `--openai.model_name`" in capsys.readouterr().err


def test_validate_reads_variables_from_a_file(spec: Path, tmp_path: Path) -> None:
    spec.write_text(SPEC + "agent:\n  max_turns: ${TURNS_OF_A_TEST}\n")
    (tmp_path / "env").write_text("TURNS_OF_A_TEST=4\n")
    assert status(["validate", str(spec)]) == 2
    assert status(["validate", str(spec), "--env-file", str(tmp_path / "env")]) == 0


def test_validate_deep_applies_option_overrides(
    spec: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spec.parent)
    spec.write_text(SPEC + "solution: {turns: [{say: yes}]}\n")
    status(["validate", str(spec), "--deep", "--json", "--set", "rewards.nonempty.weight=3"])
    (verdict,) = json.loads(capsys.readouterr().out)
    assert verdict["scores"]["gold"] == 3
    assert verdict["kept"] == "outputs/spec/deep" and (spec.parent / verdict["kept"] / "rollouts.jsonl").is_file()


@pytest.mark.parametrize(("key", "word"), [("right", "ok"), ("wrong", "FAIL")])
def test_doctor_looks_at_the_server_that_the_options_name(
    spec: Path, address: str, capsys: pytest.CaptureFixture[str], key: str, word: str
) -> None:
    flags = ["--openai.base_url", address, "--openai.model_name", "/nothing", "--openai.api_key", key]
    status(["doctor", str(spec), *flags, "--set", "agent.max_turns=3"])
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if "server policy" in line]
    assert line.startswith(f"{word} ") and "tokenizer /nothing" in said


def test_doctor_looks_at_the_server_of_the_environment(
    spec: Path, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BASE_URL", address), ("MODEL", "/nothing"), ("API_KEY", "right")):
        monkeypatch.setenv(f"OPENAI_{name}", value)
    status(["doctor", str(spec)])
    assert "server policy (openai): " in capsys.readouterr().out


def test_doctor_without_a_spec_takes_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["doctor", "--openai.model_name", "m"]) == 2
    assert "doctor SPEC" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("untyped", "has a parameter without a type: `x`"),
        ("many", "a parameter that a model cannot give (*names)"),
        ("silent", "has no docstring"),
    ],
)
def test_validate_reports_an_uncallable_function_with_its_location(
    spec: Path, capsys: pytest.CaptureFixture[str], tool: str, message: str
) -> None:
    with pytest.raises(UserError):
        python_tool(f"{spec.parent}/tools.py:{tool}")
    spec.write_text(f"{SPEC}tools:\n  - python: tools.py:typed\n  - python: tools.py:{tool}\n")
    assert status(["validate", str(spec)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "tool `" in line]
    assert line.startswith(f"{spec}:6:13: ") and message in line


def test_validate_reports_an_uncallable_state_method_with_its_location(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class World:
        def move(self, where):  # type: ignore[no-untyped-def]
            """Move."""

    with pytest.raises(UserError):
        state_tools(World(), "move")
    spec.write_text(f"{SPEC}state: tools.py:World\ntools:\n  - state: move\n")
    assert status(["validate", str(spec)]) == 2
    assert f"{spec}:6:12: tool `move` has a parameter without a type: `where`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("renderer", "wrong", "message"),
    [
        ("{tool_parser: hermess}", "hermess", "did you mean `hermes`?"),
        ("{name: qwen33}", "qwen33", "did you mean `qwen3`?"),
    ],
)
@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_validate_reports_an_unknown_renderer_with_its_location(
    spec: Path, capsys: pytest.CaptureFixture[str], renderer: str, wrong: str, message: str, kind: str
) -> None:
    server = f"{{type: {kind}, base_url: 'http://h/v1', model: m, renderer: {renderer}}}"
    spec.write_text(f"{SPEC}servers:\n  policy: {server}\n")
    assert status(["validate", str(spec)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "there is no" in line]
    column = len(f"  policy: {server}".partition(wrong)[0]) + 1
    assert line.startswith(f"{spec}:5:{column}: ") and message in line


def test_formats_of_tool_calls_have_the_names_of_other_projects() -> None:
    assert load_parser("llama4_json") is load_parser("llama3_json")
    assert load_parser("deepseek_v31") is load_parser("deepseekv31") is load_parser("deepseek_v3_1")
    assert load_parser("qwen3_xml") is load_parser("qwen3_coder")
    with pytest.raises(UserError, match="no parser reads the format 'llama4_pythonic': let a chat server read"):
        load_parser("llama4_pythonic")


def test_validate_reports_an_unusable_local_tokenizer_as_an_error(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (spec.parent / "empty").mkdir()
    spec.write_text(
        f"{SPEC}servers:\n  policy: {{type: vllm, base_url: 'http://h/v1', model: m, tokenizer: ./empty}}\n"
    )
    assert status(["validate", str(spec)]) == 2
    assert f"{spec}:5:11: its tokens cannot be exact" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "environ", "expected"),
    [
        (1, {"OPENROUTER_API_KEY": "k"}, ("openai", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY")),
        (2, {}, ("vllm", "http://localhost:8000/v1", None)),
        (3, {"OPENAI_API_KEY": "k"}, ("openai", "http://other/v1", "OPENAI_API_KEY")),
        (3, {}, ("openai", "http://other/v1", None)),
        (4, {}, ("vllm", "http://localhost:9001/v1", None)),
    ],
)
def test_a_choice_is_a_policy_of_its_type(
    spec: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    environ: dict[str, str],
    expected: tuple[str, str, str | None],
) -> None:
    answers = {"Number": number, "Address": None, "Model": "m"}

    def prompt(text: str, default: str | None = None, **_: object) -> object:
        return answers[text] or default or "http://other/v1"

    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    def load(*sets: str) -> Spec:
        return load_spec(spec, overrides=parse_extra_args((), sets), environ=environ)

    (policy,) = with_policy(load, environ).servers["policy"]
    assert (policy.type, policy.base_url, policy.api_key_env) == expected


def test_missing_openrouter_key_is_reported_before_the_next_prompt(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def prompt(text: str, **_: object) -> int:
        asked.append(text)
        return 1

    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with pytest.raises(UserError, match="OpenRouter needs a key: set OPENROUTER_API_KEY"):
        with_policy(lambda *sets: load_spec(spec, overrides=parse_extra_args((), sets)), {})
    assert asked == ["Number"]


@pytest.mark.parametrize("mode", ["process", "evaluate"])
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("batch_size", "8"), ("eval_handling", "NONE"), ("eval_limit_ratio", "0.5"), ("include_messages", "false"),
        ("inference_weight", "2"), ("max_batches_offpolicy", "3"), ("min_batch_allocation", "0.1"),
        ("min_items_sent_before_logging", "1"), ("rollout_server_url", "http://h"), ("steps_per_eval", "5"),
        ("max_token_length", "9"), ("worker_timeout", "60"),
    ],
)  # fmt: skip
def test_a_flag_of_which_nothing_comes_is_refused(
    spec: Path, capsys: pytest.CaptureFixture[str], mode: str, flag: str, value: str
) -> None:
    assert status(["run", str(spec), mode, f"--env.{flag}", value]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --env.{flag} has no effect in {mode}: "), said
    assert status(["run", str(spec), mode, f"--env.{flag}={value}"]) == 2


@pytest.mark.parametrize(
    ("mode", "flag"),
    [
        ("process", "--env.max_eval_workers=2"),
        ("process", "--env.data_dir_to_save_evals=x"),
        ("evaluate", "--env.max_num_workers=2"),
        ("evaluate", "--env.max_num_workers_per_node=2"),
        ("evaluate", "--env.data_path_to_save_groups=x"),
        ("serve", "--env.worker_timeout=60"),
    ],
)
def test_a_flag_of_another_mode_is_refused(
    spec: Path, capsys: pytest.CaptureFixture[str], mode: str, flag: str
) -> None:
    assert status(["run", str(spec), mode, flag]) == 2
    assert f"{flag.partition('=')[0]} has no effect in {mode}: " in capsys.readouterr().err


def test_flags_that_match_the_default_behaviour_are_accepted(spec: Path) -> None:
    from hermes_rl.runs.setup import in_flight, require_effect

    require_effect(["--env.worker_timeout", "-1", "--env.include_messages", "true"], "process")
    flags = ["--env.max_num_workers_per_node", "3", "--env.group_size", "2"]
    loaded = load_spec(spec, overrides=parse_extra_args(flags, ["servers.policy={type: scripted}"]), mode="process")
    assert in_flight(loaded, "process") == 6
