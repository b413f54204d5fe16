"""Clients of a service: `Client` blocks, `AsyncClient` does not; otherwise they are the same.

    with Client("http://127.0.0.1:8000") as client:
        client.submit(["2+3="], columns...)
        with client.trainer("mine") as trainer:
            for batch in trainer.batches():
                ...  # train on batch.train
                trainer.publish(model)

They need no torch until weights are published.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import httpx

from rollyard.caller import Batch, Dropped, numbers_of
from rollyard.errors import ConfigError
from rollyard.rollouts import Submitted
from rollyard.serve import calls
from rollyard.serve.calls import ASK_S, SESSION, Ask, Calls, ServiceError
from rollyard.types import Group, WeightVersion

if TYPE_CHECKING:
    from rollyard.weights.given import Weights

__all__ = ["AsyncClient", "AsyncTrainer", "Client", "Play", "ServiceError", "Trainer"]

T = TypeVar("T")

Way = Literal["upload", "group"]
PIECE = 2**20  # bytes of a file that are sent at a time
QUIET_S = 3600.0  # seconds until an answer begins: whoever publishes waits for the check of all tensors


@dataclass(frozen=True, slots=True)
class Play:
    """A member that a harness plays, by OpenAI's interface: `openai.OpenAI(base_url=..., default_headers=play.headers)`."""

    session: str
    group: int
    text: str  # of its prompt
    messages: tuple[Mapping[str, str], ...]  # likewise, where it is a conversation
    columns: Mapping[str, object]

    @property
    def headers(self) -> dict[str, str]:
        """That say which session asks."""
        return {SESSION: self.session}

    @property
    def model(self) -> str:
        """The name of a model that says the same, for a harness that sends no headers of its own."""
        return f"policy:{self.session}"


def _play(told: Mapping[str, Any]) -> Play:
    return Play(told["session"], told["group"], told["text"], tuple(told["messages"]), told["columns"])


class Client:
    """Speaks to a service.

    Args:
        url: such as http://127.0.0.1:8000.
        token: what the service has in ROLLYARD_TOKEN.
        transport: of httpx; another one for tests.

    Raises ConfigError for what is no address or no token.
    """

    def __init__(self, url: str, token: str = "", transport: httpx.BaseTransport | None = None) -> None:
        self.url = _address(url)
        self._http = httpx.Client(base_url=self.url, headers=_headers(token), timeout=_timeout(), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, prompts: Sequence[Submitted], *, key: str = "", wait_s: float = 600.0) -> tuple[int, ...]:
        """Submit prompts: all of them, or none; once, however often the request had to be made. Their ids.

        Args:
            key: of yours, to submit them once also when this is called again.
            wait_s: seconds to wait for room.

        Raises ServiceError.
        """
        return self._do(calls.submit(prompts, key, wait_s))

    def end_of_prompts(self) -> None:
        self._do(calls.end_of_prompts())

    def status(self) -> dict[str, Any]:
        return self._do(calls.status())

    def outcomes(self, after: int = 0) -> Iterator[tuple[int, Group | Dropped]]:
        """What becomes of prompts, each with its cursor, from `after` on and without end. Each comes at least once."""
        while True:
            found, after = self._do(calls.outcomes(after))
            yield from found

    def groups(self, after: int = 0) -> Iterator[tuple[int, Group]]:
        """The same of groups that were finished."""
        for cursor, each in self.outcomes(after):
            if isinstance(each, Group):
                yield cursor, each

    def trainer(self, name: str, *, take_over: bool = False, wait_s: float = 0.0) -> Trainer:
        """Be the trainer. Raises ServiceError while another one is, for so long."""
        return Trainer(self, name, self._do(calls.claim(name, take_over, wait_s)))

    def play(self, group: int | None = None, *, wait_s: float = 600.0) -> Play:
        """A member that waits for a harness. Raises ServiceError when none does in that time."""
        return _play(self._do(calls.open_session(group, wait_s)))

    def judge(self, play: Play, value: float | None, parts: Mapping[str, float] | None = None) -> None:
        """End it with a verdict; None: the configured rewards judge."""
        self._do(calls.judge(play.session, value, parts or {}))

    def fail(self, play: Play, problem: str) -> None:
        """End it without a verdict."""
        self._do(calls.fail(play.session, problem))

    def _do(self, work: Calls[T]) -> T:
        answer: httpx.Response | httpx.TransportError | None = None
        try:
            while True:
                ask = next(work) if answer is None else work.send(answer)
                time.sleep(ask.pause_s)
                answer = self._carry_out(ask)
        except StopIteration as done:
            result: T = done.value
            return result

    def _carry_out(self, ask: Ask) -> httpx.Response | httpx.TransportError:
        try:
            content = _pieces(ask.file) if ask.file else None
            return self._http.request(
                ask.method, ask.path, json=ask.body, content=content, params=dict(ask.params), headers=dict(ask.headers)
            )
        except httpx.TransportError as error:
            return error


