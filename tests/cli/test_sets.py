"""`hermes-rl run SET evaluate` as a user types it: runs, the table, going on, what fails, and what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.cli.main import status
from tests.cli.test_run import lines
from tests.commands import Command, environment, hermes, started
from tests.http_servers import Handler, serving
from tests.waiting import until_blocking

SPEC = """
dataset:
  eval: only
  key: q
  items: [{q: 1 + 1, a: "2", level: easy}, {q: 2 + 3, a: "5", level: easy}, {q: 17 * 3, a: "51", level: hard}]
prompt: {user: "{{ q }} = ?"}
solution: {turns: [{say: "{{ a }}"}]}
rewards: {exact_match: {args: {target: "{{ a }}"}}}
evaluate: {rollouts: 4}
"""
BAD, GOOD = (
    "{servers.policy: {type: scripted, error_rate: 0.75}}",
    "{servers.policy: {type: scripted, error_rate: 0.25}}",
)
SET = f"""
set:
  name: small
  specs: [sums.yaml, {{spec: ./sums.yaml, name: few, set: {{evaluate.limit: 2}}}}]
  models:
    - {{name: bad, set: {BAD}}}
    - {{name: good, set: {GOOD}}}
  by: [level]
"""
Out = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "sums.yaml").write_text(SPEC)
    (tmp_path / "small.yaml").write_text(SET)
    return tmp_path


def played(path: Path) -> list[Any]:
    return [line["id"] for line in lines(path / "rollouts.jsonl")]


def test_a_set_is_a_run_of_each_combination_and_one_table(folder: Path, capsys: Out) -> None:
    assert status(["run", "small.yaml", "evaluate"]) == 0
    said = capsys.readouterr()
    titles = [line for line in said.err.splitlines() if line.startswith("run ")]
    assert titles[1] == "run 2 of 4: sums × good, in outputs/small/sums/good"
    assert len(titles) == 4
    table = said.out.splitlines()
    assert table[0].split() == ["rank", "model", "mean", "behind", "sums", "few", "tokens", "s/rollout"]
    assert table[1].split()[:4] == ["1", "(1–2)", "good", "0.750"]
    assert any(line.split() == ["sums", "hard", "1", "0.750", "0.250"] for line in table)
    assert table[-1] == "set directory: outputs/small"
    found = json.loads((folder / "outputs/small/set.json").read_text())
    assert [(one["model"], one["rank"], one["score"]["value"]) for one in found["players"]] == [
        ("good", 1, 0.75),
        ("bad", 2, 0.25),
    ]
    rows = [[cell["rows"] for cell in one["cells"]] for one in found["players"]]
    assert rows == [[3, 2], [3, 2]]
    for run in ("sums/good", "sums/bad", "few/good", "few/bad"):
        metrics = json.loads((folder / "outputs/small" / run / "metrics.json").read_text())["results"]["all"]
        cells = {cell["path"]: cell for one in found["players"] for cell in one["cells"]}
        cell = cells[f"outputs/small/{run}"]
        assert cell["score"]["value"] == metrics["eval/mean_reward"]
        assert cell["stderr"] == metrics["eval/mean_reward_stderr"]
        assert cell["pass_at_1"] == metrics["eval/pass@1"]


def test_repeated_set_runs_nothing_and_prints_the_same_table(folder: Path, capsys: Out) -> None:
    assert status(["run", "small.yaml", "evaluate", "--quiet"]) == 0
    first = capsys.readouterr().out
    ids = played(folder / "outputs/small/sums/bad")
    assert status(["run", "small.yaml", "evaluate", "--quiet"]) == 0
    again = capsys.readouterr()
    assert again.out == first
    assert again.err.count("complete, no rollouts are left to run") == 4
    assert played(folder / "outputs/small/sums/bad") == ids
    assert status(["run", "small.yaml", "evaluate", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "outputs/small/set.json").read_text())


@pytest.mark.slow
def test_more_rollouts_and_other_weights_reach_complete_runs(folder: Path, capsys: Out) -> None:
    assert status(["run", "small.yaml", "evaluate", "--quiet"]) == 0
    ids = played(folder / "outputs/small/sums/bad")
    command = ["run", "small.yaml", "evaluate", "--quiet", "--json", "--set", "evaluate.rollouts=5"]
    capsys.readouterr()
    assert status(command) == 0
    assert len(played(folder / "outputs/small/sums/bad")) == len(ids) + 3
    before = json.loads(capsys.readouterr().out)["players"][0]["score"]["value"]
    assert status([*command, "--set", "rewards.exact_match.weight=0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["players"][0]["score"]["value"] == before / 2
    assert len(played(folder / "outputs/small/sums/bad")) == len(ids) + 3


def test_a_model_whose_server_is_away_does_not_stop_the_others(folder: Path, capsys: Out) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        gone = f"    - {{name: gone, set: {{servers.policy: {{type: openai, base_url: '{away}', model: m}}}}}}\n"
        (folder / "small.yaml").write_text(SET.replace("  models:\n", "  models:\n" + gone))
        assert status(["run", "small.yaml", "evaluate", "--quiet"]) == 1
    said = capsys.readouterr()
    assert "error: 2 of 6 runs failed; the same command retries them" in said.err
    assert "  few × gone: no server of the role 'policy' can be reached" in said.err
    assert "Traceback" not in said.err
    found = json.loads((folder / "outputs/small/set.json").read_text())
    assert [(one["model"], one["rank"]) for one in found["players"]] == [("good", 1), ("bad", 2), ("gone", None)]
    assert next(line for line in said.out.splitlines() if "gone" in line).split() == [
        "-", "gone", "-", "failed", "failed", "0", "-",
    ]  # fmt: skip


class Model(Handler):
    """A chat server that always says 2, and what that cost."""

    def do_POST(self) -> None:  # noqa: N802 - the name is that of http.server
        self.body()
        choice = {"index": 0, "message": {"role": "assistant", "content": "2"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "cost": 0.5}
        self.answer({"model": "m", "choices": [choice], "usage": usage})


def test_models_may_be_served_one_after_the_other(folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is complete needs its server no more."""
    policy = "{servers.policy: {type: openai, base_url: '${%s}', model: %s}}"
    models = [f"{{name: {name}, set: {policy % (name.upper(), name)}}}" for name in ("one", "two")]
    (folder / "small.yaml").write_text(f"set: {{name: small, specs: [sums.yaml], models: [{', '.join(models)}]}}\n")
    command = ["run", "small.yaml", "evaluate", "--quiet"]
    with serving(Model) as address:
        monkeypatch.setenv("ONE", address)
        monkeypatch.setenv("TWO", "http://127.0.0.1:1/v1")
        assert status(command) == 1
        assert "sums × two: no server of the role 'policy' can be reached" in capsys.readouterr().err
    with serving(Model) as address:
        monkeypatch.setenv("ONE", "http://127.0.0.1:1/v1")
        monkeypatch.setenv("TWO", address)
        assert status(command) == 0
    said = capsys.readouterr()
    assert "run 1 of 2: sums × one: complete, no rollouts are left to run" in said.err
    assert said.out.splitlines()[0].split() == ["rank", "model", "behind", "sums", "tokens", "s/rollout", "cost"]
    assert said.out.count("6.00 $") == 2
    found = json.loads((folder / "outputs/small/set.json").read_text())
    assert [(one["rank"], one["ranks"], one["cells"][0]["cost"]) for one in found["players"]] == [(1, [1, 2], 6.0)] * 2


