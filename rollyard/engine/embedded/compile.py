"""Compiles `decoder.cpp` for this very CPU, once, into the cache folder; later runs load what is there.

No build step at installation, and nothing fails on a machine without a compiler: the engine then decodes with torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from threading import Lock

from rollyard.environment import cache_folder, compiler_command

SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno")
TIME_LIMIT_S = 180.0


class KernelsUnavailable(Exception):
    """Why this machine has no kernels."""


_one_at_a_time = Lock()


def kernels(*defined: str) -> ctypes.CDLL:
    """The kernels, compiled now if they are not in the cache, with these macros. Raises KernelsUnavailable."""
    with _one_at_a_time:  # who comes while they are compiled waits for them
        return _made(*defined)


@cache
def _made(*defined: str) -> ctypes.CDLL:
    try:
        command = [*_compiler(), *(f"-D{macro}" for macro in defined)]
        identity = hashlib.sha256(SOURCE.read_bytes())
        identity.update("\0".join([*command, _version(command[0]), _processor()]).encode())
        library = _own_folder(cache_folder() / "kernels") / f"decoder-{identity.hexdigest()[:16]}.so"
        if not library.exists():
            _compile(command, library)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # half written by a machine that went down
            _compile(command, library)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"the kernels cannot be made or loaded: {error}") from error


def _compiler() -> list[str]:
    named = shlex.split(compiler_command())
    found = shutil.which(named[0])
    if found is None:
        raise KernelsUnavailable(f"there is no C++ compiler {named[0]!r}")
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    return [found, *named[1:], *FLAGS, native]


def _own_folder(folder: Path) -> Path:
    """What lies there is loaded and run, so nobody else may write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelsUnavailable(f"{folder} is not yours alone to write to, so no code is loaded from it")
    return folder


def _compile(command: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        code, said = _run([*command, "-o", str(made), str(SOURCE)])
        if code:
            complaint = next((line for line in said.splitlines() if "error" in line), said.strip().partition("\n")[0])
            raise KernelsUnavailable(f"{Path(command[0]).name} failed: {complaint.replace(str(SOURCE), SOURCE.name)[:200]}")
        os.replace(made, library)  # whole or not at all, whoever else compiles it at this moment


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and what it said. In a session of its own, so that a compiler's own children end with it at the limit."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise KernelsUnavailable(f"{Path(command[0]).name} took more than {TIME_LIMIT_S:.0f} s") from None
        return process.returncode, said


@cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"])[1]


def _processor() -> str:
    """What `native` stands for: a cache may be shared by machines with different CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags", "Features"))
