"""The Ray runtime: every host is an actor in one placement group. Nothing else touches Ray, and Ray is imported only here.

    the run   Actor ── take(batch) ──► Body    in the actor's process: runs the target, or a child with its own Python
              Actor ◄── fetch() ────── Body    a long poll: answered as soon as there is something

What crosses are the frames of `line`, all that wait at once, as bytes; no error is ever pickled. One batch is under way in
each direction at a time, which keeps the order. Actors are never restarted by Ray: the run decides that.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollyard.environment import carried, process_environment, ray_address, settle_ray
from rollyard.errors import ConfigError, EngineLost
from rollyard.place.body import Body, printed
from rollyard.place.bundles import Bundle, counted, fitting
from rollyard.place.child import Child, launch
from rollyard.place.mailed import Mailed
from rollyard.protocols import Channel

HERE = "local"  # Ray's own word for a cluster that is started for this process
START_S = 120.0  # seconds that Ray, or an actor in a free bundle, may take to start
QUIT_S = 10.0  # seconds a host may take to end by itself
REACH_S = 10.0  # seconds that a cluster's address may take to answer
GONE_S = 5.0  # seconds that Ray may take to end a process
GRACE_S = 1.0  # seconds that Ray here outlives a run that was killed: it ends what actors started
LOOK_S = 1.0  # seconds between two looks at a placement group that is not there yet
STORE = 2**29  # bytes of a local cluster's object store: what is under way, not weights


class Cluster:
    """Starts or joins Ray, and starts hosts there (protocols.Launcher).

    Args:
        bundles: one for each host.
        address: of a cluster, in Ray's words (`auto`, `HOST:PORT`, `ray://HOST:PORT`), or `local` to start one here.
            When empty, the one that RAY_ADDRESS names, or one that is started here. Ray reads its token from where it always
            does (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token).
        limit_s: seconds that finding room for the bundles may take.
    """

    def __init__(self, bundles: Sequence[Bundle], *, address: str = "", limit_s: float = 60.0) -> None:
        self._bundles, self._address, self._limit_s = tuple(bundles), address, limit_s
        self._head: Child | None = None  # holds the processes of a cluster that was started here
        self._watching: asyncio.Task[None] | None = None
        self._joined = False
        self._group: Any = None
        self._actors: dict[int, Actor] = {}  # by bundle
        self._starting: set[int] = set()  # bundles

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
        given = self._bundles[number]
        self._starting.add(number)
        body = _created(self._group, number, given, (name, carried(environment), str(Path.cwd())))
        actor: Actor | None = None
        try:
            async with asyncio.timeout(START_S):
                facts = json.loads(await body.begin.remote(target, order, str(python or "")))
            if "problem" in facts:
                raise EngineLost(facts["problem"])
            actor = self._actors[number] = Actor(name, body, facts)
        except TimeoutError:
            raise EngineLost(f"{name}: Ray did not start its actor within {START_S:g} s, in bundle {number} ({given})") from None
        except failures() as error:
            raise EngineLost(f"{name} cannot be started: {reason(error)}") from error
        finally:
            self._starting.discard(number)
            if actor is None:
                _kill(body)
        return actor

    async def close(self) -> None:
        """End the actors, give the bundles back, and end Ray if it was started here. Closing twice is harmless."""
        await asyncio.gather(*(actor.close() for actor in self._actors.values()))
        self._actors.clear()
        if self._watching is not None:
            if self._watching.done():
                self._group = None  # gone with Ray, which would be waited for
            self._watching.cancel()
        group, joined, self._group, self._joined = self._group, self._joined, None, False
        if group is not None or joined:
            await asyncio.to_thread(_leave, group, joined)
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
        if self._head is not None and fitting(self._bundles, await asyncio.to_thread(_nodes)) < len(self._bundles):
            raise await asyncio.to_thread(_misfit, self._bundles)  # nor will there be later
        self._group = await asyncio.to_thread(_reserved, self._bundles)
        try:
            async with asyncio.timeout(self._limit_s):
                while not await asyncio.to_thread(self._group.wait, LOOK_S):
                    pass
        except TimeoutError:
            raise await asyncio.to_thread(_misfit, self._bundles) from None


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


def _leave(group: Any, joined: bool) -> None:
    import ray

    if group is not None:
        with suppress(*failures()):
            ray.util.remove_placement_group(group)
    if joined:
        ray.shutdown()


def _created(group: Any, number: int, given: Bundle, arguments: tuple[object, ...]) -> Any:
    """Ray's handle of an actor that is being started in a bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    options = ray.remote(Body).options(num_cpus=given.cpus, num_gpus=given.gpus, max_restarts=0, scheduling_strategy=place)
    return options.remote(*arguments)


