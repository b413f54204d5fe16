"""Tokens of which only the number counts (PURE): what a simulation has in the place of a tuple."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import SupportsIndex, overload


class Told(Sequence[int]):
    """So many zeros, as the numbers of tokens or as their logprobs. Takes the same room however many they are.

    Example: Told(3)[1:] == Told(2); Told(3) + Told(2) == Told(5).
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Told: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | Told:
        found = range(self._tokens)[index]
        return Told(len(found)) if isinstance(found, range) else 0

    def __iter__(self) -> Iterator[int]:
        return iter(bytes(self._tokens))

    def __add__(self, other: Told) -> Told:
        return Told(self._tokens + other._tokens)

    def __eq__(self, other: object) -> bool:
        return other._tokens == self._tokens if isinstance(other, Told) else NotImplemented

    def __hash__(self) -> int:
        return hash((Told, self._tokens))

    def __repr__(self) -> str:
        return f"Told({self._tokens})"
