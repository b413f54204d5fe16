"""What is sent to the service and told by it, OpenAI's part aside (`openai.py`). What the run has words for is `types.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from rollyard.caller import Dropped
from rollyard.texts import not_json
from rollyard.types import LARGEST, Group

Key = Annotated[str, Field(min_length=1, max_length=200)]
Wait = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
LARGEST_ID = 2**53


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)  # JSON tells no 4.0 from 4


class Said(BaseModel):
    """What a client says: no unknown names, and nothing converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ChatMessage(Said):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str


class _Prompt(Said):
    columns: dict[str, JsonValue] = Field({}, description="given to the reward by name, and to harnesses")


class TextPrompt(_Prompt):
    text: Annotated[str, Field(min_length=1)] = Field(description="by the chat template where prompts.chat says so")


class ChatPrompt(_Prompt):
    messages: Annotated[list[ChatMessage], Field(min_length=1)] = Field(description="a conversation")


class TokensPrompt(_Prompt):
    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31), WHOLE]], Field(min_length=1)] = Field(
        description="used as they are"
    )


GivenPromptRecord = TextPrompt | ChatPrompt | TokensPrompt


PlainText = Annotated[str, Field(min_length=1, description="a text by itself, without columns")]


class Submission(Said):
    prompts: Annotated[  # `given` looks at them
        list[SkipValidation[PlainText | GivenPromptRecord]], Field(min_length=1, max_length=10_000)
    ]
    key: Key | None = Field(None, description="of the client's: the same prompts under the same key are submitted once")
    wait_s: Wait = Field(0.0, description="seconds to wait for room, at most serve.wait_s; then 429")


PROMPT: TypeAdapter[GivenPromptRecord] = TypeAdapter(GivenPromptRecord)
KINDS: dict[str, type[GivenPromptRecord]] = {"text": TextPrompt, "messages": ChatPrompt, "token_ids": TokensPrompt}


def given(prompts: Sequence[object]) -> list[GivenPromptRecord]:
    """Prompts of a submission; of many it takes too long for the run's loop. Raises RequestValidationError for what is none."""
    found: list[GivenPromptRecord] = []
    for number, prompt in enumerate(prompts):
        place = ("body", "prompts", number)
        said = {"text": prompt} if isinstance(prompt, str) else prompt
        kind = next((KINDS[name] for name in KINDS if isinstance(said, dict) and name in said), None)
        if kind is None:
            problem = {
                "type": "value_error",
                "loc": place,
                "msg": "a prompt is a text, or an object with text, messages or token_ids",
            }
            raise RequestValidationError([problem])
        try:
            found.append(kind.model_validate(said))
        except ValidationError as error:
            raise RequestValidationError([each | {"loc": place + each["loc"]} for each in error.errors()]) from None
        if why := not_json(found[-1].columns):
            raise RequestValidationError([{"type": "value_error", "loc": (*place, "columns"), "msg": f"{why} in it"}])
    return found


class Accepted(BaseModel):
    """Ids of the prompts, which are those of their groups."""

    ids: list[int]


class Ok(BaseModel):
    ok: Literal[True] = True


class Problem(BaseModel):
    """What a client is told that cannot have what it asks for."""

    class Error(BaseModel):
        message: str
        type: str
        param: str | None
        code: str

    error: Error


class FinishedGroup(BaseModel):
    """A group that was finished. `cursor`: where to go on after it."""

    cursor: int
    group: Group


class DroppedPrompt(BaseModel):
    """A prompt that was dropped."""

    cursor: int
    dropped: Dropped


class Groups(BaseModel):
    """A page of the stream. `cursor`: where to go on; as it was asked where there was nothing."""

    groups: list[FinishedGroup | DroppedPrompt]
    cursor: int


class TrainerClaim(Said):
    trainer: Key = Field(description="a name; the same trainer may take its lease again")
    take_over: bool = Field(False, description="also from another trainer whose lease is not over")


