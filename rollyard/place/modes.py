"""The placements (PURE): who generates and who trains when.

`colocated`  all devices do both in turn: generate all, sleep, train, wake with the new weights.
`separate`   a trainer and engines with devices of their own take turns; nobody sleeps, nothing is ever stale.
`async`      the same devices, at the same time: the staleness limit alone says how far generation runs ahead.
`swap`       two halves that generate and train, and trade roles after every step.
"""

from __future__ import annotations

from rollyard.place.mode import Mode
from rollyard.place.swap import Swap


class Colocated(Mode):
    """Trainer and engines share their devices and take turns."""

    shares = True


class Separate(Mode):
    """Trainer and engines have devices of their own, and take turns all the same."""


class Async(Mode):
    """Trainer and engines work at the same time.

    New weights follow one version at a time: while engines still come to one, the trainer goes on, and offers the newest
    that it has when they are done.
    """

    overlaps = True


MODES: dict[str, type[Mode]] = {"colocated": Colocated, "separate": Separate, "async": Async, "swap": Swap}
