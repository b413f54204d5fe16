"""What the double of SGLang's server is made of: its releases and routes, what goes wrong on them, the engine behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from rollyard.model.folder import load
from rollyard.place.inline import DeviceThread
from rollyard.types import FinishReason, Manifest, Sampling, WeightVersion

NEW, OLD = "0.5.23", "0.5.6"
PARAMETERS = {
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"),
    *("sampling_seed", "skip_special_tokens", "n", "stream_interval"),
}
CONTROL = {
    *("/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/update_weights_from_disk"),
    *("/update_weight_version", "/release_memory_occupation", "/resume_memory_occupation"),
}


@dataclass
class Fault:
    """What goes wrong on one route. Counts of tokens are of one answer."""

    late_s: float = 0.0  # before it does anything
    hang: bool = False  # it never answers
    status: int = 0  # it answers with this and does nothing
    body: str = ""  # it answers with this text and does nothing
    cut_after: int | None = None  # the connection breaks after so many tokens
    error_after: int | None = None  # an error comes in the stream
    garbage_after: int | None = None  # what comes is no JSON
    silent_after: int | None = None  # nothing comes any more
    abort_after: int | None = None  # the scheduler gives up, with status 500
    label: str = ""  # the weight version that it says it has, or writes with
    pretend: bool = False  # it says that it did it
    times: int | None = None  # how often; None: always

    @property
    def after(self) -> int | None:
        """Tokens that are written as they should be, before it goes wrong."""
        counts = (self.cut_after, self.error_after, self.garbage_after, self.silent_after, self.abort_after)
        return next((count for count in counts if count is not None), None)


FAULT: ContextVar[Fault] = ContextVar("FAULT")  # of the request that is handled; each has a task of its own


class FromDisk:
    """Reads a folder of weights for the engine behind (protocols.Receiver)."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] | None = None

    def prepare(self, manifest: Manifest) -> None:
        self._tensors = None
        if manifest.source:
            model = load(Path(manifest.source), torch.float32, torch.device("cpu"))
            self._tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def take(self, version: WeightVersion) -> dict[str, torch.Tensor] | None:
        return self._tensors

    def close(self) -> None:
        self._tensors = None


class SlowDevice(DeviceThread):
    """Each call to the device takes a while longer."""

    def __init__(self, step_s: float) -> None:
        super().__init__(lambda: torch.set_num_threads(1))
        self.step_s = step_s

    async def run(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.step_s:
            await asyncio.sleep(self.step_s)
        return await super().run(call, *args)


@dataclass(eq=False)
class Live:
    """One request."""

    rid: str
    prompt: int  # tokens
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)  # which load wrote each token
    finish: dict[str, Any] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Died(Exception):
    """The server process would be gone now."""


def why_malformed(ids: Any, parameters: dict[str, Any]) -> str:
    """What no schema of SGLang's has; empty where all is well."""
    unknown = parameters.keys() - PARAMETERS
    if unknown:
        return f"unknown field {sorted(unknown)[0]!r}"
    return "" if ids and all(type(token_id) is int for token_id in ids) else "input_ids must be a list of int"


def sampling_of(parameters: dict[str, Any], most: int) -> Sampling:
    """For the engine behind."""
    top_k, temperature = parameters.get("top_k", -1), parameters.get("temperature", 1.0)
    return Sampling(
        most,
        0.0 if temperature < 1e-6 else temperature,
        parameters.get("top_p", 1.0),
        0 if top_k == -1 else top_k,
        ignore_eos=parameters.get("ignore_eos", False),
    )


def reason_of(live: Live, finish: FinishReason) -> dict[str, Any]:
    if finish is FinishReason.STOP:
        return {"type": "stop", "matched": live.ids[-1]}
    if finish is not FinishReason.ABORT:
        return {"type": "length", "length": len(live.ids)}
    if not live.ids:
        return {"type": "abort", "message": "Abort in waiting queue"}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


async def write(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
