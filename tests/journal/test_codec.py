import json
import math
from datetime import date

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollyard.journal.codec import (
    pack_floats,
    pack_ids,
    pack_json,
    pack_spans,
    pack_turns,
    unpack_floats,
    unpack_ids,
    unpack_spans,
    unpack_turns,
)
from rollyard.texts import clean
from rollyard.types import FinishReason, Turn, VersionSpan, WeightVersion


def test_token_ids_are_little_endian_int32() -> None:
    assert pack_ids((1, 258)) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


@given(st.lists(st.integers(0, 2**31 - 1)), st.lists(st.floats(-1e4, 0, width=32)))
def test_blobs_are_what_numpy_reads(ids: list[int], logprobs: list[float]) -> None:
    assert np.frombuffer(pack_ids(ids), "<i4").tolist() == ids
    assert np.frombuffer(pack_floats(logprobs), "<f4").tolist() == logprobs
    assert unpack_ids(np.asarray(ids, "<i4").tobytes()) == tuple(ids)
    assert unpack_floats(np.asarray(logprobs, "<f4").tobytes()) == tuple(logprobs)


def test_spans_are_json_lists_of_five_numbers() -> None:
    spans = (VersionSpan(WeightVersion(3, 1), WeightVersion(2, 1), 16), VersionSpan(WeightVersion(4, 1), WeightVersion(2, 1), 1))
    assert json.loads(pack_spans(spans)) == [[3, 1, 2, 1, 16], [4, 1, 2, 1, 1]]
    assert unpack_spans("[[3, 1, 2, 1, 16], [4, 1, 2, 1, 1]]") == spans


def test_turns_say_what_is_new_in_their_prompts() -> None:
    turns = (
        Turn((3, 4), 2, FinishReason.STOP),
        Turn((3, 4, 5, 6, 8), 1, FinishReason.LENGTH),
        Turn((3, 8), 0, FinishReason.CONTEXT),
    )
    text = pack_turns(turns, (5, 6, 7))
    assert json.loads(text) == [[0, [3, 4], 2, "stop"], [4, [8], 1, "length"], [1, [8], 0, "context"]]
    assert unpack_turns(text, (5, 6, 7)) == turns
    assert pack_turns((), (5,)) == "[]" and unpack_turns("[]", (5,)) == ()


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1), st.lists(st.integers(0, 2)), st.sampled_from(FinishReason))))
def test_turns_come_back(said: list[tuple[list[int], list[int], FinishReason]]) -> None:
    turns = tuple(Turn(tuple(prompt), len(answer), finish) for prompt, answer, finish in said)
    ids = tuple(token for _, answer, _ in said for token in answer)
    assert unpack_turns(pack_turns(turns, ids), ids) == turns


def test_columns_keep_what_json_can_say() -> None:
    record = {"text": "é", "list": [1, 2.5, None], "object": {"a": True}}
    assert json.loads(pack_json(record)) == record


def test_a_column_that_json_has_no_words_for_is_its_repr_and_the_others_stay() -> None:
    circle: list[object] = []
    circle.append(circle)
    record = {"day": date(2024, 2, 29), "nan": math.nan, "circle": circle, "answer": [1, 2], "by pair": {(0, 1): "x"}}
    assert json.loads(pack_json(record)) == {
        "day": "datetime.date(2024, 2, 29)",
        "nan": "nan",
        "circle": "[[...]]",
        "answer": [1, 2],
        "by pair": "{(0, 1): 'x'}",
    }


def test_lone_surrogates_become_escapes() -> None:
    assert clean("a\ud800b") == "a\\ud800b"
    assert json.loads(pack_json({"a": "\ud800"})) == {"a": "\ud800"}
