"""Tokens per second: the embedded engine against Hugging Face `generate`, on one ragged workload.

Both sides write the same number of tokens for each request, which is checked, and hold at most `--slots` sequences at a
time. `generate` pads the prompts of a batch and runs until its longest answer is written; the engine refills a slot as
soon as a sequence ends. Only tokens that were asked for count. The sides take turns, and medians are compared.

    python benchmarks/engine_vs_hf.py [--requests 64] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from rollyard import worker
from rollyard.config import Config, EngineConfig, PlaceConfig
from rollyard.engine.embedded.engine import EmbeddedEngine
from rollyard.events import Rollover
from rollyard.model import folder as model_folder
from rollyard.model.architecture import Architecture
from rollyard.model.tokenizer import Tokenizer
from rollyard.place.inline import DeviceThread
from rollyard.types import EngineStats, FinishReason, Request, RequestId, Sampling, WeightVersion
from rollyard.weights.in_place import InPlace

SMOLLM2 = Path("models/smollm2-135m")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as `generate` and the engine both take them."""

    prompts: tuple[tuple[int, ...], ...]  # [requests][tokens]
    lengths: tuple[int, ...]  # [requests], tokens to write

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Result:
    """What is printed. Rates are in tokens a second, one a round."""

    model: str
    parameters: int
    requests: int
    tokens: int
    longest: int
    slots: int
    engine_tokens_per_s: tuple[float, ...]
    generate_tokens_per_s: tuple[float, ...]
    engine_median: float
    generate_median: float
    ratio: float
    engine_slots_busy: float  # mean share of slots that got a token
    generate_slots_busy: float  # share of the tokens it computed that were asked for
    threads: int
    load_average: float  # of the last minute, at the start
    versions: dict[str, str]


def workload(requests: int, vocabulary: int, cap: int, seed: int) -> Workload:
    """Answer lengths lognormal (median 40, sigma 1) up to `cap`; prompts of 8 to 48 random tokens, no two alike."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.rint(rng.lognormal(np.log(40), 1.0, requests)), 1, cap)
    prompts = (rng.integers(3, vocabulary, rng.integers(8, 49)) for _ in range(requests))
    return Workload(tuple(tuple(int(t) for t in prompt) for prompt in prompts), tuple(int(n) for n in lengths))


def random_model(folder: Path) -> None:
    """A random llama, for machines without model files."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = FastTokenizer(WordLevel({f"w{i}": i for i in range(4096)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2").save_pretrained(folder)


