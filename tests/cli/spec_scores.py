"""The table of docs/specs.md: each shipped spec, and what right and wrong answers score. As a program it prints it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from hermes_rl.runs.reward_check import check_rewards
from hermes_rl.spec.load import load_spec, shipped_specs

COLUMNS = ("gold", "empty", "garbage", "near miss")


def row(name: str, description: str, scores: Mapping[str, float | None]) -> str:
    """One line of the table."""
    cells = [f"{score:.2f}" if (score := scores.get(column)) is not None else "–" for column in COLUMNS]
    return f"| [{name}](../specs/{name}.yaml) | {description} | {' | '.join(cells)} |"


def main() -> None:
    for name, path in sorted(shipped_specs().items()):
        if "Needs the package" in path.read_text():
            continue
        spec = load_spec(name, demo=True)
        print(row(name, spec.description or "", asyncio.run(check_rewards(spec)).scores))  # noqa: T201


if __name__ == "__main__":
    main()
