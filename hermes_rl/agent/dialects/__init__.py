"""Model APIs used by agent programs.

A dialect converts the body of a request into messages and tools in the form of chat completions, and a policy reply
into a response body or the events of a stream. It decides which requests are refused. The code after it does not depend
on the dialect; `endpoint` selects the model.
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
"""Request paths, for error messages."""
COUNT_TOKENS = "/count_tokens"
"""Path suffix after Anthropic's messages path for requests that count tokens and generate nothing."""


def dialect_at(path: str) -> ProgramDialect | None:
    """Return the dialect of a path, or None."""
    return next((dialect for dialect in DIALECTS if path.endswith(dialect.path)), None)


def written_models(model: str) -> bytes:
    """Return the list of models, in a form that both OpenAI's and Anthropic's clients read; it has one model."""
    ends = {"has_more": False, "first_id": model, "last_id": model}
    return write_message({"object": "list", "data": [_model_entry(model)], **ends})


def written_model(model: str) -> bytes:
    """Return the description of a model; any name is accepted."""
    return write_message(_model_entry(model))


def written_count(tokens: int) -> bytes:
    """Return the number of tokens of a request in the form of Anthropic's API."""
    return write_message({"input_tokens": tokens})


def _model_entry(name: str) -> dict[str, str | int]:
    openai_fields: dict[str, str | int] = {"id": name, "object": "model", "owned_by": "hermes-rl", "created": 0}
    return {**openai_fields, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