class LeaseRecord(BaseModel):
    lease: str = Field(description="sent with what the trainer asks, as X-Rollyard-Lease; each time it is renewed")
    seconds: float = Field(description="after which another trainer may have it, if nothing is heard")
    version: int = Field(description="step of the weights that were published last")


class FileOfWeights(Said):
    path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(description="safetensors file below serve.weights_folder")
    stats: dict[str, float] = Field({}, description="what training tells of the step, such as loss")


class Tensor(Said):
    name: Annotated[str, Field(min_length=1, max_length=1000)]
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**40), WHOLE]], Field(max_length=8)]
    dtype: Annotated[str, Field(min_length=1, max_length=32)] = Field(description="such as torch.float32")


class GroupOfWeights(Said):
    tensors: Annotated[list[Tensor], Field(min_length=1, max_length=100_000)] = Field(
        description="in the order in which they will be sent"
    )
    stats: dict[str, float] = {}


class InvitationRecord(BaseModel):
    """Where the trainer meets the service, as rank 0 of two."""

    host: str
    port: int
    name: str
    limit_s: float


class PublishedRecord(BaseModel):
    step: int
    incarnation: int
    again: bool = Field(description="they had been published before")


class Weights(BaseModel):
    """The weights that are wanted."""

    version: int = Field(description="step of those that were published last")
    wanted: int | None = Field(description="step of those that come of the batch that is out; null: none is out")
    tensors: list[Tensor]


class SessionClaim(Said):
    group: Annotated[int, Field(ge=0, le=LARGEST_ID), WHOLE] | None = Field(
        None, description="a member of this group; else the one that waits longest"
    )
    key: Key | None = Field(None, description="of the client's: the same key opens the same session")
    wait_s: Wait = Field(0.0, description="seconds to wait for a member, at most serve.wait_s; then 429")


class Message(BaseModel):
    """Of a prompt, as it was given."""

    role: str
    content: str


class SessionRecord(BaseModel):
    """A member of a group, to be played."""

    session: str
    group: int
    text: str
    messages: list[Message]
    token_ids: list[int]
    columns: dict[str, JsonValue]
    turns: int = Field(description="answers so far")
    matched: int = Field(description="answers in the last history that were the tokens which the policy wrote")
    rendered: int = Field(description="answers in it that were tokenized from their text")


Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class Verdict(Said):
    """`value` null: the configured rewards judge what was written."""

    value: Number | None
    parts: dict[str, Number] = {}

    @model_validator(mode="after")
    def _has_a_value(self) -> Verdict:
        if self.value is None and self.parts:
            raise ValueError("parts are of a verdict, and its value is null")
        return self


class Failure(Said):
    problem: Annotated[str, Field(min_length=1, max_length=10_000)] = Field(description="why there is no verdict")


class SessionCounts(BaseModel):
    waiting: int
    going: int
    judged: int
    failed: int
    idle: int
    gone: int
    matched: int
    rendered: int


class StatusRecord(BaseModel):
    """How the run stands, and the service around it."""

    state: str
    cause: str
    version: int
    incarnation: int
    steps: int = Field(description="that are planned")
    batch: int | None = Field(description="step of the batch that is out")
    trainer: str | None = Field(description="who has the lease")
    live: int = Field(description="groups that are asked, written or judged")
    waiting: int = Field(description="prompts that were submitted and not asked yet")
    admitted: int
    trained: int
    dropped: dict[str, int]
    tokens: int
    tokens_per_s: float = Field(description="tokens a second of generation, as in the report: waiting for a trainer is not in it")
    engines: list[str]
    model: str = Field(description="folder on the service's machine: what this life of the run began with")
    cursor: int = Field(description="of the newest outcome")
    sessions: SessionCounts | None = Field(description="where harnesses play")


class Health(BaseModel):
    ok: bool
    state: str
