"""Answers of the policy as OpenAI's interface has them: as a whole, and in the pieces of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
from rollyard.serve.sessions import Session
from rollyard.types import Reply

REPLACED = "\N{REPLACEMENT CHARACTER}"  # in the text of a token that is a part of a character


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


def cut(whole: dict[str, Any], *, usage: bool) -> Iterator[dict[str, Any]]:
    """As a stream has it: for each answer who speaks, what it says, and how it ends."""
    chat = whole["object"] == "chat.completion"
    choices, counted, about = whole.pop("choices"), whole.pop("usage"), whole.pop("rollyard")
    whole["object"] = "chat.completion.chunk" if chat else whole["object"]
    for choice in choices:
        common = {"index": choice["index"]}
        said = {"logprobs": choice["logprobs"], "token_ids": choice["token_ids"], "versions": choice["versions"]}
        if chat:
            message = choice["message"]
            calls = {"tool_calls": [{"index": at} | call for at, call in enumerate(message.pop("tool_calls", []))]}
            content = {"delta": message | calls if calls["tool_calls"] else message}
            end: dict[str, Any] = {"delta": {}}
        else:
            content, end = {"text": choice["text"]}, {"text": ""}
        yield whole | {"choices": [common | content | said | {"finish_reason": None}]}
        yield whole | {
            "choices": [common | end | {"logprobs": None, "finish_reason": choice["finish_reason"]}],
            "rollyard": about,
        }
    if usage:
        yield whole | {"choices": [], "usage": counted}
