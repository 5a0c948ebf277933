"""New reward code judges what was said again; nothing is played, and what cannot be judged is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_run import lines
from tests.commands import hermes

SPEC = """
dataset: {items: [{word: ab}, {word: cde}, {word: fg}, {word: hijk}], eval: only}
prompt: {user: "Say {{ word }}"}
rewards:
  long: {fn: "rewards.py:long", range: [0, 99], args: {word: "{{ word }}"}}
  place: {fn: "rewards.py:place", weight: 0, range: [0, 99]}
solution: {turns: [{say: "{{ word }}"}]}
servers: {policy: {type: scripted, error_rate: 0.5}}
evaluate: {rollouts: 2, agent: {temperature: 1.0}}
process: {groups: 4, group_size: 2}
"""
CODE = """
def long(item, result, *, word):
    return float(len(result.final_response)) * {factor}

def place(group):
    return [float(index) * {factor} for index in range(len(group))]
"""


def write(folder: Path, *, factor: str = "1", only: bool = True) -> None:
    (folder / "spec.yaml").write_text(SPEC if only else SPEC.replace(", eval: only", ""))
    (folder / "rewards.py").write_text(CODE.format(factor=factor))


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "run" / "rollouts.jsonl")


EVALUATE = ["run", "spec.yaml", "evaluate", "--out", "run", "--quiet"]


@pytest.mark.slow
def test_changed_reward_code_regrades_recorded_rollouts_with_a_notice(tmp_path: Path) -> None:
    write(tmp_path)
    assert hermes(*EVALUATE, cwd=tmp_path).returncode == 0
    before = rollouts(tmp_path)
    write(tmp_path, factor="10")
    done = hermes(*EVALUATE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rewards long, place have changed: regrading 8 recorded rollouts without new model calls" in done.stderr
    after = rollouts(tmp_path)
    assert [line["messages"] for line in after] == [line["messages"] for line in before]
    assert [line["score"] for line in after] == [line["score"] * 10 for line in before]
    assert {line["rewards"]["place"]["value"] for line in after} == {0.0, 10.0}
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())["results"]["all"]
    assert metrics["eval/mean_reward"] == sum(line["score"] for line in after) / 8
    assert not (tmp_path / "run" / "regrade.jsonl").exists()


@pytest.mark.slow
def test_regrade_applies_changed_rewards_and_rewrites_the_groups(tmp_path: Path) -> None:
    write(tmp_path, only=False)
    assert hermes("run", "spec.yaml", "process", "--out", "run", "--quiet", cwd=tmp_path).returncode == 0
    before = {line["group"]: line for line in lines(tmp_path / "run" / "groups.jsonl")}
    write(tmp_path, factor="3", only=False)
    (tmp_path / "spec.yaml").unlink()
    done = hermes("regrade", "run", "--set", "rewards.place.weight=0.5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "in groups.jsonl: 4 groups" in done.stdout
    assert done.stdout.rstrip().endswith("run directory: run")
    assert done.stderr.rstrip().endswith("next: hermes-rl show run")
    after = {line["group"]: line for line in lines(tmp_path / "run" / "groups.jsonl")}
    assert after.keys() == before.keys()
    for name, group in after.items():
        assert group["tokens"] == before[name]["tokens"]
        assert group["scores"] == [3 * score + 1.5 * index for index, score in enumerate(before[name]["scores"])]
    again = hermes("regrade", "run", cwd=tmp_path)
    assert "anew" not in again.stderr, "the directory knows its weights and code now"


def test_fixed_reward_grades_recorded_rollouts_without_running_new_ones(tmp_path: Path) -> None:
    write(tmp_path, factor="undefined")
    once = [*EVALUATE, "--set", "evaluate.rollouts=1"]
    failed = hermes(*once, cwd=tmp_path)
    assert failed.returncode == 1
    assert "none of 4 rollouts could be graded" in failed.stderr
    played = len(rollouts(tmp_path))
    write(tmp_path)
    done = hermes(*once, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(rollouts(tmp_path)) == played, "nothing was played"
    assert sum(line["score"] is not None for line in rollouts(tmp_path)) == 4


@pytest.mark.slow
def test_code_that_breaks_what_was_judged_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    assert hermes(*EVALUATE, cwd=tmp_path).returncode == 0
    before = (tmp_path / "run" / "rollouts.jsonl").read_text()
    write(tmp_path, factor="undefined")
    done = hermes(*EVALUATE, cwd=tmp_path)
    assert done.returncode == 1
    assert "8 of 8 rollouts cannot be judged; nothing was changed" in done.stderr
    assert (tmp_path / "run" / "rollouts.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("rewards.lang.weight=2", "there is no reward 'lang'; did you mean `long`?\n"),
        ("rewards.long.fn=other.py:long", "reward 'long' needs 'word': give it under args"),
        ("rewards.long.fn=numeric_close", "reward 'long' needs 'target': give it under args"),
        ("rewards.long.args.wrod=x", "reward 'long' takes no argument 'wrod'; its arguments: word\n"),
    ],
)
def test_invalid_reward_option_is_refused_before_regrading(tmp_path: Path, change: str, said: str) -> None:
    write(tmp_path)
    (tmp_path / "other.py").write_text("def long(result, word):\n    return 1.0\n")
    assert hermes(*EVALUATE, cwd=tmp_path).returncode == 0
    for command in (["regrade", "run"], EVALUATE):
        done = hermes(*command, "--set", change, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr and "anew" not in done.stderr, done.stderr
        assert "\n" not in done.stderr.rstrip(), done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def long(ctx, *, word):\n    return 1.0\n", "it reads the rollout's sandbox (ctx)"),
        ("def long(state, *, word):\n    return 1.0\n", "it reads the state object"),
    ],
)
def test_what_needs_more_than_the_messages_is_refused_by_name(tmp_path: Path, code: str, said: str) -> None:
    write(tmp_path)
    assert hermes(*EVALUATE, cwd=tmp_path).returncode == 0
    before = (tmp_path / "run" / "rollouts.jsonl").read_text()
    (tmp_path / "rewards.py").write_text(code + "\ndef place(group):\n    return [1.0 for _ in group]\n")
    for command in (EVALUATE, ["regrade", "run"]):
        done = hermes(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert f"rewards.long has changed and cannot be computed from the run's record: {said}" in done.stderr
        assert "rewards.place" not in done.stderr
    assert (tmp_path / "run" / "rollouts.jsonl").read_text() == before


FRESH = """
dataset: {items: [{word: ab}, {word: cde}], eval: only}
prompt: {user: "Write {{ word }} to work/out."}
toolsets: [terminal]
sandbox: {files: [{to: base, content: "=", mode: 0o644}]}
artifacts: {work: {path: work}, said: {command: "cat work/out"}}
rewards:
  long: {fn: "rewards.py:long", sandbox: fresh, range: [0, 99]}
