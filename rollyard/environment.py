"""What this process takes from its environment besides options, and what processes that it starts get."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollyard.errors import ConfigError


def cache_folder() -> Path:
    """Where base policies are kept: ROLLYARD_CACHE, or rollyard/ under XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("ROLLYARD_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollyard"


def compiler_command() -> str:
    """The C++ compiler of the engine's kernels: CXX, or c++."""
    return os.environ.get("CXX") or "c++"


def engine_keys() -> tuple[str, str]:
    """Keys of engines that are servers: of their interface, and of their control routes where that is another one."""
    key = os.environ.get("ROLLYARD_ENGINE_KEY", "")
    return key, os.environ.get("ROLLYARD_ENGINE_ADMIN_KEY") or key


def judge_key() -> str:
    """Key of the servers with the language model that judges."""
    return os.environ.get("ROLLYARD_JUDGE_KEY", "")


def serve_token() -> str:
    """What clients of a service must give; empty where nobody has to. Raises ConfigError for one that none could give."""
    token = os.environ.get("ROLLYARD_TOKEN", "")
    if not (token.isascii() and token.isprintable() and token == token.strip()):
        problem = "it begins or ends with a space, or has characters that no header of HTTP has"
        raise ConfigError(problem, where="ROLLYARD_TOKEN", remedy="use letters, digits and signs")
    return token


def reward_key() -> str:
    """Key of the address that judges."""
    return os.environ.get("ROLLYARD_REWARD_KEY", "")


DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TUNING = ("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM")  # those of them that change how fast a library is
TUNED = "ROLLYARD_TUNED"  # names the ones that are set by Rollyard and not by the user


def settle_environment() -> None:
    """Defaults for libraries that read the environment when they are imported; what the user set stays.

    Waiting OpenMP threads must not spin (they slow a busy machine many times over); a model is a folder, so nothing
    asks a hub; the tokenizers' own threads would only compete with torch's.
    """
    os.environ.update(process_environment())


def process_environment() -> dict[str, str]:
    """This process's variables, with those defaults, for a process that it starts."""
    own = [name for name in TUNING if name not in os.environ]
    return {**DEFAULTS, **({TUNED: " ".join(own)} if own else {}), **os.environ}


PYTHON = ("PYTHONPATH", "PYTHONSAFEPATH")  # what a child is started with so that it finds this package


def python_variables() -> dict[str, str]:
    """Those that the user set, for a child that gives them to what it starts itself."""
    return {name: os.environ[name] for name in PYTHON if name in os.environ}


def take_python_variables(given: Mapping[str, str]) -> None:
    """In a child that has found this package: have them as the user set them."""
    for name in PYTHON:
        os.environ.pop(name, None)
    os.environ.update(given)


def peer_environment() -> dict[str, str]:
    """For a process that is no part of Rollyard: what the user set, and none of Rollyard's tuning."""
    own = {TUNED, *os.environ.get(TUNED, "").split()}
    return {name: value for name, value in os.environ.items() if name not in own}


def owned() -> bool:
    """Whether this process belongs to a run that started it, and has to end with the leader of its process group."""
    return bool(os.environ.get("ROLLYARD_OWNED"))


# Variables that say how libraries behave. A process on another machine should have them as this one has, and nothing else
# of this machine's: its folders and interpreters are its own.
FAMILIES = ("ROLLYARD_", "HF_", "NCCL_", "GLOO_", "OMP_", "TORCH_", "VLLM_")
KEYS = (
    "ROLLYARD_ENGINE_KEY",
    "ROLLYARD_ENGINE_ADMIN_KEY",
    "ROLLYARD_JUDGE_KEY",
    "ROLLYARD_REWARD_KEY",
    "ROLLYARD_TOKEN",
    "HF_TOKEN",
)  # never kept where others may read them


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """What of `environment` a process on another machine gets: what differs from this process's own, and those families."""
    return {
        name: value
        for name, value in environment.items()
        if name not in KEYS and (name in DEFAULTS or name.startswith(FAMILIES) or os.environ.get(name) != value)
    }


def adopt(variables: Mapping[str, str]) -> None:
    """In a process that somebody else started: take these variables, before the libraries that read them are imported."""
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray's own guess
    os.environ.update(variables)


NODE_ADDRESS = "ROLLYARD_NODE_ADDRESS"  # set for a process of a run that has processes on other nodes


def node_address() -> str:
    """Of this node of a cluster, as the others reach it; empty where all of the run is on one machine."""
    return os.environ.get(NODE_ADDRESS, "")


def ray_address() -> str:
    """The Ray cluster that Ray's own tools speak to: RAY_ADDRESS, which Ray also sets for the jobs it runs."""
    return os.environ.get("RAY_ADDRESS", "")


def settle_ray() -> bool:
    """Before a cluster of our own is started: let it ask for a token, a new one, unless the user says otherwise.

    Returns whether there was something to settle. Ray looks at RAY_AUTH_MODE when it is first imported, and only then.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_MODE" in os.environ:
        return False
    os.environ["RAY_AUTH_MODE"] = "token"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return True


def only_devices(numbers: Iterable[int]) -> dict[str, str]:
    """Variables of a process that is to see these GPUs alone, of those that this one sees."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[number] if seen else str(number) for number in numbers)}
