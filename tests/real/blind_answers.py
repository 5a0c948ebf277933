"""Measure the mean score of answers that need no solving, for each dataset of the shipped spec `reasoning-gym`.

    python blind_answers.py [DATASET …]

Prints a JSON object: by dataset, the answer that scores best on average and its mean score over `ROWS` rows.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "specs" / "reasoning-gym"))
ROWS = 50
SEED = 77
CONSTANTS = (
    *("", " ", "x", "0", "1", "-1", "2", "nan", "inf", "-inf", "None", "True", "False", "yes", "no", "[]", "{}", "()"),
    *(
        "[[]]",
        "[0]",
        "[1]",
        '""',
        "6*4*1*1",
        "4*6",
        "8*3",
        "0/0",
        "zoo",
        "oo",
        "I",
        "C",
        "Integral(x, x)",
        "1e999",
        "A",
    ),
)


def blind_answers(entry: dict[str, Any], golds: list[str], index: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each answer to a question that does not depend on the solution.

    Args:
        entry: the question, as the package makes it.
        golds: the answers of all questions.
        index: of this question.
    """
    yield from ((repr(text), text) for text in CONSTANTS)
    question, metadata = entry["question"], entry["metadata"]
    lines = [line for line in question.splitlines() if line.strip()]
    yield "the question", question
    yield "its first line", lines[0]
    yield "its last line", lines[-1]
    yield "its last paragraph", question.strip().rpartition("\n\n")[2]
    numbers = re.findall(r"-?\d+(?:\.\d+)?", question)
    yield "its first number", (numbers or [""])[0]
    yield "its last number", (numbers or [""])[-1]
    yield "its numbers", " ".join(numbers)
    words = re.findall(r"\w+", question)
    yield "its last word", words[-1]
    yield "the most frequent answer", Counter(golds).most_common(1)[0][0]
    yield "another answer", golds[index - 1]
    yield "another answer, reversed", golds[index - 1][::-1]
    integrand = metadata.get("integrand")
    if integrand is not None:
        yield "an unevaluated integral", f"Integral({integrand}, {metadata['variable']})"
    if "numbers" in metadata and "target" in metadata:
        numbers = "+".join(map(str, metadata["numbers"]))
        yield "a length", f"({numbers})*False + len('{'a' * int(metadata['target'])}')"


def measured(name: str) -> tuple[str, float]:
    """Return the blind answer to a dataset's questions that scores best, and its mean score."""
    from reasoning_gym import create_dataset

    dataset = create_dataset(name, seed=SEED, size=ROWS)
    entries = [dataset[index] for index in range(ROWS)]
    golds = ["" if entry["answer"] is None else str(entry["answer"]) for entry in entries]
    scores: dict[str, list[float]] = {}
    for index, entry in enumerate(entries):
        for kind, text in blind_answers(entry, golds, index):
            value = 0.0
            with suppress(Exception), redirect_stderr(StringIO()):  # a scorer that raises gives nothing
                value = float(dataset.score_answer(text, entry))
            scores.setdefault(kind, []).append(value)
    return max(((kind, sum(values) / ROWS) for kind, values in scores.items()), key=lambda each: each[1])


def main(names: list[str]) -> None:
    import rows

    with redirect_stdout(sys.stderr):  # some scorers print
        answers = {name: measured(name) for name in names or rows.names()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
