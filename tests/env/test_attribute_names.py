"""A subclass may use any attribute name; none of the base class is in its way."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import BaseEnv

from hermes_rl import compile_spec, load_spec
from tests.env.greetings import Greetings
from tests.env.test_handwritten import make, model
from tests.env.writer_model import WriterModel

__all__ = ["model"]

COMMON = """
    admission agent allow_inexact answers artifacts best buffer cache compiled context core correct count counter
    counts current curriculum data dataset directory done dropped encoder environment env epoch errors eval_buffer
    eval_dataset eval_items eval_metrics eval_results eval_rows eval_set eval_tasks evaluating examples executor
    failures files folder format_reward_buffer generator group groups idx index item items iter iterator judge key
    kept keys layer layers length lengths lock log logger logs longest loop masks memory messages metrics mode model
    numbers output path pending pending_metrics percent_correct_buffer place plan player pool position prefix
    process processes progress prompt prompts quarantine queue random reasoning record records results rewards
    reward_buffer reward_fn rng role roles rollouts room row rows run runs sampled sandbox score scores seed served
    sessions source spec state stats status step steps store system_prompt tasks test test_items tokens too_long
    toolkit tool_error_buffer tools tracker train training train_dataset train_items training_metrics turns user
    wandb wandb_mode weights written _buffer _count _current _current_group_tools _dataset _eval_items _index _items
    _iter _metrics _reward_buffer _rows _state _tool_error_buffer _training
""".split()  # noqa: SIM905
PUBLIC = {
    "compute_reward", "curriculum_state", "default_toolsets", "environ", "format_messages", "format_prompt", "groups",
    "restore_curriculum", "sandbox_for", "shut_down", "spec",
}  # fmt: skip


def names_of_atropos() -> set[str]:
    return {*dir(BaseEnv), *re.findall(r"self\.(\w+)\b", inspect.getsource(BaseEnv))}


class Busy(Greetings):
    """Assigns every common name, as an environment may do that was written before ours."""

    async def setup(self) -> None:
        await super().setup()
        for name in {*COMMON} - names_of_atropos():
            setattr(self, name, self.items if name == "items" else self.scores if name == "scores" else [])

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await super().evaluate(*args, **kwargs)
        assert self.reward_buffer == self.tool_error_buffer == []  # type: ignore[attr-defined]


async def test_process_and_evaluate_work_whatever_setup_assigns(model: WriterModel, tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    playing: Any = make(model, Busy, total_steps=2, data_path_to_save_groups=str(path))
    await playing.process_manager()
    assert [json.loads(line)["scores"] for line in path.read_text().splitlines()] == [[1.0, 1.0]] * 2
    evaluated: Any = make(model, Busy, data_dir_to_save_evals=str(tmp_path))
    await evaluated._run_evaluate()
    assert json.loads((tmp_path / "metrics.json").read_text())["results"]["all"] == {"eval/mean_reward": 1.0}


async def test_a_subclass_of_a_spec_may_assign_them_too() -> None:
    parent = compile_spec(load_spec("terminal-files"))

    class BusySpec(parent):  # type: ignore[misc, valid-type]
        async def setup(self) -> None:
            await super().setup()
            for name in {*COMMON} - names_of_atropos() - {"spec"}:
                setattr(self, name, [])

    env = BusySpec(*BusySpec.config_init())
    await env.setup()
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert len(group["scores"]) == 4
    await env.evaluate()
    await env.wandb_log({})
    await env.shut_down()


@pytest.mark.parametrize("of_a_spec", [False, True])
async def test_what_is_not_documented_is_private(model: WriterModel, of_a_spec: bool) -> None:
    if of_a_spec:
        cls = compile_spec(load_spec("terminal-files"))
        env: Any = cls(*cls.config_init())
    else:
        env = make(model)
    await env.setup()
    own = {*dir(Greetings), "items", "handed_out", "logged", "scores"} if not of_a_spec else set()
    own -= {name for cls in Greetings.__mro__[1:] for name in vars(cls)}
    found = {name for name in dir(env) if not name.startswith("_")} - names_of_atropos() - own
    assert found <= PUBLIC
    await asyncio.gather(env.shut_down())
