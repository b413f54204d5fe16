"""TRL's GRPOTrainer with Rollyard behind its rollout hook: make trl; benchmarks/.venvs/trl/bin/python examples/trl_grpo.py

A tiny model learns to sort letters. With --own TRL generates by itself, to compare.
"""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import rollyard
from rollyard.environment import cache_folder
from rollyard.prompts.tasks.task import TASKS
from rollyard.trl import RolloutFunc
from rollyard.warmup import base_policy

FOLDER = base_policy(rollyard.resolve(preset="sort").config, cache_folder(), print)  # or any Hugging Face folder
PROBLEMS = [TASKS["sort"].problem(0, number, held_out=False) for number in range(1024)]


def sorted_right(completions, answer, **columns):
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def main(own: bool) -> None:
    args = GRPOConfig(
        output_dir="runs/trl-own" if own else "runs/trl",
        max_steps=24,
        num_generations=8,
        per_device_train_batch_size=128,
        max_completion_length=26,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        max_grad_norm=0.3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
    )
    with RolloutFunc({"engine.slots": 128, "run.overwrite": True}) as rollouts:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(FOLDER),
            processing_class=AutoTokenizer.from_pretrained(FOLDER),
            reward_funcs=sorted_right,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": each.prompt, "answer": each.answer} for each in PROBLEMS]),
            rollout_func=None if own else rollouts,
        )
        trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    first, last = (sum(row["reward"] for row in part) / len(part) for part in (rows[:6], rows[-6:]))
    seconds = sorted(row["step_time"] for row in rows)[len(rows) // 2]
    print(f"reward {first:.3f} at first, {last:.3f} at last; {seconds:.3f} s a step")


if __name__ == "__main__":
    main("--own" in sys.argv[1:])
