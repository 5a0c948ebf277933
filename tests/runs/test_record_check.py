"""Names of earlier versions in records and descriptions of runs."""

from __future__ import annotations

from hermes_rl.runs.record_check import current_description, current_record


def test_names_of_an_old_record_are_translated() -> None:
    old = {
        "state": "left_out", "ending": "world_over", "played": "gave_up", "rewards": {"world_rewards": {"value": 1}},
        "program": {"left_out": {"changed": 3}, "calls": [{"begins": "I look"}]},
        "others": [{"ending": "finished", "state": "lost"}],
    }  # fmt: skip
    assert current_record(old) == {
        "state": "excluded", "stop_reason": "environment_done", "first_stop_reason": "program_aborted",
        "rewards": {"environment_rewards": {"value": 1}},
        "program": {"excluded": {"changed": 3}, "calls": [{"preview": "I look"}]},
        "others": [{"stop_reason": "finished", "state": "retries_exhausted"}],
    }  # fmt: skip


def test_reward_names_that_a_spec_chose_are_kept() -> None:
    rewards = {"left_out": {"value": 1}, "begins": {"value": 0}}
    assert current_record({"ending": "finished", "rewards": rewards})["rewards"] == rewards
    graded = {"grading": {"rewards": {"begins": "a"}, "scoring": {"endings": {"world_over": 0}}}}
    assert current_description(graded)["grading"] == {
        "rewards": {"begins": "a"}, "scoring": {"on_stop": {"environment_done": 0}}
    }  # fmt: skip
