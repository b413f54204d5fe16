"""Serves a trainer over a line: the other end of `remote.RemoteTrainer`."""

from __future__ import annotations

from pathlib import Path

from rollyard.protocols.devices import Spans
from rollyard.protocols.processes import Channel
from rollyard.protocols.training import Trainer
from rollyard.train import wire
from rollyard.train.group import Member
from rollyard.watch.spans import tell


def serve(trainer: Trainer, channel: Channel, spans: Spans) -> None:
    """Answer the calls `train.*`. Whoever owns the channel makes it ready, and closes the trainer.

    Args:
        spans: of its device: what it did is told before the answer.
    """

    async def start(content: bytes) -> bytes:
        return wire.VERSION.dump_json(trainer.version)

    async def step(content: bytes) -> bytes:
        stats = await trainer.train(wire.SHARDS.validate_json(content))
        tell(spans, channel)
        return wire.TRAINED.dump_json((stats, trainer.version))

    async def settle(content: bytes) -> bytes:
        return wire.VERSION.dump_json(await trainer.settle())

    async def save(content: bytes) -> bytes:
        await trainer.save(Path(content.decode()))
        tell(spans, channel)
        return b""

    async def become(content: bytes) -> bytes:
        await trainer.become(wire.VERSION.validate_json(content))
        return b""

    for name, handler in (
        ("start", start),
        ("step", step),
        ("settle", settle),
        ("save", save),
        ("become", become),
    ):
        channel.handle(f"train.{name}", handler)


def serve_member(trainer: Member, channel: Channel, spans: Spans, address: str = "127.0.0.1") -> None:
    """The same of one that can be one of several ranks.

    Args:
        address: of this machine, as other ranks reach it; where they meet, unless another is asked for.
    """

    async def values(content: bytes) -> bytes:
        found = await trainer.values(wire.SHARDS.validate_json(content))
        tell(spans, channel)
        return wire.VALUES.dump_json(found)

    async def open_(content: bytes) -> bytes:
        asked = wire.OPENING.validate_json(content)
        return (await trainer.open(asked.address or address, asked.limit_s)).encode()

    async def join(content: bytes) -> bytes:
        asked = wire.JOINING.validate_json(content)
        await trainer.join(asked.place, asked.rank, asked.size, asked.limit_s)
        return b""

    serve(trainer, channel, spans)
    channel.handle("train.values", values)
    channel.handle("train.open", open_)
    channel.handle("train.join", join)
