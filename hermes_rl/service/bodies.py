"""Types of requests and responses, from which the OpenAPI description is made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MOST_ROWS = 100_000
MOST_MEMBERS = 4096
_LARGEST = 2**53
"""The largest version: beyond it JSON numbers of other languages are not exact."""

Key = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]+$")]
Version = Annotated[int, Field(ge=0, le=_LARGEST)]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=1_000_000, fail_fast=True)
]
Text = Annotated[str, StringConstraints(max_length=1 << 21)]
"""Text of a turn: longer ones would delay other rollouts while they are tokenized."""
SplitName = Literal["train", "eval"]


class RequestBody(BaseModel):
    """A request: unknown keys are refused, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PolicyRequest(RequestBody):
    """The model that acts."""

    type: Name = Field("vllm", description="A type of server, as in a spec.")
    base_url: Annotated[str, StringConstraints(max_length=2000, pattern=r"^https?://[^\s\x00-\x1f]+$")] | None = Field(
        None, description="Its address; the service connects there."
    )
    model: Name | None = Field(None, description="Its model. With a `tokenizer` the name may change with the weights.")
    tokenizer: Name | None = Field(None, description="Hub name, or a folder of the service's machine.")
    version: Version | None = Field(None, description="Of its weights now; see PUT /v1/policy.")
    weights_path: Name | None = Field(None, description="Path at the server that answers with the version.")
    api_key_env: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,100}$")] | None = Field(
        None, description="Variable of the service that holds the key; the service must allow this variable."
    )


class RolloutsRequest(RequestBody):
    """A batch of groups."""

    rows: Annotated[list[Key], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MOST_ROWS, description="Keys of GET /v1/rows, a group for each."
    )
    n: Annotated[int, Field(ge=1, le=MOST_MEMBERS)] | None = Field(
        None, description="Rollouts of a group; default: the spec's serve.group_size."
    )
    batch: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:+=-]{1,200}$")] | None = Field(
        None, description="A name: the same batch and row asked again is answered from the record. Default: a new one."
    )
    split: SplitName = "train"
    sampling: dict[str, Any] = Field(default_factory=dict, description="Settings of the spec's `agent`.")
    max_staleness: Version | None = Field(
        None, description="Groups whose oldest weights are more versions old are dropped when they are handed out."
    )
    policy: PolicyRequest | None = Field(None, description="Default: the spec's.")


class SessionRequest(RequestBody):
    """A rollout that the caller steps."""

    row: Key
    split: SplitName = "train"
    sampling: dict[str, Any] = Field(default_factory=dict, description="Settings of the spec's `agent`.")
    tokenizer: Name | None = Field(
        None, description="So that a step may be token ids; default: the policy's tokenizer."
    )


class FunctionBody(RequestBody):
    """What is called."""

    name: Key
    arguments: Text = Field(description="JSON, as the model wrote it.")


class CallBody(RequestBody):
    """A call of a tool."""

    id: Key
    type: Literal["function"] = "function"
    function: FunctionBody


class MessageBody(RequestBody):
    """An assistant message."""

    role: Literal["assistant"] = "assistant"
    content: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[CallBody], Field(fail_fast=True)] | None = None


class StepRequest(RequestBody):
    """The next turn, sampled by the client: a message, or its token ids."""

    message: MessageBody | Text | None = None
    ids: TokenIds | None = None
    logprobs: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(fail_fast=True)] | None = None
    finish: Literal["stop", "length"] | None = None
    version: Version | None = None


class DifferenceUpdate(RequestBody):
    """Difference between the trainer's log-probabilities of the tokens of a step and the sampled ones, in nats."""

    mean: float = Field(ge=0, allow_inf_nan=False)
    largest: float | None = Field(None, ge=0, allow_inf_nan=False)


class PolicyUpdate(RequestBody):
    """Notice that the policy's weights have changed."""

    version: Version
    model: Name | None = Field(None, description="Name of the new weights at the server, if it changes.")
    logprob_difference: DifferenceUpdate | None = Field(None, description="Difference of the step that produced them.")


