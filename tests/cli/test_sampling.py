"""`doctor --sampling` draws tokens from the policy's servers at the spec's own settings, and at neutral ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hermes_rl.cli.main import status
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.cli.test_run import no_policy
from tests.servers.token_policy import Drawing


async def said_of(server: Drawing, tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    """What doctor says about sampling."""
    async with server.running() as url:
        spec = tmp_path / "spec.yaml"
        policy = f"{{type: vllm, base_url: '{url}', model: m, tokenizer: '{small_tokenizer_path()}'}}"
        spec.write_text(no_policy(tmp_path).read_text() + f"servers: {{policy: {policy}}}\n")
        await asyncio.to_thread(status, ["doctor", str(spec), *flags])
    return [line for line in capsys.readouterr().out.splitlines() if "sampling (vllm): " in line and "draws of" in line]


@pytest.mark.slow
async def test_sampling_check_compares_spec_and_neutral_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sampling", "--set", "agent.temperature=0.5", "--set", "agent.top_p=0.9"]
    own, neutral = await said_of(Drawing(lambda seed, number: seed), tmp_path, capsys, *flags)
    assert own.startswith("FAIL  sampling (vllm): 2000 draws of one token with temperature 0.5, top_p 0.9: total ")
    assert neutral.startswith("ok    sampling (vllm): 2000 draws of one token with temperature 1: total variation 0.0")
    both = await said_of(Drawing(lambda seed, number: seed, processed=True), tmp_path, capsys, *flags)
    assert [line.split()[0] for line in both] == ["ok", "ok"]


@pytest.mark.slow
async def test_sampling_check_measures_neutral_settings_once_when_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Drawing(lambda seed, number: seed)
    assert await said_of(server, tmp_path, capsys) == []
    assert len(server.asked) < 100
    assert len(await said_of(server, tmp_path, capsys, "--sampling")) == 1


def test_a_policy_that_says_no_probabilities_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(no_policy(tmp_path).read_text() + "servers: {policy: {type: scripted}}\n")
    assert status(["doctor", str(spec), "--sampling"]) == 0
    assert "note  sampling: no server of the policy returns the log-probabilities" in capsys.readouterr().out


def test_without_a_spec_there_is_nothing_to_draw_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["doctor", "--sampling"]) == 2
    assert "doctor SPEC [--sampling]" in capsys.readouterr().err
