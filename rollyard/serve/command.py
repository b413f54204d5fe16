"""`rollyard serve`: starts a run and serves it, until the service is told to stop or the run has failed."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollyard.config import Config
from rollyard.environment import serve_token
from rollyard.errors import ConfigError, RunFailed
from rollyard.journal.folder import RunFolder, folder_of
from rollyard.layers import Resolved, options, presets, resolve_tree, value
from rollyard.serve.settings import ServeConfig, check, check_address, check_folder
from rollyard.serve.store import NAME

if TYPE_CHECKING:
    from rollyard.protocols.rollouts import Environment
    from rollyard.rollouts import Rollouts
    from rollyard.serve.server import Server
    from rollyard.serve.service import Service
    from rollyard.watch.snapshot import Header
    from rollyard.watch.terminal import View

TEXT: Final = "serve rollouts over HTTP: prompts come, groups and batches go, weights come back"
STOPPED: Final = 130  # exit code after Ctrl-C


def add_serve(commands: Any, add_options: Callable[[argparse.ArgumentParser, type[Config]], None]) -> None:
    """Hang the command into the command line's subparsers.

    Args:
        add_options: gives a command all options of a tree.
    """
    text = TEXT[0].upper() + TEXT[1:] + ". Started again with the same options, it goes on in the same folder."
    command = commands.add_parser("serve", help=TEXT, description=text, allow_abbrev=False)
    command.add_argument("file", nargs="?", type=Path, metavar="FILE.toml", help="a run's options, and those of the service")
    command.add_argument("--preset", default="", metavar="NAME", help=f"start from a preset: {', '.join(presets())}")
    command.add_argument("--explain", action="store_true", help="print every option and where its value is from, and do nothing")
    add_options(command, ServeConfig)


def serve(given: argparse.Namespace, overrides: Mapping[str, str], explain: Callable[[Resolved[Any]], int]) -> int:
    """Serve until the end; the exit code. Raises ConfigError, RunFailed.

    Args:
        explain: prints options.
    """
    found = resolve_tree(ServeConfig, check, preset=given.preset, file=given.file, overrides=overrides)
    if given.explain:
        return explain(found)
    from rollyard.watch.terminal import Terminal, open_view

    config, console, token = found.config, Terminal(), serve_token()
    kind = config.watch.view

    def tell(line: str) -> None:
        if kind != "quiet":
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    def view(header: Header) -> View:
        return open_view(kind, header, console)

    check_address(config.serve.host, token)
    check_folder(config.serve.weights_folder)
    with _listening(config.serve.host, config.serve.port) as line:
        return asyncio.run(_serve(config, token, line, view, tell))


async def _serve(
    config: ServeConfig, token: str, line: socket.socket, view: Callable[[Header], View], tell: Callable[[str], None]
) -> int:
    from rollyard.serve.app import application
    from rollyard.serve.server import Server
    from rollyard.serve.service import Service
    from rollyard.serve.sessions import Sessions

    sessions = Sessions(config.serve.idle_s) if config.serve.episodes else None
    rollouts = _begun(config, sessions, view)
    async with rollouts:
        if rollouts.finished:
            tell(f"{rollouts.finished}; until then it serves what became of prompts")
        async with Service(config, rollouts, sessions) as service:
            server = Server(await asyncio.to_thread(application, service, token), config.serve)
            stopped = _Stopped((service.drain, server.stop))
            host = f"[{config.serve.host}]" if ":" in config.serve.host else config.serve.host
            about = f"{'with' if token else 'without'} a token; run folder: {rollouts.folder}"
            tell(f"serving http://{host}:{line.getsockname()[1]} {about}")
            await _to_the_end(service, server, line)
        if service.cause:
            raise RunFailed(service.cause)
        rollouts.stop(stopped.cause)
    return stopped.code


async def _to_the_end(service: Service, server: Server, line: socket.socket) -> None:
    """Serve until the server is stopped, or the run has failed."""
    serving = asyncio.ensure_future(server.serve([line]))
    failing = asyncio.ensure_future(service.failed.wait())
    try:
        await asyncio.wait((serving, failing), return_when=asyncio.FIRST_COMPLETED)
        if service.cause:
            service.drain()
            server.stop()
        await serving
    finally:
        failing.cancel()


def _begun(config: ServeConfig, environment: Environment | None, view: Callable[[Header], View]) -> Rollouts:
    """The run: a new one; or the next life of the one that an earlier service served in this folder.

    One that was killed in its start has not written its store yet.
    """
    from rollyard.resume import of_caller
    from rollyard.rollouts import Rollouts

    run = config.run_config
    folder = folder_of(run)
    if run.run.overwrite or not ((folder.path / NAME).exists() or of_caller(folder)):
        return Rollouts(run, environment=environment, view=view)
    return Rollouts.resume(folder.path, _changed(folder, run), environment=environment, view=view)


def _changed(folder: RunFolder, config: Config) -> dict[str, Any]:
    """Options that are others than the run had so far. Raises ConfigError when nobody can tell."""
    try:
        before = Config.model_validate(tomllib.loads(folder.config.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        remedy = "restore the file, or give another folder"
        raise ConfigError(f"it cannot be read: {error}", where=str(folder.config), remedy=remedy) from None
    names = [option.name for option in options() if option.name != "run.out"]
    return {name: now for name in names if (now := value(config, name)) != value(before, name)}


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """The port is ours before anything loads. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        problem = f"there is no address {host!r}: {error.strerror}"
        raise ConfigError(problem, where="serve.host", remedy="give one of this machine, such as 127.0.0.1") from None
    try:
        line = socket.create_server(address[:2], family=family)
    except OSError as error:
        problem = f"{host}:{port} cannot be listened on: {os.strerror(error.errno or 0)}"
        raise ConfigError(problem, where="serve.port", remedy="give another one; 0: one that is free") from None
    with line:
        yield line


class _Stopped:
    """The first signal ends it cleanly, a second one at once. `code`: what the process is to exit with."""

    def __init__(self, calls: Sequence[Callable[[], None]]) -> None:
        self.code, self.cause = 0, "the service was stopped"
        self._calls, self._heard = calls, False
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._hear, "Ctrl-C", STOPPED)
        loop.add_signal_handler(signal.SIGTERM, self._hear, "SIGTERM", 0)

    def _hear(self, what: str, code: int) -> None:
        if self._heard:
            os._exit(STOPPED)
        self._heard, self.code, self.cause = True, code, f"stopped by {what}"
        for call in self._calls:
            call()
