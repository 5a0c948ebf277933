"""Steps: words of a user that bring files along, rewards behind each, and a least reward for going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl import Group, StopReason, UserError, attach_provenance, open_env
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.regrade import regrade
from hermes_rl.runs.setup import RunOptions
from hermes_rl.runs.store import result_of, rollout_record
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.overrides import parse_extra_args
from tests.api import summing
from tests.rollouts.test_state_replies import play, says

REWARDS = '''
"""Rewards that look at steps."""
from hermes_rl import Score


def written(ctx, *, name: str):
    """Whether the file of a step holds its name."""
    ctx.write_file("secret.txt", name)
    return ctx.read_file(name).get("content", "").strip() == name


def said(result, item, *, number: int = -1):
    """Whether the agent's words are the number of its step, and which steps were there before."""
    assert number in (-1, item["step"]), (number, item)
    value = float(result.final_response.strip() == str(item["step"]))
    return Score(value, metrics={"length": len(result.final_response), "steps": len(result.steps)})


def whole(result):
    """How many steps there were before the last."""
    return len(result.steps) / 10


def fails(result):
    """Fails at the second step."""
    if len(result.steps) == 1:
        raise ConnectionError("nobody is there")
    return 1.0
'''


def spec_of(folder: Path, turns: list[Any], **sections: Any) -> Any:
    (folder / "rewards.py").write_text(REWARDS)
    spec: dict[str, Any] = {
        "name": "steps",
        "dataset": {"items": [{"names": ["one", "two", "three"]}]},
        "prompt": {"user": "0?"},
        "user": {"turns": ["1?", "2?"]},
        "rewards": {"said": {"fn": "rewards.py:said", "per_step": "mean", "args": {"number": "{{ step }}"}}},
        "solution": {"turns": turns},
        "servers": {"policy": {"type": "scripted"}},
        "process": {"groups": 1, "group_size": 1},
        **sections,
    }
    return parse_spec(yaml.safe_dump({key: part for key, part in spec.items() if part is not None}), folder=folder)


def runs(command: str) -> list[Any]:
    return [{"tools": [{"name": "terminal", "args": {"command": command}}]}, {"say": "Done."}]


@pytest.mark.parametrize(
    ("how", "words", "score", "steps"),
    [
        ("mean", ("0", "1", "2"), 1.0, 2),
        ("mean", ("0", "?", "2"), 2 / 3, 2),
        ("last", ("0", "?", "2"), 1.0, 2),
        ("last", ("0", "1", "?"), 0.0, 2),
    ],
)
async def test_a_reward_looks_at_each_step(
    tmp_path: Path, how: str, words: tuple[str, ...], score: float, steps: int
) -> None:
    rewards = {"said": {"fn": "rewards.py:said", "per_step": how, "args": {"number": "{{ step }}"}}}
    rollout = await play(spec_of(tmp_path, says(*words), rewards=rewards))
    assert (rollout.stop_reason, rollout.score) == (StopReason.FINISHED, pytest.approx(score)), rollout.error
    assert rollout.result is not None
    assert [step.turns for step in rollout.result.steps] == [1, 2]
    said = rollout.rewards["said"]
    assert [said.metrics[f"step_{n}"] for n in (1, 2, 3)] == [float(word == str(n)) for n, word in enumerate(words)]
    assert said.metrics["steps"] == (1.0 if how == "mean" else 2.0), "of each step as many as were before it"


@pytest.mark.parametrize(
    ("least", "words", "stop_reason", "score"),
    [
        (1, ("0", "1", "2"), StopReason.FINISHED, 1.0),
        (1, ("0", "?", "2"), StopReason.STEP_FAILED, 0.5),
        (1, ("?", "1", "2"), StopReason.STEP_FAILED, 0.0),
        ({"said": 0.5, "length": 1}, ("0", "1", "2"), StopReason.FINISHED, 1.0),
        ({"length": 2}, ("0", "11", "2"), StopReason.STEP_FAILED, 1.0),
        ({"nothing of that name": -5}, ("0", "1", "2"), StopReason.STEP_FAILED, 1.0),
    ],
)
async def test_the_next_words_may_ask_for_a_least_reward(
    tmp_path: Path, least: Any, words: tuple[str, ...], stop_reason: StopReason, score: float
) -> None:
    user = {"turns": [{"say": "1?", "min_reward": least}, {"say": "2?", "min_reward": least}]}
    rollout = await play(spec_of(tmp_path, says(*words), user=user))
    assert (rollout.stop_reason, rollout.score) == (stop_reason, score), rollout.error


async def test_step_provides_files_and_setup_and_rewards_leave_no_files(tmp_path: Path) -> None:
    words = [
        {
            "say": "Write {{ names[1] }}.",
            "files": [
                {"to": "given.txt", "content": "{{ names[1] }}"},
                {"to": "run.sh", "content": "echo", "mode": 755},
            ],
            "setup": ["test -x run.sh && ! test -e secret.txt && test -e one && cp given.txt copied.txt"],
            "min_reward": "{{ 1 if names else 0 }}",
        }
    ]
    spec = spec_of(
        tmp_path,
        [*runs("cd / && cd - && printf one > one"), *runs("test ! -e secret.txt && cat copied.txt > two")],
        toolsets=["terminal"],
        user={"turns": words},
        rewards={"written": {"fn": "rewards.py:written", "per_step": "mean", "args": {"name": "{{ names[step] }}"}}},
    )
    rollout = await play(spec)
    assert (rollout.stop_reason, rollout.score, rollout.error) == (StopReason.FINISHED, 1.0, None)
    assert rollout.result is not None
    assert rollout.result.tool_errors == []


@pytest.mark.parametrize(
    ("command", "part", "told"),
    [
        ("rm -f /tmp/x", {"setup": ["echo why; false"]}, "the command 'echo why; false' failed (1): why"),
        ("true", {"setup": ["test -e one"]}, "failed (1)"),
    ],
)
async def test_step_setup_broken_by_the_agent_is_its_stop_reason(
    tmp_path: Path, command: str, part: dict[str, Any], told: str
) -> None:
    spec = spec_of(
        tmp_path,
        [*runs(command), *says("never said")],
        toolsets=["terminal"],
        user={"turns": [{"say": "Go on.", **part}, {"say": "Never said."}]},
        rewards={"written": {"fn": "rewards.py:written", "per_step": "mean", "args": {"name": "{{ names[step] }}"}}},
    )
    rollout = await play(spec)
    assert (rollout.stop_reason, rollout.score) == (StopReason.ENVIRONMENT_ERROR, 0.0), rollout.error
    assert rollout.result is not None
    assert told in rollout.result.tool_errors[-1].error
    assert set(rollout.rewards["written"].metrics) == {"step_1", "step_2"}, "the step that could not begin counts"


async def test_step_rewards_require_a_sandbox_that_can_be_copied(tmp_path: Path) -> None:
    rewards = {"written": {"fn": "rewards.py:written", "per_step": "mean", "args": {"name": "one"}}}
    kept = {"toolsets": ["terminal"], "sandbox": {"keep_processes": True}}
    with pytest.raises(UserError, match=r"rewards\.written\.per_step: .*processes cannot be copied; remove sandbox"):
        await play(spec_of(tmp_path, says("0", "1", "2"), rewards=rewards, **kept))
    alone = spec_of(tmp_path, says("0"), rewards=rewards, user={"turns": []}, **kept)
    assert (await play(alone)).stop_reason is StopReason.FINISHED, "the only step is graded where the agent was"


async def test_what_the_agent_leaves_that_cannot_be_copied_is_the_lowest_value(tmp_path: Path) -> None:
    deep = "n=$(printf %0250d 0); for i in $(seq 20); do mkdir $n && cd $n; done"
    rollout = await play(
        spec_of(
            tmp_path,
            [*runs(f"echo one > one; ({deep})"), *runs("true"), *runs("true")],
            toolsets=["terminal"],
            rewards={"written": {"fn": "rewards.py:written", "per_step": "mean", "args": {"name": "one"}}},
        )
    )
    assert (rollout.stop_reason, rollout.error) == (StopReason.FINISHED, None)
    assert rollout.rewards["written"].metrics == {"step_1": 0.0, "step_2": 0.0, "step_3": 1.0}


async def test_a_user_that_opens_with_a_step_lays_it_down_first(tmp_path: Path) -> None:
    words = [{"say": "0?", "files": [{"to": "one", "content": "one"}]}, {"say": "1?", "min_reward": 1}]
    spec = spec_of(
        tmp_path,
        says("0", "1"),
        prompt={"system": "Answer."},
        user={"turns": words, "speaks_first": True},
        rewards={"written": {"fn": "rewards.py:written", "per_step": "last", "args": {"name": "one"}}},
    )
    rollout = await play(spec)
    assert (rollout.stop_reason, rollout.score, rollout.error) == (StopReason.FINISHED, 1.0, None)
    broken = spec_of(
        tmp_path, says("0"), prompt={}, user={"turns": [{"say": "0?", "setup": ["false"]}], "speaks_first": True}
    )
    with pytest.raises(UserError, match=r"user\.turns\.0: the command 'false' failed"):
        await play(broken)


async def test_failing_step_reward_fails_the_rollout(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, says("0", "1"), rewards={"fails": {"fn": "rewards.py:fails", "per_step": "mean"}})
    rollout = await play(spec)
    assert (rollout.stop_reason, rollout.score) == (StopReason.REWARD_FAILURE, None)
    assert "nobody is there" in str(rollout.error)


async def test_its_tokens_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        summing, "write", lambda text, right=True: ["0", "1\n", " 2"][text.count("<|im_start|>assistant") - 1]
    )
    sampler = summing.Sampler()
    user = {"turns": [{"say": "1?", "min_reward": 1}, {"say": "2?", "min_reward": 1}]}
    async with open_env(spec_of(tmp_path, [], solution=None, user=user)) as env:
        rollout = await env.run(env.rows()[0], sampler.policy())
    assert (rollout.stop_reason, rollout.score, rollout.turns) == (StopReason.FINISHED, 1.0, 3), rollout.error
    assert summing.trained([rollout]) == summing.sampled(sampler.answers)
    assert attach_provenance(Group("g", rollout.key.row, [rollout])).exact


async def test_recorded_steps_are_rescored_but_not_judged_again(tmp_path: Path) -> None:
    rewards = {
        "said": {"fn": "rewards.py:said", "per_step": "mean", "args": {"number": "{{ step }}"}},
        "whole": {"fn": "rewards.py:whole", "weight": 0},
    }
    spec = spec_of(tmp_path, says("0", "?", "2"), rewards=rewards)
    rollout = await play(spec)
    line = json.loads(json.dumps(rollout_record(rollout)))
    assert rollout.result is not None
    assert result_of(line).steps == rollout.result.steps
    await run_process(spec, RunOptions("process", out=tmp_path / "run", progress=Progress(quiet=True)))

    def score() -> float:
        return float(json.loads((tmp_path / "run" / "rollouts.jsonl").read_text())["score"])

    async def again(*sets: str) -> None:
        await regrade(tmp_path / "run", parse_extra_args((), sets), progress=Progress(quiet=True))

    assert score() == pytest.approx(2 / 3)
    await again("rewards.whole.weight=1")
    assert score() == pytest.approx(2 / 3 + 0.2)
    with pytest.raises(UserError, match=r"rewards differ from the run's"):
        await again("rewards.said.per_step=last")


async def test_run_with_steps_resumes(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        says("0", "1", "2"),
        dataset={"items": [{"names": [], "number": n} for n in range(6)]},
        process={"groups": 6, "group_size": 2},
    )
    for groups in (2, 6):
        limited = spec.model_copy(update={"process": spec.process.model_copy(update={"groups": groups})})
        await run_process(limited, RunOptions("process", out=tmp_path / "run", progress=Progress(quiet=True)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    assert {(line["score"], line["attempt"], len(line["steps"])) for line in lines} == {(1.0, 0, 2)}
