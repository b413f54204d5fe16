"""What a server says about itself, and whether it can serve a run.

How it must be started, beside --model-path, --host and --port:
- `--dtype` as the trainer's number format (by default SGLang turns float32 checkpoints into float16);
- `--load-format` anything: updates name theirs. The folder of a run must have the same path on the server's machine;
- `--incremental-streaming-output` (0.5.6: `--stream-output`): else every event repeats all tokens so far, which works
  and costs time quadratic in the length; `--stream-interval 4` makes events fewer;
- without the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB, whose logprobs are those of another temperature, and
  without `--preferred-sampling-params`;
- `--enable-deterministic-inference` when seeds shall count: without it SGLang ignores them;
- `--enable-memory-saver` when it shall give memory back between rollouts, and `--enable-weights-cpu-backup` for that of
  the weights too;
- `--skip-tokenizer-init` may be given: only token ids are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from rollyard.engine.http import Client, ServerRefused
from rollyard.errors import ConfigError, EngineError

OWN_TOKENS = 6  # of its context that SGLang never fills
WHERE = "engine.url"


class _Model(BaseModel):
    """Of /model_info."""

    is_generation: bool = True
    preferred_sampling_params: str | dict[str, Any] | None = None
    weight_version: str = ""


class _Server(BaseModel):
    """Of /server_info: the arguments it was started with, beside what it found out."""

    version: str = ""
    max_req_input_len: int | None = None
    max_running_requests: int | None = None
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    enable_deterministic_inference: bool = False


@dataclass(frozen=True, slots=True)
class About:
    """What the adapter needs to know."""

    version: str
    window: int  # tokens of prompt and completion at most
    slots: int
    seeds: bool  # are they heard?
    sleep: bool  # can it give back the memory of its cache?
    sleep_weights: bool  # and that of its weights, and find them again?


async def look(client: Client, window: int, slots: int, *, limit_s: float) -> About:
    """Ask the server.

    Args:
        window: tokens of prompt and completion that the run wants.
        slots: requests at a time that the run wants.

    Raises:
        ConfigError: the server is not one that the run can use.
        EngineError: it does not answer as SGLang does; EngineLost when it is not there.
    """
    try:
        model = _Model.model_validate(await client.get("/model_info", limit_s=limit_s))
        server = _Server.model_validate(await client.get("/server_info", limit_s=limit_s))
    except ValidationError as error:
        raise EngineError(f"{client.url} does not describe itself as SGLang does: {error.errors()[0]['msg']}") from None
    except ServerRefused as error:
        if error.status in (401, 403):
            remedy = "set ROLLYARD_ENGINE_KEY, and ROLLYARD_ENGINE_ADMIN_KEY where it has one for control routes"
            raise ConfigError(str(error), where=WHERE, remedy=remedy) from None
        raise
    if not model.is_generation:
        raise ConfigError(f"{client.url} serves no model that generates", where=WHERE, remedy="start it with a causal LM")
    if model.preferred_sampling_params:
        problem = f"{client.url} draws with parameters of its own: {model.preferred_sampling_params}"
        raise ConfigError(problem, where=WHERE, remedy="start it without --preferred-sampling-params")
    room = window if server.max_req_input_len is None else server.max_req_input_len
    if room < window - OWN_TOKENS:
        problem = f"{client.url} has room for {room} tokens, and the run wants {window}"
        remedy = f"start it with --context-length {window} and memory for that, or set engine.window to {room}"
        raise ConfigError(problem, where="engine.window", remedy=remedy)
    return About(
        server.version,
        min(window, room),
        min(slots, server.max_running_requests or slots),
        server.enable_deterministic_inference,
        server.enable_memory_saver,
        server.enable_memory_saver and server.enable_weights_cpu_backup,
    )


async def label(client: Client, *, limit_s: float) -> str:
    """The weight version that the server says it has."""
    return str((await client.get("/model_info", limit_s=limit_s)).get("weight_version", ""))
