"""What a user's code returned or raised, as a verdict: finite numbers, or why there are none (PURE)."""

from __future__ import annotations

import inspect
import math
import reprlib
from typing import Any

from rollyard.texts import clean
from rollyard.types import LARGEST, Reward


def number_of(value: Any, name: str) -> tuple[float | None, str]:
    """The number that `name` returned, or None and why it is none.

    Truth values count, and so do numbers of NumPy and torch. Texts do not.
    """
    if value is None:
        return None, f"{name} returned None"
    if inspect.iscoroutine(value):
        value.close()
        return None, f"{name} returned a coroutine: declare it with async def"
    try:
        number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except BaseException:  # noqa: BLE001 - of whatever class the value is, it is no number
        number = math.nan
    if not abs(number) <= LARGEST:
        return None, f"{name} returned {_shown(value)}, which is no finite float32 number"
    return number, ""


def reward_of(value: Any, name: str, part: str) -> Reward:
    """The verdict that `name` returned: a number, which is its part `part` too, or a Reward.

    Value and parts of a Reward are made plain numbers. One with anything else in it is no verdict.
    """
    if not isinstance(value, Reward):
        number, problem = number_of(value, name)
        return Reward(None, problem=problem) if number is None else Reward(number, {part: number})
    if not isinstance(value.problem, str):
        return Reward(None, problem=f"{name} returned the problem {_shown(value.problem)}, which is no text")
    number, problem = (None, "") if value.value is None else number_of(value.value, name)
    parts, wrong = _parts_of(value.parts, name)
    if problem or wrong:
        return Reward(None, problem=problem or wrong)
    return Reward(number, parts, clean(value.problem))


def _parts_of(given: Any, name: str) -> tuple[dict[str, float], str]:
    """Plain numbers by name, or what is wrong with them."""
    parts: dict[str, float] = {}
    try:
        items = list(given.items())
    except BaseException:  # noqa: BLE001 - of whatever class it is, it is no mapping
        return {}, f"{name} returned the parts {_shown(given)}, which are no numbers by name"
    for key, one in items:
        number, problem = number_of(one, name)
        if number is None:
            return {}, f"{problem}, as the part {_shown(key)}"
        if not isinstance(key, str):
            return {}, f"{name} returned a part called {_shown(key)}, which is no text"
        parts[clean(key)] = number
    return parts, ""


def cause_of(error: BaseException) -> str:
    """An error of a user's code as one text, whatever its class does when it is asked for it."""
    try:
        said = str(error)
    except BaseException:  # noqa: BLE001 - a class of the user's
        said = "it does not say why"
    return clean(f"{type(error).__name__}: {said}")


def _shown(value: Any) -> str:
    try:
        return clean(reprlib.repr(value))
    except BaseException:  # noqa: BLE001 - a class of the user's
        return f"a {type(value).__name__}"
