"""What a harness of verifiers says to the policy, as tokens; without the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rollyard.episode.verifiers import Refusal, Talk, verdict_of
from rollyard.types import FinishReason, Prompt, Reply, Reward

END = 1
PROMPT = Prompt(0, 0, (9,), "?", {}, ({"role": "user", "content": "prompt"},))


class Asked:
    """A policy that says the next of its answers; each character of a conversation is a token (protocols.Ask)."""

    def __init__(self, *answers: Sequence[int], finish: FinishReason = FinishReason.STOP) -> None:
        self.answers, self.finish, self.asked = list(answers), finish, list[tuple[tuple[int, ...], int | None, tuple[str, ...]]]()
        self.refusal: ValueError | None = None

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        self.asked.append((tuple(token_ids), max_tokens, tuple(stop)))
        if self.refusal is not None:
            raise self.refusal
        ids = tuple(self.answers.pop(0))
        return Reply(ids, "".join(chr(each) for each in ids if each != END), self.finish)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return tuple(ord(sign) for message in messages for sign in f"<{message['content']}>")

    def chat_after(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return (END, *self.chat(messages))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_what_was_sampled_stands_in_the_next_prompt_as_it_was() -> None:
    """The policy wrote "ab" as it is not tokenized; its end-of-sequence token comes once."""
    ask = Asked((97, 98, END), (99,))
    talk = Talk(ask, PROMPT)
    said = await talk.answer({"messages": [user("hi")], "max_tokens": 5, "stop": "#"})
    assert (
        said["choices"][0]["message"] == {"role": "assistant", "content": "ab"} and said["choices"][0]["finish_reason"] == "stop"
    )
    assert said["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    more = [user("hi"), {"role": "assistant", "content": [{"type": "text", "text": "ab"}]}, user("yo")]
    await talk.answer({"messages": more, "max_completion_tokens": 7})
    first = ask.encode("<hi>")
    assert ask.asked == [(first, 5, ("#",)), ((*first, 97, 98, END, *ask.encode("<yo>")), 7, ())]


async def test_a_conversation_that_was_rewritten_begins_anew() -> None:
    ask = Asked((97, END), (98,), (99,), finish=FinishReason.LENGTH)
    talk = Talk(ask, PROMPT)
    said = await talk.answer({"messages": [user("hi")]})
    assert said["choices"][0]["finish_reason"] == "length"
    await talk.answer({"messages": [user("hi"), {"role": "assistant", "content": "A"}, user("yo")]})
    await talk.answer({"messages": [user("other")]})
    assert [ids for ids, _, _ in ask.asked[1:]] == [ask.encode("<hi><A><yo>"), ask.encode("<other>")]


async def test_a_question_that_was_refused_may_be_asked_again() -> None:
    ask = Asked((97, END), (98, END))
    talk = Talk(ask, PROMPT)
    await talk.answer({"messages": [user("hi")]})
    more = [user("hi"), {"role": "assistant", "content": "a"}, user("yo")]
    ask.refusal = ValueError("99 tokens are asked for")
    with pytest.raises(ValueError, match="99"):
        await talk.answer({"messages": more, "max_tokens": 99})
    ask.refusal = None
    await talk.answer({"messages": more})
    assert ask.asked[-1][0] == (*ask.encode("<hi>"), 97, END, *ask.encode("<yo>"))


async def test_what_changes_nothing_may_be_asked() -> None:
    ask = Asked((97, END))
    plain = {"n": 1, "stream": False, "tools": [], "temperature": None, "frequency_penalty": 0.0, "presence_penalty": 0}
    await Talk(ask, PROMPT).answer(
        {"model": "policy", "user": "me", "messages": [user("hi")], "response_format": {"type": "text"}} | plain
    )
    assert len(ask.asked) == 1


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "response_format", "logprobs", "no_such_option"]
)
@pytest.mark.parametrize("value", [0, 0.0, False, 1, {"type": "json_object"}])
async def test_what_an_answer_would_not_heed_is_refused(name: str, value: object) -> None:
    """Greedy too: 0 is asked for as well as any other temperature."""
    ask = Asked((97, END))
    if name == "logprobs" and not value:
        await Talk(ask, PROMPT).answer({"messages": [user("hi")], name: value})
        return
    with pytest.raises(Refusal, match=f"cannot be asked with {name}: "):
        await Talk(ask, PROMPT).answer({"messages": [user("hi")], name: value})
    assert not ask.asked


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"messages": None}, "an object with messages"),
        ({"messages": ["hi"]}, "an object with a role"),
        ({"messages": [{"content": "hi"}]}, "an object with a role"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "more than text"),
        ({"max_tokens": "5"}, "no number of tokens"),
        ({"max_tokens": True}, "no number of tokens"),
        ({"stop": 5}, "neither a text nor several"),
        ({"tools": [{}]}, "cannot be asked with tools"),
        ({"stream": True, "temperature": 0.5}, "cannot be asked with stream, temperature"),
        ({"n": 2}, "one answer at a time"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "more than text"),
        ({"messages": [user("a"), {"role": "tool", "content": "b"}]}, "a message of tool"),
        ({"messages": [{"role": "assistant", "content": None}]}, "a message of assistant"),
    ],
)
async def test_what_cannot_be_asked_is_refused(body: dict[str, Any], problem: str) -> None:
    ask = Asked()
    with pytest.raises(Refusal, match=problem):
        await Talk(ask, PROMPT).answer({"messages": [user("hi")]} | body)
    assert not ask.asked


def trace(**rewards: float | None) -> Any:
    found = {name: None if value is None else SimpleNamespace(score=value) for name, value in rewards.items()}
    whole = sum(value or 0.0 for value in rewards.values())
    return SimpleNamespace(rewards=found, metrics={"turns": 2.0, "unknown": None}, reward=whole, errors=[])


def episode(*traces: Any, ok: bool = True, errors: Sequence[Any] = ()) -> Any:
    return SimpleNamespace(traces=traces, ok=ok, errors=errors)


def test_verdicts() -> None:
    assert verdict_of(episode(trace(right=0.5, short=0.25))) == Reward(0.75, {"turns": 2.0, "right": 0.5, "short": 0.25})
    assert verdict_of(episode(trace(right=None))) == Reward(None, problem="right gave no number")
    assert verdict_of(episode(trace(), trace())).problem.startswith("2 agents played")
    broken = SimpleNamespace(type="HarnessError", message="exited 3:\n no tool")
    assert verdict_of(episode(trace(right=1.0), ok=False, errors=[broken])) == Reward(
        None, problem="HarnessError: exited 3: no tool"
    )
    assert verdict_of(episode(trace(), ok=False)).problem == "the episode failed"


async def test_the_prompt_as_it_is_has_the_tokens_that_the_run_has_for_it() -> None:
    ask = Asked((97, END))
    await Talk(ask, PROMPT).answer({"messages": [user("prompt")]})
    assert ask.asked[0][0] == PROMPT.token_ids
