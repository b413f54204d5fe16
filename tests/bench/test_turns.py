from __future__ import annotations

from rollyard.bench.result import Measured
from rollyard.bench.turns import alternate


class Counting:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    async def warm_up(self) -> None:
        self.log.append(f"{self.name} warm")

    async def run(self, number: int) -> Measured:
        self.log.append(f"{self.name}{number}")
        return Measured(10.0 * number + len(self.name))


async def test_everyone_warms_up_and_the_order_turns_round():
    log: list[str] = []
    told: list[str] = []
    rounds = await alternate((Counting("a", log), Counting("bb", log)), 3, told.append)
    assert log == ["a warm", "bb warm", "a1", "bb1", "bb2", "a2", "a3", "bb3"]
    assert rounds.names == ("a", "bb") and len(rounds.loads) == 3
    assert [[one.value for one in side] for side in rounds.measured] == [[11.0, 21.0, 31.0], [12.0, 22.0, 32.0]]
    assert len(told) == 8
