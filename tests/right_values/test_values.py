"""Thirteen values that must be right, through the parts that a run uses. What resembles them stands beside this file."""

from __future__ import annotations

import importlib.util
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rollyard import events as ev
from rollyard.model.tokenizer import Tokenizer
from rollyard.reward.direct import Direct
from rollyard.types import Completion, FinishReason, Group, Prompt, Rollout, WeightVersion
from rollyard.watch.step import Step
from rollyard.watch.timeline import PhaseSeconds
from tests.engine.contract.makers import MAKERS, Options
from tests.engine.contract.talk import Talk, ask
from tests.engine.embedded.serving import DECODERS, answers, serving
from tests.engine.embedded.serving import ask as member_of
from tests.right_values import learning
from tests.right_values.chain import EOS, chain_folder, save_pieces, spelt
from tests.right_values.fleet import Fleet
from tests.right_values.hand import Hand
from tests.right_values.learning import TINY, advantages, completion, judged, trained

EXAMPLE = Path(__file__).parents[2] / "examples" / "external_trainer" / "trainers.py"
A, B = 0, 1


async def test_1_uneven_groups_that_come_mixed() -> None:
    """Prompts A, B, A, B, A with 0, 5, 0, 5, 3: each compared with its own, though B lost a member on the way."""
    hand = Hand(group_size=3, groups_per_batch=2, min_scored=2)
    hand.offer(A, B)
    for group, member, value in ((A, 0, 0.0), (B, 0, 5.0), (A, 1, 0.0), (B, 1, 5.0), (A, 2, 3.0)):
        hand.write(group, member)
        hand.judge(group, member, value)
    hand.fail(B, 2)
    taken = hand.take()
    assert taken is not None and [group.rewards for group in taken.groups] == [(0.0, 0.0, 3.0), (5.0, 5.0)]
    assert await advantages(taken.groups, kind="dr_grpo") == [[-1.0, -1.0, 2.0], [0.0, 0.0]]
    first, second = await advantages(taken.groups, kind="grpo", std="sample", eps=TINY)
    assert first == pytest.approx([-0.57735, -0.57735, 1.154701], abs=1e-6) and second == [0.0, 0.0]


async def test_2_no_verdict_is_no_zero() -> None:
    """1, none, 0 without std: 0.5, not trained on, -0.5. A single verdict: 0."""
    hand = Hand(group_size=3, groups_per_batch=2)
    hand.offer(0, 1)
    for group, values in ((0, (1.0, None, 0.0)), (1, (None, 7.0, None))):
        for member, value in enumerate(values):
            hand.write(group, member)
            hand.judge(group, member, value)
    taken = hand.take()
    assert taken is not None
    assert await advantages(taken.groups, kind="grpo", std="none") == [[0.5, None, -0.5], [None, 0.0, None]]
    assert (await advantages(taken.groups, kind="grpo", eps=TINY))[1] == [None, 0.0, None]


async def test_3_seven_tenths_of_float32_are_exactly_equal() -> None:
    scorer = Direct("tenth", lambda prompt, completion: np.float32(0.1), {}, 8)
    done = [completion(member=member) for member in range(7)]
    rewards = [await scorer.score(Prompt(0, 0, (3,), "p"), each) for each in done]
    await scorer.close()
    assert [reward.value for reward in rewards] == [float(np.float32(0.1))] * 7
    group = Group(Prompt(0, 0, (3,), "p"), tuple(Rollout(each, reward) for each, reward in zip(done, rewards, strict=True)))
    for kind in ("grpo", "dr_grpo", "rloo"):
        assert await advantages([group], kind=kind) == [[0.0] * 7]


@pytest.mark.parametrize("prompts", [10, 1])
async def test_4_so_many_completions_of_each_prompt_whatever_the_engines(prompts: int) -> None:
    fleet = Fleet(prompts, engines=4)
    await fleet.run()
    assert [len(batch) for batch in fleet.batches] == [prompts]
    done = [(group.id, each.completion.member) for group in fleet.batches[0] for each in group.rollouts]
    assert sorted(done) == [(prompt, member) for prompt in range(prompts) for member in range(3)]
    assert sum(fleet.asked.values()) == 3 * prompts
    if prompts == 10:
        assert len(fleet.asked) == 4, "an engine had nothing to do"