def _kill(body: Any) -> None:
    import ray

    if ray.is_initialized():
        with suppress(*failures()):
            ray.kill(body)


def _reserved(bundles: Sequence[Bundle]) -> Any:
    from ray.util import placement_group

    # On one node: weights may go through its memory, and trainers meet at its own address.
    asked = [{"CPU": bundle.cpus, "GPU": bundle.gpus} for bundle in bundles]
    return placement_group([{name: count for name, count in each.items() if count} for each in asked], strategy="STRICT_PACK")


def _nodes() -> list[Bundle]:
    """What each node has."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Bundle(resources.get("CPU", 0), resources.get("GPU", 0)) for resources in alive]


def _misfit(bundles: Sequence[Bundle]) -> ConfigError:
    import ray

    nodes, free = _nodes(), ray.available_resources()
    have = " and ".join(f"a node with {node}" for node in nodes) or "no node"
    left = Bundle(free.get("CPU", 0), free.get("GPU", 0))
    fit = fitting(bundles, nodes)
    remedy = f"{fit} of the {len(bundles)} hosts fit" if fit < len(bundles) else "all fit once others are done"
    return ConfigError(
        f"{counted(bundles)} were asked of Ray, which has {have}, and of that {left} free",
        where="place",
        remedy=f"{remedy}; use fewer hosts, less for each, or a larger cluster",
    )


# ----------------------------------------------------------------------------------------------- the run's end


class Actor:
    """A running actor and the line to it (protocols.Channel).

    Args:
        name: for messages.
        body: Ray's handle of it.
        facts: what `Body.begin` told.
    """

    def __init__(self, name: str, body: Any, facts: Mapping[str, Any]) -> None:
        self.name = name
        self.pid: int = facts["pid"]  # on its node
        self._body, self._logs = body, facts["logs"]
        self._line = Mailed(name, self.said)
        self._closed = False
        self._carrying = asyncio.create_task(self._carry(), name=f"actor {name}")

    @property
    def lost(self) -> bool:
        """It hosts nothing any more."""
        return self._line.lost

    def handle(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._line.handle(name, handler)

    def ready(self) -> None:
        self._line.ready()

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        return await self._line.call(name, content, limit_s=limit_s)

    def tell(self, name: str, content: bytes = b"") -> None:
        self._line.tell(name, content)

    async def ended(self) -> str:
        return await self._line.ended()

    def fail(self, cause: str) -> None:
        """It is known to be gone."""
        self._line.fail(cause)

    async def close(self) -> None:
        """Let it end by itself for a while, then end it. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            with suppress(TimeoutError, EngineLost):
                self._line.tell("quit")
                await asyncio.wait_for(asyncio.shield(self._carrying), QUIT_S)
        finally:
            self.kill()
            await asyncio.wait((self._carrying,), timeout=GONE_S)
            self._carrying.cancel()
            await self._line.close()

    def kill(self) -> None:
        """At once. Ray ends what it started, too."""
        _kill(self._body)

    def said(self) -> str:
        """The end of what it printed, or where that is."""
        return printed(self._logs)

    async def _carry(self) -> None:
        sending = asyncio.create_task(self._send())
        try:
            while not self.lost:
                self._line.take_batch(await self._body.fetch.remote())
            self.kill()
            async with asyncio.timeout(GONE_S):
                await self._body.fetch.remote()
        except TimeoutError:
            pass
        except failures() as error:
            self._line.fail(f"died: {reason(error)}{self.said()}")
        finally:
            sending.cancel()

    async def _send(self) -> None:
        try:
            while True:
                await self._body.take.remote(await self._line.batch())
        except failures() as error:
            self._line.fail(f"died: {reason(error)}{self.said()}")


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
