from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from rollyard.errors import ConfigError
from rollyard.model.tokenizer import StopWatcher, Tokenizer
from rollyard.types import FinishReason
from tests.tiny import TOOLS_TEMPLATE, save_tokenizer

PIECES = ("an", "swer", "</ans", "wer>!", "x")


def pieces(*words: str) -> FastTokenizer:
    tokenizer = FastTokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def bytes_as_tokens() -> FastTokenizer:
    """One token a byte, ids in the alphabet's order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = FastTokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> FastTokenizer:
    """As in Llama 2: words with a metaspace, and one token for each byte."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "<unk>": 258}
    tokenizer = FastTokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def first_stop(tokenizer: FastTokenizer, ids: list[int], stop: tuple[str, ...]) -> int | None:
    """How many tokens it takes until a stop string is in the text, by decoding every prefix whole."""
    return next((n for n in range(1, len(ids) + 1) if any(text in tokenizer.decode(ids[:n]) for text in stop)), None)


def watched(tokenizer: FastTokenizer, ids: list[int], stop: tuple[str, ...]) -> int | None:
    watcher = StopWatcher(tokenizer, stop, frozenset())
    return next((n for n, token in enumerate(ids, 1) if watcher.push(token)), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path, chat=True)
    return path


def test_text_and_back(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("ba c") == (3, 2, 38, 4)
    assert tokenizer.decode((3, 1, 2, 38, 0, 4)) == "ba c"
    assert tokenizer.decode(()) == ""


def test_spaces_are_not_cleaned_up(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(" a , b .  c")) == " a , b .  c"


def test_chat_uses_the_template_up_to_the_answer(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.has_chat_template
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert ids == (*tokenizer.encode("user=hi"), 1, *tokenizer.encode("assistant="))


def test_what_comes_between_two_answers_is_the_templates_and_the_answer_is_not_rendered(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    between = tokenizer.chat_after([{"role": "tool", "content": "ab"}])
    assert between == (1, *tokenizer.encode("tool=ab"), 1, *tokenizer.encode("assistant="))


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ASKED = [{"role": "user", "content": "hi"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


def test_tools_and_their_calls_are_as_the_template_has_them(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat=TOOLS_TEMPLATE, words=list('{}":_'))
    tokenizer = Tokenizer(tmp_path)
    begins = tokenizer.encode("tools=" + json.dumps([TOOL]))
    rest = (1, *tokenizer.encode("user=hi"), 1, *tokenizer.encode("assistant="))
    assert tokenizer.chat(ASKED, [TOOL]) == (*begins, *rest)
    call = tokenizer.encode('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    assert tokenizer.chat(CALLED, [TOOL]) == (*begins, *rest, *call, 1, *tokenizer.encode("assistant="))
    result = {"role": "tool", "tool_call_id": "1", "content": "ab"}
    assert tokenizer.chat_after([result], [TOOL]) == (1, *tokenizer.encode("tool=ab"), 1, *tokenizer.encode("assistant="))


def test_what_a_template_would_leave_out_without_a_word_is_refused(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    with pytest.raises(ConfigError, match="shows no tools"):
        tokenizer.chat(ASKED, [TOOL])
    with pytest.raises(ConfigError, match="shows no earlier calls"):
        tokenizer.chat(CALLED)
    with pytest.raises(ConfigError, match="shows no earlier calls"):
        tokenizer.chat_after(CALLED)


def test_what_a_tool_said_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    """Some templates show it beside its call alone."""
    save_tokenizer(tmp_path, chat="{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ConfigError, match="shows no results of tools here"):
        Tokenizer(tmp_path).chat_after([{"role": "tool", "content": "ab"}])
    assert Tokenizer(tmp_path).chat_after([{"role": "tool", "content": ""}]) == ()


@pytest.mark.parametrize("wrong", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages[0] + 1 }}", "{{ none.x.y }}"])
def test_whatever_a_template_raises_is_a_refusal(tmp_path: Path, wrong: str) -> None:
    save_tokenizer(tmp_path, chat=wrong)
    with pytest.raises(ConfigError, match="the chat template refuses this conversation"):
        Tokenizer(tmp_path).chat(ASKED)


def test_a_template_that_needs_calls_shows_them(tmp_path: Path) -> None:
    """It raises without."""
    save_tokenizer(tmp_path, chat="{% for m in messages if m['role'] != 'user' %}{{ m['tool_calls'][0]['id'] }}{% endfor %}")
    assert Tokenizer(tmp_path).chat(CALLED) == (29,)


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer(tmp_path)


def test_completion_text_is_cut_before_the_first_stop_string(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = (*tokenizer.encode("ab!c.d!"), 1)
    assert tokenizer.completion_text(ids, (".", "!"), FinishReason.STOP) == "ab"
    assert tokenizer.completion_text(ids, (".", "!"), FinishReason.LENGTH) == "ab!c.d!"
    assert tokenizer.completion_text(ids, ("?",), FinishReason.STOP) == "ab!c.d!"
    assert tokenizer.completion_text(ids, (), FinishReason.STOP) == "ab!c.d!"


def test_a_stop_string_completed_inside_the_fourth_token() -> None:
    tokenizer = pieces(*PIECES)
    assert watched(tokenizer, [0, 1, 2, 3, 4], ("</answer>",)) == 4
    assert watched(tokenizer, [0, 1, 2, 1, 4], ("</answer>",)) is None


def test_a_continued_completion_remembers_what_was_written() -> None:
    watcher = StopWatcher(pieces(*PIECES), ("</answer>",), frozenset())
    watcher.feed([0, 1, 2])
    assert watcher.push(3)


def test_special_tokens_do_not_part_a_stop_string(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    less, slash = tokenizer.encode("</")
    watcher = tokenizer.stream(("</",))
    assert [watcher.push(token) for token in (less, 0, 0, 0, 0, slash)] == [False] * 5 + [True]


def test_a_stop_string_of_split_characters() -> None:
    tokenizer = bytes_as_tokens()
    ids = tokenizer.encode("ab→c").ids
    assert len(ids) == 6
    assert watched(tokenizer, ids, ("→",)) == 5
    assert watched(tokenizer, ids, ("b→",)) == 5
    assert watched(tokenizer, ids, ("←", "c")) == 6


def test_a_decoder_that_strips_leading_spaces() -> None:
    space, a, b = 0x20, 256, 257
    tokenizer = byte_fallback()
    assert tokenizer.decode([space, b]) == "b"
    assert watched(tokenizer, [a, space, b], (" b",)) == 3


def test_without_stop_strings_nothing_stops() -> None:
    assert watched(pieces(*PIECES), [0, 1, 2, 3], ()) is None


@given(
    st.lists(st.integers(0, 4), max_size=30), st.lists(st.sampled_from(["a", "nx", "ran", "r>!", "x</answ", "swer"]), min_size=1)
)
def test_stops_where_the_whole_text_first_holds_one(ids: list[int], stop: list[str]) -> None:
    tokenizer = pieces(*PIECES)
    assert watched(tokenizer, ids, tuple(stop)) == first_stop(tokenizer, ids, tuple(stop))


@pytest.mark.parametrize("kind", [bytes_as_tokens, byte_fallback])
def test_broken_utf8_neither_raises_nor_hides_a_stop_string(kind: type) -> None:
    tokenizer, draw = kind(), random.Random(0)
    a, b = (256, 257) if kind is byte_fallback else (tokenizer.token_to_id("a"), tokenizer.token_to_id("b"))
    stop = ("ab", "aé")
    for _ in range(300):
        ids = [draw.choice([a, b, draw.randrange(256)]) for _ in range(40)]
        assert watched(tokenizer, ids, stop) == first_stop(tokenizer, ids, stop)
