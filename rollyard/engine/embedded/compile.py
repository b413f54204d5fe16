"""Compiles `decoder.cpp` for this very CPU, once, into the cache folder; later runs load what is there.

No build step at installation, and nothing fails on a machine without a compiler: the engine then decodes with torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from rollyard.config import cache_folder, compiler_command

SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno")
TIME_LIMIT_S = 180.0


class KernelsUnavailable(Exception):
    """Why this machine has no kernels."""


@cache
def kernels(*defined: str) -> ctypes.CDLL:
    """The kernels, compiled now if they are not in the cache, with these macros. Raises KernelsUnavailable."""
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    name = compiler_command()
    compiler = shutil.which(name)
    if compiler is None:
        raise KernelsUnavailable(f"there is no C++ compiler {name!r}")
    command = [compiler, *FLAGS, native, *(f"-D{macro}" for macro in defined)]
    identity = hashlib.sha256(SOURCE.read_bytes())
    identity.update("\0".join([*command, _version(compiler), _processor()]).encode())
    library = cache_folder() / "kernels" / f"decoder-{identity.hexdigest()[:16]}.so"
    try:
        if not library.exists():
            _compile(command, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be made or loaded: {error}") from error


def _compile(command: list[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        try:
            done = subprocess.run(
                [*command, "-o", str(made), str(SOURCE)], capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise KernelsUnavailable(f"{command[0]} took more than {TIME_LIMIT_S:.0f} s") from None
        if done.returncode:
            raise KernelsUnavailable(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
        os.replace(made, library)  # whole or not at all, whoever else compiles it at this moment


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    return done.stdout


def _processor() -> str:
    """What `native` stands for: a cache may be shared by machines with different CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags", "Features"))
