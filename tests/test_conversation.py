"""What comes back of earlier answers keeps the tokens that the policy wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from rollyard.conversation import Conversation, Rendered
from rollyard.types import Prompt
from tests.episode.toys import Toy

END = 7
TEXTS = st.sampled_from(["?", "=", "he", "hello", " world", "hellohe"])
ANSWERS = st.lists(st.integers(1, 6), min_size=1, max_size=4).flatmap(lambda ids: st.sampled_from([(*ids,), (*ids, END)]))


NOTHING = Prompt(0, 0, (5,), "nothing")


def talk(prompt: Prompt = NOTHING) -> Conversation:
    toy = Toy()
    return Conversation(prompt, toy.chat, toy.chat_after, toy.encode)


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_an_answer_is_never_tokenized_again() -> None:
    """`hello` was written as he, llo, and would be one token."""
    own, history = talk(), [said("user", "?")]
    first = own.of_messages(history)
    assert first == Rendered((4, END), 0, 0)
    own.answered_messages(history, (), first, (1, 2, END), said("assistant", "hello"))
    history += [said("assistant", "hello"), said("user", "=")]
    second = own.of_messages(history)
    assert second == Rendered((4, END, 1, 2, END, 5, END), 1, 0), "the template's end of an answer comes once"
    own.answered_messages(history, (), second, (6,), said("assistant", " world"))  # cut: it did not end by itself
    history += [said("assistant", " world"), said("tool", "?")]
    assert own.of_messages(history) == Rendered((*second.token_ids, 6, END, 4, END), 2, 0)


def test_what_a_harness_has_changed_is_told_as_tokenized_anew() -> None:
    own, history = talk(), [said("user", "?")]
    own.answered_messages(history, (), own.of_messages(history), (1, 2), said("assistant", "hello"))
    changed = [*history, said("assistant", "hello "[:-1] + "he"), said("user", "=")]
    assert own.of_messages(changed) == Rendered(Toy().chat(changed), 0, 1)
    system = [said("system", "="), *history, said("assistant", "hello"), said("user", "=")]
    assert own.of_messages(system) == Rendered(Toy().chat(system), 0, 1)


def test_of_two_answers_with_one_text_the_later_one_is_meant() -> None:
    own, history = talk(), [said("user", "?")]
    to = own.of_messages(history)
    for ids in ((3,), (1, 2)):
        own.answered_messages(history, (), to, ids, said("assistant", "hello"))
    assert own.of_messages([*history, said("assistant", "hello"), said("user", "=")]).token_ids == (4, END, 1, 2, END, 5, END)


def test_the_prompt_as_it_is_has_the_tokens_that_the_run_has_for_it() -> None:
    own = talk(Prompt(0, 0, (9, 9), "?", {}, (said("user", "he"),)))
    assert own.of_text("?").token_ids == (9, 9) == own.of_messages([said("user", "he")]).token_ids
    assert own.of_text("??").token_ids == (4, 4)


def test_texts_that_go_on() -> None:
    own = talk()
    first = own.of_text("?")
    own.answered_text("?", first, (1, 2), "hello")
    assert own.of_text("?hello=") == Rendered((4, 1, 2, 5), 1, 0)


@given(st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=5), st.booleans())
def test_every_prompt_begins_with_all_that_was_there_before(turns: Sequence[tuple[str, tuple[int, ...]]], chat: bool) -> None:
    """So that an episode is one training row: whatever the policy writes, in whatever spelling."""
    own, toy, before, text = talk(), Toy(), (), ""
    history: list[Mapping[str, str]] = []
    for number, (asked, answer) in enumerate(turns):
        reply = toy.decode(answer)
        if chat:
            history.append(said("user", asked))
            to = own.of_messages(history)
            own.answered_messages(history, (), to, answer, said("assistant", reply))
            history.append(said("assistant", reply))
        else:
            text += asked
            to = own.of_text(text)
            own.answered_text(text, to, answer, reply)
            text += reply
        assert to.token_ids[: len(before)] == before and (to.matched, to.rendered) == (number, 0)
        before = (*to.token_ids, *answer)
