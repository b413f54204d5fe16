"""TRL's rollout hook. Its trainer is a double with the same attributes here; the lane `trl` runs the real one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollyard.errors import ConfigError, RunFailed
from rollyard.model.folder import load
from rollyard.trl import RolloutFunc
from rollyard.weights import probe
from tests.tiny import tiny_folder

ROOT = Path(__file__).parent.parent
SIZE, PROMPTS = 2, 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def trainer_of(folder: Path, out: Path, **args: Any) -> Any:
    """As much of TRL 1.16.0's as is looked at."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    usual = {
        "output_dir": str(out),
        "generation_batch_size": SIZE * PROMPTS,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "no",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "generation_kwargs": None,
        "use_vllm": False,
        "seed": 7,
    }
    return SimpleNamespace(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=SimpleNamespace(**{**usual, **args}),
        state=SimpleNamespace(max_steps=2),
        accelerator=SimpleNamespace(num_processes=1, unwrap_model=lambda model: model),
        processing_class=tokenizer,
        num_generations=SIZE,
        num_iterations=1,
        max_completion_length=6,
        eos_token_ids=[1],
        tools=None,
        _is_vlm=False,
        _tokenize_prompts=lambda prompts: (tokenizer(text=prompts)["input_ids"], None, {}),
    )


def trained(trainer: Any) -> None:
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def written_by(trainer: Any, output: dict[str, list[Any]]) -> bool:
    """Are these the logprobs that the trainer's own model has?"""
    for prompt, completion, logprobs in zip(
        *(output[name] for name in ("prompt_ids", "completion_ids", "logprobs")), strict=True
    ):
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            found = trainer.model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        own = found.gather(1, torch.tensor(completion)[:, None])[:, 0]
        if not torch.allclose(own, torch.tensor(logprobs), atol=1e-4):
            return False
    return True


def test_each_call_is_answered_with_the_weights_that_the_trainer_has_then(model_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model_folder, tmp_path)
    with RolloutFunc({"engine.kernels": "plain", "engine.slots": 8}) as rollouts:
        for prompts in (["ab", "ab", "cd", "cd", "ef", "ef"], ["ab", "ab", "ab", "ab", "gh", "gh"]):
            output = rollouts(prompts, trainer)
            assert output["prompt_ids"] == [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
            assert all(1 <= len(ids) <= 6 for ids in output["completion_ids"])
            assert written_by(trainer, output), "of the very model"
            trained(trainer)
            assert not written_by(trainer, output)
    report = rollouts.report
    assert report is not None and not report.finished.failed and report.finished.cause == "all steps are done"
    assert report.prompts.trained == 2 * PROMPTS
    (checkpoint,) = (tmp_path / "rollyard" / "run" / "checkpoints").iterdir()
    ours = load(checkpoint)
    assert probe.apart(probe.table(ours), own_table(trainer)) < 1e-5, "what TRL had at last"


def own_table(trainer: Any) -> torch.Tensor:
    ids = torch.tensor(probe.prompts(trainer.model.config.vocab_size))
    with torch.no_grad():
        return trainer.model(ids).logits[:, -1].log_softmax(-1)


def test_an_evaluation_may_ask_for_other_numbers(model_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model_folder, tmp_path, eval_strategy="steps")
    with RolloutFunc({"engine.kernels": "plain", "engine.slots": 8}) as rollouts:
        for prompts in (["ab"], ["ab"] * 3 + ["cd"] * 3, ["ab", "cd", "ef", "gh", "ij"]):
            output = rollouts(prompts, trainer)
            assert len(output["completion_ids"]) == len(prompts) and written_by(trainer, output)
    assert rollouts.report is not None and rollouts.report.finished.cause == "TRL has trained enough"
    assert not rollouts.report.finished.failed


def test_a_prompt_without_room_for_an_answer_ends_it_with_the_cause(model_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model_folder, tmp_path)
    rollouts = RolloutFunc({"engine.kernels": "plain"})
    with pytest.raises(RunFailed, match=r"the prompt has 300 tokens, the window 256"), rollouts:
        rollouts(["a" * 300] * 2 + ["ab"] * 4, trainer)
    assert rollouts.report is not None and rollouts.report.finished.failed


def test_what_fails_in_the_trainer_is_a_failed_run(model_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model_folder, tmp_path)
    rollouts = RolloutFunc({"engine.kernels": "plain"})
    with pytest.raises(ZeroDivisionError), pytest.warns(RuntimeWarning, match="batch 0"), rollouts:
        rollouts(["ab"] * 6, trainer)
        raise ZeroDivisionError
    assert rollouts.report is not None and rollouts.report.finished.failed


def of_another_trl(trainer: Any) -> None:
    del trainer._tokenize_prompts


def several(trainer: Any) -> None:
    trainer.accelerator.num_processes = 2


def own_vllm(trainer: Any) -> None:
    trainer.args.use_vllm = True


def with_tools(trainer: Any) -> None:
    trainer.tools = [print]


def min_p(trainer: Any) -> None:
    trainer.args.min_p = 0.1


def penalty(trainer: Any) -> None:
    trainer.args.repetition_penalty = 1.1


def other_arguments(trainer: Any) -> None:
    trainer.args.generation_kwargs = {"min_new_tokens": 3}


def half(trainer: Any) -> None:
    trainer.model.half()


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        (of_another_trl, r"no _tokenize_prompts.*use trl 1\.16\.0"),
        (several, "accelerate: several processes"),
        (own_vllm, "use_vllm: "),
        (with_tools, "tools: "),
        (min_p, "min_p: "),
        (penalty, "repetition_penalty: "),
        (other_arguments, "generation_kwargs: "),
        (half, r"model: it is torch\.float16"),
    ],
)
def test_what_a_run_does_not_do_is_told(model_folder: Path, tmp_path: Path, asks: Callable[[Any], None], message: str) -> None:
    trainer = trainer_of(model_folder, tmp_path)
    asks(trainer)
    with pytest.raises(ConfigError, match=message), RolloutFunc() as rollouts:
        rollouts(["ab"] * 6, trainer)
    assert not (tmp_path / "rollyard").exists()