class Trainer:
    """The trainer of a service, as long as it has the lease."""

    def __init__(self, client: Client, name: str, lease: str) -> None:
        self._client, self.name, self.lease = client, name, lease
        self._batch: Batch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._client._do(calls.leave(self.lease))

    def batches(self) -> Iterator[Batch]:
        """The batches, each once weights were published for the one before, until there are no more."""
        while (found := self._do(calls.batch)) is not None:
            self._batch = found
            yield found

    def renew(self) -> None:
        """Keep the lease, in a step that takes longer."""
        self._do(calls.renew)

    def _do(self, work: Callable[[str], Calls[T]]) -> T:
        """With the lease; where it is over, and nobody else has it, with a new one."""
        try:
            return self._client._do(work(self.lease))
        except ServiceError as error:
            if error.code != "lease":
                raise
        self.lease = self._client._do(calls.claim(self.name, False, 0.0))
        return self._client._do(work(self.lease))

    def publish(self, weights: Weights, stats: Mapping[str, float] | None = None, *, way: Way = "upload") -> WeightVersion:
        """Publish what training on the batch came to: uploaded as a file, or broadcast in a torch group.

        Raises ServiceError, also for weights that do not suit; nothing has changed then.
        """
        tensors, told, step = tensors_of(weights), numbers_of(stats or {}), self._next
        if way == "group":
            return self._do(lambda lease: calls.publish_group(lease, step, tensors, told, lambda where: _send(where, tensors)))
        if way != "upload":
            raise ConfigError(f"weights do not go by {way!r}", where="way", remedy="use upload or group")
        with _file(tensors, told) as path:
            return self._do(lambda lease: calls.upload(lease, step, path))

    def publish_path(self, path: str, stats: Mapping[str, float] | None = None) -> WeightVersion:
        """Publish from a disk that both sides have: a file below the service's serve.weights_folder."""
        told = numbers_of(stats or {})
        return self._do(lambda lease: calls.publish_file(lease, self._next, path, told))

    @property
    def _next(self) -> int:
        return _step(self._batch)


