"""What OpenAI's interface asks and is answered, as far as a policy in training can do it.

What is not here is refused, and so is a value that the policy cannot be trained on: tokens are drawn from the distribution that
the run records, so whoever asks may not change it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from rollyard.conversation import ANSWERS
from rollyard.serve.records import WHOLE
from rollyard.serve.tools import answer_of, arguments_of, fit

MODEL = "policy"
Most = Annotated[int, Field(ge=1), WHOLE]
Word = Annotated[str, Field(min_length=1, max_length=256)]


def _only(*values: object, why: str) -> BeforeValidator:
    """Of what OpenAI's interface has, as much as can be done."""

    def look(value: object) -> object:
        if not any(value is each or (isinstance(value, str) and value == each) for each in values):
            raise ValueError(f"only {' and '.join(map(repr, values))} can be had: {why}")
        return value

    return BeforeValidator(look)


class Asked(BaseModel):
    """What is asked: no unknown names, and nothing converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextPart(Asked):
    type: Literal["text"]
    text: str


FREE = "tokens are trained as the policy draws them, so nothing it writes is forced"
Off = Annotated[Literal[False] | None, _only(False, None, why=FREE)]
On = Annotated[Literal[True] | None, _only(True, None, why=FREE)]


class Function(Asked):
    """What the policy may call."""

    name: Word
    description: str | None = None
    parameters: dict[str, JsonValue] | None = Field(None, description="a JSON schema")
    strict: Off = None


class Tool(Asked):
    type: Literal["function"]
    function: Function

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it: what was not sent is not in it."""
        return self.model_dump(exclude_unset=True)


class CalledFunction(Asked):
    name: Annotated[str, Field(min_length=1)]
    arguments: str = Field(description="a JSON object")


class ToolCall(Asked):
    """A call in an answer."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.function.name, "arguments": arguments_of(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Asked):
    """One of a conversation. What is empty in an answer of ours may be sent back empty."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = Field(
        None, description="parts are put together, one a line; none: of an answer that is calls alone"
    )
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=1024)] | None = Field(
        None, description="of an answer; those that were given here keep their ids"
    )
    tool_call_id: Word | None = Field(None, description="of a tool's message: which call it is the result of")
    name: Word | None = Field(None, description="of a tool's message: the tool's")
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _of_its_role(self) -> Self:
        if self.tool_calls is not None and self.role != ANSWERS:
            raise ValueError(f"a message of {self.role} has no tool_calls")
        if self.role != "tool" and (self.tool_call_id is not None or self.name is not None):
            raise ValueError(f"a message of {self.role} has no tool_call_id and no name")
        if self.content is None and self.tool_calls is None:
            raise ValueError("a message has a content, or tool_calls")
        for call in self.tool_calls or ():
            try:
                arguments_of(call.function.arguments)
            except ValueError as error:
                raise ValueError(f"arguments of {call.function.name}: {error}") from None
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        parts = [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]
        found: dict[str, Any] = {"role": self.role, "content": "\n".join(parts)}
        if self.role == ANSWERS:
            return answer_of(found["content"], [call.plain for call in self.tool_calls or ()])
        of_tool = {"tool_call_id": self.tool_call_id, "name": self.name}
        return found | {name: value for name, value in of_tool.items() if value is not None}


class StreamOptions(Asked):
    include_usage: bool = False


class ResponseFormat(Asked):
    type: Literal["text"]


class _Generation(Asked):
    """What both kinds of request have."""

    _fits = model_validator(mode="before")(staticmethod(fit))

    model: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description=f"`{MODEL}`, or `{MODEL}:SESSION` instead of the header X-Rollyard-Session"
    )
    n: Annotated[int, Field(ge=1, le=64), WHOLE] = Field(
        1, description="answers, one after the other: each is a turn of the episode"
    )
    stop: str | Annotated[list[str], Field(max_length=16)] | None = Field(None, description="texts that end an answer")
    stream: bool = Field(False, description="text comes as it is written; tokens and calls of tools with the last piece")
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
    tools: Annotated[list[Tool], Field(max_length=128)] | None = Field(
        None, description="put into the prompt by the model's chat template; calls in an answer are read by serve.tool_parser"
    )
    tool_choice: Annotated[Literal["auto", "none"] | None, _only("auto", "none", None, why=FREE)] = Field(
        None, description="auto, or none: tools are in the prompt, and answers stay text"
    )
    parallel_tool_calls: On = Field(None, description="true, or none: how many calls are in an answer is the policy's affair")

    @property
    def plain(self) -> list[dict[str, Any]]:
        """Its messages as chat templates take them. Some of those want to have with a result which tool it is of."""
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        found = [message.plain for message in self.messages]
        return [{"name": names[id_]} | each if (id_ := each.get("tool_call_id")) in names else each for each in found]

    @property
    def reads(self) -> bool:
        """Whether calls are looked for in what is answered."""
        return bool(self.tools) and self.tool_choice != "none"


class CompletionRequest(_Generation):
    prompt: str | Annotated[list[Annotated[int, WHOLE]], Field(min_length=1)]
    max_tokens: Most | None = Field(None, description="of an answer, at most and by default rollout.max_tokens")
    logprobs: Annotated[int, Field(ge=0, le=0), WHOLE] | None = Field(
        None, description="0, or none: others than the token's own are not known"
    )
    echo: Literal[False] | None = None
    suffix: None = None


Finish = Literal["stop", "length"]


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
    content: str | None = Field(description="None where it is calls alone")
    tool_calls: list[ToolCall] | None = Field(None, exclude_if=lambda calls: calls is None)


class ChatChoice(BaseModel):
    index: int
    message: Answer
    finish_reason: Finish | Literal["tool_calls"]
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
    finish_reason: Finish
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
