"""What other processes print into files is kept short here: code that never stops printing fills no disk.

What is in the middle is left out: the beginning often says why, the end what came of it. Files are written by appending, so
they can be cut at any time; what is printed while one is cut may be lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Final

MOST: Final = 16 * 2**20  # bytes that a file may have when it is looked at
FIRST, LAST = 2**16, 2**20  # bytes that are kept of one that has more
LOOK_S: Final = 1.0  # seconds between two looks


def append_only(handle: int) -> None:
    """Whoever writes to this open file, or inherits it, writes at its end."""
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_APPEND)


def shorten(handle: int) -> None:
    """Cut an open file that has become too long. Raises OSError."""
    size = os.fstat(handle).st_size
    if size <= MOST:
        return
    first, last = os.pread(handle, FIRST, 0), os.pread(handle, LAST, size - LAST)
    os.ftruncate(handle, 0)
    os.write(handle, first + f"\n... {size - len(first) - len(last)} bytes are left out ...\n".encode() + last)


async def keep_short(path: Path) -> None:
    """Look at a file again and again, until cancelled. One that is not there, or is a link, is left alone."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        except OSError:
            pass
        else:
            try:
                shorten(handle)
            finally:
                os.close(handle)
        await asyncio.sleep(LOOK_S)
