"""Versions that an engine keeps: the one that it decodes with, and the memory where the next one comes."""

from __future__ import annotations

import torch

from rollyard.errors import WeightSyncError
from rollyard.events import EngineId
from rollyard.weights.delta import Changes
from rollyard.weights.slot import Lent, Slot


class Kept:
    """Slots in turn. There are more than `count` of them only while others of the machine use them at different versions.

    Args:
        engine: whose they are.
        size: bytes of a version.
        count: slots; with one, what is taken is copied before the next offer.
    """

    def __init__(self, engine: EngineId, size: int, count: int) -> None:
        self._engine, self._size, self._count = engine, size, count
        self._slots: list[Slot] = []
        self._filled: Slot | Lent | None = None  # by the last offer
        self._held: Slot | Lent | None = None  # what was taken last lies there
        self.last = Changes()  # what made the newest version

    def begin(self, device: torch.device) -> tuple[Slot, str]:
        """One that nobody uses, to be written, and what was in it: best what the last changes were made of.

        What there is more than is needed is given back.
        """
        unheld = [slot for slot in self._slots if slot.free and (slot is not self._held or self._count == 1)]
        for slot in unheld:
            if slot.device != device:
                self._drop(slot)
        free = sorted((slot for slot in unheld if slot.device == device), key=lambda slot: slot.holds != self.last.before)
        if not free:
            free = [Slot(self._size, device)]
            self._slots += free
        for slot in free[1:]:
            if len(self._slots) > self._count:
                self._drop(slot)
        found, held = free[0], free[0].holds
        if not found.begin():
            raise WeightSyncError(f"memory of {self._engine} is used by others")
        return found, held

    def base(self, name: str) -> Slot | Lent:
        """Where the contents of this name are. Raises WeightSyncError when they are not here."""
        for slot in (self._held, *self._slots):
            if slot is not None and slot.holds == name:
                return slot
        raise WeightSyncError(f"{self._engine} does not have the version that changes were sent for")

    def fill(self, slot: Slot | Lent | None) -> None:
        """What the last offer came to. What was prepared before and not taken is not wanted any more."""
        if isinstance(self._filled, Lent) and self._filled not in (self._held, slot):
            self._filled.leave()
        self._filled = slot

    def take(self) -> None:
        """The engine decodes with what was filled last."""
        before, self._held = self._held, self._filled
        if isinstance(before, Lent) and before is not self._held:
            before.leave()

    def uses(self, lent: Lent) -> bool:
        return lent is self._held

    def close(self) -> None:
        self._filled = self._held = None
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _drop(self, slot: Slot) -> None:
        self._slots.remove(slot)
        slot.close()
