"""Relatives of the stop string over token borders: where else a completion ends, and what its text is then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

import rollyard
from rollyard import events as ev
from rollyard.errors import ConfigError
from rollyard.model.tokenizer import Tokenizer
from rollyard.rollout.controller import Controller
from rollyard.types import FinishReason, RequestId
from rollyard.watch.timeline import Timeline
from tests.compiler import needs_compiler
from tests.engine.contract.makers import MAKERS, Options
from tests.engine.contract.talk import Heard, Talk, ask
from tests.engine.embedded.serving import serving
from tests.right_values.chain import EOS, chain_folder, save_pieces, spelt

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ENGINES = [pytest.param("embedded-native", marks=needs_compiler), "embedded-plain", "sglang", "openai"]


@asynccontextmanager
async def talking(folder: Path, scratch: Path, maker: str) -> AsyncIterator[Talk]:
    async with MAKERS[maker].open(folder, scratch, Options()) as served:
        talk = Talk(served, MAKERS[maker], folder)
        await talk.calm()
        yield talk
        await talk.leave()


def text(folder: Path, heard: Heard, stop: tuple[str, ...], written: tuple[int, ...] = ()) -> str:
    assert heard.finish is not None
    return Tokenizer(folder).completion_text((*written, *heard.token_ids), stop, heard.finish)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x an swer </ans wer>! x ... without end; after 7 that comes, after 8 the end, after 9 a q, six ids without a text, an x."""
    table = spelt(4, 0, 1, 2, 3, 4) | spelt(7, 0) | spelt(8, EOS) | spelt(9, 6, 100, 101, 102, 103, 104, 105, 4)
    made = chain_folder(tmp_path_factory.mktemp("chain"), table, ends=(EOS,))
    save_pieces(made)
    return made


# Each: the last token of the prompt, stop strings, tokens at most -> token ids, why they end, text.
CASES = {
    "at the very first token": (7, ("an",), 9, (0,), STOP, ""),
    "the first token holds more": (2, (">",), 9, (3,), STOP, "wer"),
    "twice the same": (7, ("</answer>", "</answer>"), 9, (0, 1, 2, 3), STOP, "answer"),
    "two at once, the one that begins first counts": (7, ("wer>", "swer</answer>"), 9, (0, 1, 2, 3), STOP, "an"),
    "one that is never complete": (7, ("</answer>?",), 4, (0, 1, 2, 3), LENGTH, "answer</answer>!"),
    "at the last token that is allowed": (7, ("</answer>",), 4, (0, 1, 2, 3), STOP, "answer"),
    "one token less": (7, ("</answer>",), 3, (0, 1, 2), LENGTH, "answer</ans"),
    "one token at most": (7, ("</answer>",), 1, (0,), LENGTH, "an"),
    "the end at once": (8, ("</answer>",), 9, (EOS,), STOP, ""),
    "over ids that have no text": (9, ("qx",), 9, (6, 100, 101, 102, 103, 104, 105, 4), STOP, ""),
}


@pytest.mark.parametrize("maker", ENGINES)
async def test_where_it_ends_and_what_its_text_is(folder: Path, tmp_path: Path, maker: str) -> None:
    """All at once, so that none is taken for another. What is in the prompt ends nothing: it has the end and a stop string."""
    async with talking(folder, tmp_path, maker) as talk:
        requests = [
            ask((EOS, 0, 1, 2, 3, EOS, last), most, stop=stop, temperature=1.0) for last, stop, most, *_ in CASES.values()
        ]
        heard = await talk.answers(*requests)
    for (name, (_, stop, _, ids, finish, told)), one in zip(CASES.items(), heard, strict=True):
        assert (tuple(one.token_ids), one.finish) == (ids, finish), name
        assert len(one.logprobs) == len(ids), name
        assert text(folder, one, stop) == told, name


@pytest.mark.parametrize("maker", ENGINES)
@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_a_stop_string_by_two_engines(folder: Path, tmp_path: Path, maker: str, cut: int) -> None:
    """Cut within the string, or before it, and continued elsewhere: the same tokens and text as without the cut."""
    written = (0, 1, 2)[:cut]
    async with talking(folder, tmp_path, maker) as talk:
        request = ask((7,), 9 - cut, stop=("</answer>",), written=written, temperature=1.0)
        (heard,) = await talk.answers(request)
    assert ((*written, *heard.token_ids), heard.finish) == ((0, 1, 2, 3), STOP)
    assert text(folder, heard, ("</answer>",), written) == "answer"


async def test_the_shell_gives_the_text_of_the_whole_completion(folder: Path) -> None:
    """Of one that an engine ends and another began, under other weights: the reward sees all of it."""
    posted: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
    stop = ("</answer>",)
    tokenizer = Tokenizer(folder)
    async with serving(folder, kernels="plain") as engine:
        controller = Controller(
            {engine.id: engine},
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            tokenizer.completion_text,
            posted.put_nowait,
            posted.put_nowait,
            Timeline(),
        )
        controller.listen()
        request = ask((7,), 6, name=RequestId(0, 0, 1), stop=stop, written=(0, 1, 2), temperature=1.0)
        controller.carry_out([ev.Generate(engine.id, request)])
        async with asyncio.timeout(20):
            event = await posted.get()
        await controller.close()
    assert isinstance(event, ev.SegmentArrived) and event.segment.token_ids == (3,)
    assert (event.text, event.segment.finish) == ("answer", STOP)


BYTES = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))


def byte_tokenizer() -> FastTokenizer:
    """One token a byte."""
    fast = FastTokenizer(models.BPE({letter: index for index, letter in enumerate(BYTES)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return fast


@given(
    words=st.lists(st.sampled_from(["a", "é", "→", "🙂", "🙃", "</s>", " ", "\n"]), max_size=8),
    stop=st.sampled_from([("🙂",), ("→", "é"), ("</s>",), ("a🙃",), ("é\n", "é")]),
    unknown=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=4),
)
def test_a_text_that_stops_says_nothing_of_what_follows(words: list[str], stop: tuple[str, ...], unknown: Any) -> None:
    """Characters of several tokens, and ids in between that have no text: it ends as soon as a stop string is in the text."""
    made = FakeTokenizer(byte_tokenizer())
    ids = made.encode("".join(words))
    for place, count in unknown:
        ids[place:place] = [300] * count
    watcher = made.stream(stop)
    ended = next((n for n, token in enumerate(ids, 1) if watcher.push(token)), None)
    whole = next((n for n in range(1, len(ids) + 1) if any(each in made.decode(ids[:n]) for each in stop)), None)
    assert ended == whole
    if ended is None:
        assert made.completion_text(ids, stop, STOP) == made.decode(ids)
    else:
        told = made.completion_text(ids[:ended], stop, STOP)
        assert not any(each in told for each in stop) and made.decode(ids).startswith(told)


class FakeTokenizer(Tokenizer):
    """A tokenizer that needs no folder."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast, self._mute = fast, frozenset()  # as the constructor does

    def encode(self, text: str, *, special: bool = True) -> list[int]:  # type: ignore[override]
        return list(super().encode(text, special=special))


def test_a_stop_string_of_nothing_is_refused() -> None:
    """It would end every completion at its first token, with no text."""
    with pytest.raises(ConfigError, match=r"rollout\.stop"):
        rollyard.resolve(preset="sort", environment={}, overrides={"rollout.stop": ["a", ""]})
