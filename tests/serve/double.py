"""A run that does what a test says, behind the real service."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rollyard.caller import Batch, Dropped
from rollyard.episode.stage import Stage
from rollyard.errors import ConfigError
from rollyard.layers import resolve_tree
from rollyard.prompts.given import GivenSource, given_all
from rollyard.protocols.rollouts import Hearing
from rollyard.rollouts import Status
from rollyard.serve.app import application
from rollyard.serve.service import Service
from rollyard.serve.sessions import Sessions
from rollyard.serve.settings import ServeConfig
from rollyard.serve.tools import PROBE
from rollyard.types import (
    Asking,
    Completion,
    FinishReason,
    Group,
    Prompt,
    Reply,
    Reward,
    Rollout,
    Sample,
    Sampling,
    TensorInfo,
    TrainBatch,
    VersionSpan,
    WeightVersion,
)
from tests.episode.toys import WORDS as FEW
from tests.episode.toys import Toy
from tests.serve.document import Document

V0 = WeightVersion(0)
TOKEN = "of-this-test"
URL = "http://localhost:8000"
CALL = '{"name": "look", "arguments": {"at": "it"}}'
PROBED = json.dumps({"name": PROBE, "arguments": {"of": "it"}})
WORDS = FEW | {8: "<tool_call>", 9: "</tool_call>", 10: CALL, 11: PROBED}
WORD = re.compile("|".join(sorted(map(re.escape, WORDS.values()), key=len, reverse=True)))


def group(id_: int, reward: float | None = 1.0) -> Group:
    done = Completion(id_, 0, (1, 2), (-0.5, -0.25), (VersionSpan(V0, V0, 2),), FinishReason.STOP, "hello")
    return Group(Prompt(id_, id_, (4,), "?", {"answer": "hello"}), (Rollout(done, Reward(reward)),))


def batch(step: int, *ids: int) -> Batch:
    rows = tuple(
        Sample(
            each, 0, (4, 1, 2), (False, True, True), (0.0, -0.5, -0.25), (0.0, 1.0, 1.0), group(each).rollouts[0].completion.spans
        )
        for each in ids
    )
    return Batch(step, tuple(map(group, ids)), TrainBatch(step, (rows,), Sampling(9)))


class AnyText(Toy):
    """Also of texts in which there is no word. Its template shows each tool as =, and calls as the policy writes them."""

    words = WORDS

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return tuple(id_ for word in WORD.findall(text) for id_ in super(AnyText, self).encode(word)) or (4,)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        texts = [message["content"] + "".join(map(_shown, message.get("tool_calls", ()))) for message in messages]
        return (5,) * len(tools) + self.encode("".join(f"{text}<eos>" for text in texts))


def _shown(call: Mapping[str, Any]) -> str:
    return f"<tool_call>{json.dumps(call['function'])}</tool_call>"


class Policy:
    """Writes what it is told to; then `hello` as he, llo, and ends it."""

    def __init__(self) -> None:
        self.says: list[tuple[int, ...]] = []
        self.asked: list[Asking] = []
        self.heard: list[tuple[int, tuple[int, ...]]] = []  # while it writes, by who wants to hear it
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self, asking: Asking, hearing: Hearing | None = None) -> Reply:
        self.asked.append(asking)
        for after, token_ids in self.heard if hearing is not None else ():
            assert hearing is not None and asking.streams
            hearing(after, token_ids)
            await asyncio.sleep(0.02)
        await self.may.wait()
        ids = self.says.pop(0) if self.says else (1, 2, 7)
        finish = FinishReason.STOP if ids else FinishReason.CONTEXT
        spans = (VersionSpan(V0, V0, len(ids)),) if ids else ()
        return Reply(ids, AnyText().decode(ids), finish, (-0.5,) * len(ids), spans)


class Double:
    """What a service asks of `Rollouts`."""

    finished = ""

    def __init__(self, folder: Path, sessions: Sessions | None = None, room: int = 8) -> None:
        self.folder, self.version, self.model = folder, V0, folder / "model"
        self.source = GivenSource(lambda number, row: (AnyText().encode(str(row.prompt)), str(row.prompt)), room, str)
        self.source.vocabulary = len(WORDS) + 1
        self.found: asyncio.Queue[Group | Dropped | Exception | None] = asyncio.Queue()
        self.batch: asyncio.Queue[Batch | None] = asyncio.Queue()
        self.published: list[dict[str, Any]] = []
        self.tensors = (TensorInfo("a", (2,), "torch.float32"), TensorInfo("b", (1, 2), "torch.float32"))
        self.policy, self.sessions = Policy(), sessions
        self.episodes: list[asyncio.Task[Any]] = []
        self.rooms = 0  # who waits for room

    async def submit(self, prompts: Sequence[Any]) -> tuple[int, ...]:
        await self.room()
        return self.put(await self.make(prompts))

    async def room(self) -> None:
        self.rooms += 1
        try:
            await until(lambda: not self.source.full)
        finally:
            self.rooms -= 1

    async def make(self, prompts: Sequence[Any]) -> tuple[Prompt, ...]:
        return await asyncio.to_thread(self.source.make, given_all(prompts))

    def put(self, made: Sequence[Prompt]) -> tuple[int, ...]:
        return self.source.put(made)

    @property
    def next_prompt(self) -> int:
        return self.source.next

    def end_of_prompts(self) -> None:
        self.source.end()

    async def outcomes(self) -> AsyncIterator[Group | Dropped]:
        while (found := await self.found.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found

    async def batches(self) -> AsyncIterator[Batch]:
        while (found := await self.batch.get()) is not None:
            yield found

    async def publish(self, weights: Any, stats: Any) -> WeightVersion:
        if set(weights) != {"a", "b"}:
            raise ConfigError("other tensors", where="publish", remedy="send a and b")
        self.published.append({"weights": weights, "stats": dict(stats)})
        self.version = WeightVersion(self.version.step + 1)
        return self.version

    def status(self) -> Status:
        return Status("running", self.version, None, 0, self.source.waiting, ("e0",), 0, 0, {}, 0, 0.0)

    def admit(self, count: int, size: int = 1, limit_s: float = 5.0, turns: int = 8) -> None:
        """The next prompts are played by harnesses."""
        assert self.sessions is not None
        stage = Stage(self.sessions, AnyText(), len(WORDS) + 1, 9, turns, limit_s)
        for prompt in self.source.take(count)[0]:
            self.episodes += [asyncio.create_task(stage.play(prompt, self.policy)) for _ in range(size)]


async def until(true: Callable[[], object], limit_s: float = 10.0) -> None:
    """Wait for something that nobody tells of."""
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass
class Served:
    """A service that is up, and a client that has its token."""

    run: Double
    service: Service
    app: Any
    http: httpx.AsyncClient
    document: Document
    headers: dict[str, str] = field(default_factory=dict)

    async def lease(self, trainer: str = "t", **more: Any) -> dict[str, str]:
        told = (await self.http.post("/v1/trainer", json={"trainer": trainer} | more)).json()
        return {"X-Rollyard-Lease": told["lease"]}

    async def session(self, **claim: Any) -> dict[str, str]:
        """Headers of a new one."""
        told = await self.http.post("/v1/sessions", json={"wait_s": 2.0} | claim)
        assert told.status_code == 201, told.text
        return {"X-Rollyard-Session": told.json()["session"]}

    async def play(self, size: int = 1, **more: Any) -> dict[str, str]:
        """A member of a new prompt, and its session."""
        await self.run.submit(["?"])
        self.run.admit(1, size, **more)
        return await self.session()


def config(**options: Any) -> ServeConfig:
    given = {name.replace("__", "."): value for name, value in options.items()}
    values = {"prompts.source": "given", "rollout.max_tokens": 9, "environment.limit_s": 300, "serve.wait_s": 5}
    return resolve_tree(ServeConfig, lambda _: None, environment={}, overrides=values | given).config


@asynccontextmanager
async def serving(folder: Path, token: str = TOKEN, room: int = 8, **options: Any) -> AsyncIterator[Served]:
    """A service around a double."""
    made = config(prompts__waiting=room, **options)
    sessions = Sessions(made.serve.idle_s) if made.serve.episodes else None
    run = Double(folder, sessions, room)
    async with AsyncExitStack() as closing:
        service = await closing.enter_async_context(Service(made, run, sessions))  # type: ignore[arg-type]
        app = application(service, token)
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url=URL, headers={"Authorization": f"Bearer {token}"}, timeout=10
        )
        await closing.enter_async_context(http)
        document = Document((await http.get("/openapi.json")).json())

        async def hold(response: httpx.Response) -> None:
            """Whatever a test asks."""
            document.hold(response, await response.aread())

        http.event_hooks["response"].append(hold)
        yield Served(run, service, app, http, document)
        for episode in run.episodes:
            episode.cancel()
        await asyncio.gather(*run.episodes, return_exceptions=True)
