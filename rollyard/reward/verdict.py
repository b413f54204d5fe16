"""What a function returned, as a verdict: a finite number, or why there is none (PURE)."""

from __future__ import annotations

import inspect
import math
import reprlib
from typing import Any

from rollyard.types import LARGEST


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
    except Exception:  # noqa: BLE001 - of whatever class the value is, it is no number
        number = math.nan
    if not abs(number) <= LARGEST:
        return None, f"{name} returned {_shown(value)}, which is no finite float32 number"
    return number, ""


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001 - a class of the user's
        return f"a {type(value).__name__}"
