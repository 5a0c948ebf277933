"""`hermes-rl compare` as a user types it: what it refuses, what it warns of, what it says, and its status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.cli.main import status
from tests.analysis.recorded import recorded, write_run

WEIGHTS = [{"name": "right", "weight": 1.0, "gate": False}]


def described(temperature: float = 1.0, parts: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "demo": False,
        "policy": [{"type": "openai", "model": "some/model", "sampling": {"temperature": temperature, "seed": "call"}}],
        "parts": {"prompt": "1", "agent": "2", "servers": "3", "seed": "4", **(parts or {})},
        "grading": {"rewards": {"right": "a"}, "scoring": {"weightings": WEIGHTS, "clamp": None, "on_stop": {}}},
        **more,
    }


def grading(**more: Any) -> dict[str, Any]:
    found = described()["grading"]
    return {**found, **{name: {**found[name], **value} for name, value in more.items()}}


def a_run(folder: Path, scores: list[float | None], spec: str | None = None, **more: Any) -> str:
    lines = [recorded(f"row {number}", score=score, text=more.pop("text", "ok")) for number, score in enumerate(scores)]
    run = write_run(folder, lines, **described(**more))
    if spec is not None:
        (run / "spec.yaml").write_text(spec)
    return str(run)


def test_compare_reports_a_worse_run_and_its_changed_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = a_run(tmp_path / "a", [1.0] * 22 + [0.0] * 2)
    b = a_run(tmp_path / "b", [0.0] * 12 + [1.0] * 12)
    assert status(["compare", a, b]) == 0
    said = capsys.readouterr().out
    assert "B is worse than A, beyond chance" in said
    assert "2 rows fixed, 12 broken" in said
    assert "sign test p = 0.0129" in said
    assert f"hermes-rl show {b} 1" in said
    assert "warning" not in said
    assert status(["compare", a, b, "--fail-if-worse"]) == 1
    assert "is worse than" in capsys.readouterr().err
    assert status(["compare", b, a, "--fail-if-worse"]) == 0
    assert status(["compare", a, b, "--fail-if-worse", "--margin", "0.3"]) == 0


def test_each_further_run_is_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [a_run(tmp_path / name, [float(name == "b"), 1.0, 0.0]) for name in "abc"]
    assert status(["compare", *runs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["a"], one["b"]) for one in found] == [(runs[0], runs[1]), (runs[0], runs[2])]
    assert [one["found"]["score"]["difference"] for one in found] == [pytest.approx(1 / 3), 0.0]
    assert found[0]["found"]["fixed"][0]["row_key"] == "row 0"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"rewards": {"right": "b"}}, "rewards.right has other code"),
        ({"rewards": {"right": "a", "more": "c"}, "scoring": {"weightings": [*WEIGHTS, {"name": "more", "weight": 1}]}},
         "rewards.more is only in B"),
        ({"scoring": {"weightings": [{"name": "right", "weight": 2.0}]}}, "rewards.right has weight 1 in A and 2 in B"),
        ({"scoring": {"clamp": [0, 1]}}, "score.clamp is not set in A and [0, 1] in B"),
        ({"scoring": {"on_stop": {"max_turns": 0}}}, "on_stop is {} in A and {'max_turns': 0} in B"),
    ],
)  # fmt: skip
def test_another_grading_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, Any], said: str
) -> None:
    a, b = a_run(tmp_path / "a", [1.0, 0.0]), a_run(tmp_path / "b", [1.0, 0.0], grading=grading(**other))
    assert status(["compare", a, b]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "--force" in error
    assert status(["compare", a, b, "--force"]) == 0
    assert f"warning: {said}" in capsys.readouterr().out


def test_a_judge_with_a_fallback_is_the_same_for_groups_of_any_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two, three = ({**grading(rewards={"right": size}), "any_size": {"right": "alike"}} for size in ("2", "3"))
    a, b = (a_run(tmp_path / name, [1.0, 0.0], grading=own) for name, own in (("a", two), ("b", three)))
    assert status(["compare", a, b]) == 0
    assert "has other code" not in capsys.readouterr().out


def test_a_reward_that_counts_for_nothing_may_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"weightings": [*WEIGHTS, {"name": "long", "weight": 0.0, "gate": False}]}
    a = a_run(tmp_path / "a", [1.0, 0.0])
    b = a_run(tmp_path / "b", [1.0, 0.0], grading=grading(rewards={"long": "x"}, scoring=more))
    assert status(["compare", a, b]) == 0
    assert "rewards.long is only in B, which counts for nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"temperature": 0.5}, "the temperature is 1.0 in A and 0.5 in B"),
        ({"mode": "process"}, "mode is evaluate in A and process in B"),
        ({"parts": {"prompt": "9"}}, "prompt differs: a file or code that it names has other content"),
        (
            {"parts": {"prompt": "9"}, "spec": "name: asking\nprompt: {system: be brief}\n"},
            "prompt.system is not set in A and be brief in B",
        ),
        (
            {"parts": {"agent": "9"}, "spec": "agent: {temperature: 0.5, max_turns: 3}\n"},
            "agent.max_turns is not set in A and 3 in B",
        ),
        (
            {"spec": "name: asking\nevaluate: {success_threshold: 0.5}\n"},
            "evaluate.success_threshold is 1 in A and 0.5 in B",
        ),
    ],
)
def test_other_settings_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], said: str
) -> None:
    a, b = a_run(tmp_path / "a", [1.0, 0.0]), a_run(tmp_path / "b", [1.0, 0.0], **more)
    assert status(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert f"warning: {said}" in out
    assert out.count("warning:") == 1


def test_another_model_is_what_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = a_run(tmp_path / "a", [1.0, 0.0])
    policy = [{"type": "openai", "model": "other/model", "sampling": {"temperature": 1.0, "seed": "call"}}]
    b = a_run(tmp_path / "b", [1.0, 0.0], policy=policy, parts={"servers": "9", "seed": "9"})
    assert status(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "(some/model)" in out
    assert "(other/model)" in out
    assert "warning" not in out


def test_compare_reports_different_rows_and_rollout_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = a_run(tmp_path / "a", [1.0, 0.0, None]), a_run(tmp_path / "b", [1.0, 0.0])
    lines = [recorded(f"row {n}", index) | {"row_digest": "other"} for n in range(2) for index in range(2)]
    Path(b, "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert status(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "most rows have 1 rollouts in A and 2 in B" in out
    assert "rows with the same key in both runs and other content: 2" in out
    assert "rows that are only in A, and are excluded: 1" in out


def test_what_has_no_score_bounds_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = a_run(tmp_path / "a", [1.0, 0.0, 1.0, 1.0]), a_run(tmp_path / "b", [1.0, 0.0, None, 1.0])
    assert status(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "both graded 3 rows" in out
    assert "without a score: 0 rollouts in A, 1 in B; graded, they could make the difference -0.250 to +0.000" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{a}"], "compare needs two runs"),
        (["{a}", "{a}/nothing"], "there is no run at"),
        (["{a}", "{empty}"], "has no rollout yet"),
        (["{a}", "{a}", "--margin", "0.1"], "pass both"),
        (["{a}", "{a}", "--fail-if-worse", "--margin=-1"], "--margin must be 0 or more"),
    ],
)
def test_compare_reports_invalid_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    a, empty = a_run(tmp_path / "a", [1.0]), a_run(tmp_path / "empty", [])
    assert status(["compare", *(one.format(a=a, empty=empty) for one in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_compare_clusters_rows_by_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for name, better in (("a", 0), ("b", 9)):
        lines = [recorded(f"row {number}", score=float(number < better)) for number in range(24)]
        for number, line in enumerate(lines):
            line["row"]["template"] = f"t{number // 4}"
        runs.append(str(write_run(tmp_path / name, lines, **described())))
    assert status(["compare", *runs]) == 0
    assert "B is better than A, beyond chance; both graded 24 rows\n" in capsys.readouterr().out
    assert status(["compare", *runs, "--cluster-by", "template"]) == 0
    by_family = capsys.readouterr().out
    assert "no difference beyond chance; both graded 24 rows of 6 families" in by_family
    assert "sign test" not in by_family
    assert status(["compare", *runs, "--cluster-by", "templat"]) == 2
    assert "no row of" in (error := capsys.readouterr().err) and "question, answer, template" in error


def test_a_run_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "a", [1.0, 0.0])
    assert status(["compare", run, f"{run}/../a"]) == 2
    assert "is given twice" in capsys.readouterr().err
