"""Declare `prompt`, `user`, `agents` and `schedule`: the first messages, and who else takes part."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from hermes_rl.spec.section import FreeMap, Late, Map, MayTemplate, Section, Seq, SystemText
from hermes_rl.spec.sections.agent import Agent
from hermes_rl.spec.sections.common import File, short_for
from hermes_rl.spec.sections.tools import TextFile, ToolSection


def _content_shape(value: Any) -> str:
    if isinstance(value, Mapping | TextFile):
        return "file"
    return "parts" if isinstance(value, list | tuple) else "text"


class Part(Section):
    """A part of a message: text, or an image of the row (omitted if the row has none)."""

    type: Literal["text", "image_url"] | None = Field(None, description="Kind of the part; follows from its key.")
    text: str | None = Field(None, description="Text of this part.")
    image: str | None = Field(None, description="Template that gives an image, its bytes, a data URL or a path.")
    image_url: FreeMap | str | None = Field(None, description="Image as the OpenAI API takes it.")


Text = Annotated[Annotated[str, Tag("text")] | Annotated[TextFile, Tag("file")], Discriminator(_content_shape)]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[TextFile, Tag("file")] | Annotated[Seq[Late[Part]], Tag("parts")],
    Discriminator(_content_shape),
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
    """The messages that a rollout starts with: system and user, or messages."""

    system: Text | None = Field(None, description="System message: a template over the row, or {file}.")
    user: Content | None = Field(None, description="First user message: a template over the row, parts, or {file}.")
    messages: Annotated[Seq[Late[Message]], MayTemplate()] | None = Field(
        None, description="The whole conversation so far, instead of system and user."
    )


LeastReward = Annotated[
    Annotated[float, Tag("number")] | Annotated[Map[float], Tag("names")],
    Discriminator(lambda value: "names" if isinstance(value, Mapping) else "number"),
]


class UserWords(Section):
    """One scripted message of the user, with the changes that it brings."""

    say: str = Field(description="Text of the message.")
    tools: Seq[str] | None = Field(
        None, description="Names of the tools that the agent may call from now on; default: unchanged."
    )
    files: Annotated[Seq[File], MayTemplate()] = Field((), description="Files copied into the sandbox first.")
    setup: Annotated[Seq[SystemText], MayTemplate()] = Field(
        (), description="Commands run before the message, after the files are copied; one that fails ends the rollout."
    )
    min_reward: Annotated[LeastReward, MayTemplate()] | None = Field(
        None,
        description="Said only where each reward with `per_step` gave at least this much for the step before; or a "
        "mapping from names of such rewards, or of their metrics, to numbers.",
    )


class User(Section):
    """The user that replies to each turn without tool calls: a model, code of the state, or a script. Never trained
    on."""

    state: str | None = Field(
        None,
        description="Method of the state that replies instead of a model. It receives the agent's message, or None if "
        "the user speaks first.",
    )
    turns: Annotated[Seq[Annotated[Late[UserWords], short_for("say", str)]], MayTemplate()] | None = Field(
        None, description="Fixed words, one after the other; the agent's answer to the last ones is the end."
    )
    max_agent_turns: int | None = Field(
        None, ge=1, description="Model calls until the agent has to answer its user; default: no bound."
    )
    server: str = Field("user", description="Server role of the model that simulates the user.")
    system: Text | None = Field(None, description="What the user wants and knows: a template over the row, or {file}.")
    transform: str | None = Field(
        None,
        description="Method of the state that receives the model's message and returns the message for the agent, in "
        "the same form as `state`.",
    )
    speaks_first: bool = Field(False, description="The user speaks first.")
    stop: Seq[str] = Field((), description="Phrases of the user that end the rollout.")
    max_turns: int = Field(30, ge=1, description="Turns of the user after which the rollout ends.")
    tools: Seq[Late[ToolSection]] = Field((), description="Tools that the user may call.")

    @property
    def simulated(self) -> bool:
        """True if a model simulates the user."""
        return self.state is None and self.turns is None


class SeatSection(Section):
    """An agent's place in an episode of several agents."""

    server: str = Field("policy", description="Server role of the model at this seat.")
    opponents: Seq[str] = Field(
        (), description="Server roles, such as earlier checkpoints; each episode uses one of them for the seat."
    )
    opponent_sampling: Literal["uniform", "latest", "rated"] = Field(
        "uniform",
        description="Which of the opponents: any, as the seed has it; the last of the list; or rather those against "
        "whom the first seat's scores, from 0 to 1, were near a half.",
    )
    prompt: Late[Prompt] | None = Field(None, description="How its conversation starts; default: the spec's prompt.")
    tools: Seq[str] | None = Field(None, description="Names of the spec's tools that the seat may call; default: all.")
    sandbox: Literal["shared", "own"] = Field(
        "shared", description="shared: the seat shares one sandbox with all such seats; own: it has its own."
    )
    train: bool = Field(True, description="Whether what it samples is trained on.")
    baseline: Literal["seat", "row", "episode"] = Field(
        "seat",
        description="Scores that its score is compared with: seat, the same seat in the other episodes of the group; "
        "row, all seats with `row` in all episodes of the group; episode, all with `episode` in the same episode.",
    )
    message_template: Annotated[str, MayTemplate()] = Field(
        "{{ text }}",
        description="What it hears where another seat speaks: a template over `seat`, its name, and `text`.",
    )
    description: str | None = Field(None, description="schedule: call: its tool description for the first seat.")
    agent: Late[Agent] = Field(Agent.model_construct(), description="Settings that override `agent`.")


class ScheduleSection(Section):
    """Order in which several agents speak."""

    order: Literal["alternate", "simultaneous", "call"] | None = Field(
        None,
        description="alternate: one after the other; simultaneous: all at a time, who then hear each other; call: the "
        "others are tools of the first.",
    )
    rounds: int | None = Field(
        None, ge=1, description="Rounds of alternate and simultaneous; default: until a seat is out."
    )
    fn: str | None = Field(
        None, description="file.py:function, async, which gets the `seats` and awaits what they `say`."
    )
    state: str | None = Field(
        None, description="Method of the state that gets the messages so far and returns the next seat, or null to end."
    )


class Distill(Section):
    """A teacher that returns the log-probability of each token of a rollout, and the tokens that it finds most
    probable."""

    server: str = Field("teacher", description="Server role that is the teacher, with the policy's tokenizer.")
    top_k: int = Field(
        8, ge=0, description="Tokens that the teacher finds the most probable at each place; 0 asks for none."
    )
