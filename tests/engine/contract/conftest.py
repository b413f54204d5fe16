"""An engine of each kind serves all tests of the suite: some take long to start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine.contract.makers import MAKERS, Maker, Options, Served
from tests.engine.contract.model import Model, model_folder, model_of
from tests.engine.contract.talk import Talk


@pytest.fixture(scope="session", params=[pytest.param(name, marks=maker.marks) for name, maker in MAKERS.items()])
def maker(request: pytest.FixtureRequest) -> Maker:
    return MAKERS[request.param]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the engines start from."""
    return model_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """The same model with other weights."""
    return model_folder(tmp_path_factory.mktemp("trained"), like=base)


@pytest.fixture(scope="session")
def model(base: Path) -> Model:
    return model_of(base)


@pytest.fixture(scope="session")
def later(trained: Path) -> Model:
    return model_of(trained)


class Shelf:
    """Holds the engine of one kind. One that does not come to rest is closed, and the next test gets another."""

    def __init__(self, maker: Maker, folder: Path, scratch: Path) -> None:
        self._maker, self._folder, self._scratch = maker, folder, scratch
        self._stack = AsyncExitStack()
        self._served: Served | None = None
        self._talk: Talk | None = None

    async def fresh(self) -> Served:
        """One that was just started and has acknowledged no weights; nobody listens to it yet."""
        await self.clear()
        self._served = await self._stack.enter_async_context(self._maker.open(self._folder, self._scratch, Options()))
        return self._served

    async def take(self) -> Talk:
        """One at rest, with the base weights."""
        if self._talk is None:
            served = self._served or await self.fresh()
            self._talk = Talk(served, self._maker, self._folder)
            self._stack.push_async_callback(self._talk.leave)
            await self._talk.calm()
        return self._talk

    async def give_back(self) -> None:
        assert self._talk is not None
        try:
            await self._talk.calm()
        except BaseException:
            await self.clear()
            raise

    async def clear(self) -> None:
        self._served = self._talk = None
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shelf(maker: Maker, base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shelf]:
    shelf = Shelf(maker, base, tmp_path_factory.mktemp("scratch"))
    yield shelf
    await shelf.clear()


@pytest_asyncio.fixture(loop_scope="session")
async def talk(shelf: Shelf) -> AsyncIterator[Talk]:
    """An engine at rest, with the base weights."""
    yield await shelf.take()
    await shelf.give_back()


@pytest_asyncio.fixture(loop_scope="session")
async def closing(shelf: Shelf) -> AsyncIterator[Talk]:
    """The same, for a test that closes it."""
    yield await shelf.take()
    await shelf.clear()


@pytest_asyncio.fixture(loop_scope="session")
async def partner(maker: Maker, base: Path, tmp_path: Path) -> AsyncIterator[Talk]:
    """Another engine with the base weights, which goes on with what was cut."""
    other = MAKERS[maker.partner]
    async with other.open(base, tmp_path, Options(slots=3)) as served:
        talk = Talk(served, other, base)
        await talk.calm()
        yield talk
        await talk.leave()
