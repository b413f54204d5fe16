from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture, RopeScaling

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def folder(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    path.joinpath("config.json").write_text(json.dumps(config))
    if generation is not None:
        path.joinpath("generation_config.json").write_text(json.dumps(generation))
    return path


def test_reads_a_llama_with_the_end_ids_of_both_files(tmp_path: Path) -> None:
    arch = Architecture.from_folder(folder(tmp_path, LLAMA, {"eos_token_id": [3, 2, 7]}))
    assert arch == Architecture("llama", 11, 8, 3, 4, 2, 2, 16, 64, rms_eps=1e-5, tied=True, eos_ids=frozenset({2, 3, 7}))


def test_a_model_that_names_no_end_has_none() -> None:
    assert Architecture.from_hf(LLAMA | {"eos_token_id": None}).eos_ids == frozenset()


def test_biases_follow_the_family() -> None:
    qwen2 = Architecture.from_hf(LLAMA | {"model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    llama = Architecture.from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = Architecture.from_hf(LLAMA | {"model_type": "qwen3", "head_dim": 6})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 6)
    assert Architecture.from_hf(LLAMA | {"model_type": "qwen3"}).head_dim == 128


def test_parameters_counted_by_hand() -> None:
    # a layer: q 8x8, k and v 4x8 each, o 8x8, three 8x16 matrices, two norms of 8; then the last norm and the embedding
    layer = 64 + 32 + 32 + 64 + 3 * 128 + 16
    arch = Architecture.from_hf(LLAMA)
    assert arch.parameters == 3 * layer + 8 + 88
    assert Architecture.from_hf(LLAMA | {"tie_word_embeddings": False}).parameters == arch.parameters + 88


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 5e5} | LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3", "rope_type": None}},
    ],
)
def test_reads_rope_in_the_old_and_the_new_form(rope: dict[str, Any]) -> None:
    arch = Architecture.from_hf(LLAMA | rope)
    assert (arch.rope_theta, arch.rope_scaling) == (5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 32))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_it_writes_is_what_it_reads(family: str) -> None:
    config = LLAMA | {"model_type": family, "head_dim": 2, "rope_scaling": {"type": "linear", "factor": 2.0}}
    arch = Architecture.from_hf(config | {"eos_token_id": [1, 2], "pad_token_id": 0, "bos_token_id": 3})
    assert Architecture.from_hf(arch.to_hf()) == arch


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "'mamba'.*llama, qwen2, qwen3"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
        ({"partial_rotary_factor": 0.5}, "0.5 of each head"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "4 attention heads"),
        ({"hidden_size": 9}, "hidden_size 9"),
        ({"rms_norm_eps": "small"}, "small"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Architecture.from_folder(folder(tmp_path, LLAMA | change))
    assert caught.value.where == "model.path"


def test_refuses_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        Architecture.from_folder(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Architecture.from_folder(tmp_path)
    for broken in ("{broken", "[" * 99_999):
        tmp_path.joinpath("config.json").write_text(broken)
        with pytest.raises(ConfigError, match="cannot be read"):
            Architecture.from_folder(tmp_path)
    tmp_path.joinpath("config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        Architecture.from_folder(tmp_path)
