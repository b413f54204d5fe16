"""A run over several hosts: three network namespaces with a Ray node each. Real parts, a tiny model; all in one lane."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollyard.control import Order, ask
from rollyard.errors import ConfigError
from rollyard.watch.read import read_report
from rollyard.watch.report import Report
from tests.hosts.network import Host, Network, network, obstacle
from tests.small import config

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]

UP_S = 90.0  # seconds until the first step; a busy machine is slow
SILENT_S = 4.0
STEPS = 120  # three a second: enough for an engine to be lost and to come back


@pytest.fixture(scope="module")
def made() -> Iterator[Network]:
    """Three hosts, the first with the cluster's head."""
    with network() as made:
        for _ in range(3):
            made.start_node(made.add())
        yield made


@pytest.fixture
def hosts(made: Network) -> Network:
    """All of them there, whatever an earlier test did."""
    made.mend()
    return made


class Driven:
    """A run that goes on beside the test, on the first host."""

    def __init__(self, network: Network, tmp_path: Path, **changes: object) -> None:
        given: dict[str, object] = {
            "prompts.held_out": 0,
            "place.placement": "async",
            "place.generate": 2,
            "place.runtime": "ray",
            "place.ray_address": f"{network.hosts[0].address}:6379",
            "place.nodes": "spread",
            "place.silent_s": SILENT_S,
            "place.device": "cpu",
            "rollout.max_staleness": 2,
            "rollout.ignore_eos": True,
            "weights.transport": "broadcast",
            "weights.limit_s": 8,
            "weights.retries": 3,
        }
        self._network, self._out, self._said = network, tmp_path / "run", tmp_path / "said"
        (tmp_path / "config").write_text(config(self._out, **(given | changes)).model_dump_json())
        command = [sys.executable, "-m", "tests.hosts.driver", str(tmp_path / "config")]
        with self._said.open("wb") as said:
            self._process = network.hosts[0].run(command, stdout=said, stderr=subprocess.STDOUT)

    def steps(self) -> list[dict[str, object]]:
        lines = self._said.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"step"')]

    @property
    def out(self) -> Path:
        return self._out

    def until(self, reached: Callable[[], object], within_s: float) -> None:
        """Wait for it, while the run goes on."""
        end = time.monotonic() + within_s
        while not reached():
            assert self._process.poll() is None, f"the run has ended: {self._said.read_text()}"
            assert time.monotonic() < end, f"not within {within_s} s: {self._said.read_text()}"
            time.sleep(0.05)

    def until_step(self, more: int = 1, within_s: float = UP_S) -> None:
        wanted = len(self.steps()) + more
        self.until(lambda: len(self.steps()) >= wanted, within_s)

    def nodes(self, host: str) -> list[str]:
        """Where a host was so far, as of the last step."""
        found = self.steps()[-1]["nodes"]
        assert isinstance(found, dict)
        return list(found[host])

    def away(self) -> tuple[str, Host]:
        """An engine that is not on the first host, which has the run and the cluster's head, too; and where it is."""
        by_address = {host.address: host for host in self._network.hosts[1:]}
        engine = next(name for name in ("engine-0", "engine-1") if self.nodes(name)[-1] in by_address)
        return engine, by_address[self.nodes(engine)[-1]]

    def events(self, engine: str) -> list[str]:
        """What became of an engine, in order."""
        query = "SELECT event FROM engine_events WHERE engine = ? ORDER BY rowid"
        with sqlite3.connect(self._out / "journal.sqlite") as journal:
            return [event for (event,) in journal.execute(query, (engine,))]

    def came_back(self, engine: str) -> bool:
        """It was lost, is up again, and has weights."""
        events = self.events(engine)
        return "down" in events and events[events.index("down") :][:3] == ["down", "up", "loaded"]

    def report(self, within_s: float) -> Report:
        """Of the run, which ends by itself, with every prompt trained once."""
        assert self._process.wait(timeout=within_s) == 0, self._said.read_text()
        report = read_report(self._out / "report.json")
        assert not report.finished.failed
        assert report.prompts.admitted == report.prompts.trained + sum(report.prompts.dropped.values())
        with sqlite3.connect(self._out / "journal.sqlite") as journal:
            ((trained, once),) = journal.execute("SELECT COUNT(*), COUNT(DISTINCT group_id) FROM batch_groups")
        assert trained == once == report.prompts.trained == 4 * report.steps
        return report


def test_a_run_over_three_hosts_learns_and_says_where_its_hosts_were(hosts: Network, tmp_path: Path) -> None:
    run = Driven(hosts, tmp_path, run__steps=6, train__lr=1e-3)
    report = run.report(UP_S)
    assert sorted(report.nodes) == ["engine-0", "engine-1", "trainer-0"]
    assert sorted(report.nodes.values()) == [(host.address,) for host in hosts.hosts]
    assert report.weights.transport == "broadcast" and report.lost == ()
    assert report.weights.canary is not None and report.steps == 6 and len(report.versions) >= 6
    assert report.weights.probes.get("verified")


def test_a_host_that_is_cut_off_for_a_while(hosts: Network, tmp_path: Path) -> None:
    """For a moment: nobody notices. For longer: its engine is lost, and started again when it can be reached."""
    run = Driven(hosts, tmp_path, run__steps=STEPS)
    run.until_step(2)
    engine, host = run.away()
    host.cut()
    time.sleep(SILENT_S / 4)
    host.heal()
    run.until_step(4, within_s=20)
    assert run.events(engine).count("down") == 0
    host.cut()
    run.until(lambda: "down" in run.events(engine), SILENT_S + 4)
    run.until_step(1, within_s=30)  # it goes on meanwhile
    host.heal()
    run.until(lambda: run.came_back(engine), 60)
    report = run.report(within_s=120)
    assert report.steps == STEPS and report.nodes[engine] == (host.address, host.address)
    assert report.lost == (f"engine {engine} is lost: it was silent for {SILENT_S:g} s", f"{engine} is started again")


def test_a_host_that_is_killed_while_another_joins(hosts: Network, tmp_path: Path) -> None:
    run = Driven(hosts, tmp_path, run__steps=STEPS)
    run.until_step(2)
    engine, host = run.away()
    host.kill()
    run.until(lambda: "down" in run.events(engine), SILENT_S + 4)
    run.until_step(1, within_s=30)
    hosts.start_node(new := hosts.add())
    run.until(lambda: run.came_back(engine), 60)
    report = run.report(within_s=120)
    assert report.steps == STEPS and report.nodes[engine][-1] == new.address
    cause, again = report.lost
    assert cause.startswith(f"engine {engine} is lost: it died") and again == f"{engine} is started again"


def test_an_engine_joins_on_a_host_of_its_own_and_another_leaves(hosts: Network, tmp_path: Path) -> None:
    run = Driven(hosts, tmp_path, run__steps=STEPS, place__generate=1)
    run.until_step(2)
    with pytest.raises(ConfigError, match="engine-0 is the last engine"):
        ask(run.out, Order("remove", engine="engine-0"))
    ask(run.out, Order("add"))
    run.until(lambda: "loaded" in run.events("engine-1"), 60)
    run.until_step(1, within_s=30)
    ask(run.out, Order("remove", engine="engine-0", cut=True))
    run.until(lambda: "left" in run.events("engine-0"), 30)
    run.until_step(2, within_s=30)  # the newcomer alone
    report = run.report(within_s=120)
    assert report.steps == STEPS and report.lost == ()
    where = [address for (address,) in report.nodes.values()]  # one each
    assert len(set(where)) == 3 and set(where) <= {host.address for host in hosts.hosts}