@pytest.mark.slow
def test_set_resumes_the_remaining_rollouts_after_a_kill(folder: Path) -> None:
    (folder / "sums.yaml").write_text(SPEC + "agent: {max_turns: 2}\n")
    slow = SET.replace("specs: [", "specs: [{spec: sums.yaml, name: long, set: {evaluate.rollouts: 100}}, ")
    (folder / "small.yaml").write_text(slow)
    process = started("run", "small.yaml", "evaluate", "--quiet", cwd=folder)
    second = folder / "outputs/small/long/good/rollouts.jsonl"
    wait_for(lambda: second.exists() and second.read_text().count("\n") > 5)
    process.kill()
    ids = played(folder / "outputs/small/long/bad")
    assert len(ids) == 300
    cut = [line for line in second.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert len(cut) < 300
    assert not (folder / "outputs/small/sums").exists()
    done = hermes("run", "small.yaml", "evaluate", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "run 1 of 6: long × bad: complete, no rollouts are left to run" in done.stderr
    assert "run 2 of 6: long × good, in outputs/small/long/good" in done.stderr
    assert played(folder / "outputs/small/long/bad") == ids
    assert second.read_text().startswith("".join(cut))
    assert len({line["group"] for line in lines(second)}) == 3
    assert len(json.loads((folder / "outputs/small/set.json").read_text())["players"][0]["cells"]) == 3


@pytest.mark.slow
def test_ctrl_c_stops_the_set_and_keeps_complete_results(folder: Path) -> None:
    (folder / "small.yaml").write_text(SET.replace("evaluate.limit: 2", "evaluate.rollouts: 2000"))
    process = started("run", "small.yaml", "evaluate", "--quiet", cwd=folder)
    third = folder / "outputs/small/few/bad/rollouts.jsonl"
    wait_for(lambda: third.exists() and third.read_text().count("\n") > 5)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    out, said = process.said()
    assert out == ""
    assert "interrupted; complete results are saved, and the same command resumes the set" in said
    assert "Traceback" not in said
    assert not (folder / "outputs/small/few/good").exists()
    found = json.loads((folder / "outputs/small/set.json").read_text())
    assert [[cell["problem"] for cell in one["cells"]] for one in found["players"]] == [[None, "not run yet"]] * 2


def wait_for(condition: Any) -> None:
    until_blocking(condition, seconds=60)


def test_settings_the_command_line_and_the_specs_own_policy(folder: Path, capsys: Out) -> None:
    (folder / "sums.yaml").write_text(SPEC + "servers: {policy: {type: scripted, error_rate: 0}}\n")
    (folder / "small.yaml").write_text(
        "set:\n  name: small\n  specs:\n    - {spec: sums.yaml, set: {evaluate.rollouts: 1, agent.max_turns: 3}}\n"
        "  models: [{name: own, set: {evaluate.rollouts: 2, agent.max_turns: 4}}]\n"
        "  settings: [{name: plain}, {name: cool, set: {agent.max_turns: 5, evaluate.agent.temperature: 0.25}}]\n"
    )
    assert status(["run", "small.yaml", "evaluate", "--quiet", "--set", "evaluate.limit=1", "--out", "there"]) == 0
    assert capsys.readouterr().out.split()[:4] == ["rank", "model", "setting", "behind"]
    assert sorted(path.name for path in (folder / "there/sums").iterdir()) == ["own-cool", "own-plain"]
    for name, turns in (("plain", 4), ("cool", 5)):
        spec = (folder / f"there/sums/own-{name}/spec.yaml").read_text()
        assert f"max_turns: {turns}\n" in spec
        assert "rollouts: 2\n" in spec
        assert "limit: 1\n" in spec
    assert status(["run", "small.yaml", "evaluate", "--quiet", "--out", "there", "--fresh"]) == 0
    assert (folder / "there-2/sums/own-cool/metrics.json").is_file()


def test_all_errors_of_a_set_are_reported_before_the_first_run(folder: Path, capsys: Out) -> None:
    (folder / "small.yaml").write_text(
        "set:\n"
        "  name: small\n"
        "  specs: [sums.yaml]\n"
        "  models:\n"
        "    - {name: a, set: {servers.policy: {type: scripted, error_rat: 0.5}}}\n"
        "    - {name: b, set: {servers.policy: {type: scripted}, agent.max_turn: 3}}\n"
        "    - {name: c}\n"
        "    - {name: d, set: {servers.policy: {type: scripted}, dataset.eval: null}}\n"
        "    - {name: e, set: {servers.policy: {type: openai, base_url: 'http://h/v1', model: m, api_key: sk-1234}}}\n"
    )
    for command in (["run", "small.yaml", "evaluate"], ["validate", "small.yaml"]):
        assert status(command) == 2
        said = capsys.readouterr().err.splitlines()
        assert [line.partition(": ")[0] for line in said] == [
            "small.yaml:5:56",
            "small.yaml:6:57",
            "small.yaml:7:7",
            "small.yaml:9:98",
            "sums.yaml",
        ]
        assert "unknown key `error_rat`; did you mean `error_rate`?" in said[0]
        assert "unknown key `max_turn`; did you mean `max_turns`?" in said[1]
        assert "sums × c has no policy" in said[2]
        assert "a secret is written in `api_key`" in said[3]
        assert "sk-1234" not in "\n".join(said)
        assert "dataset.eval is missing" in said[4]
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("set: 3\n", ["1:6: expected a mapping, got the number 3"]),
        ("set: {name: x, specs: [sums.yaml], models: }\n", ["1:1: missing key `models`"]),
        ("set: {nam: x}\n", ["1:1: missing key `specs`", "1:7: unknown key `nam`; did you mean `name`?"]),
        (
            "set: {name: x, specs: [sums.yaml], models: [qwen, {nme: a}]}\nagent: {}\n",
            ["1:45: ", "1:52: unknown key `nme`", "2:1: unknown key `agent`; a set has"],
        ),
        (
            "set: {name: ../x, specs: [], models: [{name: a}]}\n",
            ["1:13: expected a directory name", "1:26: must not be empty"],
        ),
        (
            "set: {name: x, specs: [sum.yaml, gsm8], models: [{name: a}]}\n",
            ["1:24: there is no spec `sum.yaml`", "1:34: there is no spec `gsm8`"],
        ),
        (
            "set: {name: x, specs: [sums.yaml, sums.yaml], models: [{name: a}, {name: a}]}\n",
            ["1:35: two specs are called `sums`", "1:74: two models are called `a`"],
        ),
        (
            "set: {name: x, specs: [sums.yaml], models: [{name: a}, {name: a-b}], "
            "settings: [{name: b-c}, {name: c}]}\n",
            ["1:56: sums × a × b-c and sums × a-b × c would both use the directory sums/a-b-c"],
        ),
        (
            "set: {name: x, specs: [sums.yaml], models: [{name: a, set: {agent..x: 1}}]}\n",
            ["1:61: `agent..x` is not a key"],
        ),
    ],
)
def test_invalid_set_is_reported_with_every_location(folder: Path, capsys: Out, text: str, said: list[str]) -> None:
    (folder / "wrong.yaml").write_text(text)
    assert status(["run", "wrong.yaml", "evaluate"]) == 2
    found = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
    assert len(found) == len(said)
    for line, wanted in zip(found, said, strict=True):
        assert line.startswith(f"wrong.yaml:{wanted}"), line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "small.yaml", "process"], "small.yaml is a set, which is evaluated"),
        (["run", "small.yaml", "serve"], "hermes-rl run small.yaml evaluate"),
        (["run", "sums.yaml", "evaluate", "--json"], "--json is about sets"),
        (["validate", "--deep", "small.yaml"], "--deep needs specs"),
        (["render", "small.yaml"], "small.yaml is a set of specs"),
    ],
)
def test_unsupported_set_command_is_refused_with_a_hint(
    folder: Path, capsys: Out, arguments: list[str], said: str
) -> None:
    assert status(arguments) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "outputs").exists()


