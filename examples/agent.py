"""An agent that knows nothing of training: it speaks to an OpenAI-compatible address. What it says there becomes rollouts.

    pip install openai
    rollyard serve --model FOLDER --prompts examples/arithmetic.jsonl --serve.episodes --environment.limit_s 600 &
    python examples/agent.py http://127.0.0.1:8000 4            # four agents at a time, until nothing waits for one

A model with a chat template; a trainer takes the batches (examples/remote_trainer.py). ROLLYARD_TOKEN as with the service.
"""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from rollyard.serve.client import Client, ServiceError

TOKEN = os.environ.get("ROLLYARD_TOKEN", "")
CALL = re.compile(r"<calc>\s*(-?\d{1,9})\s*([-+])\s*(-?\d{1,9})\s*</calc>")
NUMBER = re.compile(r"-?\d+")


def agent(policy: OpenAI, problem: str) -> str:
    """It may have one expression worked out before it answers."""
    history = [{"role": "user", "content": problem}]
    for _ in range(2):
        message = policy.chat.completions.create(model="policy", messages=history).choices[0].message
        call = CALL.search(message.content)
        if call is None:
            break
        left, sign, right = call.groups()
        result = int(left) + int(right) if sign == "+" else int(left) - int(right)
        history += [message, {"role": "user", "content": f"<result>{result}</result>"}]
    return message.content


def episode(client: Client) -> bool:
    """One member of a group: it is played, and judged. False: none waits."""
    try:
        play = client.play(wait_s=30)
    except ServiceError as error:
        if error.code in ("no_member", "over", "stopping"):
            return False
        raise
    policy = OpenAI(base_url=f"{client.url}/v1", api_key=TOKEN or "none", default_headers=play.headers)
    try:
        numbers = NUMBER.findall(agent(policy, play.text))
    except Exception as error:
        client.fail(play, f"{type(error).__name__}: {error}")
        raise
    right = float(bool(numbers) and numbers[-1] == play.columns["answer"])
    client.judge(play, right, {"right": right})
    return True


def main(url: str, agents: str) -> None:
    with Client(url, TOKEN) as client, ThreadPoolExecutor(int(agents)) as pool:
        played = sum(pool.map(lambda _: sum(iter(lambda: episode(client), False)), range(int(agents))))
    print(f"{played} episodes")


main(*sys.argv[1:])