def test_what_the_trainer_says_is_not_said_twice(model_folder: Path, tmp_path: Path) -> None:
    rollouts = RolloutFunc({"rollout.group_size": 4})
    with pytest.raises(ConfigError, match=r"rollout.group_size: TRL's trainer says it: 2"), rollouts:
        rollouts(["ab"] * 6, trainer_of(model_folder, tmp_path))


# ------------------------------------------------------------------------------------------ with TRL itself


LOOKED_AT = """
import runpy, sys
import torch, trl

generate, config = trl.GRPOTrainer._generate, trl.GRPOConfig
trl.GRPOConfig = lambda **options: config(**{**options, "max_steps": 3})

def looked_at(self, prompts):
    found = generate(self, prompts)
    for prompt, completion, logprobs in list(zip(found[0], found[1], found[4], strict=True))[::8]:
        with torch.no_grad():
            table = self.model(torch.tensor([[*prompt, *completion]])).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        own = table.gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert len(completion) == 26 or completion[-1] in self.eos_token_ids
        assert float((own - torch.tensor(logprobs)).abs().max()) < 1e-4, "not of the weights that TRL has now"
    print("looked at", len(found[1]))
    return found

trl.GRPOTrainer._generate = looked_at
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def example(cwd: Path, *arguments: str, script: str = "") -> str:
    """What the example says."""
    python, path = ROOT / "benchmarks" / ".venvs" / "trl" / "bin" / "python", ROOT / "examples" / "trl_grpo.py"
    command = [python, "-c", script, path, *arguments] if script else [python, path, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rewards(said: str) -> tuple[float, float]:
    """At first and at last."""
    found = re.search(r"reward ([\d.]+) at first, ([\d.]+) at last", said)
    assert found is not None, said
    return float(found[1]), float(found[2])


@pytest.mark.trl
@pytest.mark.timeout(200)
def test_trl_gets_what_its_model_would_write_just_then(tmp_path: Path) -> None:
    assert example(tmp_path, script=LOOKED_AT).count("looked at 128") == 3


@pytest.mark.trl
@pytest.mark.timeout(400)
def test_trl_learns_as_with_its_own_generation(tmp_path: Path) -> None:
    served, own = rewards(example(tmp_path)), rewards(example(tmp_path, "--own"))
    for first, last in (served, own):
        assert last > first + 0.05
    assert abs(served[0] - own[0]) < 0.1 and abs(served[1] - own[1]) < 0.15
    assert (tmp_path / "runs" / "trl" / "rollyard" / "run" / "report.json").is_file()
