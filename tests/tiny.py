"""Tiny models in real Hugging Face folders, made with transformers and a character-level tokenizer."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<eos>")  # ids 0 and 1
CHARACTERS = string.ascii_lowercase + string.digits + " +-=,.?!</>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}={{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant={% endif %}"
)
TOOLS_TEMPLATE = (
    "{% if tools %}tools={{ tools | tojson }}<eos>{% endif %}"
    "{% for message in messages %}{{ message['role'] }}={{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}assistant={% endif %}"
)


def tiny_folder(
    tmp_path: Path,
    family: str = "llama",
    tied: bool = True,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    width: int = 64,
    vocab: int = 0,
    seed: int = 0,
    window: int = 256,
    chat: bool | str = False,
    words: Sequence[str] = (),
    **config: Any,
) -> Path:
    """A random model of `family` in a new folder under `tmp_path`. Ids from 2 on are CHARACTERS, then `words`; 0 pads, 1 ends.

    `vocab` may be larger than that: the ids beyond have no text. `chat`: with the chat template from above, or this one. `config`
    overrides config.json.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": vocab or len(SPECIAL) + len(CHARACTERS) + len(words),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 2 * width,
        "max_position_embeddings": window,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.1,  # wide enough that logits differ visibly
    }
    if family == "qwen3":
        shape["head_dim"] = width // heads
    hf_config = AutoConfig.for_model(family, **(shape | config))
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # no trivial zeros and ones
                parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path / f"{family}-{'tied' if tied else 'untied'}-{seed}"
    model.save_pretrained(folder)
    save_tokenizer(folder, chat=chat, words=words)
    return folder


def save_tokenizer(folder: Path, *, chat: bool | str = False, words: Sequence[str] = ()) -> None:
    """Write a character-level fast tokenizer into `folder`, which has a token for each of `words` too."""
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    if chat:
        fast.chat_template = chat if isinstance(chat, str) else CHAT_TEMPLATE
    fast.save_pretrained(folder)
