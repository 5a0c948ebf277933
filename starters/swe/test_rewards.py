"""pytest test_rewards.py"""

from types import SimpleNamespace
from typing import Any

from rewards import small_patch


def of(patch: bytes) -> Any:
    """What the reward asks of a rollout."""
    return SimpleNamespace(artifact=lambda name: patch)


def test_a_long_patch_is_worth_less() -> None:
    short, long = b"--- a/x\n+++ b/x\n+one\n", b"+line\n" * 100
    assert small_patch(of(short)).value > small_patch(of(long)).value == 0.5
    assert small_patch(of(b"")).value == 0
