"""Weights that come as a safetensors file: by upload, or by a path on a common disk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard.errors import ConfigError
from rollyard.serve.refusals import Refused

if TYPE_CHECKING:
    from torch import Tensor

STATS: Final = "rollyard.stats"  # in the metadata of an upload: a JSON object of numbers
DRAFT: Final = ".draft"  # as of all that is written into a run's folder
PACE: Final = 2**20  # bytes that have to come in the time that a body may be quiet
PIECE: Final = 4 * 2**20  # bytes of an upload that are written at a time


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that came. `digest`: SHA-256 of its bytes."""

    path: Path
    digest: str


@contextmanager
def _keeping() -> Iterator[None]:
    """Raises Refused where the disk does not take it."""
    try:
        yield
    except OSError as error:
        raise Refused(HTTPStatus.INSUFFICIENT_STORAGE, f"the weights cannot be kept: {error.strerror}", "disk") from None


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """A file that goes away again: with the next life of the run, when this one is killed. Raises Refused."""
    with _keeping():
        handle, name = tempfile.mkstemp(prefix=".upload", suffix=DRAFT, dir=folder)
        os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


async def paced(
    chunks: AsyncIterator[bytes], quiet_s: float, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[bytes]:
    """The same, from who does not make a body last for ever.

    Raises Refused when `PACE` bytes of it are waited for longer than `quiet_s` seconds.
    """
    waited, size, before = 0.0, 0, clock()
    async for chunk in chunks:
        waited, size = waited + clock() - before, size + len(chunk)
        if size >= PACE:
            waited, size = 0.0, 0
        elif waited > quiet_s:
            problem, remedy = f"less than {PACE} bytes of the body came in {quiet_s:g} s", "serve.body_s says so"
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, problem, "slow", remedy=remedy)
        yield chunk
        before = clock()  # what is done with it takes no time of the client's


async def receive(chunks: AsyncIterator[bytes], path: Path, most: int, quiet_s: float) -> Upload:
    """Write a body to the disk as it comes.

    Args:
        most: bytes.
        quiet_s: seconds until the next piece of it has come.

    Raises Refused when it is too long, too slow, or does not fit on the disk.
    """
    found, size, coming, gathered = hashlib.sha256(), 0, aiter(chunks), bytearray()
    with _keeping(), path.open("wb", buffering=0) as file:  # nothing is left to be written when it is closed

        async def keep() -> None:
            """The loop is the run's: it does no more than gather."""
            await asyncio.to_thread(_keep, bytes(gathered), file, found)
            gathered.clear()

        while True:
            try:
                async with asyncio.timeout(quiet_s):
                    chunk = await anext(coming)
            except StopAsyncIteration:
                break
            except TimeoutError:
                problem = f"nothing of the body came for {quiet_s:g} s"
                raise Refused(HTTPStatus.REQUEST_TIMEOUT, problem, "slow") from None
            size += len(chunk)
            if size > most:
                problem, remedy = f"weights have at most {most} bytes here", "serve.weights_gib says so"
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, problem, "size", remedy=remedy)
            gathered += chunk
            if len(gathered) >= PIECE:
                await keep()
        await keep()
    return Upload(path, found.hexdigest())


def _keep(piece: bytes, file: FileIO, digest: hashlib._Hash) -> None:
    digest.update(piece)
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]


def below(folder: str, given: str) -> Path:
    """The file of this path, which is to lie below `folder` whatever links lead where. Raises Refused."""
    if not folder:
        problem, remedy = "weights are not published from files here", "set serve.weights_folder, or upload them"
        raise Refused(HTTPStatus.FORBIDDEN, problem, "path", "path", remedy)
    outside = Refused(HTTPStatus.FORBIDDEN, "the path does not lead to a file below serve.weights_folder", "path", "path")
    try:
        above = Path(folder).resolve(strict=True)
        path = (above / given).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise outside from None
    if above not in path.parents or not path.is_file():
        raise outside
    return path


def copied(given: Path, path: Path) -> Upload:
    """As if it had been uploaded: whoever changes the file while it is looked at changes nothing here.

    Raises ConfigError when it cannot be read, Refused when the disk does not take it.
    """
    found = hashlib.sha256()
    try:
        file = given.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(error) from None
    with file, _keeping(), path.open("wb", buffering=0) as kept:
        while piece := _piece(file):
            _keep(piece, kept, found)
    return Upload(path, found.hexdigest())


def _piece(file: FileIO) -> bytes:
    try:
        return file.read(PIECE)
    except OSError as error:
        raise _unreadable(error) from None


def read(path: Path) -> Mapping[str, Tensor]:
    """Its tensors, as they lie in the file. Raises ConfigError for what is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(error) from None


def stats_of(path: Path) -> Mapping[str, float]:
    """What its metadata says of the step. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(STATS, "{}")
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(error) from None
    try:
        stats = json.loads(text)
    except (ValueError, RecursionError):
        stats = None
    if not isinstance(stats, dict) or not all(type(value) in (int, float) for value in stats.values()):
        raise ConfigError(f"the metadata {STATS} is no object of numbers", where="weights", remedy='give such as {"loss": 0.1}')
    return stats


def _unreadable(error: Exception) -> ConfigError:
    problem = f"they are no safetensors file that can be read: {error}"
    return ConfigError(problem, where="weights", remedy="send a file as safetensors.torch.save_file writes it")
