"""What a built-in task is, and which ones there are."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from rollyard.prompts.tasks import arithmetic, calculator, letters

HELD_OUT_IN = 8  # one problem in this many, by content, belongs to the held-out side


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and the one right completion."""

    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Which side a problem is on is a matter of its content alone: no seed ever trains on a held-out one."""
        return hashlib.blake2b(self.prompt.encode(), digest_size=1).digest()[0] % HELD_OUT_IN == 0


def _the_answer(prompt: str, answer: str, numbers: random.Random) -> list[tuple[str, str]]:
    return [(prompt, answer)]


@dataclass(frozen=True, slots=True)
class Task:
    """An endless, seeded supply of problems.

    Args:
        name: as in `prompts.task`.
        alphabet: every character that prompts and answers are made of.
        draw: one problem's (prompt, answer) from a random generator.
        teach: what the base policy is shown of a problem, as (what it sees, what it is to write).
    """

    name: str
    alphabet: str
    draw: Callable[[random.Random], tuple[str, str]]
    teach: Callable[[str, str, random.Random], list[tuple[str, str]]] = _the_answer

    def problem(self, seed: int, index: int, *, held_out: bool = False) -> Problem:
        """Problem `index` of the stream `seed`, always the same, from one side of the division."""
        numbers = random.Random(f"{self.name}/{seed}/{index}")
        while True:
            problem = Problem(*self.draw(numbers))
            if problem.held_out == held_out:
                return problem

    def lessons(self, seed: int, index: int) -> list[tuple[str, str]]:
        """What the base policy is shown of problem `index` of the stream `seed`."""
        problem = self.problem(seed, index)
        return self.teach(problem.prompt, problem.answer, random.Random(f"{self.name}/lessons/{seed}/{index}"))


TASKS = {
    task.name: task
    for task in (
        Task("sort", letters.ALPHABET, letters.sort),
        Task("reverse", letters.ALPHABET, letters.reverse),
        Task("arithmetic", arithmetic.ALPHABET, arithmetic.add),
        Task("calculator", calculator.ALPHABET, calculator.multiply, calculator.lessons),
    )
}
