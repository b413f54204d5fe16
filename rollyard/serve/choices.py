"""Answers of the policy as OpenAI's interface has them: as a whole, and in the pieces of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import accumulate
from typing import Any

from rollyard.serve.answers import Said, Turn
from rollyard.serve.openai import (
    MODEL,
    About,
    Answer,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Completion,
    CompletionRequest,
    Finish,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    ToolCall,
    Usage,
    Written,
)
from rollyard.serve.refusals import Refused
from rollyard.serve.sessions import Session
from rollyard.serve.streamed import REPLACED, Streamed
from rollyard.types import Reply


def chat_completion(id_: str, session: Session, request: ChatRequest, said: Said) -> ChatCompletion:
    """A chat's answers as a whole."""
    choices = [
        ChatChoice(
            index=index,
            message=_message(turn),
            finish_reason="tool_calls" if turn.calls and not turn.reply.finish.truncated else _finish(turn.reply),
            logprobs=ChatLogprobs(content=_logprobs(session, turn.reply)) if request.logprobs else None,
            token_ids=list(turn.reply.token_ids),
            versions=_versions(turn.reply),
        )
        for index, turn in enumerate(said.turns)
    ]
    usage, about = _usage(said), _about(session, said)
    return ChatCompletion(id=id_, created=int(time.time()), model=MODEL, choices=choices, usage=usage, rollyard=about)


def completion(id_: str, session: Session, request: CompletionRequest, said: Said) -> Completion:
    """A text's continuations as a whole."""
    choices = [
        TextChoice(
            index=index,
            text=turn.reply.text,
            finish_reason=_finish(turn.reply),
            logprobs=_text_logprobs(session, turn.reply) if request.logprobs is not None else None,
            token_ids=list(turn.reply.token_ids),
            versions=_versions(turn.reply),
        )
        for index, turn in enumerate(said.turns)
    ]
    usage, about = _usage(said), _about(session, said)
    return Completion(id=id_, created=int(time.time()), model=MODEL, choices=choices, usage=usage, rollyard=about)


def _message(turn: Turn) -> Answer:
    if not turn.calls:
        return Answer(content=turn.content)
    named = [(id_, CalledFunction(name=call.name, arguments=call.arguments)) for id_, call in turn.calls]
    calls = [ToolCall(id=id_, type="function", function=function) for id_, function in named]
    return Answer(content=turn.content or None, tool_calls=calls)


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
    prompt, written = len(said.to.token_ids), sum(len(turn.reply.token_ids) for turn in said.turns)
    return Usage(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written)


def _about(session: Session, said: Said) -> About:
    to = said.to
    return About(
        session=session.id,
        group=session.prompt.id,
        turn=said.last,
        matched=to.matched,
        rendered=to.rendered,
        prompt_token_ids=list(to.token_ids),
    )


class Stream:
    """The pieces of a stream: what is sure of each answer as it comes, and what was not told yet at its end.

    Args:
        id_: of the whole.
        chat: it is a chat's.
    """

    def __init__(self, id_: str, *, chat: bool) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._head = {"id": id_, "object": kind, "created": int(time.time()), "model": MODEL}
        self._chat = chat
        self._sent: dict[int, str] = {}

    def more(self, answers: Sequence[Streamed]) -> Iterator[dict[str, Any]]:
        """What is there and was not told yet. Where it contradicts what was told, the end has to show."""
        for index, answer in enumerate(answers):
            text, sent = answer.sure, self._sent.get(index, "")
            if len(text) > len(sent) and text.startswith(sent):
                yield self._piece(index, self._delta(index, text[len(sent) :]))

    def end(self, whole: ChatCompletion | Completion, *, usage: bool) -> Iterator[dict[str, Any]]:
        """The rest of each answer with its tokens, and how it ends. Raises Refused when it is not what was told of it."""
        told = whole.model_dump()
        if any(not _text(choice).startswith(self._sent.get(choice["index"], "")) for choice in told["choices"]):
            problem, remedy = "tokens were taken back that had been streamed", "ask the same again: the whole answer is there"
            raise Refused(HTTPStatus.CONFLICT, problem, "taken_back", remedy=remedy)
        for choice in told["choices"]:
            index = choice["index"]
            said = {"logprobs": choice["logprobs"], "token_ids": choice["token_ids"], "versions": choice["versions"]}
            rest = self._delta(index, _text(choice)[len(self._sent.get(index, "")) :], choice)
            yield self._piece(index, rest | said)
            end: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            ends = self._piece(index, end | {"finish_reason": choice["finish_reason"]})
            yield ends | {"rollyard": told["rollyard"]}
        if usage:
            yield self._head | {"choices": [], "usage": told["usage"]}

    def _delta(self, index: int, text: str, choice: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """More of an answer, or all that is left of it."""
        begins = index not in self._sent
        self._sent[index] = self._sent.get(index, "") + text
        if not self._chat:
            return {"text": text}
        delta: dict[str, Any] = {"role": "assistant"} if begins else {}
        calls = [] if choice is None else choice["message"].get("tool_calls", [])
        if text or not calls:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": at} | call for at, call in enumerate(calls)]
        return {"delta": delta}

    def _piece(self, index: int, about: Mapping[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [{"index": index, "logprobs": None, "finish_reason": None} | dict(about)]}


def _text(choice: Mapping[str, Any]) -> str:
    """Of a whole answer."""
    return str(choice["message"]["content"] or "") if "message" in choice else str(choice["text"])
