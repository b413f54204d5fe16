"""Shapes: numbers of parameters against transformers' own, and what follows from them by hand."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture
from rollyard.model.flops import pass_flops
from rollyard.plan.costs import priced
from rollyard.plan.hardware import hardware_of
from rollyard.plan.models import MODELS, shape_of
from rollyard.plan.shape import Shape
from tests.plan.scenarios import scenario

SMALL = {
    "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 96,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
KINDS: dict[str, dict[str, Any]] = {
    "biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "sliding_window": 16},
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", "num_experts": 6, "shared_expert_intermediate_size": 40, **ROUTED},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 6, "head_dim": 8, "decoder_sparse_step": 2, **ROUTED},
    "some dense": {"model_type": "qwen3_moe", "num_experts": 6, "head_dim": 8, "mlp_only_layers": [1], **ROUTED},
    "deepseek_v2": {
        "model_type": "deepseek_v2", "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "q_lora_rank": None,
        **ROUTED, **LATENT,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 2, "q_lora_rank": 12,
        **ROUTED, **LATENT,
    },
}  # fmt: skip
RUN = scenario(model__dtype="bfloat16")
# Bytes of one token's keys and values in 16 bits, as their publishers or papers have them.
CACHES = {"qwen2.5-32b": 262_144, "llama-70b": 327_680, "llama-8b": 131_072, "qwen3-30b-a3b": 98_304, "deepseek-v3": 70_272}
# Billions in all and for a token, as their model cards say.
PUBLISHED = {
    "llama-70b": (70.6, 70.6), "llama-8b": (8.03, 8.03), "qwen2.5-32b": (32.5, 32.5), "qwen2.5-7b": (7.61, 7.61),
    "deepseek-r1-distill-qwen-1.5b": (1.78, 1.78), "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37), "kimi-k2": (1026, 32), "smollm2-135m": (0.135, 0.135), "mixtral-8x7b": (46.7, 12.9),
}  # fmt: skip


def real(config: dict[str, Any]) -> int:
    """Parameters as transformers makes them, and the routers' corrections, which it keeps as buffers. No numbers are made."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"].replace("kimi_k2", "deepseek_v3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **{k: config[k] for k in config if k != "model_type"})
        )
    buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(parameter.numel() for parameter in model.parameters()) + buffers


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_model_of_each_kind_has_the_parameters_that_transformers_gives_it(kind: str) -> None:
    config = SMALL | KINDS[kind]
    assert Shape.from_hf(config).parameters == real(config)


@pytest.mark.parametrize("name", MODELS)
def test_a_named_model_has_the_parameters_that_transformers_gives_it(name: str) -> None:
    assert shape_of(name).parameters == real(dict(MODELS[name]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_model_is_as_large_as_its_publisher_says(name: str) -> None:
    billions, active = PUBLISHED[name]
    shape = shape_of(name)
    looked_up = shape.parameters - shape.active if not shape.experts else shape.head  # they count the embedding
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert (shape.active + looked_up) / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", CACHES)
def test_keys_and_values_of_a_token(name: str) -> None:
    assert 2 * shape_of(name).cache == CACHES[name]


def test_a_forward_pass_has_the_operations_that_the_roofline_counts() -> None:
    config = {**MODELS["smollm2-135m"]}
    shape, architecture = shape_of("smollm2-135m"), Architecture.from_hf(config | {"rope_theta": 1e4})
    norms = (2 * shape.layers + 1) * shape.hidden  # are not multiplied with as matrices are
    ours = 2 * ((shape.active - shape.head - norms) * 100 + shape.head * 7 + shape.attended * 5050)
    assert ours == pass_flops(architecture, 100, 7, 5050)


def test_latent_attention_by_hand() -> None:
    shape = shape_of("deepseek-v3")
    assert shape.cache == 61 * (512 + 64)
    assert shape.attended == 61 * 128 * (128 + 64 + 128)
    assert shape.read == 61 * 128 * (512 + 64 + 512)


def test_experts_that_a_batch_touches() -> None:
    """Of 128 experts, 8 of which a token goes to: one token touches 8, two 8 + 8 * 120 / 128, very many all."""
    shape = shape_of("qwen3-30b-a3b")
    of = {tokens: (shape.touched(tokens) - shape.shared) / shape.expert_layers / shape.expert for tokens in (0, 1, 2, 10_000)}
    assert of[0] == 0
    assert of[1] == pytest.approx(8)
    assert of[2] == pytest.approx(15.5)
    assert of[10_000] == pytest.approx(128)
    assert shape.touched(1) == pytest.approx(shape.active)


@given(st.integers(1, 4096), st.sampled_from(sorted(MODELS)))
def test_more_tokens_never_touch_less(tokens: int, name: str) -> None:
    shape = shape_of(name)
    assert shape.active <= shape.touched(tokens) * (1 + 1e-12)
    assert shape.touched(tokens) <= shape.touched(tokens + 1) <= shape.parameters


def test_a_model_is_found_by_folder_and_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | KINDS["qwen3"]))
    assert shape_of(str(tmp_path)) == shape_of(str(tmp_path / "config.json"))
    assert shape_of(str(tmp_path)).parameters == Shape.from_hf(SMALL | KINDS["qwen3"]).parameters


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        (json.dumps({"model_type": "mamba"}), "models of type 'mamba' cannot be told"),
        (json.dumps({"model_type": "llama"}), "num"),
        (json.dumps(SMALL | {"model_type": "llama", "hidden_size": "many"}), "hidden_size should be a whole number above 0"),
        (json.dumps(SMALL | {"model_type": "llama", "num_key_value_heads": 3}), "4 attention heads do not divide into 3"),
        (json.dumps(SMALL | {"model_type": "qwen3_moe"}), "num_experts_per_tok should be"),
        (json.dumps(SMALL | KINDS["deepseek_v3"] | {"kv_lora_rank": None}), "kv_lora_rank should be"),
        (json.dumps(SMALL | {"model_type": ["llama"]}), "models of type"),
        (json.dumps(SMALL | KINDS["qwen3"] | {"head_dim": 0}), "head_dim should be a whole number above 0, and is 0"),
        (json.dumps(SMALL | {"model_type": "llama", "hidden_size": 3}), "a hidden size of 3 is less than one for each of 4"),
        (json.dumps(SMALL | KINDS["qwen3_moe"] | {"mlp_only_layers": 5}), "mlp_only_layers should be a list of whole numbers"),
        (json.dumps(SMALL | KINDS["qwen3_moe"] | {"mlp_only_layers": [-1]}), "mlp_only_layers should be a list of whole numbers"),
        (json.dumps(SMALL | KINDS["qwen3_moe"] | {"decoder_sparse_step": 0}), "decoder_sparse_step should be"),
        (json.dumps(SMALL | KINDS["mixtral"] | {"num_experts_per_tok": 7}), "num_experts_per_tok is 7, and there are 6 experts"),
        (json.dumps(SMALL | {"model_type": "llama", "tie_word_embeddings": "no"}), "tie_word_embeddings should be true or false"),
        (json.dumps(SMALL | {"model_type": "llama", "num_hidden_layers": 10**9}), "num_hidden_layers is more than 100,000"),
        (json.dumps(SMALL | {"model_type": "llama", "vocab_size": 10**30}), "vocab_size is more than"),
    ],
)
def test_a_config_that_is_not_one_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=said) as error:
        shape_of(str(tmp_path))
    assert error.value.where == "model.path"


