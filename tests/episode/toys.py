"""What episodes are tested with: a tokenizer in which one text has two spellings, and a policy that says what it is told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollyard.episode.stage import Stage
from rollyard.types import Asking, FinishReason, Prompt, Reply

WORDS = {1: "he", 2: "llo", 3: "hello", 4: "?", 5: "=", 6: " world", 7: "<eos>"}
PROMPT = Prompt(0, 0, (4,), "?", {"answer": "hello"})


class Toy:
    """`hello` is 3 to this tokenizer; the policy may well write 1 2."""

    special = ("<eos>",)
    words: Mapping[int, str] = WORDS

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        ids: list[int] = []
        while text:
            best = max((word for word in self.words.values() if text.startswith(word)), key=len)
            ids.append(next(id_ for id_, word in self.words.items() if word == best))
            text = text[len(best) :]
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[id_] for id_ in ids if id_ != 7)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return self.encode("".join(message["content"] + "<eos>" for message in messages))

    def chat_after(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return (7, *self.chat(messages))


class Says:
    """A policy that writes these, one after the other, and keeps what it was asked."""

    def __init__(self, *answers: tuple[int, ...], finish: FinishReason = FinishReason.STOP) -> None:
        self._answers, self._finish = list(answers), finish
        self.asked: list[Asking] = []

    async def __call__(self, asking: Asking, hearing: object = None) -> Reply:
        self.asked.append(asking)
        ids = self._answers.pop(0)
        return Reply(ids, Toy().decode(ids), self._finish)


def stage(environment: Any, *, turns: int = 8, limit_s: float = 5.0, max_tokens: int = 9) -> Stage:
    return Stage(environment, Toy(), len(WORDS) + 1, max_tokens, turns, limit_s)
