"""Streams: each place always the same, epochs complete, problems on their own side."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.model.tokenizer import Tokenizer
from rollyard.prompts.jsonl import read_rows
from rollyard.prompts.open import check_prompts, open_prompts
from rollyard.prompts.source import Epochs, Row, Source
from rollyard.prompts.tasks.task import TASKS
from tests.tiny import tiny_folder


def source(count: int, epochs: int | None = None, done=frozenset(), seed: int = 0, shuffle: bool = True) -> Source:
    rows = [(number, Row(f"p{number}")) for number in range(count)]
    limit = None if epochs is None else epochs * count
    return Source(Epochs(rows, shuffle=shuffle, seed=seed), lambda _, row: ((1, 2), row.prompt), limit, done)


@given(st.integers(1, 9), st.integers(1, 4), st.lists(st.integers(0, 7), max_size=30), st.integers(0, 5))
def test_every_row_once_an_epoch_whatever_is_taken_at_a_time(count, epochs, takes, seed):
    stream, found = source(count, epochs, seed=seed), []
    for take in [*takes, 10**6]:
        prompts, exhausted = stream.take(take)
        found += prompts
        assert exhausted == (stream.cursor == count * epochs)
        assert len(prompts) == take or exhausted
    assert [prompt.id for prompt in found] == list(range(count * epochs))
    assert Counter(prompt.row for prompt in found) == dict.fromkeys(range(count), epochs)
    for place in {0, len(found) // 2}:
        assert source(count, epochs, frozenset(range(place)), seed).take(10**6)[0] == tuple(found[place:])


@given(st.integers(1, 20), st.frozensets(st.integers(0, 25)), st.lists(st.integers(1, 7), max_size=30))
def test_what_is_done_never_comes_again(count, done, takes):
    stream, found = source(count, 1, done), []
    for take in [*takes, 10**6]:
        prompts, exhausted = stream.take(take)
        found += prompts
        assert len(prompts) == take or exhausted
    assert [prompt.id for prompt in found] == [id_ for id_ in range(count) if id_ not in done]


def test_nothing_is_made_of_what_is_done():
    """A prompt takes a chat template and a tokenizer; of those that earlier lives trained there may be many."""
    made = []

    def render(number, row):
        made.append(number)
        return (1,), row.prompt

    stream = Source(lambda place: (place, Row("p")), render, None, frozenset(range(1, 100_000)))
    assert [prompt.id for prompt in stream.take(3)[0]] == made == [0, 100_000, 100_001] and stream.cursor == 100_002


def test_orders_differ_between_epochs_and_seeds():
    rows = [p.row for p in source(50).take(100)[0]]
    assert rows[:50] != rows[50:] and sorted(rows[:50]) == sorted(rows[50:]) == list(range(50))
    assert rows != [p.row for p in source(50, seed=1).take(100)[0]]
    assert [p.row for p in source(5, shuffle=False).take(10)[0]] == [0, 1, 2, 3, 4] * 2


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_right_seeded_and_divided(name):
    task = TASKS[name]
    drawn = [task.problem(3, index) for index in range(300)]
    assert drawn == [task.problem(3, index) for index in range(300)]
    held_out = [task.problem(0, index, held_out=True) for index in range(300)]
    assert not {p.prompt for p in drawn} & {p.prompt for p in held_out}
    for problem in drawn + held_out:
        assert set(problem.prompt + problem.answer) <= set(task.alphabet)
        if name == "arithmetic":
            left, right = problem.prompt.removeprefix("Solve ").removesuffix("=").split("+")
            assert int(problem.answer[::-1]) == int(left) + int(right) and len(problem.answer) == 3
        elif name == "calculator":
            left, right = problem.prompt.removesuffix("=").split("*")
            assert int(problem.answer) == int(left) * int(right)
        else:
            letters = problem.prompt.removesuffix("=")
            assert problem.answer == ("".join(sorted(letters)) if name == "sort" else letters[::-1])
            assert 2 <= len(letters) == len(set(letters)) <= 24


@pytest.fixture
def write(tmp_path):
    def write_(*lines: str | bytes):
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
        return path

    return write_


def test_rows_and_their_columns(write):
    path = write('{"prompt": "2+3=", "answer": "5"}', "", '{"prompt": [{"role": "user", "content": "hi"}], "level": 2}\r')
    text, chat = read_rows(path, "prompt")
    assert text == Row("2+3=", {"answer": "5"})
    assert chat.prompt == ({"role": "user", "content": "hi"},) and chat.columns == {"level": 2}


def test_a_file_may_begin_with_the_mark_that_editors_on_windows_write(write):
    (row,) = read_rows(write('\ufeff{"prompt": "2+3="}\r', ""), "prompt")
    assert row == Row("2+3=")
    with pytest.raises(ConfigError, match="has no prompts"):
        read_rows(write("\ufeff"), "prompt")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('["a"]', "not an object"),
        ('{"text": "a"}', "no field 'prompt'"),
        ('{"prompt": ""}', "an empty prompt"),
        ('{"prompt": []}', "an empty prompt"),
        ('{"prompt": 3}', "neither text nor a list"),
        ('{"prompt": [{"role": "user"}]}', "neither text nor a list"),
        ('{"prompt": "a", "completion": "b"}', "'completion'"),
        ('{"prompt": "\\ud800 x"}', "a lone surrogate"),
        ('{"prompt": [{"role": "user", "content": "\\udfff"}]}', "a lone surrogate"),
        ('{"prompt": [{"role": "\\udfff", "content": "a"}]}', "a lone surrogate"),
        ('{"prompt": "a", "x": {"y": "\\ud800"}}', "'x' holds what JSON has no words for (half a character"),
        ('{"prompt": "a", "\\ud800": 1}', "holds what JSON has no words for (half a character"),
        ('{"prompt": "a", "x": NaN}', "'x' holds what JSON has no words for (nan"),
        ('{"prompt": "a", "x": [-1e999]}', "'x' holds what JSON has no words for (-inf"),
        ('{"prompt": "a", "prompt": "b"}', "the name 'prompt' comes twice"),
        ('{"prompt": "a", "x": {"y": 1, "y": 2}}', "the name 'y' comes twice"),
    ],
)
def test_a_broken_line_is_named_and_shown(write, line, problem):
    path = write('{"prompt": "fine"}', line)
    with pytest.raises(ConfigError) as raised:
        read_rows(path, "prompt")
    assert problem in raised.value.problem and raised.value.where == f"{path}:2"
    shown = line.decode("utf-8", "backslashreplace") if isinstance(line, bytes) else line
    assert shown in raised.value.problem


def test_what_is_shown_of_a_broken_line_has_an_end(write):
    with pytest.raises(ConfigError, match="not JSON") as raised:
        read_rows(write("[" * 100_000), "prompt")
    assert len(raised.value.problem) < 300
    with pytest.raises(ConfigError, match="'x' holds what JSON has no words for") as raised:
        read_rows(write('{"prompt": "a", "x": %s}' % ("[" * 300 + "]" * 300)), "prompt")
    assert len(raised.value.problem) < 300


def test_files_that_are_none(write, tmp_path):
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_rows(path, "prompt")
    with pytest.raises(ConfigError, match="has no prompts"):
        read_rows(write("", " "), "prompt")


def config(path, **prompts) -> Config:
    return Config.model_validate({"prompts": {"path": str(path), "held_out": 2} | prompts})


async def test_held_out_rows_are_never_in_the_stream(write, tmp_path):
    path = write(*(json.dumps({"prompt": f"p{i}", "answer": i}) for i in range(10)))
    tokenizer = Tokenizer(tiny_folder(tmp_path))
    stream, held_out = await open_prompts(config(path, epochs=3), tokenizer)
    taken, exhausted = stream.take(100)
    assert exhausted and len(taken) == 24
    assert {p.row for p in taken} | {p.row for p in held_out} == set(range(10)) and len(held_out) == 2
    assert not {p.row for p in taken} & {p.row for p in held_out}
    assert taken[0].token_ids == tokenizer.encode(taken[0].text) and taken[0].columns == {"answer": taken[0].row}
    assert check_prompts(config(path)) == {"answer"}
    with pytest.raises(ConfigError, match="10 of 10 prompts held out"):
        check_prompts(config(path, held_out=10))


async def test_making_many_prompts_can_be_given_up(tmp_path):
    many = Config.model_validate({"prompts": {"task": "sort", "held_out": 10**9}})
    opening = asyncio.ensure_future(open_prompts(many, Tokenizer(tiny_folder(tmp_path))))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(opening, 0.1)
    assert opening.cancelled()


async def test_texts_become_user_messages_where_there_is_a_chat_template(write, tmp_path):
    path = write('{"prompt": "ab"}', '{"prompt": [{"role": "user", "content": "cd"}]}')
    tokenizer = Tokenizer(tiny_folder(tmp_path, chat=True))
    stream, _ = await open_prompts(config(path, held_out=0, shuffle=False), tokenizer)
    text, messages = stream.take(2)[0]
    assert text.text == "ab" and tokenizer.decode(text.token_ids) == "user=abassistant="
    assert messages.messages == ({"role": "user", "content": "cd"},) and text.messages == ()
    assert messages.text == "user: cd" and tokenizer.decode(messages.token_ids) == "user=cdassistant="
    plain, _ = await open_prompts(config(path, held_out=0, shuffle=False, chat=False), tokenizer)
    assert tokenizer.decode(plain.take(1)[0][0].token_ids) == "ab"


@pytest.mark.parametrize("prompt", ["ab日本語 c", [{"role": "user", "content": "ab日本語 c"}]])
async def test_what_the_tokenizer_does_not_know_is_told_once(write, tmp_path, prompt):
    path = write('{"prompt": "ab"}', '{"prompt": "a<pad>b"}', *[json.dumps({"prompt": prompt})] * 2)
    stream, _ = await open_prompts(config(path, held_out=0, shuffle=False), Tokenizer(tiny_folder(tmp_path, chat=True)))
    stream.take(2)
    with pytest.warns(RuntimeWarning) as told:
        stream.take(2)
    assert len(told) == 1
    assert str(told[0].message).startswith("the tokenizer does not know '日', '本', '語' of prompt 2: 'ab日本語 c'")


async def test_messages_need_a_template(write, tmp_path):
    """Also where the first prompts are texts: that is told before any of them is asked."""
    path = write('{"prompt": "ab"}', '{"prompt": [{"role": "user", "content": "cd"}]}')
    with pytest.raises(ConfigError, match="prompt 1 is a conversation, and the tokenizer has no chat template"):
        await open_prompts(config(path, held_out=0, shuffle=False), Tokenizer(tiny_folder(tmp_path)))


def test_a_prompt_without_a_token_is_told():
    stream = Source(lambda place: (7, Row("\u200b")), lambda _, row: ((), row.prompt), limit=None)
    with pytest.raises(ConfigError, match="no token of prompt 7"):
        stream.take(1)


def test_the_calculators_lessons_show_calls_and_answers_alike():
    """A quarter with a call, then what to make of its result; else the answer at once."""
    task = TASKS["calculator"]
    calls = 0
    for index in range(400):
        problem, lessons = task.problem(3, index), task.lessons(3, index)
        assert lessons == task.lessons(3, index) and not problem.held_out
        call = f"[{problem.prompt[:-1]}]"
        if len(lessons) == 2:
            calls += 1
            assert lessons == [(problem.prompt, call), (f"{problem.prompt}{call}{problem.answer}=", problem.answer)]
        else:
            assert lessons == [(problem.prompt, problem.answer)]
        assert set("".join(map("".join, lessons))) <= set(task.alphabet)
    assert 70 < calls < 130
    assert TASKS["sort"].lessons(3, 0) == [(TASKS["sort"].problem(3, 0).prompt, TASKS["sort"].problem(3, 0).answer)]
