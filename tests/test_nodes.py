"""What a config says of a cluster's nodes: how hosts lie on them, by which way weights go then, and at what address they meet."""

from __future__ import annotations

import pytest

from rollyard import meeting, worker
from rollyard.config import Config
from rollyard.environment import NODE_ADDRESS
from rollyard.errors import ConfigError
from rollyard.layers import resolve
from rollyard.place.bundles import Bundle
from rollyard.place.ray import Cluster

RAY = {"prompts.task": "sort", "place.runtime": "ray", "place.device": "cpu"}
APART = {"place.placement": "separate"}
SWAP = {"place.placement": "swap", "rollout.max_staleness": 1}


def config(*parts: dict[str, object], **values: object) -> Config:
    given = {name: value for part in (RAY, *parts) for name, value in part.items()}
    return resolve(environment={}, overrides=given | {name.replace("__", "."): value for name, value in values.items()}).config


@pytest.mark.parametrize(
    ("given", "nodes", "travels"),
    [
        (config(), "few", "in_place"),  # nothing goes from one process to another
        (config(APART), "one", "shared_memory"),
        (config(APART, weights__transport="broadcast"), "few", "broadcast"),
        (config(APART, weights__transport="checkpoint"), "few", "checkpoint"),
        (config(APART, place__nodes="one", weights__transport="broadcast"), "one", "broadcast"),
        (config(APART, place__nodes="spread"), "spread", "broadcast"),
        (config(APART, place__nodes="spread", engine__kind="sglang", engine__url="http://127.0.0.1:1"), "spread", "checkpoint"),
    ],
)
def test_hosts_lie_on_as_few_nodes_as_the_weights_can_reach(given: Config, nodes: str, travels: str) -> None:
    assert (worker.nodes_of(given), worker.transport_of(given)) == (nodes, travels)


@pytest.mark.parametrize(
    ("given", "nodes", "travels"),
    [
        (config(SWAP), "one", "shared_memory"),
        (config(SWAP, place__nodes="spread"), "spread", "broadcast"),
        (config(SWAP, weights__transport="broadcast"), "few", "broadcast"),
    ],
)
def test_so_do_halves_and_their_state(given: Config, nodes: str, travels: str) -> None:
    assert (worker.nodes_of(given), worker.handoff_of(given)) == (nodes, travels)


def test_where_others_reach_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_ADDRESS, raising=False)
    assert worker.address_of(config()) == "127.0.0.1"
    assert worker.address_of(config(weights__address="10.9.8.7")) == "10.9.8.7"
    monkeypatch.setenv(NODE_ADDRESS, "10.0.0.5")
    assert worker.address_of(config()) == "10.0.0.5"
    assert worker.address_of(config(weights__address="10.9.8.7")) == "10.9.8.7"


def test_where_servers_elsewhere_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is seen on the way to one that is not on this machine, by the kernel's routes."""
    monkeypatch.delenv(NODE_ADDRESS, raising=False)
    vllm, near = {"engine.kind": "vllm", "place.generate": 2, **APART}, "http://127.0.0.1:8000"
    assert worker.address_of(config(vllm, engine__url=f"{near},http://127.0.0.1:8001")) == "127.0.0.1"
    with pytest.raises(ConfigError, match="cannot be reached") as unknown:
        worker.address_of(config(vllm, engine__url=f"{near},http://no.such.host.invalid:8000"))
    assert unknown.value.where == "engine.url"
    monkeypatch.setattr(meeting, "own_address", lambda host, port: {"127.0.0.1": "127.0.0.1", "gpu-7": "10.0.0.1"}[host])
    assert worker.address_of(config(vllm, engine__url=f"{near},http://gpu-7:8000")) == "10.0.0.1"


async def test_a_cluster_that_is_started_here_has_one_node() -> None:
    """Which is known before Ray is looked for."""
    with pytest.raises(ConfigError, match="2 hosts, each on a node of its own, and a cluster that is started here has one") as no:
        await Cluster([Bundle()] * 2, address="local", nodes="spread").start()
    assert no.value.where == "place.nodes" and "place.ray_address" in no.value.remedy
