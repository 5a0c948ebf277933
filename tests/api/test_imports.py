"""The Python API runs in its own process without Atropos, torch and transformers, and in a notebook."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.summing import TEXT, spec_in

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("atroposlib", "torch", "transformers"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocked())
"""
PLAYED = """
import asyncio
import hermes_rl
from tests.api.summing import Sampler, sampled, spec_in, trained
from pathlib import Path

async def main():
    sampler = Sampler(wrong=0.3, version=1)
    policy = sampler.policy()
    async with hermes_rl.open_env(spec_in(Path(sys.argv[1])), record=Path(sys.argv[1]) / "run") as env:
        groups = [group async for group in env.groups(4, policy, rows=env.rows(), max_staleness=1, ahead=2)]
        groups.append(await env.run_group(env.rows()[0], 2, policy))
        session = await env.session(env.rows()[0])
        await session.start()
        await session.step("The sum is 3.")
        assert session.rollout.score == 1.0
    assert all(group.provenance.exact for group in groups), [group.provenance for group in groups]
    assert trained(rollout for group in groups for rollout in group.rollouts) == sampled(sampler.answers)
    with hermes_rl.sync(hermes_rl.open_env("terminal-files")) as env:
        assert env.run(env.rows()[0]).score is not None

asyncio.run(main())
assert not {"atroposlib", "torch", "transformers"} & set(sys.modules)
"""
CELLS = [
    "import hermes_rl\nfrom tests.api.summing import Sampler, spec_in",
    "env = await hermes_rl.open_env(spec_in(folder)).open()\npolicy = Sampler().policy()",
    "row = env.rows()[0]\n(await env.run(row, policy)).score",
    "groups = env.groups(2, policy)\nfirst = await anext(groups)",
    "second = await anext(groups)\nawait groups.close()",
    "session = await env.session(row)\nturn = await session.start()",
    "turn = await session.step('The sum is 3.')\nassert session.rollout.score == 1.0",
    "await env.close()",
    "with hermes_rl.sync(hermes_rl.open_env(spec_in(folder))) as env:\n    score = env.run(row.key, policy).score",
]
"""Each is run for itself, and awaits what it likes."""


@pytest.mark.slow
def test_api_runs_without_atropos_torch_and_transformers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + PLAYED, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def test_cells_of_a_notebook_run_one_after_another(tmp_path: Path) -> None:
    spec_in(tmp_path, TEXT)
    names: dict[str, object] = {"folder": tmp_path}
    for cell in CELLS:
        code = compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = eval(code, names)
        if asyncio.iscoroutine(found):
            await found
    assert names["score"] == 1.0
    assert names["first"] is not names["second"]