class AsyncClient:
    """The same, for an event loop."""

    def __init__(self, url: str, token: str = "", transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = _address(url)
        self._http = httpx.AsyncClient(base_url=self.url, headers=_headers(token), timeout=_timeout(), transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def submit(self, prompts: Sequence[Submitted], *, key: str = "", wait_s: float = 600.0) -> tuple[int, ...]:
        return await self._do(calls.submit(prompts, key, wait_s))

    async def end_of_prompts(self) -> None:
        await self._do(calls.end_of_prompts())

    async def status(self) -> dict[str, Any]:
        return await self._do(calls.status())

    async def outcomes(self, after: int = 0) -> AsyncIterator[tuple[int, Group | Dropped]]:
        while True:
            found, after = await self._do(calls.outcomes(after))
            for each in found:
                yield each

    async def groups(self, after: int = 0) -> AsyncIterator[tuple[int, Group]]:
        async for cursor, each in self.outcomes(after):
            if isinstance(each, Group):
                yield cursor, each

    async def trainer(self, name: str, *, take_over: bool = False, wait_s: float = 0.0) -> AsyncTrainer:
        return AsyncTrainer(self, name, await self._do(calls.claim(name, take_over, wait_s)))

    async def play(self, group: int | None = None, *, wait_s: float = 600.0) -> Play:
        return _play(await self._do(calls.open_session(group, wait_s)))

    async def judge(self, play: Play, value: float | None, parts: Mapping[str, float] | None = None) -> None:
        await self._do(calls.judge(play.session, value, parts or {}))

    async def fail(self, play: Play, problem: str) -> None:
        await self._do(calls.fail(play.session, problem))

    async def _do(self, work: Calls[T]) -> T:
        answer: httpx.Response | httpx.TransportError | None = None
        try:
            while True:
                ask = next(work) if answer is None else work.send(answer)
                await asyncio.sleep(ask.pause_s)
                answer = await self._carry_out(ask)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _carry_out(self, ask: Ask) -> httpx.Response | httpx.TransportError:
        try:
            content = _apieces(ask.file) if ask.file else None
            return await self._http.request(
                ask.method, ask.path, json=ask.body, content=content, params=dict(ask.params), headers=dict(ask.headers)
            )
        except httpx.TransportError as error:
            return error


class AsyncTrainer:
    """The same, for an event loop."""

    def __init__(self, client: AsyncClient, name: str, lease: str) -> None:
        self._client, self.name, self.lease = client, name, lease
        self._batch: Batch | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            await self._client._do(calls.leave(self.lease))

    async def batches(self) -> AsyncIterator[Batch]:
        while (found := await self._do(calls.batch)) is not None:
            self._batch = found
            yield found

    async def renew(self) -> None:
        await self._do(calls.renew)

    async def _do(self, work: Callable[[str], Calls[T]]) -> T:
        try:
            return await self._client._do(work(self.lease))
        except ServiceError as error:
            if error.code != "lease":
                raise
        self.lease = await self._client._do(calls.claim(self.name, False, 0.0))
        return await self._client._do(work(self.lease))

    async def publish(self, weights: Weights, stats: Mapping[str, float] | None = None) -> WeightVersion:
        """Uploaded as a file."""
        tensors = tensors_of(weights)
        with _file(tensors, numbers_of(stats or {})) as path:
            return await self._do(lambda lease: calls.upload(lease, _step(self._batch), path))

    async def publish_path(self, path: str, stats: Mapping[str, float] | None = None) -> WeightVersion:
        told = numbers_of(stats or {})
        return await self._do(lambda lease: calls.publish_file(lease, _step(self._batch), path, told))


# ------------------------------------------------------------------------------------------------------- in common


def _address(url: str) -> str:
    """Raises ConfigError."""
    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        found = httpx.URL("")
    if found.scheme not in ("http", "https") or not found.host:
        raise ConfigError(f"{url!r:.200} is no address of a service", where="url", remedy="give such as http://127.0.0.1:8000")
    return url.rstrip("/")


def _headers(token: str) -> dict[str, str]:
    """Raises ConfigError."""
    if not (isinstance(token, str) and token.isascii() and token.isprintable() and token == token.strip()):
        problem = "it has characters that no header of HTTP has"
        raise ConfigError(problem, where="token", remedy="give what the service has in ROLLYARD_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _timeout() -> httpx.Timeout:
    return httpx.Timeout(ASK_S * 3, read=QUIET_S)


def _step(batch: Batch | None) -> int:
    """Raises ConfigError before the first batch."""
    if batch is None:
        raise ConfigError("no batch was taken", where="publish", remedy="take one of batches(), train on it, then publish")
    return batch.step + 1


def tensors_of(weights: Weights) -> dict[str, Any]:
    """As they travel: by their Hugging Face names, on the CPU, a tied head once. Raises ConfigError."""
    from rollyard.weights.given import named, whole

    found: dict[object, str] = {}
    tensors = {}
    for name, tensor in named(weights).items():
        own = whole(name, tensor)
        if (
            found.setdefault((own.data_ptr(), own.shape), name) == name or not own.numel()
        ):  # else the same memory has another name
            tensors[name] = own.cpu().contiguous()
    return tensors


@contextmanager
def _file(tensors: Mapping[str, Any], stats: Mapping[str, float]) -> Iterator[str]:
    import json

    from safetensors.torch import save_file

    from rollyard.serve.weights import STATS

    with tempfile.TemporaryDirectory(prefix="rollyard-") as folder:
        path = Path(folder) / "weights.safetensors"
        save_file(dict(tensors), path, metadata={STATS: json.dumps(stats)})
        yield str(path)


def _send(told: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    from rollyard.serve.group import Invitation, send

    send(Invitation(told["host"], told["port"], told["name"], told["limit_s"]), list(tensors.values()))


def _pieces(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield piece


async def _apieces(path: str) -> AsyncIterator[bytes]:
    for piece in _pieces(path):
        yield piece
