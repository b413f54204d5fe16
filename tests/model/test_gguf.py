from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rollyard.errors import ConfigError
from rollyard.model import gguf as converter
from rollyard.model.tokenizer import Tokenizer
from tests.tiny import tiny_folder

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

HEADS, KV_HEADS, WIDTH = 4, 2, 64
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
# llama.cpp's name for each tensor of a layer
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbours, Hugging Face halves: rows of queries and keys are stored in another order."""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(file: Path, model: LlamaForCausalLM, *, rope_scaling: str | None = None) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(len(tokens))
    if rope_scaling is not None:
        writer.add_string("llama.rope.scaling.type", rope_scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)  # not what ends a turn, as in some files
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()

    def add(name: str, tensor: Tensor) -> None:
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(tensor.numpy()))

    add("token_embd", state["model.embed_tokens.weight"])
    add("output_norm", state["model.norm.weight"])
    for index in range(2):
        for short, long in LAYER.items():
            tensor = state[f"model.layers.{index}.{long}.weight"]
            if short in ("attn_q", "attn_k"):
                tensor = interleaved(tensor, HEADS if short == "attn_q" else KV_HEADS)
            add(f"blk.{index}.{short}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def model(tmp_path: Path) -> LlamaForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    folder = tiny_folder(
        tmp_path, heads=HEADS, kv_heads=KV_HEADS, width=WIDTH, vocab=260, window=128, rms_norm_eps=1e-5, rope_parameters=rope
    )
    return AutoModelForCausalLM.from_pretrained(folder)


def test_becomes_a_folder_that_computes_the_same(
    tmp_path: Path, model: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    write_gguf(file, model)
    assert converter.main([str(file), str(folder)]) == 0
    assert "ends at [0, 2]" in capsys.readouterr().out

    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert again.dtype == torch.float32
    assert again.generation_config.eos_token_id == [0, 2]  # the turn's end was added
    tokenizer = Tokenizer(folder)
    ids = tokenizer.chat([{"role": "user", "content": "ab"}])
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert 259 in ids


def test_what_transformers_would_leave_out_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, model, rope_scaling="linear")
    with pytest.raises(ConfigError, match="scales rotary positions"):
        converter.convert(file, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_mistakes_have_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert converter.main([str(tmp_path / "absent.gguf"), str(tmp_path / "folder")]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "text.gguf").write_text("this is no model at all" * 9)
    assert converter.main([str(tmp_path / "text.gguf"), str(tmp_path / "folder")]) == 2
    assert "no GGUF file" in capsys.readouterr().err
    assert converter.main([str(tmp_path / "text.gguf"), str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(converter, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(ConfigError, match=rf"package {package}.*rollyard\[gguf\]"):
        converter.convert(tmp_path / "model.gguf", tmp_path / "folder")