solution:
  turns: [{tools: [{name: terminal, args: {command: "mkdir work; echo -n {{ word }} > work/out; echo x > left"}}]}]
servers: {policy: {type: scripted, error_rate: 0}}
"""
LOOKS = """
def long(ctx):
    assert ctx.terminal("ls -A ~; cat base")["output"] == ".artifacts\\nbase\\nwork\\n="
    assert ctx.artifact("said").decode() == ctx.terminal("cat work/out")["output"]
    return float(len(ctx.terminal("cat work/out")["output"])) * {factor}
"""


def played_with_artifacts(folder: Path) -> None:
    (folder / "spec.yaml").write_text(FRESH)
    (folder / "rewards.py").write_text(LOOKS.format(factor=1))
    done = hermes(*EVALUATE, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(line["score"] for line in rollouts(folder)) == [2, 3]


def test_what_looks_into_a_fresh_sandbox_judges_the_kept_artifacts(tmp_path: Path) -> None:
    played_with_artifacts(tmp_path)
    (tmp_path / "rewards.py").write_text(LOOKS.format(factor=10))
    done = hermes("regrade", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(line["score"] for line in rollouts(tmp_path)) == [20, 30]
    assert all(line["artifacts"]["work"]["files"] == 1 for line in rollouts(tmp_path))


@pytest.mark.parametrize("how", ["changed", "removed", "another"])
def test_artifacts_that_are_not_what_was_taken_are_refused(tmp_path: Path, how: str) -> None:
    played_with_artifacts(tmp_path)
    (tmp_path / "rewards.py").write_text(LOOKS.format(factor=10))
    kept = tmp_path / "run" / rollouts(tmp_path)[0]["artifacts"]["work"]["path"] / "files.tar"
    said = "was changed after the rollout"
    if how == "changed":
        kept.write_bytes(kept.read_bytes().replace(b"ab", b"ba").replace(b"cde", b"edc"))
    elif how == "removed":
        kept.unlink()
        said = "cannot be read: No such file or directory"
    else:
        (tmp_path / "run" / "spec.yaml").write_text(
            (tmp_path / "run" / "spec.yaml").read_text().replace("path: work", "path: left")
        )
        said = "artifacts differ from the run's"
    done = hermes("regrade", "run", "--trust", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert sorted(line["score"] for line in rollouts(tmp_path)) == [2, 3]


def test_regrade_refuses_changes_that_affect_the_rollouts(tmp_path: Path) -> None:
    write(tmp_path)
    assert hermes(*EVALUATE, cwd=tmp_path).returncode == 0
    done = hermes("regrade", "run", "--set", "prompt.user=other", cwd=tmp_path)
    assert done.returncode == 2
    assert "prompt differ from the run's" in done.stderr


def test_changed_prompt_starts_a_new_run_with_a_notice(tmp_path: Path) -> None:
    write(tmp_path)
    assert hermes("run", "spec.yaml", "evaluate", "--quiet", cwd=tmp_path).returncode == 0
    done = hermes("run", "spec.yaml", "evaluate", "--quiet", "--set", "prompt.user=other", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "prompt changed since outputs/spec/evaluate-" in done.stderr
    assert "starting a new run; the earlier run remains" in done.stderr


@pytest.mark.parametrize("command", ["evaluate", "regrade"])
def test_changed_judge_model_regrades_recorded_rollouts(tmp_path: Path, command: str) -> None:
    text = SPEC.replace(
        '{fn: "rewards.py:long", range: [0, 99], args: {word: "{{ word }}"}}', "{fn: llm_judge, args: {rubric: Good}}"
    )
    text = text.replace("{type: scripted, error_rate: 0.5}", "{type: scripted}, judge: {type: scripted, model: first}")
    write(tmp_path)
    (tmp_path / "spec.yaml").write_text(text)
    assert hermes(*EVALUATE, cwd=tmp_path).returncode == 0
    again = EVALUATE if command == "evaluate" else ["regrade", "run"]
    done = hermes(*again, "--set", "servers.judge.model=second", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reward long has changed: regrading 8 recorded rollouts without new model calls" in done.stderr