BAD = (None, 0, -1, -(10**30), 1, 3, 7, 10**9, 10**400, 0.0, 4.0, float("inf"), float("nan"), True, False, "", "4", [], [0],
       [0.5], [True], [[]], {}, {"a": 1})  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_field_says_it_is_a_shape_or_refused(kind: str) -> None:
    """And a shape has time and memory: nothing in it is 0 that is divided by."""
    whole = SMALL | KINDS[kind]
    more = ("head_dim", "num_key_value_heads", "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
            "sliding_window", "max_position_embeddings", "mlp_only_layers", "decoder_sparse_step", "moe_layer_freq",
            "first_k_dense_replace", "n_shared_experts", "q_lora_rank")  # fmt: skip
    shapes = 0
    for name in {*whole, *more}:
        for value in BAD:
            with suppress(ConfigError):
                shape = Shape.from_hf(whole | {name: value})
                with suppress(ConfigError):
                    found = priced(RUN, shape, hardware_of("H100"))
                    assert 0 < found.engine.step(3).at(100) < math.inf and 0 < found.train_s(100, 1000) < math.inf, (name, value)
                    assert 0 < found.engine.prefill_s(10, 55) < math.inf
                    shapes += 1
    assert shapes > 20


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_config_leaves_out_is_as_transformers_has_it(kind: str) -> None:
    config = SMALL | {"num_attention_heads": 32, "hidden_size": 64} | KINDS[kind]
    for name in ("num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", "n_shared_experts", "first_k_dense_replace"):
        if kind == "qwen3_moe" and name == "head_dim":
            continue  # which transformers has no number for
        less = {key: value for key, value in config.items() if key != name}
        assert Shape.from_hf(less).parameters == real(less), name
    assert Shape.from_hf(SMALL | {"model_type": "mistral"} | {"num_attention_heads": 8}).kv_heads == 2
    bare = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"} | {"num_attention_heads": 16}
    assert Shape.from_hf(bare | {"model_type": "mistral"}).kv_heads == 8
    assert Shape.from_hf(bare | {"model_type": "mistral"}).sliding == 4096
    assert Shape.from_hf(bare | {"model_type": "mistral", "sliding_window": None}).sliding == 0
    assert Shape.from_hf(bare | {"model_type": "llama"}).kv_heads == 16


def test_a_model_that_is_not_there_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="there is no model 'lama-70b'") as error:
        shape_of("lama-70b")
    assert "llama-70b" in str(error.value.remedy)


def test_a_window_that_slides_is_read_where_it_is_on() -> None:
    assert Shape.from_hf(SMALL | {"model_type": "mistral", "sliding_window": 4096}).sliding == 4096
    assert Shape.from_hf(SMALL | {"model_type": "qwen2", "sliding_window": 4096}).sliding == 0
    assert Shape.from_hf(SMALL | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}).sliding == 4096
