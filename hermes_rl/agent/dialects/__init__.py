"""The languages in which agent programs ask for a model.

A dialect turns the body of a request into messages and tools as chat completions have them, and an answer of the policy
into a body or the events of a stream. It decides what of a request is refused. Nothing behind it knows in which dialect
a program has asked; whom the messages are sent to, `endpoint` decides.
"""

from __future__ import annotations

from hermes_rl.agent.dialects.base import ProgramDialect
from hermes_rl.agent.dialects.chat import Chat
from hermes_rl.agent.dialects.messages import Messages
from hermes_rl.agent.dialects.responses import Responses
from hermes_rl.values import write_message

DIALECTS: tuple[ProgramDialect, ...] = (Chat(), Responses(), Messages())
CHAT = DIALECTS[0]


def dialect_at(path: str) -> ProgramDialect | None:
    """Return the dialect that is spoken at a path."""
    return next((dialect for dialect in DIALECTS if path.endswith(dialect.path)), None)


def written_models(model: str) -> bytes:
    """Write the list of models, in the form that OpenAI's clients read and in Anthropic's at once: there is one."""
    listed = {"id": model, "object": "model", "owned_by": "hermes-rl", "created": 0}
    listed |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    return write_message({"object": "list", "data": [listed], "has_more": False, "first_id": model, "last_id": model})
