"""A debate of two sides, and a judge who hears all of it."""

from typing import Any

ROUNDS = 2


async def debate(seats: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Let both sides speak in turns, and then the judge."""
    transcript: list[str] = []
    message = None
    for _ in range(ROUNDS):
        for side in ("pro", "contra"):
            message = await seats[side].say(message and f"The other side says: {message}")
            if message is None:
                return {"winner": "contra" if side == "pro" else "pro"}
            transcript.append(f"{side}: {' '.join(message.split())}")  # a line break would speak as the other side
    verdict = await seats["judge"].say(f"The claim is: {row['claim']}\n\n" + "\n".join(transcript))
    return {"winner": (verdict or "").strip().lower()}


def won(result: Any) -> float:
    """Return 1 for the side that the judge prefers."""
    return float((result.outcome or {}).get("winner") == result.seat)


def named_topic(result: Any, topic: str) -> float:
    """Return 1 if each message names the topic."""
    return float(bool(result.texts) and all(topic.lower() in text.lower() for text in result.texts))
