"""A calculator as a tool: the policy may write a call such as [17*23], is told 391, and answers."""

from __future__ import annotations

import re

from rollyard.episode.transcript import Transcript
from rollyard.protocols.rollouts import Ask
from rollyard.types import Prompt, Reward

CALL = re.compile(r"\[([0-9]{1,6})([-+*])([0-9]{1,6})\]$")
CALLS = 2  # a policy that calls more often is not told any more


class Calculator:
    """Judges by exact match with the column `answer`; a part of the verdict says whether the tool was used.

    Numbers are whole and not negative, with at most six digits; what is no call is an answer.
    """

    async def episode(self, ask: Ask, prompt: Prompt) -> Reward:
        """One problem: up to `CALLS` calls, then the answer."""
        talk, used = Transcript(ask, prompt), 0
        reply = await talk.answer(stop=("]",))
        while used < CALLS and (result := calculate(ask.decode(reply.token_ids))) is not None:
            used += 1
            talk.add(result + "=")
            reply = await talk.answer(stop=("]",))
        right = float(reply.text == prompt.columns["answer"])
        return Reward(right, {"exact_match": right, "used_tool": float(used > 0)})


def calculate(text: str) -> str | None:
    """What a call at the end of a text comes to, None where there is none. Example: "[17*23]" -> "391"."""
    call = CALL.search(text)
    if call is None:
        return None
    left, right = int(call[1]), int(call[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[call[2]])
