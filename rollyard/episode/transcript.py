"""What most environments need: one conversation that grows, in which nothing is ever tokenized twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollyard.protocols.rollouts import Ask
from rollyard.types import Prompt, Reply


class Transcript:
    """All tokens so far: the prompt, the policy's answers as they were sampled, and what was put between.

    Example:
        talk = Transcript(ask, prompt)
        call = await talk.answer()
        talk.add(run_tool(call.text))
        last = await talk.answer()
    """

    def __init__(self, ask: Ask, prompt: Prompt) -> None:
        self._ask = ask
        self.token_ids = list(prompt.token_ids)
        self._answered: Sequence[int] = ()

    async def answer(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        """Ask the policy, and keep what it wrote. Raises ValueError as `protocols.Ask` does."""
        reply = await self._ask(self.token_ids, max_tokens=max_tokens, stop=stop)
        self.token_ids += reply.token_ids
        self._answered = reply.token_ids
        return reply

    def add(self, text: str) -> None:
        """Put a text after what is there, such as what a tool said."""
        self.token_ids += self._ask.encode(text)

    def say(self, *messages: Mapping[str, Any]) -> None:
        """Put messages after the last answer as the chat template does, and the beginning of the next one.

        Example: talk.say({"role": "tool", "content": "391"}).
        """
        after = self._ask.chat_after(messages)
        if self._answered and after[:1] == self._answered[-1:]:
            after = after[1:]  # the policy has ended its answer by itself
        self.token_ids += after
