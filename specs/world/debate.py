"""A debate of two sides, and a judge who hears all of it."""

from typing import Any

ROUNDS = 2


async def debate(seats: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Let both sides speak in turns, and then the judge."""
    said: list[str] = []
    heard = None
    for _ in range(ROUNDS):
        for side in ("pro", "contra"):
            heard = await seats[side].say(heard and f"The other side says: {heard}")
            if heard is None:
                return {"winner": "contra" if side == "pro" else "pro"}
            said.append(f"{side}: {' '.join(heard.split())}")  # a line break would speak as the other side
    verdict = await seats["judge"].say(f"The claim is: {row['claim']}\n\n" + "\n".join(said))
    return {"winner": (verdict or "").strip().lower()}


def won(result: Any) -> float:
    """Return 1 for the side that the judge prefers."""
    return float((result.outcome or {}).get("winner") == result.seat)


def named_topic(result: Any, topic: str) -> float:
    """Return 1 if each message names the topic."""
    return float(bool(result.texts) and all(topic.lower() in text.lower() for text in result.texts))
