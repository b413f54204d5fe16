"""Requests of OpenAI's interface, answered by a session's policy."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import accumulate
from typing import Literal

from rollyard.config import RolloutConfig
from rollyard.errors import ConfigError
from rollyard.serve.conversation import Rendered
from rollyard.serve.openai import (
    MODEL,
    About,
    Answer,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Completion,
    CompletionRequest,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
    Written,
)
from rollyard.serve.refusals import Refused
from rollyard.serve.sessions import Question, Session, Sessions
from rollyard.types import FinishReason, Reply

Finish = Literal["stop", "length"]
REPLACED = "\N{REPLACEMENT CHARACTER}"  # in the text of a token that is a part of a character


@dataclass(frozen=True, slots=True)
class Said:
    """What the policy said to one request: one answer, or several to the same history."""

    to: Rendered
    replies: tuple[Reply, ...]
    turn: int  # the last of them in its episode, from 1 on


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a client says of asking. `key`: the same for the same question; `again`: it has asked this before."""

    key: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class Saying:
    """An answer that a client waits for."""

    sessions: Sessions
    session: Session
    question: Question

    async def said(self) -> Said:
        """Raises Refused."""
        found = await self.sessions.answer(self.session, self.question)
        assert isinstance(found, Said)
        return found

    def heard(self) -> None:
        """The client has it."""
        self.sessions.heard(self.session, self.question)


class Answers:
    """Has requests answered.

    Args:
        sessions: which members they may be of.
        rollout: how the run samples.
    """

    def __init__(self, sessions: Sessions, rollout: RolloutConfig) -> None:
        self._sessions, self._rollout = sessions, rollout

    def session_of(self, model: str, header: str | None) -> Session:
        """The session that a request names. Raises Refused."""
        name, _, named = model.partition(":")
        if name != MODEL:
            problem, remedy = f"there is no model {name!r}", f"ask for {MODEL}"
            raise Refused(HTTPStatus.NOT_FOUND, problem, "model_not_found", "model", remedy)
        if header and named and header != named:
            raise Refused(HTTPStatus.BAD_REQUEST, "header and model name different sessions", "session", "model")
        if not (header or named):
            remedy = f"open one with POST /v1/sessions; name it in X-Rollyard-Session, or ask for the model {MODEL}:SESSION"
            raise Refused(
                HTTPStatus.BAD_REQUEST, "the request names no session, so nobody could judge it", "session", "model", remedy
            )
        return self._sessions.of(header or named)

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Raises Refused for what would make the tokens other than the run records them, or cannot be done."""
        rollout = self._rollout
        for name, wants, has in (
            ("temperature", request.temperature, rollout.temperature),
            ("top_p", request.top_p, rollout.top_p),
            ("frequency_penalty", request.frequency_penalty, 0.0),
            ("presence_penalty", request.presence_penalty, 0.0),
        ):
            if wants not in (None, has):
                problem = f"{name} is {has:g} in this run, and {wants:g} was asked for: tokens are trained as the run draws them"
                raise Refused(HTTPStatus.BAD_REQUEST, problem, "sampling", name, f"leave it out, or ask for {has:g}")
        if request.stream_options is not None and not request.stream:
            raise Refused(HTTPStatus.BAD_REQUEST, "the answer is not streamed", "stream_options", "stream_options")
        if (most := most_of(request)) is not None and most > rollout.max_tokens:
            problem = f"{most} tokens are asked for, and rollout.max_tokens is {rollout.max_tokens}"
            raise Refused(HTTPStatus.BAD_REQUEST, problem, "max_tokens", "max_tokens", "ask for less, or leave it out")

    @contextmanager
    def asking(self, session: Session, request: ChatRequest | CompletionRequest, attempt: Attempt) -> Iterator[Saying]:
        """Have it answered, once for a client that asks again what it has not heard."""
        content = f"{attempt.key} {content_of(request)}"
        with self._sessions.asking(session, content, attempt.again, lambda: self._say(session, request)) as question:
            yield Saying(self._sessions, session, question)

    async def _say(self, session: Session, request: ChatRequest | CompletionRequest) -> Said:
        """In turn: it knows what was said before it."""
        keep: Callable[[Rendered, Reply], None]
        talk = session.conversation
        if isinstance(request, ChatRequest):
            messages = [message.plain for message in request.messages]
            to = _rendered(lambda: talk.of_messages(messages))
            keep = lambda to, reply: talk.answered_messages(messages, to, reply.token_ids, reply.text)  # noqa: E731
        elif isinstance(request.prompt, str):
            text = request.prompt
            to = _rendered(lambda: talk.of_text(text))
            keep = lambda to, reply: talk.answered_text(text, to, reply.token_ids, reply.text)  # noqa: E731
        else:
            to, keep = Rendered(tuple(request.prompt), 0, 0), lambda to, reply: None
        replies = []
        for _ in range(request.n):
            reply = await self._ask(session, to.token_ids, most_of(request), request.stops)
            self._sessions.note(session, to.matched, to.rendered)
            keep(to, reply)
            replies.append(reply)
        return Said(to, tuple(replies), session.turns)

    async def _ask(self, session: Session, token_ids: Sequence[int], most: int | None, stop: tuple[str, ...]) -> Reply:
        try:
            reply = await session.ask(token_ids, max_tokens=most, stop=stop)
        except (ValueError, RuntimeError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error), "invalid") from None
        if not reply.token_ids and reply.finish is FinishReason.CONTEXT:
            problem = f"the history has {len(token_ids)} tokens, which leave no room in the window"
            raise Refused(HTTPStatus.BAD_REQUEST, problem, "context_length_exceeded", "messages", "ask with a shorter one")
        if not reply.token_ids and reply.finish is FinishReason.LENGTH:
            problem, remedy = "the policy has had all turns of this episode", "end the session; environment.turns says how many"
            raise Refused(HTTPStatus.BAD_REQUEST, problem, "turns_over", remedy=remedy)
        return reply


def most_of(request: ChatRequest | CompletionRequest) -> int | None:
    """Tokens of an answer at most, as far as the request says. Raises Refused when it says two things."""
    if not isinstance(request, ChatRequest):
        return request.max_tokens
    two = request.max_tokens, request.max_completion_tokens
    if None not in two and two[0] != two[1]:
        raise Refused(HTTPStatus.BAD_REQUEST, "max_tokens and max_completion_tokens differ", "max_tokens", "max_tokens")
    return two[0] if two[0] is not None else two[1]


def content_of(request: ChatRequest | CompletionRequest) -> str:
    """What tells it from another question."""
    return hashlib.sha256(request.model_dump_json(exclude={"stream", "stream_options"}).encode()).hexdigest()


def _rendered(render: Callable[[], Rendered]) -> Rendered:
    try:
        return render()
    except ConfigError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, error.problem, "template", "messages", error.remedy) from None


# ------------------------------------------------------------------------------------------------ as OpenAI says it


def chat_completion(id_: str, session: Session, request: ChatRequest, said: Said) -> ChatCompletion:
    """A chat's answers as a whole."""
    choices = [
        ChatChoice(
            index=index,
            message=Answer(content=reply.text),
            finish_reason=_finish(reply),
            logprobs=ChatLogprobs(content=_logprobs(session, reply)) if request.logprobs else None,
            token_ids=list(reply.token_ids),
            versions=_versions(reply),
        )
        for index, reply in enumerate(said.replies)
    ]
    usage, about = _usage(said), _about(session, said)
    return ChatCompletion(id=id_, created=int(time.time()), model=MODEL, choices=choices, usage=usage, rollyard=about)


