"""Questions of reasoning-gym's datasets, and the scorers of these."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Any

from hermes_rl import UserError
from hermes_rl.errors import install_command

MIXED = ("composite",)
CHANGING = (
    *("codeio", "isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note"),
    "word_ladder",
)
"""These ask something else in each process: what they draw depends on Python's order of sets."""
BLIND = (
    *("coin_flip", "complex_arithmetic", "countdown", "game_of_life", "game_of_life_halting", "puzzle24"),
    *("intermediate_integration", "simple_integration", "string_insertion"),
)
"""Their scorers pay nearly all for answers that need no solving, such as `nan` or an integral that is not evaluated."""
AT_ONCE = 50
"""Entries of one dataset; some are made all at once. The next ones are of another seed."""


@lru_cache(maxsize=512)
def dataset(name: str, seed: int) -> Any:
    """Return one dataset; it creates each entry on access."""
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise UserError(f"reasoning-gym is not installed: {install_command('reasoning-gym')}") from error
    return create_dataset(name, seed=seed, size=AT_ONCE)


def names() -> list[str]:
    """Return the names of all datasets that are used."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"reasoning-gym is not installed: {install_command('reasoning-gym')}") from error
    return sorted(set(DATASETS).difference((*MIXED, *CHANGING, *BLIND)))


def questions(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield one question of each dataset in turn, endlessly."""
    for index in count():
        for name in names():
            dataset_seed, entry_index = 10_000 * seed + index // AT_ONCE, index % AT_ONCE
            entry = dataset(name, dataset_seed)[entry_index]
            identity = {
                "id": f"{name}-{dataset_seed}-{entry_index}",
                "dataset": name,
                "seed": dataset_seed,
                "index": entry_index,
            }
            yield {**identity, "question": entry["question"], "answer": entry["answer"]}


def score(result: Any, item: Any) -> float:
    """Return the score by the dataset's scorer for the text between the last <answer> and </answer>."""
    from reasoning_gym.utils import extract_answer

    questions = dataset(item["dataset"], item["seed"])
    try:
        return float(questions.score_answer(extract_answer(result.final_response), questions[item["index"]]))
    except (ValueError, TypeError, LookupError, ArithmeticError):  # some scorers fail on text that is not an answer
        return 0.0


score.imports = ("reasoning_gym",)
