"""Messages in, text out: all that a judge needs of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollyard.engine.openai.client import OpenAIClient
from rollyard.errors import EngineError
from rollyard.types import Sampling

ANSWER = Sampling(max_tokens=1024, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Chat:
    """Asks a chat model. Many questions may be asked at a time; the client's limits hold for all together.

    Example: await Chat(client).ask([{"role": "user", "content": "Is 7 prime? yes or no"}])
    """

    client: OpenAIClient
    sampling: Sampling = ANSWER

    async def ask(self, messages: Sequence[Mapping[str, object]], *, seed: int | None = None) -> str:
        """The answer's text. Raises ServerError, and EngineError for an answer that has none or was cut short."""
        piece = await self.client.chat(messages, self.sampling, seed=seed)
        if piece.finish != "stop" or not piece.text:
            problem = f"{self.client.model} gave no whole answer: {len(piece.text)} characters, finish_reason {piece.finish}"
            raise EngineError(problem)
        return piece.text
