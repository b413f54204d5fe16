"""vLLM's server over HTTP: one that runs already, or one that is started here. Written against vLLM 0.32.

Tokens go in and out by `/inference/v1/generate`, the rest by the routes that vLLM has with VLLM_SERVER_DEV_MODE.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from rollyard.engine.closing import attempt
from rollyard.engine.http import Client, ServerRefused
from rollyard.engine.vllm.core import ADAPTER_NAME, Asked, Output, labels_of
from rollyard.engine.vllm.sockets import make_folder
from rollyard.errors import ConfigError, EngineError, EngineLost, TimeLimitExceeded
from rollyard.texts import in_a_line
from rollyard.types import WeightVersion

QUICK_S = 60.0  # seconds for what should take none; a server waits for its running step
AGAIN_S = 0.5
SETTLE_S = 0.1  # without a token: what was written before a standstill should have come
SETTLE_MOST_S = 5.0
END_S = 5.0  # seconds that one of ours may take to end by itself
DEAF_S = 60.0  # seconds without an answer about its health after which it counts as gone
UNKNOWN, MISSING = 401, (403, 404)  # answers to a wrong key, and where there is no such route
WANTED: Mapping[str, object] = {
    "logprobs_mode": "processed_logprobs",
    "policy": "priority",
    "backend": "rollyard",
    "stream_interval": 1,  # else tokens are held back while weights change
    "cut_prompts": False,  # a CPU's generator cannot be turned back: vLLM dies of a seeded prompt that takes several steps
    "speculative": False,  # the weights of a draft model would stay as they are
    "replicas": 1,
}
GENERATE = "/inference/v1/generate"
FLAGS = (
    "--worker-extension-cls rollyard.engine.vllm.worker.WorkerExtension "
    """--weight-transfer-config '{"backend": "rollyard"}' --logprobs-mode processed_logprobs """
    "--scheduling-policy priority --generation-config vllm --enable-scale-out --enable-prompt-tokens-details"
)
REMEDY = f"start it with VLLM_SERVER_DEV_MODE=1 and {FLAGS} (on a CPU --no-enable-chunked-prefill too)"
WHERE = "engine.url"


class _LogProb(BaseModel):
    logprob: float


class _LogProbs(BaseModel):
    content: list[_LogProb] = []


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Choice(BaseModel):
    token_ids: list[int] = []
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_Span] | None = None


class _Details(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens_details: _Details | None = None


class _Chunk(BaseModel):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | str | None = None


class _About(BaseModel):
    """What `worker.WorkerExtension.rollyard_about` says."""

    version: str
    logprobs_mode: str
    policy: str
    backend: str  # for weights; empty where there is none
    stream_interval: int
    cut_prompts: bool
    speculative: bool
    replicas: int
    devices: int  # of one replica
    updating: bool  # an update of weights was begun and not ended
    window: int
    slots: int


ANSWERS = TypeAdapter(list[dict[str, object]])


class ServerCore:
    """Implements `core.Core` over HTTP.

    Args:
        client: of the server; closed with this.
        start_s: seconds it may take to be there.
        sync_s: seconds that switching to new weights may take.
        window: tokens of prompt and completion that it has to have room for.
        one_device: weights come by a way that reaches one device of it alone.
        own: a server to be started, whose end is this one's; None for one that runs already and goes on afterwards.
        alpha: of the adapter that requests are computed with; 0 where there is none.
    """

    def __init__(
        self,
        client: Client,
        *,
        start_s: float,
        sync_s: float,
        window: int,
        one_device: bool = False,
        own: OwnServer | None = None,
        alpha: int = 0,
    ) -> None:
        self._alpha, self._adapted = alpha, False
        self._client, self._own, self._one_device = client, own, one_device
        self._start_s, self._sync_s, self._window = start_s, sync_s, window
        self._streams = 0
        self._heard_at = 0.0
        self._touched = False  # something of ours may be in it
        self._updating = False  # an update was begun there, and its end is not known
        self.ours = own is not None
        self.name = ""

    async def start(self, receiver: str, order: str) -> int:
        if self._own is not None:
            await self._own.start()
        await self._wait_until_there()
        about = await self._look()
        await self._knock()
        self.name = f"vLLM {about.version} server"
        self._touched = True
        await self._end_update()  # an earlier run may have left it paused, in the middle of one
        await self._post("/resume")
        info = {"factory": receiver, "order": order, "alpha": self._alpha}
        await self._post("/init_weight_transfer_engine", {"init_info": info}, self._sync_s)
        return about.slots

    async def generate(self, asked: Asked) -> AsyncGenerator[Output]:
        body = {
            "request_id": asked.name,
            "token_ids": list(asked.token_ids),
            "sampling_params": dict(asked.params),
            "cache_salt": asked.salt,
            "priority": asked.priority,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._adapted:
            body["model"] = ADAPTER_NAME
        last: Output | None = None
        self._streams += 1
        try:
            async with aclosing(self._client.events(GENERATE, body)) as events:
                async for data in events:
                    self._heard_at = monotonic()
                    output = _read(data)
                    if last is not None:
                        last = replace(last, cached=output.cached)  # what comes after its end is what it took
                    elif output.finish:
                        last = output
                    else:
                        yield output
            if last is not None:
                yield last
        finally:
            self._streams -= 1

    async def abort(self, names: Sequence[str]) -> None:
        await self._post("/abort_requests", {"request_ids": [f"generate-tokens-{name}" for name in names]})

    async def stand_still(self) -> None:
        await self._post("/pause?mode=keep&clear_cache=false")
        paused_at = monotonic()
        while self._streams and (now := monotonic()) - max(self._heard_at, paused_at) < SETTLE_S:
            if now - paused_at > SETTLE_MOST_S:
                raise TimeLimitExceeded(f"{self._client.url} was told to pause, and still writes after {SETTLE_MOST_S:g} s")
            await asyncio.sleep(SETTLE_S / 10)

    async def go_on(self) -> None:
        await self._post("/resume")

    async def ask(self, method: str, *args: object) -> Sequence[Mapping[str, object]]:
        answer = await self._post("/collective_rpc", {"method": method, "args": args}, self._sync_s)
        try:
            return ANSWERS.validate_python(answer.get("results"))
        except ValidationError:
            raise EngineError(f"{self._client.url} answers {method} with {answer}") from None

    async def update(self, version: WeightVersion, label: str) -> None:
        if self._alpha:
            await self.ask("rollyard_adapt")
            await self._post("/update_weight_version", {"new_version": label})
            self._adapted = True
            return
        if self._updating:
            await self._end_update()
        update = {"step": version.step, "incarnation": version.incarnation}
        self._updating = True
        await self._post("/start_weight_update", limit_s=self._sync_s)
        await self._post("/update_weights", {"update_info": update}, self._sync_s)
        await self._post("/finish_weight_update", {"weight_version": label}, self._sync_s)
        self._updating = False

    async def _end_update(self) -> None:
        """End an update that was begun and not ended. A step in the middle of one would end vLLM."""
        if any(answer["updating"] for answer in await self.ask("rollyard_about")):
            await self._post("/finish_weight_update", limit_s=self._sync_s)
        self._updating = False

    async def forget(self) -> None:
        await self._post("/reset_prefix_cache")

    async def ended(self) -> str:
        if self._own is None:
            return await self._deaf()
        waiting = [asyncio.create_task(self._own.ended()), asyncio.create_task(self._deaf())]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in waiting:
                task.cancel()

    async def close(self) -> None:
        """One of ours ends; another one goes on without our receiver."""
        if self._own is not None:
            await attempt(self._own.close())
        elif self._touched:
            await attempt(self._let_go())
        await attempt(self._client.close())

    async def _let_go(self) -> None:
        if self._updating:
            await self._end_update()
        await self._post("/resume")
        await self._post("/shutdown_weight_transfer_engine")

    async def _post(self, path: str, body: Mapping[str, Any] | None = None, limit_s: float = QUICK_S) -> Mapping[str, object]:
        return await self._client.post(path, body or {}, limit_s=limit_s)

    async def _wait_until_there(self) -> None:
        ended = None if self._own is None else asyncio.create_task(self._own.ended())
        last: EngineError | None = None
        try:
            async with asyncio.timeout(self._start_s):
                while True:
                    try:
                        await self._client.ping("/health", limit_s=QUICK_S)
                        return
                    except EngineError as error:
                        last = error
                    if ended is not None and ended.done():
                        raise EngineError(f"vLLM did not start: {ended.result()}")
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            raise TimeLimitExceeded(f"{self._client.url} was not there within {self._start_s:g} s: {last}") from None
        finally:
            if ended is not None:
                ended.cancel()

    async def _look(self) -> _About:
        """See that it is what a run needs. Raises ConfigError."""
        try:
            answer = (await self.ask("rollyard_about"))[0]
            about = _About.model_validate(answer)
        except (ServerRefused, ValidationError, IndexError) as error:
            problem = f"{self._client.url} is no vLLM server that can be driven: {in_a_line(error)}"
            raise ConfigError(problem, where=WHERE, remedy=REMEDY) from None
        for name, wanted in WANTED.items():
            if (found := getattr(about, name)) != wanted:
                problem = f"{self._client.url} was started with {name} {found!r}, and a run needs {wanted!r}"
                raise ConfigError(problem, where=WHERE, remedy=REMEDY)
        if self._one_device and about.devices > 1:
            problem = f"{self._client.url} has {about.devices} devices, and takes no part in a broadcast"
            raise ConfigError(problem, where="weights.transport", remedy="use shared_memory or checkpoint")
        if about.window < self._window:
            problem = f"{self._client.url} has room for {about.window} tokens, and the run wants {self._window}"
            remedy = f"start it with --max-model-len {self._window}, or set engine.window to {about.window}"
            raise ConfigError(problem, where="engine.window", remedy=remedy)
        return about

    async def _knock(self) -> None:
        """See that it takes tokens: a request that asks for nothing is refused in other words then. Raises ConfigError."""
        try:
            async with asyncio.timeout(QUICK_S), aclosing(self._client.events(GENERATE, {})) as events:
                async for _ in events:
                    return
        except TimeoutError:
            raise TimeLimitExceeded(f"{self._client.url}{GENERATE} did not answer within {QUICK_S:g} s") from None
        except ServerRefused as error:
            if error.status in MISSING:
                raise ConfigError(str(error), where=WHERE, remedy=REMEDY) from None
            if error.status == UNKNOWN:
                raise ConfigError(str(error), where=WHERE, remedy="set ROLLYARD_ENGINE_KEY to its key") from None

    async def _deaf(self) -> str:
        heard_at = monotonic()
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                await self._client.ping("/health", limit_s=DEAF_S)
                heard_at = monotonic()
            except (EngineLost, ServerRefused) as error:
                return str(error)
            except TimeLimitExceeded as error:
                if monotonic() - heard_at > DEAF_S:
                    return str(error)


class OwnServer:
    """A server in this process's group, which listens on a socket in a folder of its own.

    Raises ConfigError where no socket can be made.

    Args:
        arguments: makes those of vLLM's engine, once vLLM can be asked about its platform.
        environment: its variables.
        adapter: writes one into the folder it is given: the server has to know its name from the start.
    """

    def __init__(
        self,
        arguments: Callable[[], Mapping[str, Any]],
        environment: Mapping[str, str],
        adapter: Callable[[Path], None] | None = None,
    ) -> None:
        self._arguments, self._environment, self._adapter = arguments, environment, adapter
        self._folder = make_folder()
        self._process: asyncio.subprocess.Process | None = None
        self.socket = str(self._folder / "http")

    async def start(self) -> None:
        flags = command_line(await asyncio.to_thread(self._arguments))
        if self._adapter is not None:
            await asyncio.to_thread(self._adapter, self._folder)
            flags += ["--lora-modules", f"{ADAPTER_NAME}={self._folder}"]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--uds", self.socket, *flags),
            *("--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            env={**self._environment, "VLLM_SERVER_DEV_MODE": "1"},
        )

    async def ended(self) -> str:
        assert self._process is not None, "it was started"
        return f"vLLM's server ended with exit code {await self._process.wait()}"

    async def close(self) -> None:
        try:
            if self._process is not None and self._process.returncode is None:
                await self._end(self._process)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    @staticmethod
    async def _end(process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):  # it was gone just before
            process.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Of vLLM's server, from the arguments of its engine."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", *map(_word, value if isinstance(value, list) else [value])]
    return flags


def _word(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _read(data: bytes) -> Output:
    """Raises EngineError."""
    try:
        chunk = _Chunk.model_validate_json(data)
    except ValidationError as error:
        raise EngineError(f"the server's words are not in its schema: {error.errors()[0]['msg']} in {data[:200]!r}") from None
    if chunk.error is not None:
        said = chunk.error.get("message", chunk.error) if isinstance(chunk.error, dict) else chunk.error
        raise EngineError(f"the server failed in it: {said}")
    details = None if chunk.usage is None else chunk.usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens or 0
    if not chunk.choices:
        return Output((), (), cached=cached)
    choice = chunk.choices[0]
    logprobs = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs is not None else []
    if len(logprobs) != len(choice.token_ids):
        raise EngineError(f"the server gave {len(choice.token_ids)} tokens with {len(logprobs)} logprobs")
    reason = "" if choice.stop_reason is None else str(choice.stop_reason)
    return Output(choice.token_ids, logprobs, choice.finish_reason or "", reason, cached, labels_of(choice.weight_versions))
