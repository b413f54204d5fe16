"""What every engine writes: the right tokens, their logprobs, where it ends, and how it arrives."""

from __future__ import annotations

import math
from itertools import count
from time import monotonic_ns
from typing import Any

import pytest

from rollyard.batch.sample import rows
from rollyard.events import Rollover
from rollyard.types import PROOFS, Activity, Completion, FinishReason, Group, Prompt, Request, RequestId, Reward, Rollout
from rollyard.watch.spans import WORK
from tests.engine.contract.model import ENDS_WITHIN, PROMPTS, WINDOW, Model, text
from tests.engine.contract.talk import Heard, Talk, ask

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVALUATIONS = count()
NEAR = 1e-3  # nats between an engine's logprobs and those of a plain forward pass


def check_logprobs(talk: Talk, model: Model, request: Request, heard: Heard) -> None:
    """Those of the model, or where it decodes with none, such as could be."""
    if not talk.engine.capabilities.logprobs:
        assert all(math.isnan(logprob) for logprob in heard.logprobs)  # unknown, and said to be
    elif talk.maker.model:
        wanted = model.logprobs(request, [*request.written_ids, *heard.token_ids])[len(request.written_ids) :]
        assert heard.logprobs == pytest.approx(wanted, abs=NEAR)
    else:
        assert all(-100 < logprob <= 0 for logprob in heard.logprobs)


async def test_greedy_tokens_their_logprobs_and_where_they_end(talk: Talk, model: Model) -> None:
    requests = [ask(prompt, ENDS_WITHIN - name % 3) for name, prompt in enumerate(PROMPTS)]
    for request, heard in zip(requests, await talk.answers(*requests), strict=True):
        wanted = model.greedy(request)
        assert heard.token_ids == wanted
        ended = wanted[-1] in model.ends
        assert heard.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(wanted) == request.sampling.max_tokens
        check_logprobs(talk, model, request, heard)
    ends = {heard.finish for heard in talk.heard.values()}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}


async def test_the_end_of_sequence_can_be_ignored(talk: Talk, model: Model) -> None:
    requests = [ask(prompt, ENDS_WITHIN, ignore_eos=True) for prompt in PROMPTS]
    for request, heard in zip(requests, await talk.answers(*requests), strict=True):
        assert heard.token_ids == model.greedy(request)
        assert (len(heard.token_ids), heard.finish) == (ENDS_WITHIN, FinishReason.LENGTH)


async def test_one_token(talk: Talk, model: Model) -> None:
    request = ask(PROMPTS[0], 1)
    (heard,) = await talk.answers(request)
    assert heard.token_ids == model.greedy(request) and len(heard.token_ids) == 1 and heard.finish is not None


async def test_what_is_trained_is_what_was_sampled_the_end_included(talk: Talk, model: Model) -> None:
    prompt = next(prompt for prompt in PROMPTS if model.greedy(ask(prompt, ENDS_WITHIN))[-1] in model.ends)
    (heard,) = await talk.answers(ask(prompt, ENDS_WITHIN))
    assert heard.finish is not None and heard.token_ids[-1] in model.ends
    tokens = tuple(heard.token_ids)
    done = Completion(0, 0, tokens, tuple(heard.logprobs), tuple(heard.spans), heard.finish, "")
    group = Group(Prompt(0, 0, prompt, ""), (Rollout(done, Reward(1.0)),))
    (sample,) = rows(group, group.rollouts[0], 0.5)
    assert sample.token_ids == (*prompt, *tokens)
    assert [token for token, trained in zip(sample.token_ids, sample.mask, strict=True) if trained] == heard.token_ids
    assert sum(span.tokens for span in sample.spans) == sum(sample.mask) == len(tokens)


async def test_stop_strings_over_token_borders(talk: Talk, model: Model) -> None:
    prompt = PROMPTS[1]
    whole = model.greedy(ask(prompt, 20, ignore_eos=True))
    stop = text(whole)[5:8]  # three tokens, each a character
    assert len(stop) == 3
    request = ask(prompt, 20, stop=("never", stop), ignore_eos=True)
    (heard,) = await talk.answers(request)
    wanted = model.greedy(request)
    assert text(wanted).endswith(stop) and heard.token_ids == wanted
    assert heard.finish is FinishReason.STOP
    check_logprobs(talk, model, request, heard)
    # Cut within the stop string and continued: the part that was written before counts.
    rest = ask(prompt, 20, stop=(stop,), ignore_eos=True, written=wanted[:-1])
    (heard,) = await talk.answers(rest)
    assert (heard.token_ids, heard.finish) == (wanted[-1:], FinishReason.STOP)


@pytest.mark.parametrize(
    ("room", "max_tokens", "finish"),
    [(8, 50, FinishReason.CONTEXT), (8, 8, FinishReason.LENGTH), (8, 7, FinishReason.LENGTH), (1, 9, FinishReason.CONTEXT)],
)
async def test_the_window_ends_a_completion(talk: Talk, model: Model, room: int, max_tokens: int, finish: FinishReason) -> None:
    prompt = tuple(2 + at % 37 for at in range(WINDOW - room))
    request = ask(prompt, max_tokens, ignore_eos=True)
    (heard,) = await talk.answers(request)
    assert (len(heard.token_ids), heard.finish) == (min(room, max_tokens), finish)
    assert heard.token_ids == model.greedy(request)


