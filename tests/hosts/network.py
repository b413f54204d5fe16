"""Hosts that are network namespaces of this machine, on one switch. A link can be cut, and a host killed, by itself.

The switch has a namespace of its own, so nothing of the machine's network changes, and all of it is gone with the
namespaces. What a killed test run left behind goes when the next one starts.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[2]
PREFIX = "rollyard"
PORT = 6379  # of the cluster's head
STORE = 100 * 2**20  # bytes of a node's object store: messages, not weights
START_S = 90.0  # seconds a node may take to be there; a busy machine is slow
TOKEN = secrets.token_hex(32)  # one for all nodes and the run
# The head gives a node up after so many failures: one that refuses fails twice a second, one that is silent every 2.5 s.
HEALTH = {"period_ms": 500, "timeout_ms": 2000, "failure_threshold": 14, "initial_delay_ms": 1000}


@cache
def obstacle() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    name = f"{PREFIX}-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if tried.returncode:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    for kind in (("bridge",), ("veth", "peer", "name", "rollyardtry1")):
        tried = subprocess.run(["ip", "link", "add", "rollyardtry0", "type", *kind], capture_output=True, text=True, timeout=20)
        if tried.returncode:
            return f"no {kind[0]} can be made here: {tried.stderr.strip()}"
        _ip("link", "delete", "rollyardtry0")
    return ""


class Host:
    """One namespace: `number` counts from 1."""

    def __init__(self, network: Network, number: int) -> None:
        self._network, self._number = network, number
        self.name, self.address = f"{network.name}-{number}", f"10.77.0.{number}"
        self.node: subprocess.Popen[bytes] | None = None  # Ray's

    def run(self, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a process there; it goes with the host."""
        return self._network.run(self, command, **options)

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def cut(self) -> None:
        """From all others. What was under way is neither delivered nor refused."""
        _ip("-n", self._network.switch, "link", "set", f"port{self._number}", "down")

    def heal(self) -> None:
        _ip("-n", self._network.switch, "link", "set", f"port{self._number}", "up")

    def kill(self) -> None:
        """Every process of it, at once."""
        until = time.monotonic() + 20
        while pids := self.pids():
            assert time.monotonic() < until, f"{self.name} does not die: {pids}"
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


class Network:
    """A switch and its hosts, added one by one."""

    def __init__(self) -> None:
        self.name = f"{PREFIX}-{os.getpid()}"
        self.switch = f"{self.name}-switch"
        self.hosts: list[Host] = []
        self.folder = Path(mkdtemp(prefix="ry", dir="/tmp"))  # short: it holds Ray's sockets
        self._running: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "switch", "up")

    def add(self) -> Host:
        """One more host, on the switch."""
        host = Host(self, number := len(self.hosts) + 1)
        _ip("netns", "add", host.name)
        self.hosts.append(host)
        ends = ("link", "add", "line", "netns", host.name, "type", "veth", "peer", "name", f"port{number}", "netns", self.switch)
        _ip(*ends)
        _ip("-n", self.switch, "link", "set", f"port{number}", "master", "switch", "up")
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "line")
        for interface in ("lo", "line"):
            _ip("-n", host.name, "link", "set", interface, "up")
        return host

    def run(self, host: Host, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        within = ["ip", "netns", "exec", host.name, *command]
        process = subprocess.Popen(within, env=environment(), cwd=ROOT, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
        self._running.append(process)
        return process  # type: ignore[no-any-return]

    def start_node(self, host: Host, cpus: int = 1) -> None:
        """A Ray node: the head on the first host, which the others join. Two that start at once get in each other's way."""
        first = self.hosts[0]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}/ray"]
        role = head if host is first else [f"--address={first.address}:{PORT}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={host.address}"]
        command += [f"--num-cpus={cpus}", f"--object-store-memory={STORE}", "--block"]
        printed, until = self.folder / f"{host.name}.log", time.monotonic() + START_S
        with printed.open("wb") as log:
            host.node = starting = self.run(host, command, stdout=log, stderr=log)
        while "Ray runtime started" not in (said := printed.read_text()):
            assert starting.poll() is None and time.monotonic() < until, f"no Ray node on {host.name}: {said}"
            time.sleep(0.1)

    def mend(self) -> None:
        """Heal what is cut, and start the nodes that have ended."""
        for host in self.hosts:
            host.heal()
            if host.node is not None and host.node.poll() is not None:
                host.kill()
                self.start_node(host)

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        for process in self._running:
            process.wait(timeout=20)
        for name in [*(host.name for host in self.hosts), self.switch]:
            _ip("netns", "delete", name)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def network() -> Iterator[Network]:
    _clean()
    made = Network()
    try:
        made.open()
        yield made
    finally:
        made.close()


def environment() -> dict[str, str]:
    """Of every node and of the run."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray = {f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()}
    ray |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""}
    return {**os.environ, **ray, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _clean() -> None:
    """Namespaces, and what runs there, of test runs that are no more."""
    for name in re.findall(rf"^({PREFIX}-(\d+)-\S+)", _ip("netns", "list"), re.MULTILINE):
        whole, pid = name
        if not Path(f"/proc/{pid}").exists():
            for left in _ip("netns", "pids", whole).split():
                with suppress(ProcessLookupError):
                    os.kill(int(left), signal.SIGKILL)
            _ip("netns", "delete", whole)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
