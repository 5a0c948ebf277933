"""The flags of Atropos that bound how much is in flight have an effect in every mode, or are refused by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.commands import LIBRARIES, hermes, program
from tests.env.test_program import SPEC_ENV
from tests.env.test_serve_concurrency import Slow

SPEC = """
name: bounded
dataset: {{items: [{{q: one}}, {{q: two}}, {{q: three}}, {{q: four}}], eval: {eval}}}
prompt: {{user: "{{{{ q }}}}"}}
rewards: {{right: {{fn: exact_match, args: {{target: done}}}}}}
servers: {{policy: {{type: openai, base_url: "{model}", model: m}}}}
process: {{group_size: 3, groups: 4}}
evaluate: {{rollouts: 2}}
"""


@pytest.mark.parametrize(
    ("mode", "flags", "most"),
    [
        ("process", ["--env.max_num_workers", "2"], 6),
        ("process", ["--env.max_num_workers", "2", "--set", "process.concurrency=4"], 4),
        ("process", ["--env.max_num_workers", "-1"], None),
        ("evaluate", ["--env.max_eval_workers=2"], 4),
        ("evaluate", [], None),
    ],
)
async def test_flags_limit_the_concurrent_groups(tmp_path: Path, mode: str, flags: list[str], most: int | None) -> None:
    model = Slow()
    async with model.running() as url:
        rows = "only" if mode == "evaluate" else "null"
        (tmp_path / "spec.yaml").write_text(SPEC.format(model=url, eval=rows))
        done = await asyncio.to_thread(
            hermes, "run", "spec.yaml", mode, "--quiet", *flags, cwd=tmp_path, loaded=LIBRARIES
        )
    assert done.returncode == 0, done.stderr
    if most is None:
        assert model.most > 6 if mode == "process" else model.most > 4
    else:
        assert model.most == most


@pytest.mark.parametrize("mode", ["process", "evaluate"])
@pytest.mark.parametrize("flag", [["--env.max_token_length", "99"], ["--env.max_token_length=99"]])
def test_max_token_length_is_refused_in_modes_without_a_trainer(tmp_path: Path, mode: str, flag: list[str]) -> None:
    for done in (
        hermes("run", "terminal-files", mode, *flag, cwd=tmp_path),
        program(SPEC_ENV, mode, *flag, cwd=tmp_path),
    ):
        assert done.returncode == 2
        assert f"--env.max_token_length has no effect in {mode}" in done.stderr
        assert "agent.max_tokens" in done.stderr
    assert not (tmp_path / "outputs").exists()
