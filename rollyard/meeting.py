"""Where processes of a torch group meet: a store that one of them holds, on one address and a port that the system chose."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch

dist: Any = torch.distributed  # its classes written in C++ have no types


def held_store(address: str, limit_s: float) -> Any:
    """A store that others join at `address` and its `port`. torch's own would listen on every address.

    Raises OSError when `address` is none of this machine.
    """
    family, _, _, _, there = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(there[:2], family=family)
    port, limit = listening.getsockname()[1], timedelta(seconds=limit_s)
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening.detach()
    )


def own_address(host: str, port: int) -> str:
    """Of this machine, as it is seen on the way to `host`. Nothing is sent."""
    family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as line:
        line.connect(there)
        return str(line.getsockname()[0])
