"""How messages of this room name things."""

from __future__ import annotations

from rollyard.types import WeightVersion


def named(version: WeightVersion) -> str:
    """A version in words."""
    return f"version {version.step}" + (f" of incarnation {version.incarnation}" if version.incarnation else "")
