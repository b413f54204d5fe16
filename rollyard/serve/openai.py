"""What OpenAI's interface asks and is answered, as far as a policy in training can do it.

What is not here is refused, and so is a value that the policy cannot be trained on: tokens are drawn from the distribution that
the run records, so whoever asks may not change it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollyard.serve.records import WHOLE

MODEL = "policy"
Most = Annotated[int, Field(ge=1), WHOLE]


class Asked(BaseModel):
    """What is asked: no unknown names, and nothing converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextPart(Asked):
    type: Literal["text"]
    text: str


class Message(Asked):
    """One of a conversation. What is empty in an answer of ours may be sent back empty."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] = Field(description="parts are put together, one a line")
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role, "content": "\n".join(parts)}


class StreamOptions(Asked):
    include_usage: bool = False


class ResponseFormat(Asked):
    type: Literal["text"]


class _Generation(Asked):
    """What both kinds of request have."""

    model: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description=f"`{MODEL}`, or `{MODEL}:SESSION` instead of the header X-Rollyard-Session"
    )
    n: Annotated[int, Field(ge=1, le=64), WHOLE] = Field(
        1, description="answers, one after the other: each is a turn of the episode"
    )
    stop: str | Annotated[list[str], Field(max_length=16)] | None = Field(None, description="texts that end an answer")
    stream: bool = Field(False, description="each answer comes in one piece, once it is whole")
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="that of the run, or none")
    top_p: float | None = Field(None, description="that of the run, or none")
    frequency_penalty: float | None = Field(None, description="0, or none")
    presence_penalty: float | None = Field(None, description="0, or none")
    user: str | None = Field(None, description="is not looked at")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(_Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Most | None = Field(None, description="of an answer, at most and by default rollout.max_tokens")
    max_completion_tokens: Most | None = Field(None, description="the same")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0), WHOLE] | None = Field(
        None, description="0, or none: others than the token's own are not known"
    )
    response_format: ResponseFormat | None = None


class CompletionRequest(_Generation):
    prompt: str | Annotated[list[Annotated[int, WHOLE]], Field(min_length=1)]
    max_tokens: Most | None = Field(None, description="of an answer, at most and by default rollout.max_tokens")
    logprobs: Annotated[int, Field(ge=0, le=0), WHOLE] | None = Field(
        None, description="0, or none: others than the token's own are not known"
    )
    echo: Literal[False] | None = None
    suffix: None = None


class Written(BaseModel):
    """Tokens of one version of the weights, in a row."""

    step: int
    incarnation: int
    tokens: int


class About(BaseModel):
    """What OpenAI's interface has no word for: how the answers stand in the training data."""

    session: str | None = Field(description="None: they are not captured")
    group: int | None
    turn: int = Field(description="of the episode, from 1 on: the last of this request")
    matched: int = Field(description="answers in the history that are the tokens which the policy wrote")
    rendered: int = Field(description="answers in the history that were tokenized from their text: not the policy's, or changed")
    prompt_token_ids: list[int]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = Field(description="None where the token is a part of a character")
    top_logprobs: list[Any]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class Answer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: Answer
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None = None
    token_ids: list[int]
    versions: list[Written]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    rollyard: About


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: TextLogprobs | None = None
    token_ids: list[int]
    versions: list[Written]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    rollyard: About


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
