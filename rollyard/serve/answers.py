"""Requests of OpenAI's interface, answered by a session's policy."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rollyard.config import RolloutConfig
from rollyard.conversation import Rendered
from rollyard.errors import ConfigError
from rollyard.protocols.rollouts import Hearing
from rollyard.serve.openai import MODEL, ChatRequest, CompletionRequest
from rollyard.serve.refusals import Refused
from rollyard.serve.sessions import Question, Session, Sessions
from rollyard.serve.streamed import Progress, Streamed
from rollyard.serve.tools import OPEN, Call, Parser, answer_of, arguments_of, read, unreadable
from rollyard.types import FinishReason, Reply

Keep = Callable[[Rendered, "Turn"], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. `content`: all of its text that is no call; `calls`: each with its identity."""

    reply: Reply
    content: str
    calls: tuple[tuple[str, Call], ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """As it comes back in a history."""
        functions = [(id_, {"name": call.name, "arguments": arguments_of(call.arguments)}) for id_, call in self.calls]
        calls = [{"id": id_, "type": "function", "function": function} for id_, function in functions]
        return answer_of(self.content, calls)


@dataclass(frozen=True, slots=True)
class Said:
    """What the policy said to one request: one answer, or several to the same history."""

    to: Rendered
    turns: tuple[Turn, ...]
    last: int  # which turn of its episode the last of them is, from 1 on


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

    @property
    def progress(self) -> Progress:
        """What of it is there already."""
        return self.question.progress

    def heard(self) -> None:
        """The client has it."""
        self.sessions.heard(self.session, self.question)


class Answers:
    """Has requests answered.

    Args:
        sessions: which members they may be of.
        rollout: how the run samples.
        parser: how calls of tools are read.
    """

    def __init__(self, sessions: Sessions, rollout: RolloutConfig, parser: Parser) -> None:
        self._sessions, self._rollout, self._parser = sessions, rollout, parser

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
        with self._sessions.asking(
            session, content, attempt.again, lambda progress: self._say(session, request, progress)
        ) as question:
            yield Saying(self._sessions, session, question)

    async def _say(self, session: Session, request: ChatRequest | CompletionRequest, progress: Progress) -> Said:
        """In turn: it knows what was said before it."""
        to, keep = self._to(session, request)
        turns = []
        for _ in range(request.n):
            hearing = progress.begin(self._streamed(session, request)) if request.stream else None
            reply = await self._ask(session, to.token_ids, most_of(request), request.stops, hearing)
            self._sessions.note(session, to.matched, to.rendered)
            turns.append(self._turn(request, reply))
            keep(to, turns[-1])
        return Said(to, tuple(turns), session.turns)

    def _to(self, session: Session, request: ChatRequest | CompletionRequest) -> tuple[Rendered, Keep]:
        """The tokens that it asks to go on from, and what remembers an answer to them. Raises Refused."""
        talk = session.conversation
        if isinstance(request, ChatRequest):
            messages, tools = request.plain, [tool.plain for tool in request.tools or ()]
            if request.reads and (why := unreadable(self._parser, session.ask, tools)):
                remedy = "serve with --serve.tool_parser none, and calls stay text; or ask with tool_choice none"
                raise Refused(HTTPStatus.BAD_REQUEST, f"no call would be read: {why}", "tool_parser", "tools", remedy)
            to = _rendered(lambda: talk.of_messages(messages, tools))
            return to, lambda to, turn: talk.answered_messages(messages, tools, to, turn.reply.token_ids, turn.message)
        if isinstance(request.prompt, str):
            text = request.prompt
            to = _rendered(lambda: talk.of_text(text))
            return to, lambda to, turn: talk.answered_text(text, to, turn.reply.token_ids, turn.reply.text)
        return Rendered(tuple(request.prompt), 0, 0), lambda to, turn: None

    def _streamed(self, session: Session, request: ChatRequest | CompletionRequest) -> Streamed:
        calls = (OPEN,) if self._reads(request) and self._parser != "none" else ()
        return Streamed(session.ask.decode, (*self._rollout.stop, *request.stops, *calls), blank=bool(calls))

    def _reads(self, request: ChatRequest | CompletionRequest) -> bool:
        return isinstance(request, ChatRequest) and request.reads

    def _turn(self, request: ChatRequest | CompletionRequest, reply: Reply) -> Turn:
        if not self._reads(request):
            return Turn(reply, reply.text)
        found = read(self._parser, reply.text)
        return Turn(reply, found.content, tuple((f"call_{secrets.token_hex(12)}", call) for call in found.calls))

    async def _ask(
        self, session: Session, token_ids: Sequence[int], most: int | None, stop: tuple[str, ...], hearing: Hearing | None
    ) -> Reply:
        try:
            reply = await session.ask(token_ids, max_tokens=most, stop=stop, hearing=hearing)
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
