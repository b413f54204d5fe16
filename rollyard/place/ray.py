"""The Ray runtime: every host is an actor in one placement group. Nothing else touches Ray, and Ray is imported only here.

Actors are never restarted by Ray: the run decides that. Ray finds another node for the bundle of one that is gone, as soon
as there is room; whoever is started in it waits for that.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rollyard.environment import NODE_ADDRESS, carried, process_environment, ray_address, settle_ray
from rollyard.errors import ConfigError, EngineLost
from rollyard.place.actor import Actor, Hold
from rollyard.place.body import VERSION, Body
from rollyard.place.bundles import Bundle, Nodes, fitting, misfit
from rollyard.place.child import Child, launch
from rollyard.protocols.processes import Channel

HERE = "local"  # Ray's own word for a cluster that is started for this process
START_S = 120.0  # seconds that Ray may take to start
REACH_S = 10.0  # seconds that a cluster's address may take to answer
GRACE_S = 1.0  # seconds that Ray here outlives a run that was killed: it ends what actors started
LOOK_S = 1.0  # seconds between two looks at a placement group that is not there yet
PULSE = "pulse"  # of a thread, in Ray's words a concurrency group
NODE_LABEL = "ray.io/node-id"  # Ray gives every node one
STRATEGIES: Mapping[Nodes, str] = {"one": "STRICT_PACK", "few": "PACK", "spread": "STRICT_SPREAD"}  # in Ray's words
STORE = 2**29  # bytes of a local cluster's object store: what is under way, not weights


class Cluster:
    """Starts or joins Ray, and starts hosts there (protocols.Launcher).

    Args:
        bundles: one for each host.
        address: of a cluster, in Ray's words (`auto`, `HOST:PORT`, `ray://HOST:PORT`), or `local` to start one here.
            When empty, the one that RAY_ADDRESS names, or one that is started here. Ray reads its token from where it always
            does (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token).
        nodes: how the bundles lie on the cluster's nodes.
        limit_s: seconds that finding room for the bundles may take.
        start_s: seconds that an actor may take to start, and that Ray may take to find a node for its bundle when that one's
            is gone.
        silent_s: seconds without a sign of life after which an actor counts as lost.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        *,
        address: str = "",
        nodes: Nodes = "one",
        limit_s: float = 60.0,
        start_s: float = 120.0,
        silent_s: float = 30.0,
    ) -> None:
        self._bundles, self._address, self._nodes = list(bundles), address, nodes
        self._limit_s, self._start_s, self._silent_s = limit_s, start_s, silent_s
        self._head: Child | None = None  # holds the processes of a cluster that was started here
        self._watching: asyncio.Task[None] | None = None
        self._joined = False
        self._places: list[tuple[Any, int]] = []  # Ray's group of each bundle, and its number there
        self._spare: set[int] = set()  # bundles of hosts that left
        self._actors: dict[int, Actor] = {}  # by bundle
        self._starting: set[int] = set()  # bundles
        self._asking = asyncio.Lock()  # where one more may be depends on where the one before is
        self.nodes: dict[int, tuple[str, ...]] = {}  # addresses: where the actors of each bundle were, the last one last

    async def start(self) -> None:
        """Be ready to launch.

        Raises:
            ConfigError: Ray is not installed, cannot be reached, or has no room.
            EngineLost: Ray does not start here.
        """
        try:
            await self._join()
            await self._reserve()
        except BaseException:
            await self.close()
            raise

    async def launch(
        self,
        target: str,
        order: bytes,
        *,
        name: str,
        environment: Mapping[str, str],
        python: Path | None = None,
        bundle: int | None = None,
    ) -> Actor:
        """Start an actor that runs `target`: see `protocols.Launcher`.

        Args:
            environment: its variables. Those of this machine only (PATH, HOME) stay behind. They are set once the actor's
                interpreter runs, so what an interpreter reads at its start (PYTHONPATH) comes too late, except with `python`.
            python: an interpreter on the actor's node. It runs in a child of the actor.
            bundle: which one it is given; the first that is free when None.

        Raises EngineLost when it cannot be started.
        """
        number = self._free(bundle)
        self._starting.add(number)
        try:
            async with asyncio.timeout(self._start_s):
                while (actor := await self._begun(number, name, environment, (target, order, str(python or "")))) is None:
                    pass
        except TimeoutError:
            late = f"{name}: Ray did not start its actor within {self._start_s:g} s, in bundle {number} ({self._bundles[number]})"
            nowhere = not await asyncio.to_thread(_home, *self._places[number])
            raise EngineLost(f"{late}{', for which no node has room' if nowhere else ''}") from None
        finally:
            self._starting.discard(number)
        return actor

    async def _begun(self, number: int, name: str, environment: Mapping[str, str], order: tuple[str, bytes, str]) -> Actor | None:
        """The actor of a bundle; None when the bundle's node was gone. Raises EngineLost, and ConfigError for another version."""
        place = self._places[number]
        home = await asyncio.to_thread(_home, *place)
        apart = self._head is None and self._nodes != "one"  # elsewhere all is on one machine, and meets at its loopback
        body = _created(*place, self._bundles[number], (name, carried(environment), str(Path.cwd()), apart))
        actor: Actor | None = None
        try:
            facts = json.loads(await body.begin.remote(*order))
            if "problem" in facts:
                raise EngineLost(facts["problem"])
            _check_version(name, facts)
            actor = self._actors[number] = Actor(name, _held(body), facts, self._silent_s)
            self.nodes[number] = (*self.nodes.get(number, ()), facts["address"])
        except failures() as error:
            if await asyncio.to_thread(_alive, home):
                raise EngineLost(f"{name} cannot be started: {reason(error)}") from error
            await asyncio.sleep(LOOK_S)  # Ray finds another, or whoever is started next waits until it does
        finally:
            if actor is None:
                _kill(body)
        return actor

    async def more(self, bundle: Bundle) -> int:
        """Room for a host that was not there at the start: the number of its bundle. Raises ConfigError when there is none."""
        async with self._asking:
            return await self._one_more(bundle)

    async def _one_more(self, bundle: Bundle) -> int:
        for number in self._spare:
            if self._bundles[number] == bundle:
                self._spare.discard(number)
                return number
        free = await asyncio.to_thread(_unused)
        if self._head is not None and not bundle.fits(free):
            raise await asyncio.to_thread(_misfit, [bundle], self._nodes)  # a cluster that was started here does not grow
        homes = await asyncio.to_thread(lambda: {_home(*place) for place in self._places if place[0] is not None})
        group = await self._reserved([bundle], _beside(homes, self._nodes))
        self._bundles.append(bundle)
        self._places.append((group, 0))
        return len(self._bundles) - 1

    async def less(self, number: int) -> None:
        """The host of this bundle left. What was reserved for it alone is given back; the rest is for the next one."""
        group, _ = self._places[number]
        self.nodes.pop(number, None)
        if sum(other is group for other, _ in self._places) > 1:
            self._spare.add(number)
            return
        self._places[number] = (None, 0)
        await asyncio.to_thread(_remove, [group])

    async def close(self) -> None:
        """End the actors, give the bundles back, and end Ray if it was started here. Closing twice is harmless."""
        await asyncio.gather(*(actor.close() for actor in self._actors.values()))
        self._actors.clear()
        if self._watching is not None:
            if self._watching.done():
                self._places.clear()  # gone with Ray, which would be waited for
            self._watching.cancel()
        groups, joined, self._places, self._joined = _groups(self._places), self._joined, [], False
        await asyncio.to_thread(_leave, groups, joined)
        if self._head is not None:
            await self._head.close()

    async def _watch(self, head: Child) -> None:
        """Ray itself may end, and would find out late."""
        cause = await head.ended()
        for actor in self._actors.values():
            actor.fail(f"is gone with Ray, which {cause}")

    def _free(self, wanted: int | None) -> int:
        busy = self._starting | {number for number, actor in self._actors.items() if not actor.lost}
        for number in range(len(self._bundles)):
            if number not in busy and wanted in (None, number):
                return number
        raise ValueError(f"bundle {wanted} hosts something" if wanted is not None else "every bundle hosts something")

    async def _join(self) -> None:
        address = self._address or ray_address() or HERE
        late = "ray" in sys.modules
        if late and sys.modules["ray"].is_initialized():  # by whoever uses this package; it stays theirs
            return
        if address == HERE:
            _check_alone(self._bundles, self._nodes)
        if address == HERE and settle_ray() and late:
            problem = "Ray was imported before it could be told to ask for a token"
            raise ConfigError(problem, where="RAY_AUTH_MODE", remedy="set it to token (or disabled) before Ray is imported")
        await asyncio.to_thread(_check_installed)
        if address == HERE:
            address = await self._start_head()
        elif address != "auto":
            await reach(address)
        self._joined = True
        with _signals_kept():
            await asyncio.to_thread(_connect, address)

    async def _start_head(self) -> str:
        """The address of a cluster on this machine. It has as many CPUs as are asked for: they only count."""
        order = json.dumps({"num_cpus": math.ceil(sum(bundle.cpus for bundle in self._bundles))})
        target, environment = f"{__name__}:serve_head", process_environment()
        self._head = await launch(target, order.encode(), name="Ray", environment=environment, grace_s=GRACE_S)
        address = await self._head.call("address", limit_s=START_S)
        self._watching = asyncio.create_task(self._watch(self._head), name="Ray")
        return address.decode()

    async def _reserve(self) -> None:
        """Raises ConfigError when there is no room."""
        if self._head is not None and fitting(self._bundles, await asyncio.to_thread(_there), self._nodes) < len(self._bundles):
            raise await asyncio.to_thread(_misfit, self._bundles, self._nodes)  # nor will there be later
        # A running cluster may grow for what is asked of it.
        group = await self._reserved(self._bundles)
        self._places = [(group, number) for number in range(len(self._bundles))]

    async def _reserved(self, bundles: Sequence[Bundle], where: Mapping[str, str] | None = None) -> Any:
        """Ray's group of these bundles. Raises ConfigError when it finds no room in time.

        Args:
            where: labels that their nodes have.
        """
        group = await asyncio.to_thread(_asked, bundles, self._nodes, where)
        try:
            async with asyncio.timeout(self._limit_s):
                while not await asyncio.to_thread(group.wait, LOOK_S):
                    pass
        except BaseException as error:
            await asyncio.to_thread(_remove, [group])
            if isinstance(error, TimeoutError):
                raise await asyncio.to_thread(_misfit, bundles, self._nodes) from None
            raise
        return group


