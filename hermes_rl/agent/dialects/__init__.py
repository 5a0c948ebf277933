"""The languages in which agent programs ask for a model.

A dialect turns the body of a request into messages and tools as chat completions have them, and an answer of the policy
into a body or the events of a stream. It decides what of a request is refused. Nothing behind it knows in which dialect
a program has asked; whom the messages are sent to, `endpoint` decides.
"""

from __future__ import annotations

from hermes_rl.agent.dialects.base import ProgramDialect
from hermes_rl.agent.dialects.chat import Chat
from hermes_rl.agent.dialects.google import Google
from hermes_rl.agent.dialects.messages import Messages
from hermes_rl.agent.dialects.responses import Responses
from hermes_rl.values import write_message

GOOGLE = (Google("generateContent", stream=False), Google("streamGenerateContent", stream=True))
DIALECTS: tuple[ProgramDialect, ...] = (Chat(), Responses(), Messages(), *GOOGLE)
CHAT = DIALECTS[0]
PATHS = [f"…{dialect.path}" for dialect in DIALECTS]
"""Where a request is answered, for messages."""
COUNT_TOKENS = "/count_tokens"
"""How a path ends, behind that of Anthropic's messages, at which a request is counted and not answered."""


def dialect_at(path: str) -> ProgramDialect | None:
    """Return the dialect that is spoken at a path."""
    return next((dialect for dialect in DIALECTS if path.endswith(dialect.path)), None)


def written_models(model: str) -> bytes:
    """Write the list of models, in the form that OpenAI's clients read and in Anthropic's at once: there is one."""
    ends = {"has_more": False, "first_id": model, "last_id": model}
    return write_message({"object": "list", "data": [_model(model)], **ends})


def written_model(model: str) -> bytes:
    """Write what is known of a model, which is there under any name."""
    return write_message(_model(model))


def written_count(tokens: int) -> bytes:
    """Write how many tokens a request has, as Anthropic's clients read it."""
    return write_message({"input_tokens": tokens})


def _model(name: str) -> dict[str, str | int]:
    known: dict[str, str | int] = {"id": name, "object": "model", "owned_by": "hermes-rl", "created": 0}
    return {**known, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
