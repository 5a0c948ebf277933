"""Groups made by an environment's own code are checked in every mode, and errors name their place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hermes_rl.env.serve import serve_environment
from hermes_rl.errors import UserError
from tests.env.canned import Canned, group, make
from tests.trainers.collects import Collects

Makes = Callable[[int], Any]


class Groups(Canned):
    """`makes(number)` gives the group of an item."""

    makes: Makes = staticmethod(lambda number: group(0.0, 1.0))

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        return self.makes(item), []


class Processed(Canned):
    """`makes(number)` is what is made of a group in the end."""

    makes: Makes = staticmethod(lambda number: group(0.0, 1.0))

    async def postprocess_histories(self, trajectories: Any) -> Any:
        return self.makes(self.number)


async def processed(cls: type[Canned], makes: Makes, folder: Path, total: int = 2) -> list[dict[str, Any]]:
    path = folder / "groups.jsonl"
    env = make(cls, total_steps=total, data_path_to_save_groups=str(path), max_num_workers=1)
    env.makes = makes  # type: ignore[attr-defined]
    await env.process_manager()
    return [json.loads(line) for line in path.read_text().splitlines()]


async def served(cls: type[Canned], makes: Makes, folder: Path, total: int = 2) -> list[dict[str, Any]]:
    env, trainer = make(cls, max_num_workers=1, ensure_scores_are_not_same=False), Collects(total)
    env.makes = makes  # type: ignore[attr-defined]
    await env.setup()
    try:
        await serve_environment(env, trainer)
    finally:
        await env.shut_down()
    return [line for _, lines in trainer.groups for line in lines]


three = group(0.0, 1.0, 0.5)
BROKEN = {
    "it has {'tokens': 2, 'scores': 2, 'masks': 3} instead of 2 members": {**group(0.0, 1.0), "masks": three["masks"]},
    "it has scores, tokens, and no masks": {**group(0.0, 1.0), "masks": None},
    "entry 1 of masks has 2 values for 3 tokens": {**group(0.0, 1.0), "masks": [[-100, 2, 3], [-100, 2]]},
    "entry 0 of inference_logprobs has 1 values for 3 tokens": group(0.0, 1.0, inference_logprobs=[[0.1]] * 2),
    "its messages are 1 instead of 2": group(0.0, 1.0, messages=[[]]),
    "a score is 'good'": {**group(0.0, 1.0), "scores": [1.0, "good"]},
    "its scores are a float": {**group(0.0, 1.0), "scores": 1.0},
    "it is a tuple": [("tokens", 1)],
    "TypeError: object of type 'NoneType' has no len()": {**group(0.0, 1.0), "tokens": [None, None]},
    "TypeError: 'float' object cannot be interpreted as an integer": {**group(0.0, 1.0), "tokens": [[1.5, 2, 3]] * 2},
    "OverflowError: int too big to convert": {**group(0.0, 1.0), "tokens": [[1 << 63, 2, 3]] * 2},
    "TypeError: 'str' object is not a mapping": group(0.0, 1.0, messages=["hi", "ho"]),
    "AttributeError: 'list' object has no attribute 'get'": group(0.0, 1.0, group_overrides=[2]),
    "TypeError: set has no JSON form": group(0.0, 1.0, overrides=[{1}, {2}]),
    "ValueError: Out of range float values": group(0.0, 1.0, inference_logprobs=[[math.nan] * 3] * 2),
}


@pytest.mark.parametrize("play", [processed, served])
@pytest.mark.parametrize("cls", [Groups, Processed])
@pytest.mark.parametrize("said", BROKEN)
async def test_a_broken_group_ends_the_program_with_its_place(
    play: Any, cls: type[Canned], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        await play(cls, lambda number: BROKEN[said], tmp_path)
    method = "collect_trajectories" if cls is Groups else "postprocess_histories"
    assert str(refused.value).startswith(f"{cls.__name__}.{method} gave a group that cannot be used: {said}")
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if f"def {method}" in text)
    assert str(refused.value).endswith(f"test_own_groups.py:{line})")


@pytest.mark.parametrize("play", [processed, served])
@pytest.mark.parametrize("cls", [Groups, Processed])
async def test_a_broken_group_after_a_good_one_costs_itself_alone(play: Any, cls: type[Canned], tmp_path: Path) -> None:
    broken = {**group(0.0, 1.0), "masks": [[1]]}
    lines = await play(cls, lambda number: broken if number == 2 else group(0.0, float(number)), tmp_path, 3)
    assert [line["scores"] for line in lines][:3] == [[0.0, 1.0], [0.0, 3.0], [0.0, 4.0]]


@pytest.mark.parametrize("play", [processed, served])
@pytest.mark.parametrize("cls", [Groups, Processed])
async def test_a_score_that_is_not_finite_costs_its_group_alone(play: Any, cls: type[Canned], tmp_path: Path) -> None:
    lines = await play(cls, lambda number: group(0.0, math.nan if number == 1 else 1.0), tmp_path)
    assert [line["scores"] for line in lines][:2] == [[0.0, 1.0]] * 2


@pytest.mark.parametrize("play", [processed, served])
async def test_arrays_of_numpy_are_as_good_as_lists(play: Any, tmp_path: Path) -> None:
    lists = group(0.0, 1.0)
    arrays = {**lists, **{name: [np.array(each) for each in lists[name]] for name in ("tokens", "masks")}}
    lines = await play(Groups, lambda number: arrays, tmp_path)
    assert [np.array(line["tokens"]).tolist() for line in lines] == [lists["tokens"]] * 2


async def test_a_broken_rollout_names_the_method_that_was_overridden(tmp_path: Path) -> None:
    env = make(play=lambda number: {"tokens": [1, 2], "masks": [1], "scores": 1.0}, total_steps=1,
               data_path_to_save_groups=str(tmp_path / "groups.jsonl"))  # fmt: skip
    with pytest.raises(UserError, match=r"Canned.collect_trajectory gave .*entry 0 of masks has 1 values for 2 tokens"):
        await env.process_manager()


class Few(Processed):
    """Three items, of which nothing is made."""

    async def get_next_item(self) -> Any:
        number = await super().get_next_item()
        return number if number <= 3 else None


@pytest.mark.parametrize(("cls", "groups"), [(Few, 3), (Processed, 101)])
async def test_postprocessing_that_drops_every_group_is_reported_as_the_cause(
    cls: type[Canned], groups: int, tmp_path: Path
) -> None:
    said = rf"Processed.postprocess_histories returned nothing for all {groups} groups .*test_own_groups.py:\d+\)$"
    with pytest.raises(UserError, match=said):
        await processed(cls, lambda number: None, tmp_path)


async def test_groups_dropped_by_postprocessing_are_counted_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = await processed(Few, lambda number: group(0.0, 1.0) if number == 1 else None, tmp_path)
    assert len(lines) == 1
    assert "there are no more items, and postprocess_histories returned nothing for 2 groups" in capsys.readouterr().err


async def test_exception_in_postprocess_histories_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Processed.postprocess_histories raised KeyError: 7 at .*test_own_groups.py"):
        await processed(Processed, lambda number: {}[7], tmp_path)
