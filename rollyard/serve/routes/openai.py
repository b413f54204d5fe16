"""OpenAI's interface: what a harness asks here is captured as the turns of its member."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from rollyard.serve.answers import Answers, Attempt, Said, Saying
from rollyard.serve.asked import Played, Served, refusals, unless_gone
from rollyard.serve.choices import Stream, chat_completion, completion
from rollyard.serve.openai import MODEL, ChatCompletion, ChatRequest, Completion, CompletionRequest, Model, Models
from rollyard.serve.refusals import Refused
from rollyard.serve.service import Service
from rollyard.serve.sessions import Session, Sessions

router = APIRouter(prefix="/v1", tags=["openai"])
STARTED = int(time.time())
ALIVE_S = 10.0  # seconds between two signs of life of a stream whose answer is being written
EVENTS = "text/event-stream"
Named = Annotated[str | None, Header(alias="X-Rollyard-Session", max_length=100, description="the session that asks")]
Whole = ChatCompletion | Completion
Make = Callable[[Said], Whole]


def _streams(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    told = "with `stream`: pieces as OpenAI's interface has them, then `[DONE]`"
    return {200: {"description": f"the answers; {told}", "model": model, "content": {EVENTS: {"schema": {"type": "string"}}}}}


@router.get("/models", responses=refusals())
async def models() -> Models:
    """The policy in training, which is all that there is."""
    return Models(data=[Model(id=MODEL, created=STARTED, owned_by="rollyard")])


@router.post("/chat/completions", response_model=ChatCompletion, responses=_streams(ChatCompletion) | refusals(404, 409, 410))
async def chat(service: Served, sessions: Played, asked: ChatRequest, request: Request, named: Named = None) -> Response:
    """Answers to a conversation. What the policy wrote of it before keeps the tokens that it wrote."""
    asking = _Asking(service, sessions, request, asked, named)
    return await asking.answer(lambda said: chat_completion(asking.id, asking.session, asked, said))


@router.post("/completions", response_model=Completion, responses=_streams(Completion) | refusals(404, 409, 410))
async def complete(
    service: Served, sessions: Played, asked: CompletionRequest, request: Request, named: Named = None
) -> Response:
    """Continuations of a text, or of token ids as they are."""
    asking = _Asking(service, sessions, request, asked, named)
    return await asking.answer(lambda said: completion(asking.id, asking.session, asked, said))


class _Asking:
    """One request."""

    def __init__(
        self, service: Service, sessions: Sessions, request: Request, asked: ChatRequest | CompletionRequest, named: str | None
    ) -> None:
        service.check_open()
        self._request, self._asked = request, asked
        self._answers = Answers(sessions, service.config.rollout, service.config.serve.tool_parser)
        self._answers.check(asked)
        self._attempt = _attempt(request)
        self.session: Session = self._answers.session_of(asked.model, named)
        self.id = f"{'chatcmpl' if isinstance(asked, ChatRequest) else 'cmpl'}-{secrets.token_hex(12)}"

    async def answer(self, make: Make) -> Response:
        """Raises Refused. What a client does not wait for is there when it asks again."""
        if self._asked.stream:
            return StreamingResponse(self._pieces(make), media_type=EVENTS)
        with self._asking() as saying:
            said = await unless_gone(self._request, saying.said())
            saying.heard()
        return Response(make(said).model_dump_json(), media_type="application/json")

    def _asking(self) -> AbstractContextManager[Saying]:
        return self._answers.asking(self.session, self._asked, self._attempt)

    async def _pieces(self, make: Make) -> AsyncIterator[bytes]:
        """What is sure of the answer as it is written, with signs of life between; then the rest."""
        stream, options = Stream(self.id, chat=isinstance(self._asked, ChatRequest)), self._asked.stream_options
        with self._asking() as saying:
            writing = asyncio.ensure_future(saying.said())
            try:
                while not writing.done():
                    changed = saying.progress.changed
                    for piece in stream.more(saying.progress.answers):
                        yield _event(piece)
                    if not await _more(writing, changed):
                        yield b": the policy is at work\n\n"
                whole = make(await writing)
                for piece in stream.end(whole, usage=options is not None and options.include_usage):
                    yield _event(piece)
            except Refused as refused:
                yield _event(refused.content)
                return
            finally:
                writing.cancel()
            saying.heard()
        yield b"data: [DONE]\n\n"


async def _more(writing: asyncio.Future[Said], changed: asyncio.Event) -> bool:
    """Wait until there is more of it, or all. False: nothing came for a while."""
    coming = asyncio.ensure_future(changed.wait())
    try:
        done, _ = await asyncio.wait((writing, coming), timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        coming.cancel()


def _attempt(request: Request) -> Attempt:
    """As OpenAI's own clients say it when they try again, and as others do."""
    tried = request.headers.get("x-stainless-retry-count", "0")
    key = request.headers.get("idempotency-key", "")
    return Attempt(key, bool(key) or tried.strip() not in ("", "0"))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
