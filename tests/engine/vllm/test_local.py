"""vLLM in this process, when its core has died: whatever it is told, it is lost. A stub stands for vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import pytest

from rollyard.engine.vllm.local import LocalCore
from rollyard.errors import EngineLost
from rollyard.types import WeightVersion


class EngineDeadError(Exception):
    """As vLLM's own."""


class Dead:
    """Answers like `AsyncLLM` whose core is gone."""

    errored = True

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, None]]:
        async def call(*args: object, **options: object) -> None:
            raise EngineDeadError

        return call


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> LocalCore:
    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.exceptions", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("vllm.distributed.weight_transfer", "vllm.distributed.weight_transfer.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.engine.exceptions"].EngineDeadError = EngineDeadError  # type: ignore[attr-defined]
    sys.modules["vllm.distributed.weight_transfer.base"].WeightTransferUpdateRequest = dict  # type: ignore[attr-defined]
    made = LocalCore(dict)
    made._llm = Dead()
    return made


@pytest.mark.parametrize(
    "told",
    [
        lambda core: core.abort(["a"]),
        lambda core: core.stand_still(),
        lambda core: core.go_on(),
        lambda core: core.forget(),
        lambda core: core.ask("rollyard_about"),
        lambda core: core.update(WeightVersion(1), "0.1.0"),
    ],
)
async def test_a_dead_core_is_a_lost_engine(core: LocalCore, told: Callable[[LocalCore], Coroutine[Any, Any, object]]) -> None:
    with pytest.raises(EngineLost, match="vLLM's core ended"):
        await told(core)


async def test_one_that_dies_while_it_comes_to_a_stand(core: LocalCore) -> None:
    class Stopping(Dead):
        async def pause_generation(self, **options: object) -> None:
            """It stood still, and died then."""

    core._llm = Stopping()
    with pytest.raises(EngineLost):
        await core.stand_still()
