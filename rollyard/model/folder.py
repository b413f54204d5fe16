"""Hugging Face folders: read into a `CausalLM`, written so that `AutoModelForCausalLM.from_pretrained` loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollyard.durable import write_folder
from rollyard.errors import ConfigError
from rollyard.model import adapter
from rollyard.model.architecture import WHERE, Architecture, base_of
from rollyard.model.shards import Collectives, Whole
from rollyard.model.transformer import CausalLM
from rollyard.types import TensorInfo

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 4 * 2**30  # of one file at most, unless one tensor is larger
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FORMATS = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.uint8": "U8"}  # in safetensors
# Copied beside the weights: how completions end, and the tokenizer.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def load(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", ranks: Collectives | None = None
) -> CausalLM:
    """Read a model. Tensors go straight into the parameters, one after the other.

    Args:
        ranks: each has only some rows of every tensor, and reads no others.

    Raises ConfigError for a folder that is no supported model, or whose tensors are not exactly the architecture's.
    """
    shape = Architecture.from_folder(folder)
    model = CausalLM(shape, dtype, device) if ranks is None else CausalLM.of_ranks(shape, dtype, torch.device(device), ranks)
    parameters = tensors(model)
    missing, unknown, second_head = set(parameters), set(), None
    with model.stamp.writing():
        for name, tensor in stored(weight_files(folder)):
            if name == HEAD and model.architecture.tied:
                second_head = tensor
            elif name in parameters:
                _fill(name, parameters[name], tensor, model.parts)
                missing.discard(name)
            elif not name.endswith("rotary_emb.inv_freq"):  # old writers kept what follows from config.json
                unknown.add(name)
    if missing or unknown:
        problem = "; ".join(f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has unknown", unknown)) if names)
        raise ConfigError(f"{folder} {problem}", where=WHERE, remedy="the tensors should be those that config.json describes")
    # Some writers store a tied head once more, which is fine as long as it is the same.
    if second_head is not None and not _same(second_head, model.head_weight, model.parts):
        problem = f"{HEAD} differs from {EMBEDDING}, but config.json ties them"
        raise ConfigError(f"{folder}: {problem}", where=WHERE, remedy="set tie_word_embeddings to false in config.json")
    return model


def save(model: CausalLM, folder: Path, source: Path, also: Callable[[Path], None] | None = None) -> None:
    """Write `model` as a new folder, with the configuration and the tokenizer of `source`; of an adapted one the adapter alone.

    The folder appears whole or not at all: it is written beside its place, synced to disk, then renamed.

    Args:
        model: on any device, all of it here.
        folder: must not exist; its parent is made.
        source: the folder the model was loaded from.
        also: adds more files to the folder it is given, before the rename.

    Raises FileExistsError when `folder` exists.
    """
    if not model.adapted:
        save_each(infos(tensors(model)), whole_tensors(model), folder, source, also)
        return

    def write(draft: Path) -> None:
        adapter.write(model, draft, source)
        _write_beside(draft, source, also)  # without config.json: transformers then looks for the model that it is for

    write_folder(folder, write)


def save_each(
    described: Sequence[TensorInfo],
    each: Iterable[tuple[str, Tensor]],
    folder: Path,
    source: Path,
    also: Callable[[Path], None] | None = None,
) -> None:
    """The same of tensors that come one after the other, as they are described. None is held longer than it takes to write."""
    write_folder(folder, lambda draft: _write(described, each, draft, source, also))


def write_tensors(path: Path, described: Sequence[TensorInfo], each: Iterable[tuple[str, Tensor]]) -> None:
    """A safetensors file of tensors that come one after the other: all that are described, in that order, on any device."""
    head, end = dict[str, object]({"__metadata__": {"format": "pt"}}), 0
    for info in described:
        begin, end = end, end + _bytes(info)
        head[info.name] = {"dtype": FORMATS[info.dtype], "shape": list(info.shape), "data_offsets": [begin, end]}
    content = json.dumps(head).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for _, tensor in each:
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
            del tensor  # before the next one comes


def _write_weights(draft: Path, described: Sequence[TensorInfo], each: Iterator[tuple[str, Tensor]]) -> None:
    """One file, or several and their index."""
    files = _cut(described)
    if len(files) == 1:
        write_tensors(draft / WEIGHTS, described, each)
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        write_tensors(draft / name, part, islice(each, len(part)))
    where = {info.name: name for name, part in zip(names, files, strict=True) for info in part}
    total = sum(_bytes(info) for info in described)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _cut(described: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
    """In order, so that a file is as large as may be."""
    files, size = [list[TensorInfo]()], 0
    for info in described:
        if files[-1] and size + _bytes(info) > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(info)
        size += _bytes(info)
    return files


def _bytes(info: TensorInfo) -> int:
    size: int = prod(info.shape) * getattr(torch, info.dtype.removeprefix("torch.")).itemsize
    return size


def infos(named: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    """How these tensors are described."""
    return tuple(TensorInfo(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named.items())


def tensors(model: CausalLM) -> dict[str, Tensor]:
    """What is trained by its Hugging Face names, detached and shared: the parameters, a tied head left out, or an adapter."""
    return {name: parameter.detach() for name, parameter in model.trained().items()}


def whole_tensors(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """The same one after the other. Of ranks that share a model each has to ask; only rank 0 gets any."""
    for name, tensor in tensors(model).items():
        whole = model.parts.collected(tensor)
        if whole is not None:
            yield name, whole
            del whole  # before the next one comes


def _write(
    described: Sequence[TensorInfo],
    each: Iterable[tuple[str, Tensor]],
    draft: Path,
    source: Path,
    also: Callable[[Path], None] | None,
) -> None:
    _write_weights(draft, described, iter(each))
    # Readers take the number format from the configuration, which the model may have left.
    config = json.loads((base_of(source) / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = described[0].dtype.removeprefix("torch.")
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_beside(draft, source, also)


def _write_beside(draft: Path, source: Path, also: Callable[[Path], None] | None) -> None:
    """How completions end, the tokenizer, and what the caller adds."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    if also is not None:
        also(draft)


def weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
            odd = [name for name in names if Path(name).name != name or "\0" in name]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(f"{folder / INDEX} is broken: {error!r}", where=WHERE, remedy="fetch the model again") from error
        if odd:
            problem = f"{folder / INDEX} names {odd[0]!r}, which is no file beside it"
            raise ConfigError(problem, where=WHERE, remedy="fetch the model again")
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ConfigError(f"{folder} lacks {_some(absent)}", where=WHERE, remedy="fetch the model again")
        return [folder / name for name in names]
    if any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            f"{folder} has weights only as pytorch_model.bin, which can run code when it is read",
            where=WHERE,
            remedy="convert it to safetensors: load it with transformers and call save_pretrained",
        )
    raise ConfigError(f"{folder} has no {WEIGHTS}", where=WHERE, remedy="give a folder with safetensors weights")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file that is open."""

    shape: tuple[int, ...]
    _slice: Any

    def rows(self, which: slice) -> Tensor:
        """Some rows of it; nothing else is read. A single number has none, and is read whole."""
        found: Tensor = self._slice[which] if self.shape else self._slice[...]
        return found


def stored(files: Iterable[Path]) -> Iterator[tuple[str, Stored]]:
    """All tensors of these safetensors files. Raises ConfigError for one that cannot be read."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                    found = file.get_slice(name)
                    yield name, Stored(tuple(found.get_shape()), found)
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be read: {error}", where=WHERE, remedy="fetch the model again") from error


def _fill(name: str, parameter: Tensor, tensor: Stored, parts: Whole) -> None:
    if tensor.shape != parameter.shape:
        problem = f"{name} has the shape {list(tensor.shape)}, where config.json asks for {list(parameter.shape)}"
        raise ConfigError(problem, where=WHERE, remedy="check config.json")
    parts.own(parameter).copy_(tensor.rows(parts.rows(tensor.shape)))


def _same(tensor: Stored, parameter: Tensor, parts: Whole) -> bool:
    own = parts.own(parameter)
    return tensor.shape == tuple(parameter.shape) and torch.equal(tensor.rows(parts.rows(tensor.shape)).to(own), own)


def _some(names: set[str] | list[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
