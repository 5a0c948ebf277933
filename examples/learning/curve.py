"""A learning curve as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 260, 46, 40
_INK, _FAINT, _LINE = "#333", "#ddd", "#2a6fb0"


def draw(reward: Sequence[float]) -> str:
    """Mean reward of each step's batch, from 0 to 1."""
    across, up = WIDTH - LEFT - 16, HEIGHT - BOTTOM - 16

    def x(step: float) -> float:
        return LEFT + across * step / max(1, len(reward) - 1)

    def y(value: float) -> float:
        return 16 + up * (1 - value)

    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(reward))
    levels = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="{_FAINT}"/>'
        f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.1f}</text>'
        for v in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    )
    steps = "".join(
        f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'
        for step in range(0, len(reward), 10)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{levels}{steps}'
        f'<polyline points="{points}" fill="none" stroke="{_LINE}" stroke-width="2"/>'
        f'<text x="{LEFT + across / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">trainer step</text>'
        f'<text x="14" y="{16 + up / 2:.0f}" text-anchor="middle" transform="rotate(-90 14 {16 + up / 2:.0f})">'
        "mean reward at temperature 1</text></svg>\n"
    )
