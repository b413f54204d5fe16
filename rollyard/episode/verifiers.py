"""Environments of the package `verifiers`, played with the policy: its harness speaks to a server here, its task judges.

The server is an OpenAI-compatible one on a loopback address. What it is asked becomes the tokens of a question to the policy, and
what was sampled goes into the next question as it is wherever the conversation goes on: nothing is ever tokenized twice.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rollyard import verifiers
from rollyard.conversation import ANSWERS, Conversation
from rollyard.protocols.rollouts import Ask
from rollyard.types import FinishReason, Prompt, Reward

if TYPE_CHECKING:
    from aiohttp import web
    from verifiers.v1 import Env, Episode, Trace

SESSION: Final = "X-Session-ID"  # of a trace of verifiers, with each of its requests
KEY: Final = "X-Rollyard-Key"
UNSET: Final = "ROLLYARD_NO_SUCH_KEY"  # verifiers takes keys from the environment: this server's comes in a header
MODEL: Final = "policy"
START_S: Final = 120.0  # that the servers of one environment may take to start
KNOWN: Final = frozenset({"messages", "max_tokens", "max_completion_tokens", "stop"})  # what an answer depends on
UNSEEN: Final = frozenset({"model", "user", "metadata"})  # what none does
PLAIN: Final[Mapping[str, Any]] = {  # what changes nothing with this value alone. Whatever else is asked for, is refused
    "n": 1,
    "stream": False,
    "tools": [],
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
}

Message = dict[str, Any]


class Verifiers:
    """Plays prompts of `prompts.task = "verifiers/NAME"` (protocols.Environment)."""

    def __init__(self) -> None:
        self._served: dict[verifiers.Named, asyncio.Task[Served]] = {}

    async def episode(self, ask: Ask, prompt: Prompt) -> Reward:
        """One of verifiers' episodes, whose task judges it.

        Raises ConfigError for a prompt that is of none, TimeoutError when verifiers' servers do not start.
        """
        column: Any = prompt.columns[verifiers.COLUMN]
        named = verifiers.Named(column["taskset"], column["options"])
        return await (await self._at(named)).play(verifiers.task_of(column), Talk(ask, prompt))

    async def _at(self, named: verifiers.Named) -> Served:
        """Started once for all episodes, whichever of them ends meanwhile; once more, when that has failed."""
        starting = self._served.get(named)
        if starting is None or (starting.done() and (starting.cancelled() or starting.exception() is not None)):
            starting = self._served[named] = asyncio.create_task(Served.start(verifiers.environment(named)))
            starting.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits by then
        return await asyncio.shield(starting)


class Refusal(Exception):
    """What the policy cannot be asked."""


@dataclass
class Talk:
    """A conversation of an agent with the policy."""

    ask: Ask
    prompt: Prompt
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.prompt, self.ask.chat, self.ask.chat_after, self.ask.encode)

    async def answer(self, body: object) -> Mapping[str, Any]:
        """An answer of OpenAI's interface. Raises Refusal, or what kept the policy from answering."""
        messages, most, stop = _asked(body)
        async with self.turn:
            to = self.conversation.of_messages(messages)
            said = await self.ask(to.token_ids, max_tokens=most, stop=stop)
            answer = {"role": ANSWERS, "content": said.text}
            self.conversation.answered_messages(messages, (), to, said.token_ids, answer)
        finish = "length" if said.finish in (FinishReason.LENGTH, FinishReason.CONTEXT) else "stop"
        prompt, written = len(to.token_ids), len(said.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        choice = {"index": 0, "message": answer, "finish_reason": finish, "logprobs": None}
        about = {"id": f"turn-{prompt}", "object": "chat.completion", "created": 0, "model": MODEL}
        return {**about, "choices": [choice], "usage": usage}


def _asked(body: object) -> tuple[list[Message], int | None, tuple[str, ...]]:
    """Messages, most tokens and ends of a request. Raises Refusal for one with anything else in it."""
    if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list):
        raise Refusal("a request is an object with messages")
    if body.get("n") not in (None, 1):
        raise Refusal("the policy gives one answer at a time")
    given = {name: value for name, value in body.items() if value is not None and name not in KNOWN | UNSEEN}
    if refused := [name for name, value in given.items() if name not in PLAIN or value != PLAIN[name]]:
        raise Refusal(f"the policy cannot be asked with {', '.join(refused)}: its tokens are drawn as the run says")
    most = next((body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None), None)
    if most is not None and type(most) is not int:
        raise Refusal(f"{most!r} is no number of tokens")
    stop = body.get("stop") or ()
    if not isinstance(stop, str | list | tuple):
        raise Refusal(f"stop is {stop!r}, neither a text nor several")
    return [_plain(each) for each in body["messages"]], most, (stop,) if isinstance(stop, str) else tuple(stop)


