"""Memory for whole versions that processes of one machine share: anonymous, and gone with the last one that maps it.

Nobody has to clean up, and two runs cannot meet in it. It is opened through /proc, so all sides belong to one user. A slot
begins with the name of what is in it. Locks say who uses it, and are let go of however a process ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from rollyard.errors import ConfigError, WeightSyncError

PAGE = 4096  # bytes in front of what is shared
SHARED = hasattr(os, "memfd_create")


class Slot:
    """A process's own: it writes while nobody else uses what is in it.

    Args:
        size: bytes.
        device: of the memory; only a CPU's can be shared.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device  # as it was asked for: torch gives its tensors a number
        self.holds = ""  # the name of what is in it, once that is whole
        self._handle, self.path = -1, ""
        if SHARED and device.type == "cpu" and size:
            self._handle = allocate(PAGE + size)
            self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
            self._map = map_all(self._handle)
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, offset=PAGE, count=size)
        else:
            self.tensor = torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def free(self) -> bool:
        """Nobody else uses what is in it."""
        if self._handle < 0:
            return True
        if not _locked(self._handle, fcntl.LOCK_EX):
            return False
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        return True

    def begin(self) -> bool:
        """Write it from now on. False when somebody uses what is in it."""
        if self._handle >= 0:
            if not _locked(self._handle, fcntl.LOCK_EX):
                return False
            _write_name(self._map, "")
        self.holds = ""
        return True

    def end(self, name: str) -> None:
        """It is written, and others may use it."""
        self.holds = name
        if self._handle >= 0:
            _write_name(self._map, name)
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Its memory is given back once nobody maps it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Lent:
    """A slot of another process.

    Raises WeightSyncError when it cannot be mapped.
    """

    def __init__(self, path: str) -> None:
        self.holds, self.path = "", path
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(f"memory {path} of another process cannot be opened: {error}") from error
        self._map = map_all(self._handle)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, offset=PAGE)

    @property
    def still(self) -> bool:
        """Its path means the same memory as when it was opened."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            return False

    def use(self, name: str) -> None:
        """What is in it stays until `close` or `leave`. Raises WeightSyncError when it is not `name`."""
        if not _locked(self._handle, fcntl.LOCK_SH) or _read_name(self._map) != name:
            self.leave()
            raise WeightSyncError(f"memory {self.path} of another process does not hold what it should")
        self.holds = name

    def leave(self) -> None:
        self.holds = ""
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._handle >= 0:
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # the mapping, which may live on, would keep it
            os.close(self._handle)
            self._handle = -1


def allocate(size: int) -> int:
    """A handle of so many bytes. Raises ConfigError where there is no such memory, or not enough."""
    if not SHARED:
        remedy = "use checkpoint or broadcast"
        raise ConfigError("this system has no anonymous shared memory", where="weights.transport", remedy=remedy)
    handle = os.memfd_create("rollyard-weights", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(handle, 0, size)  # all of it now: a full machine says so here, not by a bus error later
    except OSError as error:
        os.close(handle)
        raise ConfigError(f"{size} bytes of shared memory: {error}", where="weights.transport", remedy="free memory") from error
    return handle


def map_all(handle: int) -> mmap.mmap:
    """All of it, all pages present at once: faulting them in one by one would take longer than the copy."""
    return mmap.mmap(handle, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _locked(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_name(shared: mmap.mmap, name: str) -> None:
    shared[: len(name) + 1] = len(name).to_bytes(1, "little") + name.encode()


def _read_name(shared: mmap.mmap) -> str:
    return shared[1 : 1 + shared[0]].decode()
