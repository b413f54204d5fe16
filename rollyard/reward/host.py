"""What a worker process runs: it loads the functions, and judges with them until the line ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rollyard.functions import load_function
from rollyard.protocols.processes import Channel
from rollyard.reward import origin
from rollyard.reward.function import WHERE, Takes, batch_columns
from rollyard.settle import Surroundings, heard, leave_if_full, settle
from rollyard.verdict import cause_of, number_of

Verdict = tuple[float | None, str]  # a number, or why there is none
UNLISTED = (Mapping, Set, str, bytes, bytearray)  # what gives items one by one, and yet has no reward for each completion


class Source(NamedTuple):
    """Where a function comes from: `load`, as the config names it; or `file`, where it was written to.

    `needs` is a module that it imports when it is called, and that takes long.
    """

    name: str
    load: str = ""
    file: str = ""
    needs: str = ""


class Order(NamedTuple):
    """All that a worker needs."""

    functions: tuple[Source, ...]
    around: Surroundings

    @classmethod
    def read(cls, content: bytes) -> Order:
        functions, around = json.loads(content)
        return cls(tuple(Source(*source) for source in functions), Surroundings(*around))


class Asked(NamedTuple):
    """One call: of several completions only for a function that judges several at once."""

    function: int
    limit_s: float
    texts: Sequence[tuple[str, str]]  # prompt, completion
    arguments: Sequence[Mapping[str, Any]]


async def serve(channel: Channel, order: bytes) -> None:
    """Judge. Raises ConfigError when a function cannot be loaded here."""
    ordered = Order.read(order)
    settle(ordered.around, "reward.memory_mib")
    judges = [Judge(source.name, loaded(source)) for source in ordered.functions]

    async def start(content: bytes) -> bytes:
        return b""

    async def judge(content: bytes) -> bytes:
        asked = Asked(*json.loads(content))
        return json.dumps(await judges[asked.function].judge(asked)).encode()

    channel.handle("start", start)
    channel.handle("judge", judge)
    with heard():
        channel.ready()
        await channel.ended()


def loaded(source: Source) -> Callable[..., Any]:
    """The function. Raises ConfigError when it cannot be loaded here."""
    if source.needs:
        import_module(source.needs)
    return origin.read(Path(source.file)) if source.file else load_function(source.load, WHERE)


class Judge:
    """One function. Whatever it does short of ending the process comes out as a verdict, or as none."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function, self._takes = name, function, Takes.of(function)

    async def judge(self, asked: Asked) -> list[Verdict]:
        """A verdict for each completion; a single one with an error for several, which then are to be asked one by one."""
        texts, arguments, limit_s = asked.texts, asked.arguments, asked.limit_s
        if self._takes.batched:
            several = dict(zip(("prompts", "completions"), map(list, zip(*texts, strict=True)), strict=True))
            named = {name: several[name] for name in self._takes.texts} | batch_columns(arguments)
            value, problem = await self._call(limit_s, (), named)
            return [(None, problem)] if problem else self._verdicts(value, len(texts))
        value, problem = await self._call(limit_s, texts[0], arguments[0])
        return [(None, problem)] if problem else [number_of(value, self._name)]

    async def _call(self, limit_s: float, texts: Sequence[str], named: Mapping[str, Any]) -> tuple[Any, str]:
        """What it returned, or what went wrong."""
        if not self._takes.asynchronous:
            return await _outside(partial(self._function, *texts, **named))
        try:
            async with asyncio.timeout(limit_s) as clock:
                return await self._function(*texts, **named), ""
        except BaseException as error:  # noqa: BLE001 - whatever a user's function raises is a missing verdict, told with its cause
            if clock.expired():
                return None, f"no verdict within {limit_s:g} s"
            leave_if_full(error)
            return None, cause_of(error)

    def _verdicts(self, value: Any, count: int) -> list[Verdict]:
        """Of several completions."""
        try:
            values = None if isinstance(value, UNLISTED) else list(value)
        except Exception:  # noqa: BLE001 - of whatever class the value is, it is no list
            values = None
        if values is None:
            return [(None, f"{self._name} returned a {type(value).__name__}, not a list of numbers")] * count
        if len(values) != count:
            return [(None, f"{self._name} returned {len(values)} rewards for {count} completions")] * count
        return [number_of(one, self._name) for one in values]


async def _outside(call: Callable[[], Any]) -> tuple[Any, str]:
    """What `call` returned, or what went wrong. It runs as in a script: on the main thread, so that it may set signals, and
    with no event loop around it, so that it may run one."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, str]] = loop.create_future()

    def run() -> None:
        asyncio._set_running_loop(None)
        try:
            outcome.set_result((call(), ""))
        except BaseException as error:  # noqa: BLE001 - as above
            leave_if_full(error)
            outcome.set_result((None, cause_of(error)))
        finally:
            asyncio._set_running_loop(loop)

    loop.call_soon(run)
    return await outcome
