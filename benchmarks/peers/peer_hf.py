"""Hugging Face `generate` in padded batches, as TRL calls it: every batch runs until its longest completion is written."""

from __future__ import annotations

import time
from typing import Any

from protocol import Channel, serve


class HuggingFace:
    def load(self, model: str, dtype: str, threads: int, window: int) -> dict[str, Any]:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch, self._model = torch, AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {"versions": versions}

    def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float, batch: int, seed: int) -> dict[str, Any]:
        self._torch.manual_seed(seed)
        self._settle(temperature)
        ids: list[list[int]] = []
        computed = 0
        started = time.perf_counter()
        for start in range(0, len(prompts), batch):
            some, wanted = prompts[start : start + batch], lengths[start : start + batch]
            for row, length in zip(self._batch(some, max(wanted)), wanted, strict=True):
                ids.append(row[:length])
                computed += max(wanted)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "ids": ids, "figures": {"slots busy": sum(lengths) / computed}}

    def _settle(self, temperature: float) -> None:
        """No end-of-sequence id: every completion has the length that is asked for."""
        from transformers import GenerationConfig

        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
        )
        self._model.generation_config = GenerationConfig(pad_token_id=0, **sampling)

    def _batch(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        torch = self._torch
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, max_new_tokens=tokens)
        found: list[list[int]] = out[:, width:].tolist()
        return found


if __name__ == "__main__":
    channel = Channel()
    peer = HuggingFace()
    serve(channel, {"load": peer.load, "generate": peer.generate})
