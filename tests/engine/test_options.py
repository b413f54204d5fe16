"""Options that an engine would ignore are refused, with whom they are for."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rollyard.config import Config
from rollyard.engine.options import HEEDED, check_options
from rollyard.engine.vllm import arguments as vllm
from rollyard.errors import ConfigError
from rollyard.hosts import interpreter
from rollyard.layers import resolve

SEPARATE = {"place.placement": "separate"}
VLLM = SEPARATE | {"engine.kind": "vllm"}
RUNNING = VLLM | {"engine.url": "http://127.0.0.1:8000"}
SGLANG = SEPARATE | {"engine.kind": "sglang", "engine.url": "http://127.0.0.1:30000"}
OTHER: dict[str, object] = {  # than the default
    "page_tokens": 32,
    "pages": 100,
    "step_tokens": 512,
    "prefill_tokens": 64,
    "dtype": "bfloat16",
    "share_prompts": False,
    "batching": "static",
    "kernels": "plain",
    "python": sys.executable,
    "start_s": 100.0,
    "tensor_parallel_size": 2,
    "gpu_memory_utilization": 0.5,
    "extra": '{"block_size": 32}',
}
HEEDS = {
    "here": ({}, "page_tokens pages step_tokens prefill_tokens dtype share_prompts batching kernels"),
    "child": (SEPARATE, "page_tokens pages step_tokens prefill_tokens dtype share_prompts batching kernels python start_s"),
    "vllm": (
        VLLM,
        "page_tokens pages step_tokens dtype share_prompts python start_s tensor_parallel_size gpu_memory_utilization extra",
    ),
    "running": (RUNNING, "start_s"),
    "sglang": (SGLANG, "start_s"),
}


def config(**values: Any) -> Config:
    return resolve(environment={}, overrides={"prompts.task": "sort"} | values).config


def test_every_option_of_the_table_is_looked_at() -> None:
    assert OTHER.keys() == HEEDED.keys()


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("way", HEEDS)
def test_what_an_engine_would_ignore_is_refused(way: str, name: str) -> None:
    given, heeds = HEEDS[way]
    check_options(config(**given))
    made = config(**given, **{f"engine.{name}": OTHER[name]})
    if name in heeds.split():
        check_options(made)
    else:
        with pytest.raises(ConfigError, match=rf"engine\.{name}: .* takes no notice of it \(leave it out: it is for "):
            check_options(made)


@pytest.mark.parametrize("name", ["stream_interval", "speculative_config", "spec_model", "uds", "port", "data_parallel_size"])
@pytest.mark.parametrize("spelt", [str, lambda name: name.replace("_", "-"), lambda name: "--" + name.replace("_", "-")])
def test_arguments_of_vllm_that_are_not_free(name: str, spelt: Any) -> None:
    engine = config(**VLLM, **{"engine.extra": f'{{"{spelt(name)}": 9}}'}).engine
    with pytest.raises(ConfigError, match=rf"engine\.extra: {name} is not free"):
        vllm.check(engine, 1.0)


@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python", "/tmp"])
def test_an_interpreter_that_is_none(python: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.python"):
        interpreter(config(**SEPARATE, **{"engine.python": python}).engine)


def test_a_server_that_is_named_twice() -> None:
    twice = "http://127.0.0.1:8000,http://127.0.0.1:8000/"
    with pytest.raises(ConfigError, match=r"engine\.url: a server is named twice"):
        config(**RUNNING | {"engine.url": twice, "place.generate": 2})


def test_a_step_of_vllm_on_a_cpu_holds_a_whole_prompt() -> None:
    engine = config(**VLLM, **{"engine.step_tokens": 100}).engine
    vllm.check(engine, 1.0, 100, cpu=True)
    vllm.check(engine, 1.0, 101, cpu=False)
    with pytest.raises(ConfigError, match=r"engine\.step_tokens: .* \(use at least 101, or a smaller engine\.window\)"):
        vllm.check(engine, 1.0, 101, cpu=True)