def _check_installed() -> None:
    try:
        import ray  # noqa: F401 (it takes a while, and is there from now on)
    except ModuleNotFoundError:
        raise ConfigError("Ray is not installed", where="place.runtime", remedy="pip install 'rollyard[ray]'") from None


def failures() -> tuple[type[Exception], ...]:
    """What a call through Ray may raise when the other side, or the way to it, is gone."""
    from ray.exceptions import RayError

    return RayError, ConnectionError


def reason(error: Exception) -> str:
    """Ray's message without its advice."""
    text = str(error).partition(" Some common causes")[0].strip()
    return text.rpartition("The actor is dead because ")[2] or type(error).__name__


async def reach(address: str) -> None:
    """Raises ConfigError when nobody listens there. Ray itself would try for minutes."""
    where, remedy = "place.ray_address", "give auto, HOST:PORT or ray://HOST:PORT of a cluster that runs, or local"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{address!r} is no address", where=where, remedy=remedy)
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        raise ConfigError(f"nothing answers at {address} ({error or 'no connection'})", where=where, remedy=remedy) from error
    writer.close()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it starts, below Python, and ends the process: who was to hear of it hears again."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    kept = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                if handler is not None:
                    signal.signal(number, handler)


def _connect(address: str) -> None:
    import ray

    broken: tuple[type[Exception], ...] = (*failures(), ImportError, RuntimeError, ValueError)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except broken as error:
        problem, remedy = f"Ray at {address} cannot be joined: {reason(error)}", "see what Ray says"
        if "token" in f"{error} {error.__cause__}".lower():
            problem = f"Ray at {address} refuses this run's token"
            remedy = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as the cluster has it"
        raise ConfigError(problem, where="place.ray_address", remedy=remedy) from error