def completion(id_: str, session: Session, request: CompletionRequest, said: Said) -> Completion:
    """A text's continuations as a whole."""
    choices = [
        TextChoice(
            index=index,
            text=reply.text,
            finish_reason=_finish(reply),
            logprobs=_text_logprobs(session, reply) if request.logprobs is not None else None,
            token_ids=list(reply.token_ids),
            versions=_versions(reply),
        )
        for index, reply in enumerate(said.replies)
    ]
    usage, about = _usage(said), _about(session, said)
    return Completion(id=id_, created=int(time.time()), model=MODEL, choices=choices, usage=usage, rollyard=about)


def _finish(reply: Reply) -> Finish:
    return "length" if reply.finish.truncated else "stop"


def _logprobs(session: Session, reply: Reply) -> list[TokenLogprob]:
    found = []
    for id_, logprob in zip(reply.token_ids, reply.logprobs, strict=True):
        text = session.ask.decode([id_])
        whole = None if REPLACED in text else list(text.encode())
        found.append(TokenLogprob(token=text, logprob=logprob, bytes=whole, top_logprobs=[]))
    return found


def _text_logprobs(session: Session, reply: Reply) -> TextLogprobs:
    tokens = [session.ask.decode([id_]) for id_ in reply.token_ids]
    ends = list(accumulate(map(len, tokens)))
    return TextLogprobs(tokens=tokens, token_logprobs=list(reply.logprobs), text_offset=[0, *ends[:-1]] if ends else [])


def _versions(reply: Reply) -> list[Written]:
    return [Written(step=version.step, incarnation=version.incarnation, tokens=tokens) for version, _, tokens in reply.spans]


def _usage(said: Said) -> Usage:
    prompt, written = len(said.to.token_ids), sum(len(reply.token_ids) for reply in said.replies)
    return Usage(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written)


def _about(session: Session, said: Said) -> About:
    to = said.to
    return About(
        session=session.id,
        group=session.prompt.id,
        turn=said.turn,
        matched=to.matched,
        rendered=to.rendered,
        prompt_token_ids=list(to.token_ids),
    )
