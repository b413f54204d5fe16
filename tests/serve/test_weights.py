"""Uploads have an end, in time and on the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from rollyard.durable import clear_drafts
from rollyard.errors import ConfigError
from rollyard.serve.refusals import Refused
from rollyard.serve.settings import check
from rollyard.serve.weights import PACE, copied, draft, paced, receive
from tests.serve.double import config


class Sender:
    """Sends pieces of these sizes, each after so many seconds."""

    def __init__(self, sizes: Sequence[int], after_s: float) -> None:
        self.now, self._sizes, self._after_s = 0.0, sizes, after_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for size in self._sizes:
            self.now += self._after_s
            yield bytes(size)


@pytest.mark.parametrize(("sizes", "comes"), [([1] * 1000, 6), ([PACE // 4] * 1000, 1000), ([PACE, *[1] * 1000], 7)])
async def test_who_sends_next_to_nothing_is_hung_up_on(sizes: list[int], comes: int) -> None:
    sender, came = Sender(sizes, 10.0), 0
    try:
        async for _ in paced(aiter(sender), 60.0, lambda: sender.now):
            came += 1
    except Refused as refused:
        assert (refused.status, refused.code) == (408, "slow")
    assert came == comes


async def test_a_disk_that_is_slow_takes_no_time_of_the_client() -> None:
    sender, came = Sender([1] * 10, 1.0), 0
    async for _ in paced(aiter(sender), 60.0, lambda: sender.now):
        sender.now += 100.0
        came += 1
    assert came == 10


async def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    """Also when that shows with the last few bytes, or before the first."""

    async def few() -> AsyncIterator[bytes]:
        yield b"few"

    with pytest.raises(Refused, match="No space left") as refused:
        await receive(few(), Path("/dev/full"), 9, 5.0)
    assert (refused.value.status, refused.value.code) == (507, "disk")
    given = tmp_path / "given"
    given.write_bytes(b"few")
    with pytest.raises(Refused, match="No space left"):
        copied(given, Path("/dev/full"))
    with pytest.raises(Refused, match="No such file"), draft(tmp_path / "nowhere"):
        pass


def test_what_cannot_be_read_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    for given in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no safetensors file"):
            copied(given, tmp_path / "kept")


def test_an_upload_that_was_cut_by_a_kill_goes_with_the_next_life(tmp_path: Path) -> None:
    with draft(tmp_path) as path:
        path.write_bytes(b"x")
        clear_drafts(tmp_path)
        assert not path.exists()


def test_a_lease_is_longer_than_what_its_trainer_waits_for() -> None:
    with pytest.raises(ConfigError, match="its lease ends after 5 s"):
        check(config(serve__wait_s=5, serve__lease_s=5, serve__body_s=1))
    with pytest.raises(ConfigError, match="not heard for 60 s"):
        check(config(serve__lease_s=20))
