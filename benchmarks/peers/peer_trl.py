"""TRL's `GRPOTrainer` on the CPU. Its loop runs as ever, but waits for a message before each step.

The policy is loaded in the format that is asked for and trained in it, without checkpointing of gradients. A step generates
all its completions in one batch, whatever the size of a micro-batch.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from protocol import Channel

MICRO: int | None = None  # completions of one forward and backward pass, a divisor of a step's; None: all of a step


class Trl:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._prompts: list[list[int]] = []
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._generation_s = self._rollout_s = self._began = 0.0

    def load(self, model: str, dtype: str, threads: int, **about: Any) -> dict[str, Any]:
        import torch
        import transformers
        import trl
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        lines = [json.loads(line) for line in Path(about["prompts"]).read_text(encoding="utf-8").splitlines()]
        rows = [{"prompt": [{"role": "user", "content": line["prompt"]}], "answer": line["answer"]} for line in lines]
        self._trainer = self._observed(trl.GRPOTrainer)(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)),
            reward_funcs=self._reward(Path(about["reward"])),
            args=trl.GRPOConfig(**self._options(about)),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[self._gate(transformers.TrainerCallback)],
        )
        versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        return {"versions": versions}

    def _options(self, about: dict[str, Any]) -> dict[str, Any]:
        fixed = {"generation_kwargs": {"min_new_tokens": about["tokens"]}} if about["fixed"] else {}
        completions = about["groups"] * about["size"]
        micro = MICRO or completions
        return {
            "output_dir": str(Path(about["prompts"]).parent / "trl"),
            "max_completion_length": about["tokens"],
            "num_generations": about["size"],
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": completions // micro,  # and as many to a generation, by TRL's default
            "max_steps": about["steps"],
            "learning_rate": about["learning_rate"],
            "lr_scheduler_type": "constant",
            "shuffle_dataset": False,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "beta": 0.0,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **fixed,
        }

    def _reward(self, path: Path) -> Any:
        spec = importlib.util.spec_from_file_location("reward", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def reward(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
            rows = zip(prompts, completions, answer, strict=True)
            self._rewards = [module.sums(p[-1]["content"], c[0]["content"], a) for p, c, a in rows]
            return self._rewards

        return reward

    def _observed(peer, trainer: Any) -> Any:
        """The trainer, with a clock around what it does once a step."""

        class Observed(trainer):  # type: ignore[misc]
            def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
                started = time.perf_counter()
                found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
                peer._generation_s = time.perf_counter() - started
                peer._prompts = [list(map(int, ids)) for ids in prompt_ids]
                peer._lengths = [len(ids) for ids in found[0]]
                return found

            def _generate_and_score_completions(self, inputs: Any) -> Any:
                started = time.perf_counter()
                found = super()._generate_and_score_completions(inputs)
                peer._rollout_s = time.perf_counter() - started
                return found

        return Observed

    def _gate(peer, callback: Any) -> Any:
        class Gate(callback):  # type: ignore[misc]
            """One step for each message."""

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                message = peer._channel.receive()
                if message["do"] == "quit":
                    peer._channel.end()
                peer._began = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                peer._channel.send(peer._step(time.perf_counter() - peer._began))

        return Gate()

    def _step(self, seconds: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "generation_s": self._generation_s,
            "training_s": seconds - self._rollout_s,
            "lengths": self._lengths,
            "prompts": self._prompts,
            "reward": sum(self._rewards) / len(self._rewards),
        }

    def train(self) -> None:
        """All steps, or as many as are asked for."""
        self._trainer.train()


if __name__ == "__main__":
    channel = Channel()
    peer = Trl(channel)
    message = channel.receive()
    if message.pop("do") == "load":
        channel.send(peer.load(**message))
        peer.train()
    channel.end()
