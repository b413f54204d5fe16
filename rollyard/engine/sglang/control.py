"""The control routes of a server: pausing, new weights, memory. It knows what the server was told and not yet told back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from rollyard.engine.http import Client, ServerRefused
from rollyard.engine.sglang import server
from rollyard.errors import EngineError, EngineLost, TimeLimitExceeded, WeightSyncError
from rollyard.events import WakePart
from rollyard.types import Manifest, WeightVersion

QUICK_S = 60.0  # seconds for what should take none; a server waits for its running step, and for one second more
AGAIN_S = 0.5
SETTLE_S = 0.2  # without a token: what was written before a standstill has come
SETTLE_MOST_S = 5.0
BUSY = 400  # what the flush of a cache that is in use is answered with
STARTING = 503
TAGS = {WakePart.WEIGHTS: "weights", WakePart.CACHE: "kv_cache"}


def label_of(version: WeightVersion) -> str:
    """What the server calls a version."""
    return f"{version.step}.{version.incarnation}"


class Control:
    """Tells one server what to do.

    Args:
        name: of its engine.
        client: of the server.
        start_s: seconds it may take to be there.
        sync_s: seconds that new weights, or taking memory, may take.
    """

    def __init__(self, name: str, client: Client, start_s: float, sync_s: float) -> None:
        self._name, self._client, self._start_s, self._sync_s = name, client, start_s, sync_s
        self._held = False  # it takes no requests until it is told to go on
        self.standing = False  # requests are under way there, and stand still
        self._given: set[WakePart] = set()  # memory it gave back

    async def start(self, window: int, slots: int) -> server.About:
        """Wait until it is there, ask what it is, and let it go on if an earlier run left it paused."""
        last: EngineError | None = None
        try:
            async with asyncio.timeout(self._start_s):
                while True:
                    try:
                        about = await server.look(self._client, window, slots, limit_s=self._start_s)
                        break
                    except (EngineLost, ServerRefused) as error:
                        if isinstance(error, ServerRefused) and error.status != STARTING:
                            raise
                        last = error
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            why = last or f"{self._client.url} did not answer"
            raise TimeLimitExceeded(f"engine {self._name} was not ready within {self._start_s:g} s: {why}") from None
        await self._post("/continue_generation", {})
        return about

    async def abort(self, rid: str) -> None:
        """End one request. One that the server does not know is no error."""
        await self._post("/abort_request", {"rid": rid})

    async def stop(self) -> None:
        """End all requests there, whoever's they are; none is taken until it is told to go on."""
        if self.standing:  # what stands still does not hear that it is to end
            await self.go_on()
        await self._post("/pause_generation", {"mode": "abort"})
        self._held = True

    async def stand(self, heard_at: Callable[[], float]) -> None:
        """Let all requests stand still. `heard_at` says when the last token came: the answer may come before that."""
        await self._post("/pause_generation", {"mode": "in_place"})
        self._held = self.standing = True
        began = now = monotonic()
        while now - began < SETTLE_MOST_S and now - max(began, heard_at()) < SETTLE_S:
            await asyncio.sleep(SETTLE_S / 4)
            now = monotonic()

    async def go_on(self) -> None:
        """End a pause, if there is one."""
        if self._held:
            await self._post("/continue_generation", {})
        self._held = self.standing = False

    async def check_folder(self, manifest: Manifest) -> None:
        """Raises WeightSyncError when the version's folder is not there."""
        if not await asyncio.to_thread(Path(manifest.source, "config.json").is_file):
            raise WeightSyncError(f"engine {self._name}: {manifest.source!r} is no folder of a model")

    async def load(self, manifest: Manifest) -> None:
        """Read the version's folder, and look that the server says it has it. Raises WeightSyncError.

        What stands still keeps its cache, and the server must not be told to drop it: it would end. No other request
        takes from that, for prompts are cached by version.
        """
        label = label_of(manifest.version)
        body = {
            "model_path": manifest.source,
            "load_format": "auto",  # a server that was started with dummy weights would make up new ones
            "weight_version": label,
            "flush_cache": not self.standing,
        }
        with self._failures(label):
            said = await self._client.post("/update_weights_from_disk", body, limit_s=self._sync_s)
            if said.get("success") is not True:
                raise WeightSyncError(f"engine {self._name} did not take weights {label}: it answered {dict(said)}")
            if "Weight version updated" not in str(said.get("message")):  # 0.5.6 leaves it out while it is paused
                await self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
            has = await server.label(self._client, limit_s=QUICK_S)
        if has != label:
            raise WeightSyncError(f"engine {self._name} was given weights {label} and says that it has {has!r}")

    async def release(self, *, weights: bool) -> None:
        """Give memory back. Raises EngineError when the server is not idle: it would end if it was told then."""
        until = monotonic() + QUICK_S
        while not await self._flushed():
            if monotonic() > until:
                raise EngineError(f"engine {self._name} cannot sleep: its server was not idle within {QUICK_S:g} s")
            await asyncio.sleep(AGAIN_S)
        given = {WakePart.CACHE, WakePart.WEIGHTS} if weights else {WakePart.CACHE}
        body = {"tags": [TAGS[part] for part in sorted(given)]}
        await self._client.post("/release_memory_occupation", body, limit_s=self._sync_s)
        self._given |= given

    async def take_back(self, part: WakePart) -> None:
        """Take memory that was given back; no other, for the server would end if it was told to."""
        if part in self._given:
            await self._client.post("/resume_memory_occupation", {"tags": [TAGS[part]]}, limit_s=self._sync_s)
            self._given.discard(part)

    async def _flushed(self) -> bool:
        try:
            await self._post("/flush_cache", {})
        except ServerRefused as error:
            if error.status != BUSY:
                raise
            return False
        return True

    async def _post(self, path: str, body: dict[str, object]) -> None:
        await self._client.post(path, body, limit_s=QUICK_S)

    @contextmanager
    def _failures(self, label: str) -> Iterator[None]:
        try:
            yield
        except EngineLost:
            raise
        except (EngineError, TimeLimitExceeded) as error:
            raise WeightSyncError(f"engine {self._name} did not take weights {label}: {error}") from error
