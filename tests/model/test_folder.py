from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollyard.errors import ConfigError
from rollyard.model import folder as folder_module
from rollyard.model.folder import load, save, weight_files
from tests.tiny import tiny_folder

WEIGHTS = "model.safetensors"


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Change tensors of a folder; None takes one away. Names with `__` for dots."""
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor.contiguous()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def shard(folder: Path) -> None:
    """Split the weights into two files with an index, as transformers does for large models."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_saved_model_is_what_transformers_loads(tmp_path: Path, family: str, tied: bool) -> None:
    source, target = tiny_folder(tmp_path, family, tied=tied), tmp_path / "deep" / "saved"
    model = load(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    save(model, target, source, also=lambda draft: (draft / "extra.txt").write_text("more") and None)

    again = AutoModelForCausalLM.from_pretrained(target)
    names = {name for name, _ in again.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in names) is not tied
    assert again.dtype == torch.float32
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    with safe_open(target / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == names
    assert all(torch.equal(a, b) for a, b in zip(load(target).parameters(), model.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(target).encode("abc") == [2, 3, 4]
    assert again.generation_config.eos_token_id == 1
    assert (target / "extra.txt").read_text() == "more"
    assert [path.name for path in target.parent.iterdir()] == ["saved"]


def test_the_saved_configuration_names_the_dtype_of_the_weights(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        target = tmp_path / str(dtype)
        save(load(source, dtype), target, source)
        assert AutoModelForCausalLM.from_pretrained(target).dtype == dtype
        source = target


def test_an_existing_folder_is_refused_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path)
    model = load(source)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError):
        save(model, source, source)

    def fail(draft: Path) -> None:
        assert (draft / WEIGHTS).is_file()
        raise KeyError("disk")

    with pytest.raises(KeyError):
        save(model, tmp_path / "new", source, also=fail)
    assert sorted(tmp_path.iterdir()) == before


def test_reads_shards(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    whole = load(folder)
    shard(folder)
    assert all(torch.equal(a, b) for a, b in zip(load(folder).parameters(), whole.parameters(), strict=True))
    missing = sorted(folder.glob("model-*.safetensors"))[0]
    missing.unlink()
    with pytest.raises(ConfigError, match=missing.name):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="weight_map"):
        load(folder)


@pytest.mark.parametrize("most", [1, 40_000, 10**9])
def test_writes_several_files_where_one_would_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Also one for each tensor. transformers reads them as well, and nobody takes one of them for all."""
    monkeypatch.setattr(folder_module, "FILE_BYTES", most)
    source = tiny_folder(tmp_path, tied=False)
    model = load(source)
    save(model, tmp_path / "saved", source)
    files = weight_files(tmp_path / "saved")
    assert len(files) == {1: len(list(model.parameters())), 10**9: 1}.get(most, len(files))
    assert all(path.stat().st_size < max(most, 4 * 64 * 128) + 4096 for path in files)
    again, theirs = load(tmp_path / "saved"), AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter) and torch.equal(theirs[name], parameter)


def test_casts_to_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    exact, cast = load(folder), load(folder, torch.bfloat16)
    assert torch.equal(cast.head_weight, exact.head_weight.bfloat16())
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.bfloat16}


def test_names_are_compared_on_both_sides(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    edit(folder, model__norm__weight=None, model__surplus=torch.zeros(1))
    with pytest.raises(ConfigError, match=r"lacks model\.norm\.weight; has unknown model\.surplus"):
        load(folder)


def test_what_old_writers_stored_besides_is_passed_over(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    load(folder)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    edit(folder, model__norm__weight=torch.zeros(3))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has the shape \[3\].*\[64\]"):
        load(folder)


def test_a_tied_head_may_be_stored_twice_if_it_is_the_same(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, tied=True)
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    edit(folder, lm_head__weight=embedding.clone())
    load(folder, torch.bfloat16)
    edit(folder, lm_head__weight=embedding + 1)
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs"):
        load(folder)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, tied=False)
    edit(folder, lm_head__weight=None)
    with pytest.raises(ConfigError, match=r"lacks lm_head\.weight"):
        load(folder)


def test_folders_without_readable_weights(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (folder / WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="convert it to safetensors"):
        load(folder)
    with pytest.raises(ConfigError, match="no folder"):
        load(tmp_path / "absent")


def test_a_config_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.2\..* and 4 more"):
        load(folder)
