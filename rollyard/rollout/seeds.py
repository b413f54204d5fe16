"""Seeds of completions (PURE): randomness belongs to (run seed, prompt, member), whatever engine or batch."""

from __future__ import annotations

import hashlib


def completion_seed(run_seed: int, group: int, member: int) -> int:
    """64 bits that name one completion's noise."""
    key = f"{run_seed}/{group}/{member}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
