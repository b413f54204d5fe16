"""How every engine stops: cut and continued elsewhere, paused in three ways, asleep, and closed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollyard.errors import EngineError, RequestRejected
from rollyard.events import Rollover, WakePart
from rollyard.types import FinishReason, Request, RequestId, VersionSpan
from tests.engine.contract.model import LONG, PROMPTS, WINDOW, Model
from tests.engine.contract.talk import Heard, Talk, ask

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUIET_S = 0.25  # longer than any engine keeps a token to itself


def segments(talk: Talk) -> int:
    return sum(len(heard.segments) for heard in talk.heard.values())


async def silent(talk: Talk, since: int | None = None) -> None:
    """Nothing is written any more, since so many segments."""
    before = segments(talk) if since is None else since
    await asyncio.sleep(QUIET_S)
    assert segments(talk) == before


def long_requests(count: int, **sampling: float) -> list[Request]:
    return [ask(PROMPTS[name % 4], LONG, seed=name, ignore_eos=True, **sampling) for name in range(count)]


async def cut_and_go_on(first: Talk, second: Talk, sampling: dict[str, float]) -> tuple[list[Request], list[list[int]]]:
    """Requests, and the tokens of each: begun at one engine and cut there, ended at the other."""
    begun = long_requests(12, **sampling)
    parts = first.ask(*begun)
    await first.some(parts[0])
    await first.engine.abort([request.id for request in begun])
    await first.until(lambda: all(part.finish for part in parts))
    assert sum(0 < len(part.token_ids) < LONG for part in parts) > 0, "none was cut half-way"
    assert {part.finish for part in parts} <= {FinishReason.ABORT, FinishReason.LENGTH}
    left = [
        ask(r.prompt_ids, LONG - len(part.token_ids), name=r.id, seed=r.seed, ignore_eos=True, written=part.token_ids, **sampling)
        for r, part in zip(begun, parts, strict=True)
        if part.finish is FinishReason.ABORT
    ]
    rest = dict(zip([request.id for request in left], await second.answers(*left), strict=True))
    version, other = first.engine.version, second.engine.version
    assert version is not None and other is not None
    for request, part in zip(begun, parts, strict=True):
        end = rest.get(request.id, Heard())
        spans = [(version, version, len(part.token_ids)), (other, other, len(end.token_ids))]
        assert part.spans + end.spans == [VersionSpan(*span) for span in spans if span[2]]
        assert (end.finish or part.finish) is FinishReason.LENGTH
    whole = [part.token_ids + rest.get(r.id, Heard()).token_ids for r, part in zip(begun, parts, strict=True)]
    return begun, whole


@pytest.mark.parametrize("here_first", [True, False])
async def test_what_was_cut_goes_on_elsewhere(talk: Talk, partner: Talk, base: Path, model: Model, here_first: bool) -> None:
    if talk.engine.capabilities.train:
        await talk.change(base)  # another version than the partner's
    first, second = (talk, partner) if here_first else (partner, talk)
    begun, whole = await cut_and_go_on(first, second, {})
    assert whole == [model.greedy(request) for request in begun]


async def test_what_was_sampled_and_cut_goes_on_elsewhere(talk: Talk, partner: Talk) -> None:
    """With the very tokens that it would have had, where noise is promised; complete in any case."""
    begun, whole = await cut_and_go_on(talk, partner, {"temperature": 1.0})
    assert all(len(tokens) == LONG for tokens in whole)
    if talk.engine.capabilities.noise:
        uncut = [ask(r.prompt_ids, LONG, seed=r.seed, ignore_eos=True, temperature=1.0) for r in begun]
        assert whole == [heard.token_ids for heard in await talk.answers(*uncut)]


async def test_unknown_names_are_no_matter(talk: Talk, model: Model) -> None:
    await talk.engine.abort([RequestId(10**6, 3), RequestId(-5, 0)])
    request = ask(PROMPTS[0], 100, ignore_eos=True)
    (heard,) = talk.ask(request)
    await talk.engine.abort([RequestId(10**6, 3)])
    await talk.until(lambda: heard.finish)
    assert heard.token_ids == model.greedy(request)
    await talk.engine.abort([request.id])  # it has ended


async def test_a_name_is_free_again_after_its_end(talk: Talk) -> None:
    request = ask(PROMPTS[0], LONG, ignore_eos=True)
    (heard,) = talk.ask(request)
    with pytest.raises(RequestRejected, match="same id"):
        talk.engine.generate([request])
    await talk.engine.abort([request.id])
    await talk.until(lambda: heard.finish)
    (again,) = await talk.answers(request)
    assert len(again.token_ids) == LONG
    twin = ask(PROMPTS[1])
    with pytest.raises(RequestRejected, match="same id"):
        talk.engine.generate([twin, twin])
    await silent(talk)  # neither was taken


async def test_a_request_that_can_never_run(talk: Talk) -> None:
    """It is refused, or ends with its problem; what came with it runs."""
    cases = {"no room": ask([3] * WINDOW, 4), "too long": ask([3] * (WINDOW + 40), 4)}
    if talk.maker.model:
        cases["no such token"] = ask([5, 10**6], 4)
    for request in cases.values():
        try:
            (heard,) = talk.ask(request)
        except RequestRejected as error:
            assert str(error)
            continue
        await talk.until(lambda heard=heard: heard.finish)
        assert heard.finish is FinishReason.ERROR and heard.problem and not heard.token_ids
    (heard,) = await talk.answers(ask(PROMPTS[0], 5, ignore_eos=True))
    assert len(heard.token_ids) == 5


async def test_drain_finishes_first(talk: Talk, model: Model) -> None:
    requests = [ask(prompt, 40, ignore_eos=True) for prompt in PROMPTS]
    written = talk.ask(*requests)
    pausing = asyncio.create_task(talk.engine.pause(Rollover.DRAIN))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="finishing what it has"):
        talk.engine.generate([ask(PROMPTS[0])])
    await pausing
    await asyncio.sleep(0)  # whoever listens has its turn
    assert [heard.token_ids for heard in written] == [model.greedy(request) for request in requests]
    with pytest.raises(EngineError, match="paused"):
        talk.engine.generate([ask(PROMPTS[0])])
    await talk.engine.resume()
    assert (await talk.answers(ask(PROMPTS[0], 3)))[0].finish is not None


async def test_pause_abort_cuts_all(talk: Talk, base: Path, trained: Path, later: Model) -> None:
    """Nothing comes after it has paused; what was cut goes on with new weights, each token under the version that wrote it."""
    requests = long_requests(12)
    written = talk.ask(*requests)
    await talk.some(written[0])
    await talk.engine.pause(Rollover.ABORT)
    await asyncio.sleep(0)
    assert all(heard.finish in (FinishReason.ABORT, FinishReason.LENGTH) for heard in written)
    await silent(talk)
    with pytest.raises(EngineError, match="paused"):
        talk.engine.generate([ask(PROMPTS[0])])
    if not talk.engine.capabilities.train:
        return
    old = talk.engine.version
    new = await talk.change(trained)
    await talk.engine.resume()
    cut, part = next((r, h) for r, h in zip(requests, written, strict=True) if h.token_ids and h.finish is FinishReason.ABORT)
    assert part.spans == [VersionSpan(old, old, len(part.token_ids))]
    # Greedy over prompt and what the old weights wrote, as one longer prompt.
    (heard,) = await talk.answers(ask(cut.prompt_ids, 12, ignore_eos=True, written=part.token_ids))
    assert heard.spans == [VersionSpan(new, new, 12)]
    if talk.maker.model:
        assert heard.token_ids == later.greedy(ask([*cut.prompt_ids, *part.token_ids], 12, ignore_eos=True))


async def test_pause_keep_stands_still(talk: Talk, trained: Path, later: Model) -> None:
    """Weights change under what runs: its later tokens carry the new version, and the old one of what they attend to."""
    if not talk.engine.capabilities.keep:
        with pytest.raises(EngineError, match="keep"):
            await talk.engine.pause(Rollover.KEEP)
        return
    written = talk.ask(*long_requests(12))
    await talk.some(written[0])
    await talk.engine.pause(Rollover.KEEP)
    await asyncio.sleep(0)
    begun = [len(heard.token_ids) for heard in written if heard.finish is None]
    assert max(begun) > 0
    before, old = segments(talk), talk.engine.version
    new = await talk.change(trained)
    await silent(talk, before)
    await talk.engine.resume()
    fresh = ask(PROMPTS[0], 12, ignore_eos=True)  # the prompt of one that was kept
    (after,) = await talk.answers(fresh)
    await talk.until(lambda: all(heard.finish for heard in written))
    kept = 0
    for heard in written:
        count = heard.spans[0].tokens
        if heard.spans[0].version == old and count < LONG:
            kept += 1
            assert heard.spans == [VersionSpan(old, old, count), VersionSpan(new, old, LONG - count)]
        else:  # it had ended before, or had not begun
            assert heard.spans in ([VersionSpan(old, old, LONG)], [VersionSpan(new, new, LONG)])
    assert kept > 0
    assert after.spans == [VersionSpan(new, new, 12)]  # nothing of the old pages in it
    assert after.token_ids == later.greedy(fresh)


async def refused_sleep(talk: Talk) -> None:
    """It cannot sleep while requests run. Where this process is slow, they have ended by then: it sleeps, and is asked again."""
    for _ in range(10):
        written = talk.ask(*long_requests(2))
        await talk.some(written[0])
        try:
            await talk.engine.sleep()
        except EngineError as error:
            assert "requests run" in str(error)
            return
        await talk.until(lambda written=written: all(heard.finish for heard in written))
        await talk.engine.wake(WakePart.WEIGHTS)
        await talk.engine.wake(WakePart.CACHE)
    raise AssertionError("they always ended before it was told to sleep")


async def test_sleeping_and_waking(talk: Talk, trained: Path, later: Model) -> None:
    if not talk.engine.capabilities.sleep:
        with pytest.raises(EngineError, match="sleep"):
            await talk.engine.sleep()
        return
    await refused_sleep(talk)
    await talk.engine.pause(Rollover.ABORT)
    await talk.engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        talk.engine.generate([ask(PROMPTS[0])])
    await talk.engine.wake(WakePart.WEIGHTS)
    with pytest.raises(EngineError, match="asleep"):
        talk.engine.generate([ask(PROMPTS[0])])
    new = await talk.change(trained)
    await talk.engine.wake(WakePart.CACHE)
    await talk.engine.resume()
    request = ask(PROMPTS[2], 12)
    (heard,) = await talk.answers(request)
    assert heard.token_ids == later.greedy(request) and heard.spans == [VersionSpan(new, new, len(heard.token_ids))]