class GymRunRequest(BaseModel):
    """NeMo Gym's BaseRunRequest; all other fields of the row are returned with the result."""

    model_config = ConfigDict(extra="allow")

    responses_create_params: dict[str, Any]
    verifier_metadata: dict[str, Any] = Field(description="`row_key`: the row to run.")


# ----------------------------------------------------------------------------------------------------- Answers


class RowResponse(BaseModel):
    """A row."""

    key: str
    index: int
    digest: str = Field(description="SHA-256 of its content.")


class RowsResponse(BaseModel):
    """A page of rows."""

    rows: list[RowResponse]
    fingerprint: str = Field(description="Fingerprint of all rows of the split.")
    after: str | None = Field(description="Cursor of the next page: GET /v1/rows?after=…; null on the last page.")


class SequenceResponse(BaseModel):
    """Tokens that the policy saw as one context."""

    ids: list[int]
    mask: list[int] = Field(description="1 where a token is trained on.")
    logprobs: list[float] | None = Field(description="As sampled, 0.0 where the mask is 0; null: not known.")
    spans: list[tuple[int, int, int]] = Field(
        description="Each turn in it, from 0, with the position of its first token and the position after its last."
    )


class RolloutResponse(BaseModel):
    """A member of a group."""

    id: str
    score: float | None = Field(description="null: it was not scored, or its group was dropped.")
    baseline: float | None = Field(
        description="Value in comparisons of the group's scores: its score, or the worst score of the group if its "
        "retries are exhausted and the spec has `on_stop: {retries_exhausted: worst}`."
    )
    stop_reason: str
    error: str | None
    trainable: bool
    rewards: dict[str, float | None]
    credit: list[float] | None = Field(description="One value per turn, where a reward gives credit to turns.")
    overrides: dict[str, Any] = Field(description="What rewards say about it, as `set_advantage_to_zero`.")
    turns: int
    messages: list[dict[str, Any]]
    sequences: list[SequenceResponse]
    seat: str | None = Field(None, description="Of several agents: whose it is.")
    server: str | None = Field(None, description="Of several agents: the role of `servers` that sampled it.")
    weights: list[int | None] | None = Field(None, description="Of several agents: as `weights` of the group.")
    compared: str | None = Field(
        None, description="Of several agents: rollouts with the same name are one group for advantages."
    )


class GroupResponse(BaseModel):
    """A line of the answer to POST /v1/rollouts."""

    group: str
    row_key: str
    dropped: str | None = Field(
        description="Reason why it must not be trained on: a stop reason or `inexact`; else null."
    )
    detail: str | None
    weights: list[int | None] = Field(description="Oldest and newest weight version that sampled it.")
    provenance: dict[str, Any] | None
    rollouts: list[RolloutResponse]


class EndOfBatch(BaseModel):
    """Last record of a stream; without it the stream was interrupted."""

    end: Literal[True]
    groups: int
    dropped: int
    cut: str | None = Field(None, description="Why rows are missing, where some are: ask the same batch again.")


class SeatResponse(BaseModel):
    """How a session has ended for one of several agents."""

    score: float | None
    stop_reason: str
    messages: list[dict[str, Any]]


class TurnResponse(BaseModel):
    """What a session is asked now, or how it has ended."""

    id: str
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    prompt_ids: list[int] | None = None
    stop_ids: list[int] | None = None
    seat: str | None = Field(None, description="Who of several agents speaks, whose conversation this is.")
    done: bool = False
    score: float | None = None
    stop_reason: str | None = None
    error: str | None = None
    seats: dict[str, SeatResponse] | None = Field(None, description="Of several agents: how it has ended for each.")


class HealthResponse(BaseModel):
    """Whether the service takes requests."""

    status: Literal["ok", "ending"]
    name: str
    record: str


class EnvironmentResponse(BaseModel):
    """One of several environments, which has the paths of a service below its own."""

    name: str
    path: str
    record: str


class AllHealthResponse(BaseModel):
    """Whether a service of several environments takes requests."""

    status: Literal["ok", "ending"]
    environments: list[EnvironmentResponse]


class ErrorResponse(BaseModel):
    """Why a request is not done."""

    model_config = ConfigDict(extra="allow")

    error: str
    detail: str
    place: str | None = Field(None, description="Where in the request.")
