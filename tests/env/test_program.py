"""`.cli()`: environments as programs, strict where atroposlib's parser guesses, silent about keys."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl import HermesAgentEnvConfig
from hermes_rl.env.program import _copy_with, _merge_servers, _read_settings
from hermes_rl.errors import UserError
from hermes_rl.tokens.hub import HubTokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.commands import program
from tests.env.test_token_exact import tokenizer_folder
from tests.env.writer_model import WriterModel, writer_model
from tests.servers.token_policy import TokenPolicy
from tests.tokens.families import CODER, write_coder

ROOT = Path(__file__).parents[2]
KEY = "sk-never-shown-0815"


SPEC_ENV = "from hermes_rl import compile_spec, load_spec; compile_spec(load_spec('terminal-files')).cli()"
BY_HAND = "from tests.env.greetings import Greetings; Greetings.cli()"


model = pytest.fixture(writer_model)


def test_a_compiled_spec_processes_as_the_command_line_does(tmp_path: Path) -> None:
    done = program(SPEC_ENV, "process", "--env.total_steps", "2", "--env.group_size", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (groups,) = tmp_path.rglob("groups.jsonl")
    assert [len(json.loads(line)["scores"]) for line in groups.read_text().splitlines()] == [3, 3]


@pytest.mark.slow
def test_a_compiled_spec_evaluates(tmp_path: Path) -> None:
    done = program(SPEC_ENV, "evaluate", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("metrics.json"))) == 1
    assert re.search(r"^mean_reward \d\.\d{4}$", done.stdout, re.MULTILINE), done.stdout


async def test_an_environment_by_hand_processes_and_prints_no_key(model: WriterModel, tmp_path: Path) -> None:
    arguments = [
        "process", "--openai.base_url", model.url, "--openai.model_name", "writer", "--openai.api_key", KEY,
        "--env.tokenizer_name", str(small_tokenizer_path()), "--env.total_steps", "2", "--env.group_size", "2",
        "--env.data_path_to_save_groups", "made/groups.jsonl",
    ]  # fmt: skip
    done = await asyncio.to_thread(program, BY_HAND, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "made" / "groups.jsonl").read_text().splitlines()) == 2
    assert model.keys == {f"Bearer {KEY}"}
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert all(KEY not in text for text in [done.stdout, done.stderr, *written])


@pytest.mark.slow
async def test_evaluate_by_hand_writes_no_key_either(model: WriterModel, tmp_path: Path) -> None:
    arguments = [
        "evaluate", "--openai.base_url", model.url, "--openai.model_name", "writer", "--openai.api_key", KEY,
        "--env.tokenizer_name", str(small_tokenizer_path()), "--env.data_dir_to_save_evals", "evals",
    ]  # fmt: skip
    done = await asyncio.to_thread(program, BY_HAND, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"] == {"eval/mean_reward": 1.0}
    assert "eval/mean_reward 1.0000\n" in done.stdout
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert all(KEY not in text for text in [done.stdout, done.stderr, *written])


async def test_tool_call_format_defaults_to_the_format_of_the_template(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=True)
    (folder / "chat_template.jinja").write_text(CODER)

    def writes(prompt: str, chance: random.Random) -> str:
        if "<tool_response>" in prompt:
            return "Done.<|im_end|>"
        who = prompt.rpartition("Write hello ")[2].split()[0]
        return write_coder("", None, [("terminal", {"command": f"echo hello {who} > ~/greeting.txt"})]) + "<|im_end|>"

    async with TokenPolicy(HubTokenizer(str(folder)), writes).running() as url:
        arguments = [
            "process", "--openai.server_type", "vllm", "--openai.base_url", url, "--openai.model_name", "m",
            "--openai.tokenizer_name", str(folder), "--env.tokenizer_name", str(folder),
            "--env.total_steps", "1", "--env.group_size", "2", "--env.data_path_to_save_groups", "groups.jsonl",
        ]  # fmt: skip
        done = await asyncio.to_thread(program, BY_HAND, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert json.loads(line)["scores"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage"),
        (["train"], "usage"),
        (["process", "--env.group_sise", "2"], "did you mean group_size"),
        (["process", "--env.group_size", "two"], "group_size"),
        (["process", "--env.group_size"], "needs a value"),
        (["process", "--env.group_size", "2", "--env.group_size", "3"], "given twice"),
        (["process", "--testing", "true"], "unknown flag --testing"),
        (["process", "stray"], "unexpected argument"),
        (["process", "--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_flags_end_with_2_and_no_traceback(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hermes_rl.env.program import main
    from tests.env.greetings import Greetings

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(Greetings, arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["process", "--help"], ["serve", "-h"]])
def test_help_lists_the_flags(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from hermes_rl.env.program import main
    from tests.env.greetings import Greetings

    main(Greetings, arguments)
    said = capsys.readouterr()
    assert said.out.startswith("usage: ")
    assert "--env.max_agent_turns\n    Model calls per rollout.\n" in said.out
    assert "--openai.base_url\n" in said.out
    assert said.err == ""


def test_minus_one_lists_and_mappings_are_values() -> None:
    given = _read_settings(
        ["--env.worker_timeout", "-1", "--env.enabled_toolsets", "[terminal, file]", "--env.extra_body={a: 1}"]
    )
    config = _copy_with(HermesAgentEnvConfig(), given["env"], "--env")
    assert config.worker_timeout == -1
    assert config.enabled_toolsets == ["terminal", "file"]
    assert config.extra_body == {"a": 1}


def test_a_config_file_gives_way_to_flags_and_knows_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("env: {group_size: 2, seed: 5}\nopenai: {model_name: m}\n")
    given = _read_settings(["--config", str(file), "--env.group_size", "7"])
    assert given == {"env": {"group_size": 7, "seed": 5}, "openai": {"model_name": "m"}}
    file.write_text("")
    assert _read_settings(["--config", str(file)]) == {"env": {}, "openai": {}}
    file.write_text("environment: {}\n")
    with pytest.raises(UserError, match="unknown key 'environment'"):
        _read_settings(["--config", str(file)])


def test_openai_flags_change_every_server() -> None:
    servers = [APIServerConfig(base_url="http://a"), APIServerConfig(base_url="http://b")]
    changed = _merge_servers(servers, {"model_name": "m"})
    assert [(s.base_url, s.model_name) for s in changed] == [("http://a", "m"), ("http://b", "m")]


OVERRIDDEN = """
import sys
from hermes_rl import compile_spec, load_spec
from hermes_rl.spec.overrides import parse_extra_args
changes = parse_extra_args([], ["process.group_size=3", "process.groups=5", "agent.max_turns=7"])
compile_spec(load_spec("terminal-files", overrides=changes)).cli()
"""


def test_flags_override_spec_changes_of_a_program_and_keep_the_rest(tmp_path: Path) -> None:
    done = program(OVERRIDDEN, "process", "--env.total_steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (groups,) = tmp_path.rglob("groups.jsonl")
    assert [len(json.loads(line)["scores"]) for line in groups.read_text().splitlines()] == [3, 3]
    assert "max_turns: 7" in (groups.parent / "spec.yaml").read_text()


@pytest.mark.slow
def test_a_program_gives_no_advice_about_models(tmp_path: Path) -> None:
    def anew(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    advice = "PyTorch was not found"
    if advice not in anew("import transformers").stderr:
        pytest.skip("the library has nothing to say here")
    code = "from hermes_rl import HermesAgentBaseEnv; import transformers; HermesAgentBaseEnv.cli()"
    done = anew(code, "--help")
    assert done.returncode == 0 and "--env.group_size" in done.stdout
    assert advice not in done.stderr
