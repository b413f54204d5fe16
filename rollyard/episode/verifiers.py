"""Environments of the package `verifiers`, played with the policy: its harness speaks to a server here, its task judges.

The server is an OpenAI-compatible one on a loopback address. What it is asked becomes the tokens of a question to the policy, and
what was sampled goes into the next question as it is wherever the conversation goes on: nothing is ever tokenized twice.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rollyard import verifiers
from rollyard.protocols.rollouts import Ask
from rollyard.types import FinishReason, Prompt, Reward

if TYPE_CHECKING:
    from aiohttp import web
    from verifiers.v1 import Env, Episode, Trace

SESSION: Final = "X-Session-ID"  # of a trace of verifiers, with each of its requests
KEY: Final = "X-Rollyard-Key"
UNSET: Final = "ROLLYARD_NO_SUCH_KEY"  # verifiers takes keys from the environment: this server's comes in a header
MODEL: Final = "policy"
REFUSED: Final = (
    "tools",
    "stream",
    "temperature",
    "top_p",
    "logit_bias",
)  # what would change how tokens are drawn, or is not there

Message = dict[str, Any]


class Verifiers:
    """Plays prompts of `prompts.task = "verifiers/NAME"` (protocols.Environment)."""

    def __init__(self) -> None:
        self._served: dict[verifiers.Named, Served] = {}
        self._starting = asyncio.Lock()

    async def episode(self, ask: Ask, prompt: Prompt) -> Reward:
        """One of verifiers' episodes, whose task judges it. Raises ConfigError for a prompt that is of none."""
        column: Any = prompt.columns[verifiers.COLUMN]
        named = verifiers.Named(column["taskset"], column["options"])
        async with self._starting:
            if named not in self._served:
                self._served[named] = await Served.start(verifiers.environment(named))
        return await self._served[named].play(verifiers.task_of(column), Talk(ask))


class Refusal(Exception):
    """What the policy cannot be asked."""


@dataclass(slots=True)
class Talk:
    """A conversation of an agent with the policy: as messages, and as the tokens that stand for them."""

    ask: Ask
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    answered: Sequence[int] = ()
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """An answer of OpenAI's interface. Raises Refusal, or what kept the policy from answering."""
        if asked := [name for name in REFUSED if body.get(name) not in (None, False, [])]:
            raise Refusal(f"the policy cannot be asked with {', '.join(asked)}")
        if body.get("n") not in (None, 1):
            raise Refusal("the policy gives one answer at a time")
        messages, stop = [_plain(each) for each in body["messages"]], body.get("stop") or ()
        async with self.turn:
            self._go_on(messages)
            most = body.get("max_completion_tokens") or body.get("max_tokens")
            said = await self.ask(self.token_ids, max_tokens=most, stop=(stop,) if isinstance(stop, str) else stop)
            prompt = len(self.token_ids)
            self.messages = [*messages, {"role": "assistant", "content": said.text}]
            self.token_ids += said.token_ids
            self.answered = said.token_ids
        finish = "length" if said.finish in (FinishReason.LENGTH, FinishReason.CONTEXT) else "stop"
        usage = {"prompt_tokens": prompt, "completion_tokens": len(said.token_ids), "total_tokens": prompt + len(said.token_ids)}
        choice = {"index": 0, "message": self.messages[-1], "finish_reason": finish, "logprobs": None}
        about = {"id": f"turn-{prompt}", "object": "chat.completion", "created": 0, "model": MODEL}
        return {**about, "choices": [choice], "usage": usage}

    def _go_on(self, messages: list[Message]) -> None:
        """The tokens of these messages: behind those that there are, where the conversation goes on from what was said."""
        if self.messages and messages[: len(self.messages)] == self.messages and len(messages) > len(self.messages):
            after = self.ask.chat_after(messages[len(self.messages) :])
            if self.answered and after[:1] == self.answered[-1:]:
                after = after[1:]  # the policy has ended its answer by itself
            self.token_ids += after
        else:
            self.token_ids = list(self.ask.chat(messages))


def _plain(message: Mapping[str, Any]) -> Message:
    """Role and text of a message. Raises Refusal for one with something else in it."""
    content = message.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if message.get("tool_calls") or message.get("role") == "tool" or not isinstance(content, str):
        raise Refusal(f"a message of {message.get('role')} has more than text in it")
    return {"role": message["role"], "content": content}


class Served:
    """An environment of verifiers, and the server that its agents take for their model."""

    def __init__(self, environment: Env[Any], address: str, key: str) -> None:
        from verifiers.v1 import EvalClientConfig, ModelContext

        self._environment = environment
        client = EvalClientConfig(base_url=f"{address}/v1", api_key_var=UNSET, headers={KEY: key})
        self._context = ModelContext(model=MODEL, client=client)
        self._key = key
        self._talks: dict[str, Talk] = {}  # by the trace's identity
        self._open = AsyncExitStack()  # as long as the process

    @classmethod
    async def start(cls, environment: Env[Any]) -> Served:
        """Raises what verifiers raises when its servers do not start."""
        from aiohttp import web

        held = socket.create_server(("127.0.0.1", 0))
        served = cls(environment, f"http://127.0.0.1:{held.getsockname()[1]}", secrets.token_urlsafe())
        pages = web.Application(client_max_size=2**26)
        pages.router.add_post("/v1/chat/completions", served._complete)
        runner = web.AppRunner(pages, access_log=None)
        await runner.setup()
        served._open.push_async_callback(runner.cleanup)
        await web.SockSite(runner, held).start()
        await served._open.enter_async_context(environment.serving())
        return served

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