async def test_the_window_counts_what_was_written_before(talk: Talk, model: Model) -> None:
    prompt = tuple(2 + at % 37 for at in range(WINDOW - 20))
    whole = model.greedy(ask(prompt, WINDOW, ignore_eos=True))
    assert len(whole) == 20
    (heard,) = await talk.answers(ask(prompt, 50, ignore_eos=True, written=whole[:-5]))
    assert (heard.token_ids, heard.finish) == (whole[-5:], FinishReason.CONTEXT)


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.8, 0.95, 0), (1.2, 1.0, 5)])
async def test_a_group_from_one_prompt(talk: Talk, model: Model, temperature: float, top_p: float, top_k: int) -> None:
    """More members than slots; each complete, none like another, and the logprobs of what each was drawn from.

    An engine without the capability `truncation` gives others where top_p or top_k narrow it, and a run refuses it then.
    """
    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    members = [ask(PROMPTS[3], 20, name=RequestId(10**6 + top_k, k), seed=1000 + k, **options) for k in range(24)]
    written = await talk.answers(*members)
    long = [tuple(heard.token_ids) for heard in written if len(heard.token_ids) > 5]  # most may well end before, and at once
    assert len(set(long)) == len(long) > 1
    for request, heard in zip(members, written, strict=True):
        if heard.finish is FinishReason.LENGTH:
            assert len(heard.token_ids) == 20
        elif talk.maker.model:
            assert heard.finish is FinishReason.STOP and heard.token_ids[-1] in model.ends
        if talk.engine.capabilities.truncation or (top_p, top_k) == (1.0, 0):
            check_logprobs(talk, model, request, heard)
        if talk.maker.model:
            assert not model.ends & set(heard.token_ids[:-1])


async def test_noise_belongs_to_seed_and_index(talk: Talk, partner: Talk) -> None:
    """Whatever else is in the batch, whatever engine of the kind. Without that capability nothing is promised of samples."""
    if not talk.engine.capabilities.noise:
        seeds = [ask(PROMPTS[4], 16, seed=seed, temperature=1.0, ignore_eos=True) for seed in range(6)]
        assert len({tuple(heard.token_ids) for heard in await talk.answers(*seeds)}) > 1
        return
    requests = [ask(prompt, 16, seed=name, temperature=1.0) for name, prompt in enumerate(PROMPTS)]
    first = [heard.token_ids for heard in await talk.answers(*requests)]
    again = [ask(prompt, 16, seed=name, temperature=1.0) for name, prompt in enumerate(PROMPTS)]
    others = [ask(PROMPTS[0], 30, seed=99 + k, temperature=2.0) for k in range(3)]
    mixed = await talk.answers(*others, *again[::-1])
    assert [heard.token_ids for heard in mixed[: len(others) - 1 : -1]] == first
    assert [heard.token_ids for heard in await partner.answers(*requests)] == first


async def test_tokens_arrive_while_they_are_written(talk: Talk) -> None:
    (heard,) = talk.ask(ask(PROMPTS[0], 200, ignore_eos=True))
    await talk.until(lambda: heard.segments)
    assert heard.finish is None
    await talk.until(lambda: heard.finish)
    assert len(heard.segments) > 200 // 32 and len(heard.token_ids) == 200
    assert {(segment.version, segment.oldest_kv) for segment in heard.segments} == {(talk.engine.version,) * 2}


async def test_totals_grow(talk: Talk) -> None:
    before = talk.engine.stats()
    written = await talk.answers(*(ask(prompt, 10, ignore_eos=True) for prompt in PROMPTS[:6]))
    await talk.engine.pause(Rollover.DRAIN)  # those of an engine elsewhere come a little after the tokens
    after = talk.engine.stats()
    assert sum(len(heard.token_ids) for heard in written) == 60 == after.generated_tokens - before.generated_tokens
    assert after.slots == talk.engine.slots > 0
    if after.steps:  # a server may not tell its steps
        assert after.steps > before.steps and after.step_s > before.step_s


async def test_an_engine_says_when_it_writes_and_for_what(talk: Talk) -> None:
    while talk.engine.spans.drain():
        pass
    began = monotonic_ns()
    await talk.answers(*(ask(prompt, 10, ignore_eos=True) for prompt in PROMPTS[:2]))
    between = monotonic_ns()
    await talk.answers(ask(PROMPTS[2], 10, ignore_eos=True, name=RequestId(-7, next(EVALUATIONS))))
    evaluated = monotonic_ns()
    await talk.answers(ask(PROMPTS[2], 10, ignore_eos=True, name=RequestId(PROOFS - 7, next(EVALUATIONS))))
    await talk.engine.pause(Rollover.DRAIN)
    ended = monotonic_ns()
    await talk.engine.resume()
    spans = talk.engine.spans.drain()
    assert all(began <= span.start_ns <= span.end_ns for span in spans)
    writing = [span for span in spans if span.what in ("", "probe")]
    assert {(span.activity, span.what) for span in writing} == set(WORK)
    for span in writing:
        if span.activity is Activity.GENERATE:
            assert span.start_ns < between
        elif span.activity is Activity.EVAL:
            assert between <= span.end_ns and span.start_ns < evaluated
        else:
            assert evaluated <= span.end_ns <= ended


async def test_what_is_computed_again_is_told_apart(talk: Talk) -> None:
    """Prompt and tokens of a request that goes on, but for the newest; or less, where they are in a cache."""
    whole = (*PROMPTS[0], *range(3, 23))
    before = talk.engine.stats()
    await talk.answers(ask(whole, 2, ignore_eos=True, written=(5, 6, 7, 8)))
    await talk.engine.pause(Rollover.DRAIN)
    after = talk.engine.stats()
    await talk.engine.resume()
    if after.prefilled_tokens or after.recomputed_tokens:  # not every server tells
        assert 3 <= after.recomputed_tokens - before.recomputed_tokens <= len(whole) + 3
        assert after.prefilled_tokens - before.prefilled_tokens <= 1
