"""The dashboard beside a run: what becomes of it is nothing of the run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.dashboard import beside
from rollyard.errors import EngineLost
from rollyard.journal.folder import RunFolder


class Dead:
    """A child that was killed once it had said where it answers."""

    closed = False

    def ready(self) -> None: ...

    async def call(self, name: str, *, limit_s: float) -> bytes:
        return b"http://127.0.0.1:1/"

    def tell(self, name: str) -> None:
        raise EngineLost("the dashboard was ended by signal 9")

    def kill(self) -> None: ...

    async def close(self) -> None:
        self.closed = True


async def test_a_run_whose_dashboard_was_killed_ends_as_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Dead()

    async def launch(*_: object, **__: object) -> Dead:
        return dead

    monkeypatch.setattr(beside, "launch", launch)
    with pytest.warns(RuntimeWarning, match="ended by signal 9; the run went on without it"):
        async with beside.beside(RunFolder(tmp_path), 0) as address:
            assert address == "http://127.0.0.1:1/"
    assert dead.closed
