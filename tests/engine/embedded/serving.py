"""An embedded engine on a tiny model, and the plain transformers model to compare it with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollyard.config import EngineConfig
from rollyard.engine.embedded.engine import EmbeddedEngine
from rollyard.model.folder import load
from rollyard.model.tokenizer import Tokenizer
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.protocols.rollouts import Engine
from rollyard.protocols.weights import Receiver
from rollyard.types import FinishReason, Manifest, Request, RequestId, Sampling, Segment, WeightVersion
from tests.compiler import needs_compiler

WINDOW = 256
DECODERS = (pytest.param("native", marks=needs_compiler), "plain")


class InPlace:
    """A receiver for parameters that were changed where they are."""

    def __init__(self) -> None:
        self.received: list[WeightVersion] = []

    def prepare(self, manifest: Manifest) -> None:
        pass

    def take(self, version: WeightVersion) -> None:
        self.received.append(version)

    def close(self) -> None:
        pass


async def change(engine: Engine, version: WeightVersion) -> None:
    """The parameters as they are now become `version` in the engine."""
    await engine.prepare(Manifest(version, (), 0))
    await engine.load(version)


@dataclass
class Written:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish: FinishReason | None = None


def ask(
    name: int,
    prompt: Sequence[int],
    max_tokens: int = 12,
    *,
    member: int = 0,
    written: Sequence[int] = (),
    seed: int | None = None,
    priority: int = 0,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> Request:
    sampling = Sampling(max_tokens, temperature, top_p, top_k, stop, ignore_eos)
    noise = name * 1000 + member if seed is None else seed
    return Request(RequestId(name, member), tuple(prompt), sampling, noise, tuple(written), priority)


@asynccontextmanager
async def serving(
    folder: Path,
    *,
    model: CausalLM | None = None,
    window: int = WINDOW,
    loaded: bool = True,
    sole: bool = False,
    receiver: Receiver | None = None,
    **config: object,
) -> AsyncIterator[EmbeddedEngine]:
    """A started engine, with version (0, 0) acknowledged when `loaded`."""
    device = DeviceThread(lambda: torch.set_num_threads(1))
    policy = model or load(folder, torch.float32, torch.device("cpu"))
    options = EngineConfig.model_validate({"slots": 8, "page_tokens": 4, **config})
    engine = EmbeddedEngine("engine-0", policy, Tokenizer(folder), device, receiver or InPlace(), options, window, sole)
    try:
        await engine.start()
        if loaded:
            await change(engine, WeightVersion(0))
        yield engine
    finally:
        await engine.close()
        device.close()


async def collect(engine: Engine, count: int, into: dict[RequestId, Written] | None = None) -> dict[RequestId, Written]:
    """What the engine writes until `count` requests have ended."""
    written = {} if into is None else into
    async for segments in engine.segments():
        for segment in segments:
            one = written.setdefault(segment.request, Written())
            assert one.finish is None, "a segment after the last one"
            one.segments.append(segment)
            one.token_ids += segment.token_ids
            one.logprobs += segment.logprobs
            one.finish = segment.finish
        if sum(one.finish is not None for one in written.values()) == count:
            return written
    raise AssertionError("the engine closed too early")


async def answers(engine: Engine, requests: Sequence[Request]) -> dict[RequestId, Written]:
    engine.generate(requests)
    return await collect(engine, len(requests))


class Reference:
    """The same folder in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """transformers' own `generate`, one prompt at a time: no padding, no batch."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
        """`[completion tokens, vocab]`: what predicted each token, from one plain forward pass over the whole sequence."""
        whole = torch.tensor([[*prompt, *completion]])
        return self.model(whole).logits[0, len(prompt) - 1 : -1].float()

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """`[completion tokens]`"""
        distribution = torch.log_softmax(self.logits(prompt, completion) / temperature, dim=-1)
        return distribution.gather(1, torch.tensor(completion)[:, None])[:, 0]
