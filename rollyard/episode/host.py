"""What a worker process runs: it loads the environment, and plays many episodes at a time until the line ends."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter

from rollyard.episode.load import load_environment
from rollyard.episode.stage import Played, Stage
from rollyard.protocols.processes import Channel
from rollyard.protocols.rollouts import Ask, Environment, Hearing
from rollyard.settle import Surroundings, heard, leave_if_full, settle
from rollyard.types import Asking, Prompt, Reply

if TYPE_CHECKING:
    from rollyard.model.tokenizer import Tokenizer

ASK_S = 24 * 3600.0  # seconds that an answer of the policy may take: as long as the longest rollout


@dataclass(frozen=True, slots=True)
class Order:
    """All that a worker needs."""

    environment: str  # as the config names it
    tokens: str  # file of the policy's tokenizer
    folder: str  # of the model, for its chat template
    vocabulary: int
    max_tokens: int
    turns: int
    limit_s: float
    around: Surroundings


LOOSE = ConfigDict(ser_json_inf_nan="constants")  # a column may be a number that is none
ORDER = TypeAdapter(Order)
PLAY = TypeAdapter(tuple[int, Prompt], config=LOOSE)  # number of the episode
ASK = TypeAdapter(tuple[int, Asking])
REPLY = TypeAdapter(tuple[Reply])
PLAYED = TypeAdapter(tuple[Played])
STOP = TypeAdapter(int)


async def serve(channel: Channel, order: bytes) -> None:
    """Play. Raises ConfigError when the environment cannot be loaded here."""
    ordered = ORDER.validate_json(order)
    settle(ordered.around, "environment.memory_mib")
    environment, tokens = load_environment(ordered.environment), _Tokens(ordered)
    stage = Stage(_Bounded(environment), tokens, ordered.vocabulary, ordered.max_tokens, ordered.turns, ordered.limit_s)
    going: dict[int, asyncio.Task[Played]] = {}

    async def start(content: bytes) -> bytes:
        return b""

    async def play(content: bytes) -> bytes:
        number, prompt = PLAY.validate_json(content)

        async def answer(asking: Asking, hearing: Hearing | None = None) -> Reply:
            asked = ASK.dump_json((number, replace(asking, streams=False)))
            (reply,) = REPLY.validate_json(await channel.call("ask", asked, limit_s=ASK_S))
            return reply

        episode = going[number] = asyncio.ensure_future(stage.play(prompt, answer))
        try:
            await asyncio.wait((episode,))
        finally:
            del going[number]
        return b"" if episode.cancelled() else PLAYED.dump_json((episode.result(),))

    async def stop(content: bytes) -> bytes:
        if (episode := going.get(STOP.validate_json(content))) is not None:
            episode.cancel()
        return b""

    for name, handler in (("start", start), ("play", play), ("stop", stop)):
        channel.handle(name, handler)
    with heard():
        channel.ready()
        await channel.ended()


@dataclass(frozen=True, slots=True)
class _Bounded:
    """An environment that ends its process when it has reached the memory limit."""

    environment: Environment

    async def episode(self, ask: Ask, prompt: Prompt) -> Any:
        try:
            return await self.environment.episode(ask, prompt)
        except MemoryError as error:
            leave_if_full(error)
            raise


class _Tokens:
    """The policy's tokenizer. What only the chat template needs is loaded with the first conversation."""

    def __init__(self, ordered: Order) -> None:
        from tokenizers import Tokenizer

        self._fast, self._folder = Tokenizer.from_file(ordered.tokens), Path(ordered.folder)

    @cached_property
    def special(self) -> Collection[str]:
        return [token.content for token in self._fast.get_added_tokens_decoder().values() if token.special]

    @cached_property
    def _full(self) -> Tokenizer:
        from rollyard.model.tokenizer import Tokenizer

        return Tokenizer(self._folder)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return tuple(self._fast.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return self._full.chat(messages, tools)

    def chat_after(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return self._full.chat_after(messages, tools)
