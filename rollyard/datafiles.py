"""Files of a data set: whether they are still the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

WHOLLY: Final = 2**24  # bytes of a file that are all looked at, in a fingerprint; of a larger one only some
LOOKS: Final = 64  # places in it, evenly spread
LOOK: Final = 2**16  # bytes at each


def fingerprint(path: Path) -> str:
    """Of a file's size and content, of a large one in many places; of a folder's files and their names. Raises OSError."""
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file() and not each.name.startswith((".", "cache-")))
        told = "\n".join(f"{each.relative_to(path)} {fingerprint(each)}" for each in files)
        return f"{len(files)} files {hashlib.blake2b(told.encode(), digest_size=12).hexdigest()}"
    size, found = path.stat().st_size, hashlib.blake2b(digest_size=12)
    with path.open("rb") as file:
        if size <= WHOLLY:
            found.update(file.read())
        for number in range(LOOKS if size > WHOLLY else 0):
            file.seek(number * (size - LOOK) // (LOOKS - 1))
            found.update(file.read(LOOK))
    return f"{size} {found.hexdigest()}"
