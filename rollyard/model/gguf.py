"""Turn a GGUF file into a Hugging Face folder: `python -m rollyard.model.gguf FILE.gguf FOLDER`.

Transformers reads the file and dequantises it. What is written is float32: the model as its quantisation left it.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollyard.durable import write_folder
from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture


def convert(file: Path, folder: Path) -> Architecture:
    """Write `folder` with the model, tokenizer, chat template and generation config of `file`. Returns its architecture.

    Raises ConfigError when the file cannot be read, its family is unknown, a needed package is missing, or `folder` exists.
    """
    _check(file, folder)
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

    try:
        named = {"gguf_file": file.name, "trust_remote_code": False}  # whatever else lies in that folder
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **named)
        read = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype="float32", **named)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", where=str(file), remedy="give a GGUF file of a causal LM") from error
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(read).__name__]
    Architecture.from_hf(config.to_dict())
    # Transformers saves no model that came from a GGUF file, so its tensors go into a fresh one.
    fresh: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype="float32")  # type: ignore[no-untyped-call]
    fresh.load_state_dict(read.state_dict())
    fresh.generation_config = read.generation_config
    ends = Architecture.from_hf(config.to_dict(), read.generation_config.to_dict()).eos_ids | turn_ends(tokenizer)
    fresh.generation_config.eos_token_id = sorted(ends)

    def write(draft: Path) -> None:
        fresh.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    write_folder(folder, write)
    return Architecture.from_folder(folder)


def turn_ends(tokenizer: Any) -> frozenset[int]:
    """The added token that a chat template puts after the assistant's answer: where a chat completion ends."""
    if not tokenizer.chat_template:
        return frozenset()
    answer = "the answer"
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    after = tokenizer(text.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
    return frozenset(token_id for token_id in after[:1] if token_id in tokenizer.added_tokens_decoder)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 after a user's mistake."""
    about = "Turn a GGUF file into a Hugging Face folder."
    parser = argparse.ArgumentParser(prog="python -m rollyard.model.gguf", description=about)
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="the folder to make")
    options = parser.parse_args(arguments)
    try:
        arch = convert(options.file, options.folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.folder}: {arch.family}, {arch.parameters / 1e6:.1f} M parameters, ends at {sorted(arch.eos_ids)}")
    return 0


def _check(file: Path, folder: Path) -> None:
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise ConfigError(f"reading GGUF needs the package {package}", where=str(file), remedy="pip install 'rollyard[gguf]'")
    if not file.is_file():
        raise ConfigError("there is no such file", where=str(file), remedy="give a GGUF file")
    if folder.exists():
        raise ConfigError("the folder exists", where=str(folder), remedy="remove it or give another")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except ValueError as error:
        raise ConfigError(f"this is no GGUF file: {error}", where=str(file), remedy="give a GGUF file") from error
    scaling = [field.contents() for name, field in reader.fields.items() if name.endswith("rope.scaling.type")]
    if scaling not in ([], ["none"]) or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        # Transformers leaves these out without a word, and the model would be a different one.
        raise ConfigError("the file scales rotary positions", where=str(file), remedy="use the model's own Hugging Face folder")


if __name__ == "__main__":
    sys.exit(main())
