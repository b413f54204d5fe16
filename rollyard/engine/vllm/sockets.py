"""Folders for the sockets of servers that are started here. What a process that was killed left, the next one takes away."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

from rollyard.environment import cache_folder
from rollyard.errors import ConfigError

LONGEST = 107  # bytes of a Unix socket's path


def make_folder() -> Path:
    """A folder of this process for a socket called `http`. Raises ConfigError where its path would be too long."""
    root = cache_folder().absolute() / "vllm"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(root)
    folder = Path(tempfile.mkdtemp(prefix=f"{_here()}-{os.getpid()}-", dir=root))
    if len(os.fsencode(folder / "http")) > LONGEST:
        folder.rmdir()
        problem = f"a socket below {root} would have a path of more than {LONGEST} bytes"
        raise ConfigError(problem, where="ROLLYARD_CACHE", remedy="set it to a shorter path")
    return folder


def _sweep(root: Path) -> None:
    """Remove those of processes that ended. Of other machines and containers, which may share the cache, nothing is known."""
    for folder in root.iterdir():
        here, _, rest = folder.name.partition("-")
        owner = rest.partition("-")[0]
        if here == _here() and owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _here() -> str:
    """Where a process id means the same process."""
    return hashlib.sha256(f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]
