"""Which requests engines take."""

from __future__ import annotations

import pytest

from rollyard.engine.admission import check, check_possible
from rollyard.errors import EngineError, RequestRejected
from rollyard.types import RequestId
from tests.engine.embedded.serving import ask


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"started": False}, "was not started"),
        ({"acknowledged": False}, "acknowledged no weights"),
        ({"asleep": True}, "is asleep"),
        ({"paused": True, "draining": True}, "is paused"),
        ({"draining": True}, "is finishing"),
        ({"held": "is being held"}, "is being held"),
    ],
)
def test_states(state: dict[str, bool], words: str) -> None:
    with pytest.raises(EngineError, match=f"engine-0 takes no requests: it .*{words}"):
        check("engine-0", [ask(0, [5])], (), **state)  # type: ignore[arg-type]


def test_ids() -> None:
    check("engine-0", [ask(0, [5]), ask(1, [5])], {RequestId(2, 0)})
    for requests, running in (([ask(0, [5])], {RequestId(0, 0)}), ([ask(0, [5]), ask(0, [6])], set())):
        with pytest.raises(RequestRejected, match="same id"):
            check("engine-0", requests, running)


def test_what_can_never_run() -> None:
    check_possible(ask(0, [0, 9], 1, written=[3]), window=4, vocab_size=10)
    for request, words in (
        (ask(0, [], 1), "no prompt"),
        (ask(0, [5], 0), "no token"),
        (ask(0, [5, 6], 1, written=[7, 8]), "window of 4"),
        (ask(0, [10], 1), "vocabulary of 10"),
        (ask(0, [5], 1, written=[-1]), "vocabulary of 10"),
    ):
        with pytest.raises(RequestRejected, match=words):
            check_possible(request, window=4, vocab_size=10)
    with pytest.raises(RequestRejected, match="too cold"):
        check_possible(ask(0, [5], 1), window=4, vocab_size=10, more="it is too cold")
