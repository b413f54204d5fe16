"""What runs inside vLLM's own worker: a transfer backend that takes weights from one of Rollyard's receivers.

vLLM imports this module by name (`worker_extension_cls`) before it makes the worker, on every device; nothing on our side
of the line does. Written against vLLM 0.32; with `local` and `server` all that knows its insides.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rollyard.engine import wire
from rollyard.engine.vllm.core import ADAPTER
from rollyard.engine.vllm.reads import Reads, beyond, share_bytes
from rollyard.environment import owned
from rollyard.errors import RollyardError, WeightSyncError
from rollyard.model import adapter
from rollyard.protocols.weights import Receiver
from rollyard.types import Manifest, Slice, WeightVersion

BACKEND = "rollyard"
NO_REPACK = "rollyard_no_repack"  # among `additional_config`: leave a tied head as vLLM leaves it, to show that this is seen
Factory = Callable[[str, torch.device, int], Receiver]  # of the order, the device and the worker's rank
Answer = dict[str, object]


@dataclass
class Order(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the receiver comes from: `module:function`, and what that function is given. `alpha`: of the adapter, or 0."""

    factory: str
    order: str
    alpha: int = 0


@dataclass
class Version(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version was taken and is to be switched to."""

    step: int
    incarnation: int


class Transfer(WeightTransferEngine):  # type: ignore[misc]
    """Holds the receiver and feeds the model through vLLM's layer-by-layer reload, which repacks what it packs.

    Where an adapter is what travels, the model stays as it is.
    """

    init_info_cls, update_info_cls = Order, Version
    supports_draft_weight_update = False
    _receiver: Receiver | None = None
    _thread: ThreadPoolExecutor | None = None
    _alpha = 0  # of the adapter, if that is what travels
    _begun = False  # the model is taken apart: a step would fail

    def init_transfer_engine(self, init_info: Order) -> None:
        self.shutdown()  # an earlier run's, in a server that goes on from run to run
        module, _, function = init_info.factory.partition(":")
        factory: Factory = getattr(importlib.import_module(module), function)
        self._rank, self._alpha = int(self.parallel_config.rank), init_info.alpha
        self._receiver = factory(init_info.order, self.device, self._rank)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._coming: dict[int, Future[None]] = {}
        self._taken: Mapping[str, Tensor] = {}
        self._share: Mapping[str, Slice | None] = {}  # of each tensor, what this worker needs; empty where it is the only one
        self._current: Mapping[str, Tensor] = {}  # what the model was filled with last; empty before the first load

    def prepare(self, number: int, manifest: str) -> None:
        """Begin to bring tensors near, beside generation."""
        assert self._thread is not None and self._receiver is not None, "it was given a receiver"
        offered = wire.MANIFEST.validate_json(manifest)
        self._share = _share_of(offered, self._rank)
        self._coming = {number: self._thread.submit(self._receiver.prepare, offered)}

    def prepared(self, number: int) -> bool:
        """Whether they are there. Raises what went wrong, such as WeightSyncError."""
        coming = self._coming[number]
        if coming.done():
            coming.result()
        return coming.done()

    def take(self, version: WeightVersion) -> int:
        """Bytes that this worker needs of the version that was prepared, to be filled in. Raises WeightSyncError."""
        assert self._receiver is not None, "it was given a receiver"
        taken = self._receiver.take(version)
        assert taken is not None, "a receiver in another process has tensors of its own"
        self._taken = taken
        return share_bytes(taken, self._share)

    def start_weight_update(self) -> None:
        self._put_together()
        initialize_layerwise_reload(self.model)
        self._begun = True

    def receive_weights(self, update_info: Version) -> None:
        """Fill the model with what was taken. If that fails half way, it is filled again with what it had."""
        try:
            self._fill(self._taken)
        except BaseException:
            self._put_together()  # closes the layers that were begun, as they are
            if self._current:
                self.start_weight_update()
                self._fill(self._current)
            raise
        self._current = self._taken

    def adapt(self) -> None:
        """Put the adapter that was taken in the place of the one before. If that fails half way, that one is there again.

        No update of weights in vLLM's words: at the end of one vLLM removes every adapter.
        """
        try:
            _fill_adapter(self.model, self._taken, self._alpha)
        except BaseException:
            if self._current:
                _fill_adapter(self.model, self._current, self._alpha)
            raise
        self._current = self._taken

    def finish_weight_update(self) -> None:
        """All that can fail has happened where it could be undone. One that was begun and given up leaves what was there."""
        self._put_together()

    def _put_together(self) -> None:
        """Layers that got no tensor since the update was begun have their old ones again."""
        if self._begun:
            finalize_layerwise_reload(self.model, self.model_config)
        self._begun = False

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        if self._share:
            with Reads(tensors) as reads:
                self.model.load_weights(tensors.items())
                self._put_together()
            if problem := beyond(reads.found, self._share):
                raise WeightSyncError(f"worker {self._rank} needs more than the manifest says: {problem}")
        else:
            self.model.load_weights(tensors.items())
            self._put_together()
        if not (self.vllm_config.additional_config or {}).get(NO_REPACK):
            _repack_tied_heads(self.model)

    def shutdown(self) -> None:
        if self._thread is not None and self._receiver is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._receiver.close()
        self._thread = self._receiver = None
        self._taken, self._current = {}, {}


def _share_of(manifest: Manifest, rank: int) -> Mapping[str, Slice | None]:
    if not manifest.shares:
        return {}
    return {info.name: part for info, part in zip(manifest.tensors, manifest.shares[rank], strict=True)}


def _fill_adapter(model: Any, tensors: Mapping[str, Tensor], alpha: int) -> None:
    """Put an adapter in the place of the one before. Requests name it by its number, so those under way go on with it."""
    manager, mapper = model.lora_manager, getattr(model, "hf_to_vllm_mapper", None)
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if adapter.A in name)
    made = LoRAModel.from_lora_tensors(
        ADAPTER,
        # Copies: vLLM multiplies B in place, and what was taken may be the trainer's own memory.
        {adapter.PREFIX + name: tensor.clone() for name, tensor in tensors.items()},
        PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    if unknown := {name for name in made.loras if not _has_adapter(manager, name)}:
        raise ValueError(f"vLLM has no place for an adapter of {min(unknown)}")
    manager.remove_adapter(ADAPTER)
    manager.add_adapter(made)
    manager.activate_adapter(ADAPTER)


def _has_adapter(manager: Any, name: str) -> bool:
    """Is there a layer of this name, or one that it is packed into?"""
    return name in manager.modules or any(name in parts for parts in manager.packed_modules.values())


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """A tied head is packed anew from the embedding that it shares.

    vLLM 0.32 on a CPU computes logits with a packed copy of the head. A reload brings a tied head no tensor of its own, so
    that the copy is left as it was, silently. Other versions are left alone: the canary says whether they need it.
    """
    if not (vllm.__version__.startswith("0.32.") and current_platform.is_cpu()):
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Methods that vLLM adds to its worker; answers are objects, which pass through its server as they are.

    A problem is told as text: vLLM would wrap an exception into one of its own.
    """

    weight_transfer_engine: Transfer
    vllm_config: Any
    _weight_update_active: bool

    def rollyard_about(self) -> Answer:
        config = self.vllm_config
        model, scheduler, parallel = config.model_config, config.scheduler_config, config.parallel_config
        return {
            "version": vllm.__version__,
            "logprobs_mode": str(model.logprobs_mode),
            "policy": str(scheduler.policy),
            "backend": "" if config.weight_transfer_config is None else str(config.weight_transfer_config.backend),
            "stream_interval": int(scheduler.stream_interval),
            "cut_prompts": bool(scheduler.enable_chunked_prefill) and current_platform.is_cpu(),
            "speculative": config.speculative_config is not None,
            "replicas": int(parallel.data_parallel_size),
            "devices": int(parallel.world_size),
            "updating": self._weight_update_active,
            "window": int(model.max_model_len),
            "slots": int(scheduler.max_num_seqs),
        }

    def rollyard_prepare(self, number: int, manifest: str) -> Answer:
        self.weight_transfer_engine.prepare(number, manifest)
        return {}

    def rollyard_prepared(self, number: int) -> Answer:
        return _told(lambda: {"done": self.weight_transfer_engine.prepared(number)})

    def rollyard_take(self, step: int, incarnation: int) -> Answer:
        return _told(lambda: {"bytes": self.weight_transfer_engine.take(WeightVersion(step, incarnation))})

    def rollyard_adapt(self) -> Answer:
        self.weight_transfer_engine.adapt()
        return {}


def _told(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except RollyardError as error:
        return {"problem": str(error)}


def _outlive_not(leader: int) -> None:
    """End the whole process group with its leader, the process that drives vLLM: vLLM itself would go on without it."""
    try:
        handle = os.pidfd_open(leader)
        select.select([handle], [], [])
    except ProcessLookupError:
        pass  # it is gone already
    os.killpg(0, signal.SIGKILL)


if owned():
    threading.Thread(target=_outlive_not, args=(os.getpgrp(),), name="leader", daemon=True).start()
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
