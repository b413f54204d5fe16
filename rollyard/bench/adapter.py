"""`bench sync --workload adapter`: a new version of an adapter beside one of all parameters, by the same transports.

The engine is an embedded one in a process of its own, which merges an adapter into the weights that it has.
"""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from functools import partial
from itertools import product
from pathlib import Path

import torch

from rollyard import hosts, worker
from rollyard.bench.result import Result, Side
from rollyard.bench.setting import Setting
from rollyard.bench.sync import Transport
from rollyard.bench.turns import Tell, alternate
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread

TRANSPORTS = ("shared_memory", "broadcast")
WHAT = {"lora": "adapter", "full": "all parameters"}


async def bench(setting: Setting, tell: Tell) -> Result:
    """Raises ConfigError, EngineError, WeightSyncError, TimeLimitExceeded."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollyard-bench-")))
        device = DeviceThread()
        stack.callback(device.close)
        await device.run(worker.set_threads, setting.threads)
        sides, policies = list[Transport](), dict[str, worker.Policy]()
        for transport, what in product(TRANSPORTS, WHAT):
            own = {"model.dtype": setting.dtype, "engine.window": 1024, "place.placement": "separate", "weights.what": what}
            config = setting.config(own | {"weights.transport": transport})
            if what not in policies:
                policies[what] = await device.run(worker.load_policy, config, setting.model)
                await device.run(partial(_train, policies[what].model))
            tell(f"{WHAT[what]} by {transport}: starting an engine")
            publisher = worker.build_publisher(config, policies[what], device, folder)
            stack.callback(publisher.close)
            engine = await hosts.launch_engine(config, f"engine-{transport}-{what}", setting.model)
            stack.push_async_callback(engine.close)
            await engine.start()
            sides.append(Transport(f"{WHAT[what]}, {transport}", publisher, engine))
        rounds = await alternate(sides, setting.rounds, tell)
        found = [Side.of(name, measured) for name, measured in zip(rounds.names, rounds.measured, strict=True)]
        return setting.result("sync", "ms", found, rounds, decoder=sides[0].engine.stats().decoder)


@torch.no_grad()
def _train(model: CausalLM) -> None:
    """An adapter that begins without an effect gets one."""
    with model.stamp.writing():
        for parameter in model.trained().values():
            parameter.add_(1e-3)
