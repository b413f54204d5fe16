"""`bench engine --workload decode`: one step of 64 sequences, beside its linear layers alone."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from rollyard import worker
from rollyard.bench.generate import Embedded
from rollyard.bench.result import Measured, Result
from rollyard.bench.serving import Served, serving
from rollyard.bench.setting import Setting
from rollyard.bench.turns import Tell, alternate
from rollyard.bench.workload import SHAPES, build
from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture
from rollyard.place.inline import DeviceThread

if TYPE_CHECKING:
    from rollyard.engine.embedded.native import NativeDecoder

ROWS = 64
TIMES = 8  # steps' worth of linear layers in a round


class Linears:
    """The packed linear layers of one step, each at its own weights, and nothing between them."""

    name = "its linear layers alone"

    def __init__(self, decoder: NativeDecoder, device: DeviceThread) -> None:
        self._decoder, self._device = decoder, device

    async def warm_up(self) -> None:
        await self.run(0)

    async def run(self, number: int) -> Measured:
        seconds = sorted(await self._device.run(partial(self._seconds, TIMES)))
        return Measured(1000 * seconds[TIMES // 2])

    def _seconds(self, times: int) -> list[float]:
        import torch

        layers = list(self._decoder.linears())
        x = torch.randn(ROWS, max(layer.inputs for layer in layers))
        out = torch.empty(ROWS, max(layer.outputs for layer in layers))
        found = []
        for _ in range(times):
            started = time.perf_counter()
            self._decoder.run_linears(x, out)
            found.append(time.perf_counter() - started)
        return found


async def bench(setting: Setting, tell: Tell) -> Result:
    """Milliseconds of both. Raises ConfigError where the engine's own kernels cannot be used."""
    shape = SHAPES["64x1"]
    vocabulary = Architecture.from_folder(setting.model).vocab_size
    config = setting.config({"model.dtype": setting.dtype, "engine.window": shape.window, "engine.slots": ROWS})
    async with serving([config], setting.model, setting.threads) as host:
        if host.engines[0].stats().decoder != "native":
            raise ConfigError("only the native decoder has linear layers to time", where="engine.kernels", remedy="use native")
        decoder = await host.device.run(_decoder, config, setting)
        step = Embedded("decode step", host.engines[0], partial(build, shape, vocabulary), _step_ms)
        rounds = await alternate((step, Linears(decoder, host.device)), setting.rounds, tell)
    return setting.result("engine", "ms", rounds.sides(), rounds, decoder="native")


def _decoder(config: Config, setting: Setting) -> NativeDecoder:
    from rollyard.engine.embedded.check import checked
    from rollyard.engine.embedded.native import NativeDecoder
    from rollyard.engine.embedded.pages import PagePool

    model = worker.load_policy(config, setting.model).model
    decoder = NativeDecoder(checked(), model, PagePool(1, 16), model.head_weight.dtype, sole=True)
    decoder.refresh()
    return decoder


def _step_ms(served: Served) -> float:
    """Of a step that computes one token for each sequence: all after the first token, which took the prompts."""
    each = len(served.written.token_ids[0]) - 1
    return 1000 * (served.written.seconds - served.first_token_s) / each
