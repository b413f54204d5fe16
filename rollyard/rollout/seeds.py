"""Seeds of completions (PURE): randomness belongs to (run seed, prompt, member), whatever engine or batch."""

from __future__ import annotations

import hashlib


def completion_seed(run_seed: int, group: int, member: int, turn: int = 0) -> int:
    """64 bits that name one completion's noise, or that of a turn of an episode."""
    key = (f"{run_seed}/{group}/{member}" + (f"/{turn}" if turn else "")).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
