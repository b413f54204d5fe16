"""What is new in each event, for both styles, and events that are none. Written by hand from the schema of /generate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollyard.engine.sglang.event import Reader
from rollyard.errors import EngineError


def event(count: int, ids: list[int], logprobs: list[list[Any]] | None, **meta: Any) -> bytes:
    return json.dumps(
        {
            "text": "x",
            "output_ids": ids,
            "meta_info": {
                "id": "a",
                "completion_tokens": count,
                "output_token_logprobs": logprobs,
                "weight_version": "3.0",
                **meta,
            },
        }
    ).encode()


def triples(*ids: int) -> list[list[Any]]:
    return [[-token_id / 10, token_id, None] for token_id in ids]


STOP = {"type": "stop", "matched": 1}
ABORT = {"type": "abort", "message": "x", "status_code": None, "err_type": None}


@pytest.mark.parametrize(
    "events",
    [
        [event(2, [4, 5], triples(4, 5)), event(3, [4, 5, 6], triples(4, 5, 6)), event(4, [4, 5, 6, 1], triples(4, 5, 6, 1))],
        [event(2, [4, 5], triples(4, 5)), event(3, [6], triples(6)), event(4, [1], triples(1))],
        [event(2, [4, 5], triples(4, 5)), event(3, [6], triples(4, 5, 6)), event(4, [1], triples(4, 5, 6, 1))],
    ],
    ids=["all so far", "what is new", "what is new, with all logprobs"],
)
def test_three_styles(events: list[bytes]) -> None:
    reader = Reader()
    news = [reader.read(data) for data in events]
    assert [one.token_ids for one in news] == [(4, 5), (6,), (1,)]
    assert [one.logprobs for one in news] == [(-0.4, -0.5), (-0.6,), (-0.1,)]
    assert {one.label for one in news} == {"3.0"}


def test_an_event_may_hold_nothing_new() -> None:
    reader = Reader()
    reader.read(event(2, [4, 5], triples(4, 5)))
    last = reader.read(event(2, [4, 5], triples(4, 5), finish_reason=STOP))
    assert last.token_ids == () and last.end is not None and last.end.type == "stop"


@pytest.mark.parametrize(
    ("last", "new"),
    [
        (event(2, [5], triples(4, 5), finish_reason=ABORT), ()),  # the last token once more
        (event(3, [6], triples(4, 5, 6), finish_reason=ABORT), (6,)),  # one that was not sent before
        (event(4, [7], triples(4, 5, 6, 7), finish_reason=ABORT), ()),  # token 6 lies between, and is not known
        (event(3, [6], None, finish_reason=ABORT), ()),  # no logprob, so it does not count
        (event(0, [], None, finish_reason={"type": "abort", "message": "Abort in waiting queue"}), ()),
    ],
)
def test_what_an_abort_repeats_or_leaves_out(last: bytes, new: tuple[int, ...]) -> None:
    reader = Reader()
    reader.read(event(2, [4, 5], triples(4, 5)))
    assert reader.read(last).token_ids == new


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"text": "ab', "not in the schema of /generate"),
        (b"[]", "not in the schema"),
        (b'{"output_ids": "4", "meta_info": {}}', "output_ids"),
        (event(1, [4], [[None, 4, None]]), "output_token_logprobs"),  # a logprob that was no number
        (b'{"output_ids": [4], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[NaN, 4, null]]}}', "logprobs"),
        (event(2, [4], triples(4)), "the 2 tokens"),  # fewer than it counts
        (event(1, [4], []), "the 1 tokens"),
        (event(1, [4], triples(5)), "the 1 tokens"),  # logprobs of other tokens
        (b'{"text": "a"}', "says nothing about its request"),
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"error": {"code": 1}}', "code"),
    ],
)
def test_what_is_no_event(data: bytes, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        Reader().read(data)


def test_a_count_never_goes_back() -> None:
    reader = Reader()
    reader.read(event(2, [4, 5], triples(4, 5)))
    with pytest.raises(EngineError, match="-1 tokens"):
        reader.read(event(1, [4], triples(4)))
