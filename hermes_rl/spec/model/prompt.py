"""``prompt`` and ``user``: what the agent is told first, and who answers it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from hermes_rl.spec.model.base import FreeMap, Late, MayTemplate, Section, Seq
from hermes_rl.spec.model.tools import Tool


def _shape(value: Any) -> str:
    if isinstance(value, Mapping | TextFile):
        return "file"
    return "parts" if isinstance(value, list | tuple) else "text"


class TextFile(Section):
    """A text kept in a file of its own; it is a template like any other text here."""

    file: str = Field(description="Path, relative to this file.")


class Part(Section):
    """A piece of a message: text, or an image that the row has (left out where the row has none)."""

    type: Literal["text", "image_url"] | None = Field(None, description="Kind of the part; follows from its key.")
    text: str | None = Field(None, description="Text of this part.")
    image: str | None = Field(None, description="Template that gives an image, its bytes, a data URL or a path.")
    image_url: FreeMap | str | None = Field(None, description="Image as the OpenAI API takes it.")


Text = Annotated[Annotated[str, Tag("text")] | Annotated[TextFile, Tag("file")], Discriminator(_shape)]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[TextFile, Tag("file")] | Annotated[Seq[Late[Part]], Tag("parts")],
    Discriminator(_shape),
]


class Message(Section):
    """One message of the conversation that a rollout starts with."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], MayTemplate()] = Field(
        description="Who speaks: system, user, assistant or tool."
    )
    content: Content | None = Field(None, description="Text, a list of parts, or {file}.")
    name: str | None = Field(None, description="Name of the speaker, where the model's template knows one.")
    reasoning_content: str | None = Field(None, description="Reasoning of an earlier assistant turn.")
    tool_calls: Annotated[Seq[FreeMap], MayTemplate()] | None = Field(
        None, description="Calls of an earlier assistant turn, as the OpenAI API has them."
    )
    tool_call_id: str | None = Field(None, description="Call that a tool message answers.")


class Prompt(Section):
    """How a rollout starts: system and user, or messages."""

    system: Text | None = Field(None, description="System message: a template over the row, or {file}.")
    user: Content | None = Field(None, description="First user message: a template over the row, parts, or {file}.")
    messages: Annotated[Seq[Late[Message]], MayTemplate()] | None = Field(
        None, description="The whole conversation so far, instead of system and user."
    )


class User(Section):
    """A simulated user: it answers each turn without tool calls; its tokens are never trained on."""

    server: str = Field("user", description="Server role that plays the user.")
    system: Text | None = Field(None, description="What the user wants and knows: a template over the row, or {file}.")
    opens: bool = Field(False, description="The user speaks first.")
    stop: Seq[str] = Field((), description="Phrases of the user that end the rollout.")
    max_turns: int = Field(30, ge=1, description="Turns of the user after which the rollout ends.")
    tools: Seq[Late[Tool]] = Field((), description="Tools that the user may call.")
