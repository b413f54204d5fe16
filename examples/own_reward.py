"""A reward of one's own for a built-in task, step by step: python examples/own_reward.py"""

import rollyard


def letters_in_place(prompt: str, completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(len(completion), len(answer))


run = rollyard.Run(rollyard.resolve(preset="tiny", overrides={"run.name": "own_reward"}).config, reward=letters_in_place)
for step in run:
    print(step.step, step.reward_mean, len(step.groups))
