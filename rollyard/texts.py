"""Texts that others have written, made fit for where they go (PURE)."""

from __future__ import annotations


def clean(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate becomes its escape, as in JSON."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