def test_another_run_in_a_folder_of_the_set_is_refused(folder: Path, capsys: Out) -> None:
    assert status(["run", "small.yaml", "evaluate", "--quiet"]) == 0
    (folder / "sums.yaml").write_text(SPEC.replace("= ?", "is what?"))
    assert status(["run", "small.yaml", "evaluate", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "outputs/small/few/bad contains a run of another spec" in said
    assert "changed: prompt" in said


def test_dry_run_of_a_valid_set_runs_nothing(folder: Path, capsys: Out) -> None:
    assert status(["validate", "small.yaml"]) == 0
    assert capsys.readouterr().out == "small.yaml: valid\n"
    assert status(["run", "small.yaml", "evaluate", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("to run: 12 rollouts") == 2
    assert said.count("to run: 8 rollouts") == 2
    assert not (folder / "outputs").exists()


def test_the_environment_or_the_demo_may_give_the_policy(
    folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "small.yaml").write_text(
        "set: {name: small, specs: [sums.yaml], models: [{name: a, set: {agent.max_turns: 7}}]}\n"
    )
    with serving(Model) as address:
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        monkeypatch.setenv("OPENAI_MODEL", "m")
        assert status(["run", "small.yaml", "evaluate", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["players"][0]["cells"][0]["policy"] == "m"
    assert "max_turns: 7\n" in (folder / "outputs/small/sums/a/spec.yaml").read_text()
    monkeypatch.delenv("OPENAI_MODEL")
    assert status(["run", "small.yaml", "evaluate", "--quiet"]) == 2
    assert "small.yaml:1:49: sums × a has no policy" in capsys.readouterr().err
    assert status(["run", "small.yaml", "evaluate", "--quiet", "--demo", "--out", "demo"]) == 0
    assert "scripted" in (folder / "demo/set.json").read_text()


def test_the_set_of_the_documentation_is_valid(folder: Path, capsys: Out) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sets.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (folder / "small-models.yaml").write_text(block)
    assert status(["validate", "small-models.yaml"]) == 0, capsys.readouterr().err


def test_table_wider_than_the_terminal_wraps_its_columns(folder: Path) -> None:
    assert hermes("run", "small.yaml", "evaluate", "--quiet", cwd=folder).returncode == 0
    end, terminal = pty.openpty()
    env = environment({"COLUMNS": "60", "TERM": "xterm", "NO_COLOR": "1"})
    with os.fdopen(terminal, "wb", 0) as screen, Path(os.devnull).open("r+") as nothing:
        streams = (nothing, screen, nothing)
        process = Command("run", "small.yaml", "evaluate", "--quiet", cwd=folder, env=env, streams=streams)
    said = b""
    with contextlib.suppress(OSError):  # a terminal that nobody writes to any more
        while part := os.read(end, 4096):
            said += part
    os.close(end)
    assert process.wait(timeout=30) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", said.decode()).splitlines()
    heads = [line.split() for line in shown if "rank  model" in line]
    assert heads == [
        ["rank", "model", "mean", "behind"],
        ["rank", "model", "sums", "few", "tokens"],
        ["rank", "model", "s/rollout"],
    ]
    assert "…" not in "".join(shown)
    assert max(map(len, shown)) <= 60
