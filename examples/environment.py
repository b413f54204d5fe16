"""An environment of one's own: a model with a chat template may have expressions worked out before it answers.

    rollyard run --model FOLDER --prompts examples/arithmetic.jsonl --environment.name examples/environment.py:WithCalculator \\
      --rollout.max_tokens 48

The model writes <calc>57 + 87</calc>, reads what that is, and goes on; what it read is not learnt, and nothing that it wrote is
tokenized again. The verdict is the environment's own: no --reward is needed. That there is such a tool is for the prompts to
say (prompts.system); a model that never calls it by chance does not learn to.
"""

from __future__ import annotations

import re

from rollyard import Prompt, Reward, Transcript

CALL = re.compile(r"<calc>\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*</calc>\s*$")
NUMBER = re.compile(r"-?\d+")


class WithCalculator:
    """Judges by the last number of the last answer, and says how often the tool was used."""

    def __init__(self, calls: int = 2) -> None:
        self._calls = calls

    async def episode(self, ask, prompt: Prompt) -> Reward:
        """One problem: some calls, then the answer."""
        talk, used = Transcript(ask, prompt), 0
        reply = await talk.answer(stop=("</calc>",))
        while used < self._calls and (call := CALL.search(ask.decode(reply.token_ids))):
            used += 1
            talk.say({"role": "user", "content": f"<result>{calculate(*call.groups())}</result>"})
            reply = await talk.answer(stop=("</calc>",))
        numbers = NUMBER.findall(reply.text)
        right = float(bool(numbers) and numbers[-1] == prompt.columns["answer"])
        return Reward(right, {"right": right, "calls": float(used)})


def calculate(left: str, sign: str, right: str) -> int:
    """ "57", "+", "87" -> 144."""
    one, other = int(left), int(right)
    return {"+": one + other, "-": one - other, "*": one * other}[sign]