@pytest.mark.parametrize(("limit", "cap", "live"), [(1, 0, 20), (1, 15, 15), (0, 0, 10)])
async def test_5_batches_that_do_not_divide_evenly(limit: int, cap: int, live: int) -> None:
    """23 prompts in batches of 10: steps of 10, 10, 3, each prompt once, and it ends."""
    fleet = Fleet(23, engines=2, max_staleness=limit, max_live_groups=cap)
    await fleet.run()
    assert [len(batch) for batch in fleet.batches] == [10, 10, 3]
    assert sorted(group.id for batch in fleet.batches for group in batch) == list(range(23))
    assert fleet.most_live == live
    assert fleet.core.counts.trained == fleet.core.counts.admitted == 23 and not fleet.core.counts.dropped


async def test_6_masks_come_from_lengths() -> None:
    """Pad and end are both 0: a 0 that was sampled is learnt, one that fills a row is not."""
    long, short, wide = (completion(ids, member=k) for k, ids in enumerate([(5, 7, 0), (5,), (5, 6, 7, 8, 9)]))
    found = await learning.rows([judged((long, 1.0), (short, 0.0), (wide, 0.5), prompt=(3,))])
    samples = [found[0, member] for member in range(3)]
    assert [sample.mask for sample in samples] == [(False, *(True,) * n) for n in (3, 1, 5)]
    padded = _example().Rows(samples, "cpu")  # as a trainer sees them that pads
    assert [[int(on) for on in row[1:]] for row in padded.mask.tolist()][:2] == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert padded.ids[:2, 1:].tolist() == [[5, 7, 0, 0, 0], [5, 0, 0, 0, 0]]


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("external_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kernels", DECODERS)
async def test_7_the_end_of_sequence_is_a_set(tmp_path: Path, kernels: str) -> None:
    """Ends 1 and 106: of 9 9 106, 9 9 9 and 9 1 only the second is truncated."""
    folder = chain_folder(tmp_path, {20: {9: 0.0}, 9: {9: 0.0, 106: 0.0, 1: 0.0}}, ends=(1, 106))
    requests = [member_of(0, (20,), 3, member=k, temperature=1.0) for k in range(60)]
    async with serving(folder, kernels=kernels) as engine:
        written = await answers(engine, requests)
    by_tokens = {tuple(one.token_ids): one for one in written.values()}
    assert all(
        one.finish is (FinishReason.STOP if ids[-1] in (1, 106) else FinishReason.LENGTH) for ids, one in by_tokens.items()
    )
    wanted = ((9, 9, 106), (9, 9, 9), (9, 1))
    ends = [by_tokens[ids].finish or FinishReason.ERROR for ids in wanted]
    group = judged(*((completion(ids, end, member=k), 0.0) for k, (ids, end) in enumerate(zip(wanted, ends, strict=True))))
    step = Step(1, WeightVersion(1), (group,), learning.stats(), PhaseSeconds(), 8, {})
    assert step.to_metrics()["completion_truncated_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("maker", ["embedded-native", "embedded-plain", "sglang", "openai"])
async def test_8_a_stop_string_over_token_borders(tmp_path: Path, maker: str) -> None:
    """an|swer|</ans|wer>!|x with the stop string </answer>: four ids, four logprobs, and the text before it."""
    folder = chain_folder(tmp_path, spelt(4, 0, 1, 2, 3, 4), ends=(EOS,))
    save_pieces(folder)
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(MAKERS[maker].open(folder, tmp_path, Options()))
        talk = Talk(served, MAKERS[maker], folder)
        stack.push_async_callback(talk.leave)
        await talk.calm()
        (heard,) = await talk.answers(ask((4,), 9, stop=("</answer>",), temperature=1.0))
    assert heard.token_ids == [0, 1, 2, 3] and heard.logprobs == pytest.approx([0.0] * 4, abs=1e-5)
    assert heard.finish is FinishReason.STOP
    assert Tokenizer(folder).completion_text(heard.token_ids, ("</answer>",), heard.finish) == "answer"


async def test_9_what_the_window_leaves() -> None:
    """Window 32, up to 8 tokens: a prompt of 30 may write 2; one of 32 and one of 40 are dropped, the others unharmed."""
    hand = Hand(group_size=2, groups_per_batch=2, window=32)
    said = hand.send(
        ev.PromptsOffered(tuple(Prompt(i, i, (7,) * n, "p") for i, n in enumerate((30, 32, 40, 31))), exhausted=True)
    )
    assert {(each.request.id.group, each.request.sampling.max_tokens) for each in said if isinstance(each, ev.Generate)} == {
        (0, 2), (3, 1)
    }  # fmt: skip
    assert [drop for drop in hand.dropped() if drop[1] is None] == [(1, None, "context"), (2, None, "context")]
    for group, tokens in ((0, (5, 6)), (3, (5,))):
        for member in range(2):
            hand.write(group, member, tokens, FinishReason.LENGTH)
            hand.judge(group, member, float(member))
    assert {done.finish for done in hand.completions()} == {FinishReason.CONTEXT}  # room was what ended them
    taken = hand.take()
    assert taken is not None and [group.id for group in taken.groups] == [0, 3]
    assert all(len(group.rollouts) == 2 for group in taken.groups)


@pytest.mark.parametrize("kernels", DECODERS)
async def test_10_the_temperature_is_the_same_on_both_sides(tmp_path: Path, kernels: str) -> None:
    """Logits 2 and 0 at temperature 0.5: token 0 has probability e^4 / (e^4 + 1)."""
    folder = chain_folder(tmp_path, {7: {0: 2.0, 2: 0.0}})
    done = await _first_token_0(folder, kernels, temperature=0.5)
    assert done.logprobs == pytest.approx((-0.01815,), abs=1e-5)
    step = await trained(folder, [judged((done, 1.0), prompt=(7,))], rollout={"temperature": 0.5})
    assert step.ratio_mean == pytest.approx(1.0, abs=1e-5) and step.logprob_gap_max < 1e-5 and step.tokens == 1
    other = replace(done, logprobs=(0.0,))  # the gap is then all of the trainer's own logprob
    step = await trained(folder, [judged((other, 1.0), prompt=(7,))], rollout={"temperature": 0.5})
    assert step.logprob_gap_max == pytest.approx(0.01815, abs=1e-5)


@pytest.mark.parametrize("kernels", DECODERS)
async def test_11_the_kept_set_is_the_same_on_both_sides(tmp_path: Path, kernels: str) -> None:
    """0.5, 0.3, 0.2 with top_k 2: token 0 is drawn with 0.5 / 0.8, and the trainer renormalises alike."""
    logits = [float(np.log(share)) for share in (0.5, 0.3, 0.2)]
    folder = chain_folder(tmp_path, {7: {0: logits[0], 2: logits[1], 3: logits[2]}})
    done = await _first_token_0(folder, kernels, top_k=2)
    assert done.logprobs == pytest.approx((float(np.log(0.5 / 0.8)),), abs=1e-5)
    step = await trained(folder, [judged((done, 1.0), prompt=(7,))], rollout={"top_k": 2})
    assert step.ratio_mean == pytest.approx(1.0, abs=1e-5) and step.logprob_gap_max < 1e-5
    assert step.kept_set_misses == 0.0


async def _first_token_0(folder: Path, kernels: str, temperature: float = 1.0, top_k: int = 0) -> Completion:
    """A completion of one token, which is 0."""
    requests = [member_of(0, (7,), 1, member=k, temperature=temperature, top_k=top_k, ignore_eos=True) for k in range(20)]
    async with serving(folder, kernels=kernels) as engine:
        written = await answers(engine, requests)
    one = next(one for one in written.values() if one.token_ids == [0])
    return completion(one.token_ids, FinishReason.LENGTH, logprobs=one.logprobs)


async def test_12_a_completion_by_two_versions() -> None:
    """a b by version 1, cut, c by version 2."""
    hand = Hand(version=1, group_size=1, max_staleness=1)
    hand.offer(7)
    first = hand.requests[7, 0]
    hand.send(ev.EngineHeld("e"))
    hand.write(7, 0, (11, 12), FinishReason.ABORT)
    hand.version = 2
    hand.load()
    hand.send(ev.EngineReleased("e"))
    second = hand.requests[7, 0]
    assert second.written_ids == (11, 12) and second.seed == first.seed and second.prompt_ids == first.prompt_ids
    assert second.sampling == replace(first.sampling, max_tokens=first.sampling.max_tokens - 2)
    hand.write(7, 0, (13,), FinishReason.STOP)
    (done,) = hand.completions()
    assert [span.version.step for span in done.spans for _ in range(span.tokens)] == [1, 1, 2]
    found = await learning.rows([judged((done, 1.0), id_=7)])
    sample = found[7, 0]
    assert sample.mask == (False, False, True, True, True) and sample.token_ids[2:] == (11, 12, 13)
    assert sum(span.tokens for span in sample.spans) == 3


RULES = dict(max_staleness=2, groups_per_batch=4)


class Test13:
    """Staleness limit 2, batches of 4, resumed at version 10: 40 groups were admitted and consumed."""

    def test_nothing_live(self) -> None:
        assert Hand(version=10, **RULES).first == 12

    def test_five_live(self) -> None:
        assert Hand(version=10, **RULES).offer(*range(40, 45)) == 7

    def test_five_finished_before_and_still_live(self) -> None:
        recovered = [learning.rewarded(0.0, 1.0, id_=id_) for id_ in range(40, 45)]
        versions = [replace(group, rollouts=tuple(_by(each, 10) for each in group.rollouts)) for group in recovered]
        hand = Hand(version=10, recovered=versions, **RULES)
        assert hand.offer(*range(40, 45)) == 7
        assert not hand.requests, "they are finished"

    def test_one_dropped_while_live(self) -> None:
        hand = Hand(version=10, **RULES)
        assert hand.offer(*range(40, 52)) == 0
        assert hand.room(hand.fail(44, 0)) == 0  # its group is live as long as a member is
        assert hand.room(hand.fail(44, 1)) == 1

    def test_three_versions_behind_with_limit_3(self) -> None:
        """Begun at version 3, trained at 6."""
        hand = Hand(version=3, max_staleness=3, group_size=1)
        assert hand.first == 4
        hand.offer(0, 1, 2, 3)
        self.train_three(hand)
        hand.write(3, 0, (5, 1), version=3)
        hand.judge(3, 0, 1.0)
        taken = hand.take()
        assert taken is not None and (taken.step, taken.groups[0].id) == (6, 3)
        (span,) = taken.groups[0].rollouts[0].completion.spans
        assert taken.step - span.version.step == 3

    def test_three_versions_behind_with_limit_2(self) -> None:
        """What will be trained at 6 is not begun at 3; what an engine writes of version 3 all the same is refused."""
        hand = Hand(version=3, max_staleness=2, group_size=1, retries=1)
        assert hand.first == 3
        hand.offer(0, 1, 2)
        self.train_three(hand)
        hand.offer(3)
        assert (3, 0) not in hand.requests, "the engine is at version 3"
        hand.load()
        hand.send(ev.EngineLoaded("e", WeightVersion(6)))
        hand.write(3, 0, (5, 1), version=3)
        assert not [done for done in hand.completions() if done.group == 3]
        assert hand.request(3).attempt == 1 and hand.requests[3, 0].written_ids == ()

    @pytest.mark.parametrize(("limit", "joins"), [(3, True), (2, False)])
    def test_three_versions_behind_after_a_restart(self, limit: int, joins: bool) -> None:
        group = learning.rewarded(1.0, id_=9)
        old = replace(group, rollouts=tuple(_by(each, 3) for each in group.rollouts))
        hand = Hand(version=6, recovered=[old], max_staleness=limit, group_size=1)
        hand.offer(9)
        taken = hand.take()
        assert (taken is not None) == joins == ((9, 0) not in hand.requests)

    @staticmethod
    def train_three(hand: Hand) -> None:
        for group in range(3):
            hand.write(group, 0, version=3)
            hand.judge(group, 0, 1.0)
            assert hand.take() is not None
            hand.train()


def _by(rollout: Rollout, version: int) -> Rollout:
    done = rollout.completion
    by = WeightVersion(version)
    return replace(rollout, completion=replace(done, spans=tuple(span._replace(version=by, oldest_kv=by) for span in done.spans)))
