"""A peer: a long-lived child with its own Python, spoken to in JSON lines over its standard input and output.

    load      {"do": "load", "model": ..., ...}         -> {"versions": {...}}
    generate  {"do": "generate", "prompts": ..., ...}   -> {"seconds": ..., "ids": ..., ...}
    step      {"do": "step"}                            -> {"seconds": ..., ...}
    quit      {"do": "quit"}                            -> the process ends

A peer that cannot do what it is asked answers {"error": ...}. It ends by itself when its standard input does, so it does
not outlive its parent. Its environment is the user's, without Rollyard's own tuning. What its libraries print goes to a
log, whose end is shown when something fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rollyard.environment import peer_environment
from rollyard.errors import ConfigError, RollyardError, TimeLimitExceeded

FOLDER = Path(__file__).parents[2] / "benchmarks"  # scripts and environments; they are no part of the package
LINE = 2**28  # bytes of one answer at most
LOG_LINES = 15
QUIT_S = 10.0  # seconds a peer may take to end


class PeerError(RollyardError):
    """A peer ended, broke the protocol, or wrote something else than was asked for."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a peer is started."""

    name: str
    python: Path
    script: Path


def find(name: str, folder: Path = FOLDER) -> Command:
    """The command of a peer. Raises ConfigError when its script or its environment is not there."""
    script = folder / "peers" / f"peer_{name}.py"
    if not script.is_file():
        problem = f"{script} is not there: the peers come with the source, not with the package"
        raise ConfigError(problem, where=f"--peer {name}", remedy="run it from a clone, installed with pip install -e .")
    if name == "hf":  # what Rollyard itself needs is all it needs
        return Command(name, Path(sys.executable), script)
    python = folder / ".venvs" / name / "bin" / "python"
    if not python.exists():
        problem = f"there is no environment of {name} ({python})"
        raise ConfigError(problem, where=f"--peer {name}", remedy=f"make bench-{name}")
    return Command(name, python, script)


class Peer:
    """One running peer. One question at a time."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.name = command.name
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, do: str, limit_s: float, **values: object) -> dict[str, Any]:
        """Send a message, wait for the answer.

        Raises:
            PeerError: the peer ended, could not do it, or answered no JSON object.
            TimeLimitExceeded: no answer within `limit_s` seconds.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise TimeLimitExceeded(f"peer {self.name} took more than {limit_s:g} s to {do}{self._said()}") from None
        except (ConnectionError, ValueError) as error:  # a broken pipe; a line beyond the limit
            raise PeerError(f"peer {self.name} is lost: {error}{self._said()}") from error
        if not line.endswith(b"\n"):
            raise PeerError(f"peer {self.name} {await self._ending()} when asked to {do}{self._said()}")
        return self._parsed(line, do)

    async def _ending(self) -> str:
        try:
            return f"ended with exit code {await asyncio.wait_for(self._process.wait(), QUIT_S)}"
        except TimeoutError:
            return "closed its output"

    def _parsed(self, line: bytes, do: str) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(f"peer {self.name} answered no JSON object: {line[:200]!r}{self._said()}")
        if "error" in answer:
            raise PeerError(f"peer {self.name} cannot {do}: {answer['error']}{self._said()}")
        return answer

    async def close(self, grace_s: float = QUIT_S) -> None:
        """Let it end within `grace_s` seconds, or end it and its children."""
        try:
            if self._process.returncode is None and self._process.stdin is not None:
                async with asyncio.timeout(grace_s):
                    self._process.stdin.write(b'{"do": "quit"}\n')
                    await self._process.stdin.drain()
                    await self._process.wait()
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._kill()
        await self._process.wait()

    def _kill(self) -> None:
        """The whole group: what a library started may outlive the peer itself."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _said(self) -> str:
        """The end of what it printed."""
        # Not by seeking: the peer writes at the same offset.
        size = os.fstat(self._log.fileno()).st_size
        lines = os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace").rstrip().splitlines()[-LOG_LINES:]
        return "".join(f"\n  | {line}" for line in lines)


@asynccontextmanager
async def running(command: Command) -> AsyncIterator[Peer]:
    """Start a peer in a process group of its own; end it whatever happens. Raises PeerError when it cannot start."""
    with tempfile.TemporaryFile() as log:
        try:
            process = await asyncio.create_subprocess_exec(
                command.python,
                command.script,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE,
                env=peer_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"peer {command.name} cannot be started: {error}") from error
        peer = Peer(command, process, log)
        try:
            yield peer
        except BaseException:
            await peer.close(grace_s=0)
            raise
        await peer.close()
