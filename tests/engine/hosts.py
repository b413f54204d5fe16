"""What children of the engine tests run: scripted engines, so that they start fast."""

from __future__ import annotations

import os

from rollyard.engine.fake import FakeEngine, Script
from rollyard.engine.host import serve
from rollyard.protocols.processes import Channel
from rollyard.types import Request


async def scripted(channel: Channel, order: bytes) -> None:
    """Writes for ever, slowly; a request of seed 13 kills the engine after 20 tokens."""

    def script(request: Request) -> Script:
        return Script((7,) * 4000, die_after=20 if request.seed == 13 else None)

    os.write(1, b"serving scripts\n")
    await serve(FakeEngine("scripted", script=script, token_s=0.002), channel)
