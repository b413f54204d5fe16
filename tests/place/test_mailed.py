"""Frames in batches: whole, in order, and not too many at once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.errors import EngineLost
from rollyard.place import mailed
from rollyard.place.mailed import Mailed, split


async def carry(left: Mailed, right: Mailed) -> None:
    while True:
        right.take_batch(await left.batch())


async def test_two_ends_speak_over_whatever_carries_the_batches() -> None:
    near, far = Mailed("the far end"), Mailed("the near end")
    carrying = [asyncio.create_task(carry(near, far)), asyncio.create_task(carry(far, near))]
    heard: list[bytes] = []

    async def hear(content: bytes) -> bytes:
        heard.append(content)
        return b""

    async def pause(content: bytes) -> bytes:
        for number in range(50):
            far.tell("tokens", b"%d" % number)
        return b"paused"

    near.handle("tokens", hear)
    far.handle("pause", pause)
    assert await near.call("pause", limit_s=5) == b"paused"
    assert heard == [b"%d" % number for number in range(50)]
    waiting = asyncio.create_task(near.call("play", limit_s=30))
    await asyncio.sleep(0.01)
    far.end_because("fell over")
    with pytest.raises(EngineLost, match="the far end fell over"):
        await waiting
    assert await near.ended() == "fell over"
    for task in carrying:
        task.cancel()
    await near.close()
    await far.close()


async def test_what_is_no_message_fails_the_line() -> None:
    line = Mailed("the far end")
    line.take_batch(b"\x02\x00\x00\x00[]" + b"\x02\x00\x00\x00{}")
    assert (await line.ended()).startswith("sent what is no message: TypeError")


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=20), st.integers(1, 100))
def test_frames_arrive_whole_and_in_order_in_batches_of_bounded_size(frames: list[bytes], most: int) -> None:
    async def through() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mailed, "BATCH", most)
            line = Mailed("the far end")
            for frame in frames:
                line.forward(frame)
            arrived: list[bytes] = []
            while len(arrived) < len(frames):
                batch = await line.batch()
                part = list(split(batch))
                assert part and (len(part) == 1 or len(batch) <= most)
                arrived += part
            assert arrived == frames
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(line.batch(), 0.001)

    asyncio.run(through())
