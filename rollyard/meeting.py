"""Where processes of a torch group meet, and the group that they make there.

They meet at a store that one of them holds, on one address and a port that the system chose. A group stands outside torch's
default one, which whatever else is in a process may use for itself. Nobody can interrupt a collective from inside: whoever
drops its group closes the lines to the others, who fail then at once instead of at their time limit.
"""

from __future__ import annotations

import atexit
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch

dist: Any = torch.distributed  # its classes written in C++ have no types

COME_S = 0.01  # seconds between two looks for who has come
CONNECT_S = (1.0, 5.0)  # seconds at least and at most that gloo is given to connect two members that have come
END_S = 1.0  # seconds that a process that ends gives its threads at meetings

_ending = threading.Event()
_threads = WeakSet[threading.Thread]()


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


def told(store: Any, keys: Sequence[str], limit_s: float, left: threading.Event | None = None) -> list[str]:
    """What everybody said there, each at a key `at-WHO`.

    Raises RuntimeError, with who did not, when not all have in time, when it is `left`, or when this process ends.
    """
    until = time.monotonic() + limit_s
    while late := [key for key in keys if not store.check([key])]:
        if time.monotonic() > until or (left is not None and left.is_set()) or _ending.wait(COME_S):
            raise RuntimeError(f"{', '.join(key.partition('-')[2] for key in late)} did not come")
    return [store.get(key).decode() for key in keys]


def has_come(store: Any, name: str, rank: int) -> bool:
    """Whether a member is at this meeting."""
    return bool(dist.PrefixStore(name, store).check([f"at-rank {rank}"]))


def new_group(
    store: Any,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    address: str,
    limit_s: float,
    left: threading.Event | None = None,
) -> Any:
    """A process group: gloo between CPUs, NCCL between GPUs (never run with more than one GPU so far).

    Args:
        store: where the members meet; `name` is what they have agreed to call this meeting, each time another.
        address: of this process, where the other members reach it (gloo).
        limit_s: seconds until all members have come, and later for each collective; not for `send` and `recv`, which are
            given theirs where they are waited for. Connecting, once all have come, may take half as long again, and 5 s to
            25 s: gloo tries five times.
        left: set when nobody is to be waited for any more.

    Raises RuntimeError when not all members come in time, or before it is left, and at once when this rank has been at this
    meeting before.
    """
    met, limit = dist.PrefixStore(name, store), timedelta(seconds=limit_s)
    if met.add(f"at-rank {rank}", 1) > 1:
        raise RuntimeError(f"another process was rank {rank} of this group")
    told(met, [f"at-rank {number}" for number in range(size)], limit_s, left)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(met, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    least, most = CONNECT_S
    gloo._timeout = timedelta(seconds=min(max(limit_s / 10, least), most))
    group = dist.ProcessGroupGloo(met, rank, size, gloo)
    group.set_timeout(limit)
    return group


def start_thread(work: Callable[[], None]) -> None:
    """For what meets: a thread that a process does not wait for when it ends, since nobody can interrupt a collective.

    It is told of the end, though, and has a moment: Python's end of a thread inside torch's C++ would abort the process.
    """
    thread = threading.Thread(target=work, name="meeting", daemon=True)
    _threads.add(thread)
    thread.start()


@atexit.register
def _end() -> None:
    _ending.set()
    until = time.monotonic() + END_S
    for thread in tuple(_threads):
        thread.join(max(0.0, until - time.monotonic()))


def failure(call: Callable[[], object]) -> str:
    """Why a call to torch's groups did not come through; empty when it did.

    Words only: an exception would keep the group alive, and with it the lines by which the others see that we have left.
    """
    try:
        call()
    except (RuntimeError, ValueError, OSError) as error:
        lines = str(error).strip().splitlines()  # torch's messages go on with stack traces
        return lines[0] if lines else type(error).__name__
    return ""
