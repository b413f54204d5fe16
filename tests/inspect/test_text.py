"""One rollout as text: which token has which colour, and that no token's text is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollyard.inspect.detail import detail
from rollyard.inspect.source import Source
from rollyard.inspect.text import picture
from rollyard.inspect.words import Words, words_of
from rollyard.journal.folder import RunFolder
from tests.inspect.runs import write_run
from tests.tiny import save_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = write_run(tmp_path_factory.mktemp("inspect") / "run")
    save_tokenizer(folder.path / "checkpoints" / "step-000002")  # ids from 2 on: a b c d ...
    return folder


def told(run: RunFolder, group: int, member: int, colour: str = "version", words: bool = True) -> list[Text]:
    with Source(run) as source:
        shown = detail(source, group, member)
    known = words_of(run)[0] if words else None
    return list(picture(shown, known, "there is none", colour))


def coloured(text: Text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_tokens_have_the_colour_of_what_wrote_them(run: RunFolder) -> None:
    lines = told(run, 1, 0)
    assert [line.plain for line in lines] == [
        "group 1, member 0, life 0, row 11: trained in step 2",
        "reward 0.25 (match 0.25, form 0.5)",
        "finished 1970-01-01 00:16:40 UTC; logprob -1.00 nats, -0.250 a token",
        'columns {"answer": "a1"}',
        "■ version 0: tokens 1-2  ■ version 1: tokens 3-4 (keys and values from 0)",
        "── prompt, 2 tokens",
        "prompt 1",
        "── completion, 4 tokens, length",
        "abcd",
    ]
    assert coloured(lines[-1]) == [("a", "cyan"), ("b", "cyan"), ("c", "yellow"), ("d", "yellow")]
    assert [style for _, style in coloured(lines[4])] == ["cyan", "yellow"]


def test_an_episode_is_shown_turn_by_turn(run: RunFolder) -> None:
    """Its tokens have p = 0.61 and p = 0.05."""
    lines = told(run, 4, 0, "logprob")
    assert [line.plain for line in lines][-8:] == [
        "── turn 1: 2 tokens more to read",
        "eb",
        "── answer 1, 1 tokens, stop",
        "a",
        "── turn 2: 2 tokens more to read",
        "hh",
        "── answer 2, 1 tokens, context",
        "c",
    ]
    assert coloured(lines[-5]) == [("a", "cyan")] and coloured(lines[-1]) == [("c", "magenta")]
    assert lines[1].plain == "reward no verdict: no number"


def test_what_was_kept_of_a_member_that_is_under_way(run: RunFolder) -> None:
    lines = [line.plain for line in told(run, 4, 1)]
    assert lines[0] == "group 4, member 1, life 1, row 14: under way"
    assert lines[2] == "not finished; logprob -3.00 nats, -1.000 a token"
    assert lines[-2:] == ["── completion, 3 tokens, not finished", "def"]


def test_nothing_is_there_of_one_that_was_dropped_before(run: RunFolder) -> None:
    lines = [line.plain for line in told(run, 3, 1)]
    assert lines[0] == "group 3, member 1, life 0, row 13: dropped, stale: too old"
    assert lines[-2:] == ["── completion, 0 tokens, not finished", ""]


def test_ids_stand_for_tokens_without_a_tokenizer(run: RunFolder) -> None:
    lines = told(run, 1, 0, words=False)
    assert "there is none" in lines[4].plain
    assert [line.plain for line in lines][-4:] == ["── completion, 4 tokens, length", "2 3 4 5 ", "── as text", "text 1.0"]


def test_a_tokenizer_that_is_none_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert words_of(run) == (None, "the run has no checkpoint yet, and its model's folder no tokenizer.json")
    broken = run.path / "checkpoints" / "step-000002" / "tokenizer.json"
    broken.write_text("{}")
    words, why = words_of(run)
    assert words is None and str(broken) in why


def test_the_tokenizer_of_the_model_serves_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    run, model = write_run(tmp_path / "run"), tmp_path / "model"
    save_tokenizer(model)
    run.config.write_text(f'[model]\npath = "{model}"\n')
    words, _ = words_of(run)
    assert words is not None and words.split((2, 3, 1)) == ["a", "b", "<eos>"]


@pytest.fixture(scope="module")
def bytes_of(tmp_path_factory: pytest.TempPathFactory) -> tuple[Words, Tokenizer]:
    """A tokenizer of single bytes, as byte-level BPE falls back to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: id_ for id_, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return Words(path), tokenizer


def test_a_character_of_several_tokens_is_the_last_one_s(bytes_of: tuple[Words, Tokenizer]) -> None:
    words, tokenizer = bytes_of
    assert words.split(tokenizer.encode("é🙂a").ids) == ["", "é", "", "", "", "🙂", "a"]
    assert words.split(tokenizer.encode("🙂").ids[:2]) == ["", "\ufffd"]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_texts_of_tokens_make_up_the_whole(bytes_of: tuple[Words, Tokenizer], text: str) -> None:
    words, tokenizer = bytes_of
    ids = tokenizer.encode(text).ids
    assert "".join(words.split(ids)) == text and len(words.split(ids)) == len(ids)