def _groups(places: Sequence[tuple[Any, int]]) -> list[Any]:
    """Each once."""
    return list({id(group): group for group, _ in places if group is not None}.values())


def _leave(groups: Sequence[Any], joined: bool) -> None:
    if groups:
        _remove(groups)
    if joined:
        import ray

        ray.shutdown()


def _remove(groups: Sequence[Any]) -> None:
    import ray

    for group in groups:
        with suppress(*failures()):
            ray.util.remove_placement_group(group)


class _Placed(Body):
    """A body that knows its node's address, as the cluster has it.

    Args:
        apart: others are on other nodes, and reach this one by it.
    """

    def __init__(self, name: str, variables: Mapping[str, str], folder: str, apart: bool) -> None:
        import ray

        address: str = ray.util.get_node_ip_address()
        super().__init__(name, {**variables, NODE_ADDRESS: address if apart else ""}, folder, address)

    async def pulse(self) -> None:
        await super().pulse()

    # As ray.method would do it, for which Ray would have to be imported: on a thread beside the actor's own.
    pulse.__dict__["__ray_concurrency_group__"] = PULSE


def _created(group: Any, number: int, given: Bundle, arguments: tuple[object, ...]) -> Any:
    """Ray's handle of an actor that is being started in a bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    kind = ray.remote(concurrency_groups={PULSE: 1})(_Placed)
    options = kind.options(num_cpus=given.cpus, num_gpus=given.gpus, max_restarts=0, scheduling_strategy=place)
    return options.remote(*arguments)


def _held(body: Any) -> Hold:
    calls = (body.take.remote, body.fetch.remote, body.pulse.remote)
    return Hold(*calls, partial(_kill, body), body.hurt.remote, failures(), reason)


def _kill(body: Any) -> None:
    import ray

    if ray.is_initialized():
        with suppress(*failures()):
            ray.kill(body)


def _asked(bundles: Sequence[Bundle], nodes: Nodes, where: Mapping[str, str] | None) -> Any:
    from ray.util import placement_group

    asked = [{"CPU": bundle.cpus, "GPU": bundle.gpus} for bundle in bundles]
    wanted = [{name: count for name, count in each.items() if count} for each in asked]
    labels = [dict(where) for _ in bundles] if where else None
    return placement_group(wanted, strategy=STRATEGIES[nodes], bundle_label_selector=labels)


def _beside(homes: Set[str], nodes: Nodes) -> Mapping[str, str] | None:
    """Labels of the nodes where one more host may be, beside those that are at `homes`."""
    known = sorted(homes - {""})
    if nodes == "few" or not known:
        return None
    return {NODE_LABEL: f"{'in' if nodes == 'one' else '!in'}({','.join(known)})"}


def _home(group: Any, number: int) -> str:
    """The node of a bundle, as Ray calls it; empty while Ray looks for one."""
    from ray.util import placement_group_table

    found: str = placement_group_table(group)["bundles_to_node_id"].get(number) or ""
    return found


def _alive(node: str) -> bool:
    import ray

    return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


def _there() -> list[Bundle]:
    """What each node has."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Bundle(resources.get("CPU", 0), resources.get("GPU", 0)) for resources in alive]


