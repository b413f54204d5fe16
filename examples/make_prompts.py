"""Makes arithmetic.jsonl: short sums and differences from reasoning-gym's generators, each once.

Needs `pip install reasoning-gym`; then: python examples/make_prompts.py --count 64 > examples/arithmetic.jsonl
"""

import argparse
import json

import reasoning_gym


def main() -> None:
    parser = argparse.ArgumentParser(description="Arithmetic questions as JSON Lines: a prompt and its answer in each line.")
    parser.add_argument("--count", type=int, default=64, help="how many questions (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions (default: 0)")
    given = parser.parse_args()
    shape = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    # More than asked for, as short questions repeat.
    questions = reasoning_gym.create_dataset("chain_sum", size=2 * given.count, seed=given.seed, **shape)
    distinct = {item["question"]: item["answer"] for item in questions}
    for prompt, answer in list(distinct.items())[: given.count]:
        print(json.dumps({"prompt": prompt, "answer": answer}))


if __name__ == "__main__":
    main()
