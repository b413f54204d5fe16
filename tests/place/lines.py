"""Both ends of a line, in this process."""

from __future__ import annotations

import asyncio
import socket

from rollyard.place.link import Link


async def joined(near_name: str = "the far end", far_name: str = "the near end") -> tuple[Link, Link]:
    """Two open links; each is named after what is at its other end."""
    left, right = socket.socketpair()
    near = Link(near_name, *await asyncio.open_connection(sock=left))
    far = Link(far_name, *await asyncio.open_connection(sock=right))
    near.open()
    far.open()
    return near, far
