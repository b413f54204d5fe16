"""Which requests an engine takes: the same reasons in the same words, whichever engine it is (PURE)."""

from __future__ import annotations

from collections.abc import Container, Sequence

from rollyard.errors import EngineError, RequestRejected
from rollyard.types import Request, RequestId


def check(
    engine: str,
    requests: Sequence[Request],
    running: Container[RequestId],
    *,
    started: bool = True,
    acknowledged: bool = True,
    asleep: bool = False,
    paused: bool = False,
    draining: bool = False,
    held: str = "",
) -> None:
    """Raise EngineError when the engine takes none now, RequestRejected when it has one of these already.

    Args:
        engine: its id.
        requests: what it is asked.
        running: those whose last segment has not come.
        acknowledged: it has weights that were sent to it.
        held: another reason why it takes none, in words that follow "it".
    """
    states = (
        (not started, "was not started"),
        (not acknowledged, "has acknowledged no weights"),
        (asleep, "is asleep"),
        (paused, "is paused"),
        (draining, "is finishing what it has"),
        (bool(held), held),
    )
    if state := next((text for applies, text in states if applies), ""):
        raise EngineError(f"engine {engine} takes no requests: it {state}")
    names = {request.id for request in requests}
    if len(names) < len(requests) or any(name in running for name in names):
        raise RequestRejected(f"engine {engine} has a request of the same id already")


def check_possible(request: Request, window: int, vocab_size: int, more: str = "") -> None:
    """Raise RequestRejected for a request that can never run.

    Args:
        window: tokens of prompt and completion at most.
        vocab_size: of the model.
        more: what else is wrong with it, empty when nothing is.
    """
    ids = (*request.prompt_ids, *request.written_ids)
    problem = more
    if not request.prompt_ids:
        problem = "it has no prompt"
    elif request.sampling.max_tokens < 1:
        problem = "it asks for no token"
    elif len(ids) >= window:
        problem = f"its {len(ids)} tokens leave no room in the window of {window}"
    elif max(ids) >= vocab_size or min(ids) < 0:
        problem = f"it has token ids outside the vocabulary of {vocab_size}"
    if problem:
        raise RequestRejected(f"request {tuple(request.id)} can never run: {problem}")
