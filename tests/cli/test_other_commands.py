"""`validate`, `list`, `schema`, `doctor`, and the question for a policy on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hermes_rl.cli.listing import list_entries
from hermes_rl.cli.main import status
from hermes_rl.errors import install_command
from tests.cli.test_run import no_policy
from tests.commands import ROOT, Command, environment, hermes
from tests.http_servers import Handler, serving

KINDS = ["specs", "toolsets", "tools", "distributions", "rewards", "parsers", "renderers", "sandboxes", "agents"]


@pytest.mark.parametrize("kind", KINDS)
def test_list_names_what_a_spec_may_use(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["list", kind]) == 0
    plain = capsys.readouterr().out
    assert status(["list", kind, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries
    assert all(entry["name"] in plain and entry["description"] for entry in entries)


def test_every_shipped_reward_is_listed() -> None:
    shipped = {path.stem for path in (ROOT / "rewards").glob("*.py")}
    assert {entry["name"] for entry in list_entries("rewards")} >= shipped


def test_every_shipped_spec_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    names = [path.stem for path in (ROOT / "specs").glob("*.yaml")]
    assert status(["validate", *names]) == 0
    assert [line.endswith(": valid") for line in capsys.readouterr().out.splitlines()] == [True] * len(names)


def test_validate_reports_every_problem_at_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "bad.yaml"
    spec.write_text("dataset: {items: [{q: hi}]}\nprompt: {user: '{{ qq }}'}\nrewards: {exact_mach: {}}\nagnt: {}\n")
    assert status(["validate", str(spec)]) == 2
    said = capsys.readouterr().err
    assert f"{spec}:4:1:" in said
    spec.write_text("dataset: {items: [{q: hi}]}\nprompt: {user: '{{ qq }}'}\nrewards: {exact_mach: {}}\n")
    assert status(["validate", str(spec)]) == 2
    said = capsys.readouterr().err
    assert f"{spec}:2:" in said
    assert "did you mean" in said


def test_validate_gives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["validate", str(tmp_path / "missing.yaml"), "--json"]) == 2
    (verdict,) = json.loads(capsys.readouterr().out)
    assert verdict["problems"][0]["message"]


def test_schema_is_the_committed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["schema"]) == 0
    committed = json.loads((ROOT / "docs" / "spec.schema.json").read_text())
    assert json.loads(capsys.readouterr().out) == committed


def test_doctor_reports_control_groups_and_sandbox_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["doctor"]) == 0
    assert "sandbox control groups: " in capsys.readouterr().out
    assert status(["doctor"]) == 0
    assert "ok    sandbox bubblewrap" in capsys.readouterr().out


def test_doctor_asks_the_docker_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert status(["doctor"]) == 0
    assert "note  sandbox docker: the Docker engine at" in capsys.readouterr().out
    spec = tmp_path / "container.yaml"
    spec.write_text("dataset: {items: [{q: hi}]}\nprompt: {user: '{{ q }}'}\nsandbox: {backend: docker}\n")
    assert status(["doctor", str(spec)]) == 1
    said = capsys.readouterr().out
    assert "FAIL  sandbox docker" in said
    assert "systemctl start docker" in said


def test_doctor_looks_at_the_servers_of_a_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.yaml"
    server = "servers: {policy: {base_url: 'http://127.0.0.1:1/v1', model: /m}}\n"
    spec.write_text(no_policy(tmp_path).read_text() + server)
    assert status(["doctor", str(spec), "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["server policy (openai)"]["ok"] is False
    assert checks["server policy (openai)"]["remedy"]
    assert checks["tokenizer /m"]["ok"] is False


class Keeper(Handler):
    """A server that wants the key "right", and is broken for the key "unlucky"."""

    def do_GET(self) -> None:  # noqa: N802 - the name is that of http.server
        answers = {"Bearer right": 200, "Bearer unlucky": 500}
        self.answer(b"", answers.get(self.headers.get("Authorization", ""), 401))


@pytest.mark.parametrize(
    ("key", "word", "said"),
    [
        ("right", "ok", "answers with status 200"),
        ("wrong", "FAIL", "refuses the key (status 401)"),
        ("unlucky", "FAIL", "answers with status 500"),
        (None, "FAIL", "the environment variable THE_KEY"),
    ],
)
def test_doctor_calls_each_server_with_its_key_and_reports_the_response(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    word: str,
    said: str,
) -> None:
    monkeypatch.delenv("THE_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("THE_KEY", key)
    spec = tmp_path / "spec.yaml"
    with serving(Keeper) as address:
        judge = f"{{base_url: '{address}/v1', model: m, api_key_env: THE_KEY}}"
        spec.write_text(no_policy(tmp_path).read_text() + f"servers: {{policy: {{type: scripted}}, judge: {judge}}}\n")
        status(["doctor", str(spec)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "server judge" in line]
    assert line.startswith(f"{word} ") and said in line


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_on_a_terminal_the_policy_is_asked_for(tmp_path: Path) -> None:
    main, side = pty.openpty()
    command = ["run", str(no_policy(tmp_path)), "process", "--set", "process.groups=1"]
    with os.fdopen(side, "r+b", 0) as terminal, (tmp_path / "out").open("w") as out:
        process = Command(*command, cwd=tmp_path, env=environment(), streams=(terminal, out, terminal))
    os.write(main, b"5\n")
    said = b""
    while process.poll() is None or b"groups" not in said:
        try:
            said += os.read(main, 4096)
        except OSError:
            break
    assert process.wait(timeout=60) == 0, said.decode()
    os.close(main)
    assert b"OpenRouter" in said
    assert b"scripted demo" in said


def test_a_malformed_spec_ends_a_run_with_2_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("dataset: {items: [{q: hi}]}\nprompt: {user: hi\n")
    done = hermes("run", "bad.yaml", "process", cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.yaml:" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_openenv_names_the_missing_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_spec("openenv") is None, "this test is for where OpenEnv is not installed"
    assert status(["serve-openenv", "terminal-files"]) == 2
    assert install_command("openenv") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("hermes-rl re", ["regrade", "render", "report"]),
        ("hermes-rl run term", ["terminal-bench", "terminal-bench-2", "terminal-files"]),
        ("hermes-rl run e", ["env", "exam.yaml"]),
        ("hermes-rl run env/", ["env/math.yaml"]),
        ("hermes-rl run ./e", ["./env", "./exam.yaml"]),
        ("hermes-rl run exam.yaml e", ["env", "evaluate", "exam.yaml"]),
        ("hermes-rl run exam.yaml env s", ["scienceworld", "serve", "swe"]),
        ("hermes-rl run exam.yaml evaluate e", []),
        ("hermes-rl validate e", ["env", "exam.yaml"]),
    ],
)
def test_a_shell_completes_commands_specs_and_modes(words: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "empty").mkdir()
    for name in ("env/math.yaml", "exam.yaml"):
        (tmp_path / name).touch()
    asked = {"_HERMES_RL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    program = "import sys; sys.argv[0] = 'hermes-rl'; from hermes_rl.cli.main import main; main()"
    done = hermes(cwd=tmp_path, env=asked, code=program)
    assert sorted(done.stdout.split()) == offered


def test_help_fits_on_a_page_and_says_no_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["run", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--fresh               Start a new run" in said
    assert "--set KEY=VALUE" in said and "<bool>" not in said and len(said.splitlines()) < 45
    assert status(["--help"]) == 0
    assert "..." not in capsys.readouterr().out.split("Commands:")[1]


def test_invalid_choice_is_reported_with_the_allowed_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["list", "spec"]) == 2
    assert "Invalid value for 'kind': 'spec' is not one of 'specs'" in capsys.readouterr().err


def test_a_locale_that_lacks_a_character_ends_no_command() -> None:
    environ = {"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "hermes_rl.cli.main", "serve-http", "--help"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "SPEC" in done.stdout