def _unused() -> Bundle:
    """What nobody uses, of all nodes together."""
    import ray

    free = ray.available_resources()
    return Bundle(free.get("CPU", 0), free.get("GPU", 0))


def _misfit(bundles: Sequence[Bundle], nodes: Nodes) -> ConfigError:
    problem, remedy = misfit(bundles, _there(), _unused(), nodes)
    return ConfigError(problem, where="place", remedy=remedy)


def _check_alone(bundles: Sequence[Bundle], nodes: Nodes) -> None:
    if nodes == "spread" and len(bundles) > 1:
        problem = f"{len(bundles)} hosts, each on a node of its own, and a cluster that is started here has one node"
        raise ConfigError(problem, where="place.nodes", remedy="name a running cluster with --place.ray_address, or use auto")


def _check_version(name: str, facts: Mapping[str, Any]) -> None:
    if facts["version"] != VERSION:
        problem = f"{name} is on {facts['address']}, which has Rollyard {facts['version']}, and the run is of {VERSION}"
        raise ConfigError(problem, where="place.ray_address", remedy="install the same version on every node")


# -------------------------------------------------------------------------------------------- in another process


async def serve_head(channel: Channel, order: bytes) -> None:
    """Run a cluster on this machine until the line ends.

    In a child of the run, since Ray's processes end with whoever started them only in part: these lead or stay in its process
    group, which ends with the run however that ends.
    """
    import ray

    # Ports are chosen by Ray among the free ones. No dashboard.
    ray.init(
        address=HERE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=STORE,
        **json.loads(order),
    )

    async def address(content: bytes) -> bytes:
        found: str = ray.get_runtime_context().gcs_address
        return found.encode()

    channel.handle("address", address)
    channel.ready()
    ended = asyncio.ensure_future(channel.ended())
    try:
        await ended
    finally:
        if ended.cancelled():  # told to quit
            ray.shutdown()
        else:  # the run is gone: Ray ends its actors and what they started, then this group ends
            threading.Event().wait(GRACE_S)
