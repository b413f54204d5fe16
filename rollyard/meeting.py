"""Where processes of a torch group meet, and the group that they make there.

They meet at a store that one of them holds, on one address and a port that the system chose. A group stands outside torch's
default one, which whatever else is in a process may use for itself. Nobody can interrupt a collective from inside: whoever
drops its group closes the lines to the others, who fail then at once instead of at their time limit.
"""

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


def store_at(host: str, port: int, limit_s: float) -> Any:
    """The store that another process holds there. Raises RuntimeError when nobody answers in time."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))


def new_group(store: Any, name: str, rank: int, size: int, device: torch.device, address: str, limit_s: float) -> Any:
    """A process group: gloo between CPUs, NCCL between GPUs (never run with more than one GPU so far).

    Args:
        store: where the members meet; `name` is what they have agreed to call this meeting, each time another.
        address: of this process, where the other members reach it (gloo).
        limit_s: seconds that meeting, and later each collective, may take.

    Raises RuntimeError when not all members come in time.
    """
    met, limit = dist.PrefixStore(name, store), timedelta(seconds=limit_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(met, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    gloo._timeout = limit
    return dist.ProcessGroupGloo(met, rank, size, gloo)
