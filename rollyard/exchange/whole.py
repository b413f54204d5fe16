"""Is a version's folder all that was written? The last file that is put into it says what that was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from rollyard.errors import ExchangeError
from rollyard.exchange.files import read_whole, saying, write_whole

WHOLE = "whole.json"
REMEDY = "delete this folder: training goes on from the version before it, if that is kept"

SIZES = TypeAdapter(dict[str, int])  # bytes of each file, by its name
ANY: TypeAdapter[Any] = TypeAdapter(Any)


def seal(folder: Path) -> None:
    """Nothing more comes into it. Raises ExchangeError."""
    with saying(f"{folder} cannot be read"):
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    write_whole(folder / WHOLE, json.dumps(sizes, indent=1).encode())


def is_whole(folder: Path) -> bool:
    """Was it sealed? A folder that somebody else made is none of ours."""
    return (folder / WHOLE).is_file()


def check_whole(folder: Path) -> None:
    """Raises ExchangeError for one that was spoilt since it was sealed, as far as names, sizes and heads of files tell."""
    try:
        for name, size in read_whole(folder / WHOLE, SIZES).items():
            _check(folder / name, size)
    except ExchangeError as error:
        raise ExchangeError(f"{folder} is damaged: {error} ({REMEDY})") from error


def _check(path: Path, size: int) -> None:
    with saying(f"{path.name} cannot be read"):
        found = path.stat().st_size
    if found != size:
        raise ExchangeError(f"{path.name} has {found:,} bytes, and had {size:,}")
    if path.suffix == ".json":
        read_whole(path, ANY)
    elif path.suffix == ".safetensors":
        try:
            with saying(f"{path.name} cannot be read"), safe_open(path, framework="np"):
                pass  # its head says where the tensors are, and was looked at
        except SafetensorError as error:
            raise ExchangeError(f"{path.name} cannot be read: {error}") from error