def _plain(message: object) -> Message:
    """Role and text of a message. Raises Refusal for one with something else in it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refusal("a message is an object with a role and a content")
    content = message.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if message.get("tool_calls") or message["role"] == "tool" or not isinstance(content, str):
        raise Refusal(f"a message of {message['role']} has more than text in it")
    return {"role": message["role"], "content": content}


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


class Served:
    """An environment of verifiers, and the server that its agents take for their model."""

    def __init__(self, environment: Env[Any], address: str, key: str, opened: AsyncExitStack) -> None:
        from verifiers.v1 import EvalClientConfig, ModelContext

        self._environment = environment
        client = EvalClientConfig(base_url=f"{address}/v1", api_key_var=UNSET, headers={KEY: key})
        self._context = ModelContext(model=MODEL, client=client)
        self._key = key
        self._talks: dict[str, Talk] = {}  # by the trace's identity
        self._opened = opened  # as long as the process

    @classmethod
    async def start(cls, environment: Env[Any]) -> Served:
        """Raises what verifiers raises when its servers do not start, and TimeoutError; nothing stays open then."""
        async with AsyncExitStack() as opened:
            held = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            served = cls(environment, f"http://127.0.0.1:{held.getsockname()[1]}", secrets.token_urlsafe(), opened)
            try:
                async with asyncio.timeout(START_S) as limit:
                    await served._listen(held)
                    await opened.enter_async_context(environment.serving())
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise TimeoutError(f"the servers of verifiers did not start within {START_S:g} s") from error
            served._opened = opened.pop_all()
        return served

    async def _listen(self, held: socket.socket) -> None:
        from aiohttp import web

        pages = web.Application(client_max_size=2**26)
        pages.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(pages, access_log=None)
        self._opened.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.SockSite(runner, held).start()

    async def play(self, task: Any, talk: Talk) -> Reward:
        """One episode."""
        minted: list[str] = []

        def begin(trace: Trace) -> None:
            minted.append(trace.id)
            self._talks[trace.id] = talk

        try:
            return verdict_of(await self._environment.run_episode(task, self._context, on_trace=begin))
        finally:
            for id_ in minted:
                del self._talks[id_]

    async def _complete(self, request: web.Request) -> web.Response:
        from aiohttp import web

        if not secrets.compare_digest(request.headers.get(KEY, ""), self._key):
            return web.json_response({"error": {"message": "who asks is not known"}}, status=401)
        talk = self._talks.get(request.headers.get(SESSION, ""))
        if talk is None:
            return web.json_response({"error": {"message": "no episode of this name is played"}}, status=404)
        try:
            return web.json_response(await talk.answer(await request.json()))
        except (Refusal, ValueError) as error:  # what `Ask` does not take, too
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)


def verdict_of(episode: Episode) -> Reward:
    """What verifiers says of it: the sum of its task's rewards, each by its weight, and metrics beside. None where it failed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or errors:
        told = errors[-1] if errors else None
        problem = "the episode failed" if told is None else f"{told.type}: {told.message}"
        return Reward(None, problem=" ".join(problem.split()))
    if len(episode.traces) != 1:
        return Reward(None, problem=f"{len(episode.traces)} agents played, and whose reward counts nobody says")
    (trace,) = episode.traces
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        return Reward(None, problem=f"{', '.join(missing)} gave no number")
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Reward(float(trace.reward), {**metrics, **scores})