class HuggingFace:
    """`generate` in padded batches, in the order the requests came."""

    def __init__(self, folder: Path, batch: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
        self._batch = batch
        self.computed = 0  # tokens of the last run, padding to the longest answer included

    @property
    def parameters(self) -> int:
        return int(self._model.num_parameters())

    def run(self, work: Workload) -> None:
        self.computed = 0
        for start in range(0, len(work.prompts), self._batch):
            self._generate(work.prompts[start : start + self._batch], work.lengths[start : start + self._batch])

    def _generate(self, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> None:
        width, longest = max(map(len, prompts)), max(lengths)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, max_new_tokens=longest)
        if out.shape != (len(prompts), width + longest):
            raise SystemExit(f"generate wrote {out.shape[1] - width} tokens where {longest} were asked for")
        self.computed += len(prompts) * longest


async def run_engine(engine: EmbeddedEngine, work: Workload, first_group: int) -> None:
    """Hand over every request at once; check that each comes back with exactly its tokens."""
    wanted = {RequestId(first_group + row, 0): length for row, length in enumerate(work.lengths)}
    engine.generate(
        [
            Request(id, prompt, Sampling(length, ignore_eos=True), seed=id.group, priority=id.group)
            for (id, length), prompt in zip(wanted.items(), work.prompts, strict=True)
        ]
    )
    written = dict.fromkeys(wanted, 0)
    left = len(wanted)
    async for segments in engine.segments():
        for segment in segments:
            written[segment.request] += len(segment.token_ids)
            if segment.finish is not None:
                left -= 1
                if segment.finish is not FinishReason.LENGTH:
                    raise SystemExit(f"{segment.request} ended with {segment.finish} {segment.problem}")
        if not left:
            break
    if written != wanted:
        raise SystemExit("the engine wrote another number of tokens than was asked for")


async def compare(name: str, folder: Path, options: argparse.Namespace) -> Result:
    load_average = os.getloadavg()[0]
    architecture = Architecture.from_folder(folder)
    threads = worker.threads_of(Config(place=PlaceConfig(threads=options.threads)), architecture)
    torch.set_num_threads(threads)  # of this thread, where `generate` runs
    device = DeviceThread()
    try:
        await device.run(worker.set_threads, threads)
        model = await device.run(model_folder.load, folder)
        engine = EmbeddedEngine(
            "engine-0", model, Tokenizer(folder), device, EngineConfig(slots=options.slots), architecture.window
        )
        await engine.start()
        try:
            await load_weights(engine, InPlace(model))
            other = HuggingFace(folder, options.slots)
            rates, stats = await alternate(engine, other, options, architecture.vocab_size)
        finally:
            await engine.close()
    finally:
        device.close()
    work = workload(options.requests, architecture.vocab_size, options.cap, options.seed)
    ours, theirs = (tuple(rate[side] for rate in rates) for side in (0, 1))
    return Result(
        model=name,
        parameters=other.parameters,
        requests=options.requests,
        tokens=work.tokens,
        longest=max(work.lengths),
        slots=options.slots,
        engine_tokens_per_s=ours,
        generate_tokens_per_s=theirs,
        engine_median=statistics.median(ours),
        generate_median=statistics.median(theirs),
        ratio=statistics.median(ours) / statistics.median(theirs),
        engine_slots_busy=stats.slots_busy,
        generate_slots_busy=work.tokens / other.computed,
        threads=threads,
        load_average=load_average,
        versions={
            "rollyard": metadata.version("rollyard"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    )


async def load_weights(engine: EmbeddedEngine, weights: InPlace) -> None:
    version = WeightVersion(0)
    await weights.publish(version)
    await engine.pause(Rollover.DRAIN)
    await engine.load(version, weights)
    await engine.resume()


async def alternate(
    engine: EmbeddedEngine, other: HuggingFace, options: argparse.Namespace, vocabulary: int
) -> tuple[list[tuple[float, float]], EngineStats]:
    """(engine, generate) rates, one pair a round. No round begins that would not end within the time limit."""
    few = workload(2, vocabulary, 8, options.seed + 1)
    await run_engine(engine, few, first_group=0)
    other.run(few)
    work = workload(options.requests, vocabulary, options.cap, options.seed)
    rates: list[tuple[float, float]] = []
    begin = time.perf_counter()
    for number in range(options.rounds):
        spent = time.perf_counter() - begin
        if rates and spent + spent / len(rates) > options.limit:
            print(f"stopped after {len(rates)} rounds: {options.limit:.0f} s are nearly used up", file=sys.stderr)
            break
        started = time.perf_counter()
        await run_engine(engine, work, first_group=1000 * (number + 1))
        middle = time.perf_counter()
        other.run(work)
        rates.append((work.tokens / (middle - started), work.tokens / (time.perf_counter() - middle)))
    return rates, engine.stats()


def show(result: Result) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    print(f"{result.model}: {result.parameters / 1e6:.1f} M parameters, float32, {result.threads} threads")
    print(
        f"{result.requests} requests, {result.tokens} tokens in all, the longest {result.longest}; "
        f"at most {result.slots} at a time; {len(result.engine_tokens_per_s)} rounds"
    )
    print(f"  {'':22}{'tokens/s':>10}{'slots busy':>12}   rounds")
    for name, median, busy, rounds in (
        ("embedded engine", result.engine_median, result.engine_slots_busy, result.engine_tokens_per_s),
        ("Hugging Face generate", result.generate_median, result.generate_slots_busy, result.generate_tokens_per_s),
    ):
        print(f"  {name:22}{median:>10.1f}{busy:>12.0%}   {' '.join(f'{rate:.1f}' for rate in rounds)}")
    print(f"  ratio {result.ratio:.2f}")
    print(f"{versions}; load average at the start {result.load_average:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help=f"model folder (default: {SMOLLM2} if it is there, else a random llama)")
    parser.add_argument("--requests", type=int, default=64, help="requests of the workload")
    parser.add_argument("--cap", type=int, default=384, help="tokens of the longest answer at most")
    parser.add_argument("--slots", type=int, default=16, help="sequences at a time, on both sides")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs the workload")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no round is begun (the first always is)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of torch on both sides (0: by model size)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    folder = options.model or (SMOLLM2 if SMOLLM2.is_dir() else None)
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            folder, name = Path(scratch), "a random llama (make model fetches a real one)"
            random_model(folder)
        else:
            name = str(folder)
        result = asyncio.run(compare(name, folder, options))
    print(json.dumps(asdict(result))) if options.json else show(result)


if __name__ == "__main__":
    main()
