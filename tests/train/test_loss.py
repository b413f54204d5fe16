"""Policy losses, corrections, divergences and denominators: by hand, or against plain versions in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollyard.config import TrainConfig
from rollyard.train.loss import Denominators, Known, needs_rows, of_rows, part_loss, policy_loss, token_sums
from rollyard.types import Sample

CLIP = TrainConfig(clip_low=0.2, clip_high=0.3, correction="none")
E = math.e


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios])


def known(advantages: list[float], weights: list[float] | None = None, behaviour: Any = None, **more: Any) -> Known:
    """Of one row, unless `trained` says otherwise; sampled with probability 1, where nothing else is said."""
    count = len(advantages)
    values = {"trained": (count,)} | {name: torch.tensor(value) if name != "trained" else value for name, value in more.items()}
    before = torch.zeros(count) if behaviour is None else torch.as_tensor(behaviour)
    return Known(before, torch.tensor(advantages), torch.tensor(weights or [1.0] * count), **values)


def slopes(new: torch.Tensor, about: Known, config: TrainConfig) -> tuple[float, list[float]]:
    """The loss and its gradient."""
    new = new.detach().clone().requires_grad_()
    loss = policy_loss(new, about, config)
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad.tolist()


# ------------------------------------------------------------------------------------------------------------ ppo


def test_each_side_of_the_clip_range_by_hand() -> None:
    """Terms -r A or the clipped one: 1, 1.5 -> 1.3, 0.5, and for A = -1: 1.5, 0.5 -> 0.8. Clipped terms have no slope."""
    new, about = logs(1.0, 1.5, 0.5, 1.5, 0.5), known([1.0, 1.0, 1.0, -1.0, -1.0], [0.2] * 5)
    loss, gradient = slopes(new, about, CLIP)
    sums = token_sums(new, about, CLIP)
    assert loss == sums.loss.item() == pytest.approx((-1.0 - 1.3 - 0.5 + 1.5 + 0.8) / 5)
    assert gradient == pytest.approx([-0.2, 0.0, -0.1, 0.3, 0.0])
    assert sums.clipped.item() == 2
    assert sums.ratio.item() == pytest.approx(5.0)
    assert sums.gap.item() == pytest.approx(2 * math.log(1.5) + 2 * math.log(2))
    assert sums.gap_max.item() == pytest.approx(math.log(2))
    assert sums.ratios.tolist() == pytest.approx([1.0, 1.5, 0.5, 1.5, 0.5])


def test_clip_higher_lets_an_unlikely_token_gain_more() -> None:
    """DAPO's 0.2 and 0.28: a ratio of 1.25 has a slope there, and none at 0.2 and 0.2."""
    assert slopes(logs(1.25), known([1.0]), TrainConfig(clip_high=0.28, correction="none"))[1] == pytest.approx([-1.25])
    assert slopes(logs(1.25), known([1.0]), TrainConfig(clip_high=0.2, correction="none"))[1] == [0.0]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_an_advantage_of_zero_teaches_nothing_and_is_never_clipped(loss: str) -> None:
    new, about, config = logs(0.1, 1.0, 10.0), known([0.0] * 3), CLIP.model_copy(update={"loss": loss})
    assert slopes(new, about, config) == (0.0, [0.0, 0.0, 0.0])
    assert token_sums(new, about, config).clipped.item() == 0


def test_only_the_difference_of_logprobs_counts() -> None:
    """Behaviour -2 and -0.1, now -1.5 and -0.2: ratios e^0.5 and e^-0.1."""
    loss, _ = slopes(torch.tensor([-1.5, -0.2]), known([-1.0, 2.0], behaviour=[-2.0, -0.1]), CLIP)
    assert loss == pytest.approx(math.exp(0.5) - 2 * math.exp(-0.1))


# ----------------------------------------------------------------------------------------------------- gspo, cispo

GSPO = TrainConfig(loss="gspo", clip_low=0.2, clip_high=0.3, correction="none", aggregation="sequence")


def test_the_ratio_of_a_row_by_hand() -> None:
    """Rows of log ratios (0.1, 0.3) and (0.9): s = e^0.2 = 1.2214, unclipped, and e^0.9 > 1.3, clipped with advantage 2 and
    not with -2. Each row weighs 1/2, its tokens 1/4 each: slopes s A / 4."""
    new, weights, s = torch.tensor([0.1, 0.3, 0.9]), [0.25, 0.25, 0.5], math.exp(0.2)
    about = known([1.0, 1.0, 2.0], weights, trained=(2, 1))
    loss, gradient = slopes(new, about, GSPO)
    assert loss == pytest.approx(-s / 2 - 1.3 * 2 / 2)
    assert gradient == pytest.approx([-s / 4, -s / 4, 0.0])
    assert token_sums(new, about, GSPO).clipped.item() == 1
    loss, gradient = slopes(new, known([1.0, 1.0, -2.0], weights, trained=(2, 1)), GSPO)
    assert loss == pytest.approx(-s / 2 + math.exp(0.9)) and gradient[2] == pytest.approx(math.exp(0.9))


def test_the_token_form_has_the_gradient_of_the_row() -> None:
    """GSPO as it stands in the paper: the mean over rows of min(s A, clip(s) A), with the gradient through s itself."""
    drawn, trained = torch.Generator().manual_seed(0), (4, 1, 7, 2)
    new = (torch.randn(14, generator=drawn) * 0.2).requires_grad_()
    behaviour, each = torch.randn(14, generator=drawn) * 0.2, torch.tensor([1.0, -0.5, 2.0, -1.5])
    s = torch.stack([(own - then).mean().exp() for own, then in zip(new.split(trained), behaviour.split(trained), strict=True)])
    expected = -torch.minimum(s * each, s.clamp(0.8, 1.3) * each).mean()
    expected.backward()
    weights = torch.cat([torch.full((count,), 1 / (4 * count)) for count in trained])
    advantages = torch.repeat_interleave(each, torch.tensor(trained))
    loss, gradient = slopes(new, Known(behaviour, advantages, weights, trained), GSPO)
    assert loss == pytest.approx(expected.item(), abs=1e-6) and new.grad is not None
    assert gradient == pytest.approx(new.grad.tolist(), abs=1e-6)


def test_a_clipped_weight_keeps_its_gradient() -> None:
    """CISPO: weights 1, 1.5 -> 1.3, 0.5 -> 0.8; the slope of -w A log p is -w A, on both sides of the range."""
    config = CLIP.model_copy(update={"loss": "cispo"})
    new, about = logs(1.0, 1.5, 0.5), known([1.0, 1.0, -1.0])
    loss, gradient = slopes(new, about, config)
    assert gradient == pytest.approx([-1.0, -1.3, 0.8])
    assert loss == pytest.approx(-1.3 * math.log(1.5) + 0.8 * math.log(0.5))
    assert token_sums(new, about, config).clipped.item() == 2
    unbounded = config.model_copy(update={"clip_low": 1.0})
    assert slopes(new, about, unbounded)[1] == pytest.approx([-1.0, -1.3, 0.5])


# ------------------------------------------------------------------------------------------------------ correction


def corrected(kind: str, **options: Any) -> TrainConfig:
    return TrainConfig(clip_low=0.2, clip_high=0.3, correction=kind, **options)


def test_weights_by_hand() -> None:
    """w = 0.25, 1, 1.5, 4 in a batch that is one step: the clipped ratio is 1 everywhere, the slope -A w' ."""
    new, about = logs(0.25, 1.0, 1.5, 4.0), known([1.0, 1.0, -1.0, 1.0])
    for config, weights, cut in (
        (corrected("truncate"), [0.25, 1.0, 1.5, 2.0], 1),
        (corrected("truncate", correction_cap=1.0), [0.25, 1.0, 1.0, 1.0], 2),
        (corrected("mask"), [0.25, 1.0, 1.5, 0.0], 1),
        (corrected("mask", correction_floor=0.5, correction_cap=5.0), [0.0, 1.0, 1.5, 4.0], 1),
    ):
        loss, gradient = slopes(new, about, config)
        signed = [-weights[0], -weights[1], weights[2], -weights[3]]
        assert gradient == pytest.approx(signed) and loss == pytest.approx(sum(signed))
        sums = token_sums(new, about, config)
        assert (sums.truncated.item(), sums.clipped.item()) == (cut, 0)
        assert sums.ratio.item() == pytest.approx(6.75)  # what is told is new / behaviour


def test_the_weight_of_a_row_is_the_product_of_its_tokens() -> None:
    """Rows of ratios (0.5, 3) and (2, 2): products 1.5, and 4 -> 2 or 0."""
    new, about = logs(0.5, 3.0, 2.0, 2.0), known([1.0] * 4, trained=(2, 2))
    config = corrected("truncate", correction_level="sequence")
    assert slopes(new, about, config)[1] == pytest.approx([-1.5, -1.5, -2.0, -2.0])
    config = corrected("mask", correction_level="sequence")
    assert slopes(new, about, config)[1] == pytest.approx([-1.5, -1.5, 0.0, 0.0])
    assert token_sums(new, about, config).truncated.item() == 2


def test_the_decoupled_objective_by_hand() -> None:
    """Behaviour 1, proximal 0.5, now 1: the ratio 2 is clipped at 1.3 (A = 1), the weight 0.5 stands outside. With A = -1 the
    ratio 2 stays, and so does its slope."""
    about = known([1.0, -1.0], proximal=[math.log(0.5)] * 2)
    loss, gradient = slopes(torch.zeros(2), about, corrected("truncate"))
    assert loss == pytest.approx(0.5 * (-1.3 + 2.0)) and gradient == pytest.approx([0.0, 0.5 * 2.0])
    sums = token_sums(torch.zeros(2), about, corrected("truncate"))
    assert sums.gap_max.item() == pytest.approx(math.log(2))  # of the engine and the policy before the first step
    assert sums.ratios.tolist() == [1.0, 1.0] and sums.clipped.item() == 1


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
def test_a_ratio_that_overflows_is_a_number_and_is_told(loss: str, correction: str) -> None:
    """exp(100) is none in float32. Beyond e^20 a ratio has no slope, a logprob (cispo) has its own; the gap tells how far."""
    new, config = torch.tensor([100.0, 0.0]), corrected(correction, loss=loss)
    for advantage in (1.0, -1.0):
        about = known([advantage, advantage], trained=(1, 1))
        value, gradient = slopes(new, about, config)
        assert math.isfinite(value) and all(map(math.isfinite, gradient))
        if correction == "none":
            assert gradient == pytest.approx([-1.3 * advantage if loss == "cispo" else 0.0, -advantage])
        sums = token_sums(new, about, config)
        assert sums.gap_max.item() == 100.0 and sums.truncated.item() == 1
        assert sums.ratios.tolist() == [pytest.approx(math.exp(20)), 1.0]
    down = token_sums(-new, known([1.0, 1.0], trained=(1, 1)), config)
    assert down.ratios.tolist() == [pytest.approx(0.0), 1.0] and math.isfinite(down.loss.item())


def test_sums_lose_no_small_number_beside_a_large_one() -> None:
    """2^24 + 1 + 1: in float32 the ones are lost."""
    sums = token_sums(torch.tensor([-(2.0**24), -1.0, -1.0]), known([0.0] * 3), CLIP)
    assert sums.gap.item() == 2**24 + 2 and sums.gap_max.item() == 2**24


# ---------------------------------------------------------------------------------------------------------- the KL


def test_estimators_by_hand() -> None:
    """r = log 2 and log 1/2: k1 r; k2 r^2 / 2; k3 1/2 - 1 + log 2 and 2 - 1 - log 2."""
    log2, reference = math.log(2), [0.0, 0.0]
    for kind, values in (
        ("k1", [log2, -log2]),
        ("k2", [log2**2 / 2] * 2),
        ("k3", [log2 - 0.5, 1 - log2]),
    ):
        config = CLIP.model_copy(update={"kl": 0.1, "kl_kind": kind})
        assert token_sums(logs(2, 0.5), known([0.0, 0.0], reference=reference), config).kl.item() == pytest.approx(sum(values))


def test_what_each_estimator_teaches() -> None:
    """Behaviour is now, so ratios are 1. Slopes: k1 as an advantage and k2 c r; k3 c (1 - e^-r)."""
    new, c, about = logs(2, 0.5), 0.1, known([0.0, 0.0], [0.5, 0.5], behaviour=logs(2, 0.5), reference=[0.0, 0.0])
    r = math.log(2)
    for kind, expected in (("k1", [c * r, -c * r]), ("k2", [c * r, -c * r]), ("k3", [c * 0.5, -c])):
        _, gradient = slopes(new, about, CLIP.model_copy(update={"kl": c, "kl_kind": kind}))
        assert gradient == pytest.approx([value / 2 for value in expected]), kind


def test_no_estimator_drives_away_however_far_the_reference_is() -> None:
    """k3 on both sides of 20 nats below: e^20 - 1 - 20 at most, with a gradient below 0 or none. Above, and in k2, no limit."""
    config, most = CLIP.model_copy(update={"kl": 1.0, "kl_kind": "k3"}), math.exp(20) - 21
    for r, value, slope in (
        (-19.0, math.exp(19) - 20, 1 - math.exp(19)),
        (-20.5, most, 0.0),
        (-100.0, most, 0.0),
        (100.0, 99.0, 1.0),
    ):
        about = known([0.0], behaviour=[r], reference=[0.0])
        loss, gradient = slopes(torch.tensor([r]), about, config)
        assert loss == pytest.approx(value, rel=1e-6) and gradient == pytest.approx([slope], rel=1e-6)
        loss, gradient = slopes(torch.tensor([r]), about, config.model_copy(update={"kl_kind": "k2"}))
        assert loss == pytest.approx(r * r / 2) and gradient == pytest.approx([r])


def test_expected_gradients_are_those_of_the_divergences() -> None:
    """Over all of a distribution: k1 and k2 have the gradient of KL(policy | reference), k3 that of KL(reference | policy)."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64).log()
    own = logits.log_softmax(0)
    forward, backward = (reference.exp() * (reference - own)).sum(), (own.exp() * (own - reference)).sum()
    expected = {"k3": torch.autograd.grad(forward, logits, retain_graph=True)[0]}
    expected["k1"] = expected["k2"] = torch.autograd.grad(backward, logits)[0]
    for kind, gradient in expected.items():
        own = logits.log_softmax(0)
        shares = own.detach().exp()  # each token as often as it is drawn
        about = Known(own.detach(), torch.zeros(4), shares, (4,), reference=reference)
        loss = policy_loss(own, about, CLIP.model_copy(update={"kl": 1.0, "kl_kind": kind}))
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient)


# ----------------------------------------------------------------------------------------------- all of it together


def plain(new: np.ndarray, about: Known, config: TrainConfig) -> float:
    """Token by token, in float64, from the formulas alone."""
    then, adv, weights = (tensor.double().numpy() for tensor in (about.behaviour, about.advantages, about.weights))
    near = new if about.proximal is None else about.proximal.double().numpy()
    base, total, first = (then if config.correction == "none" else near), 0.0, 0
    for count in about.trained:
        row = slice(first, first + count)
        whole = np.exp(np.mean(new[row] - base[row]))
        for t in range(first, first + count):
            w = 1.0
            if config.correction != "none":
                w = np.exp(near[t] - then[t] if config.correction_level == "token" else np.sum(near[row] - then[row]))
                outside = not config.correction_floor <= w <= config.correction_cap
                w = min(w, config.correction_cap) if config.correction == "truncate" else (0.0 if outside else w)
            r, a, k = (whole if config.loss == "gspo" else np.exp(new[t] - base[t])), adv[t], 0.0
            if about.reference is not None:
                d = new[t] - float(about.reference[t])
                a = a - config.kl * d if config.kl_kind == "k1" else a
                k = {"k1": 0.0, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[config.kl_kind]
            clip = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
            term = -clip * a * new[t] if config.loss == "cispo" else -min(r * a, clip * a)
            total += weights[t] * (w * term + config.kl * k)
        first += count
    return total


def drawn(seed: int, *, proximal: bool, reference: bool) -> tuple[torch.Tensor, Known]:
    numbers, trained = torch.Generator().manual_seed(seed), (3, 1, 6, 2, 4)
    new, then, near, ref, adv = (torch.randn(16, generator=numbers) * 0.4 for _ in range(5))
    weights = torch.rand(16, generator=numbers)
    return new, Known(then, adv, weights, trained, near if proximal else None, ref if reference else None)


OPTIONS = [
    (loss, correction, level, kl)
    for loss in ("ppo", "gspo", "cispo")
    for correction, level in (("none", "token"), ("truncate", "token"), ("mask", "token"), ("truncate", "sequence"))
    for kl in ("", "k1", "k3")
]


@pytest.mark.parametrize(("loss", "correction", "level", "kl"), OPTIONS)
@pytest.mark.parametrize("proximal", [False, True])
def test_every_combination_equals_the_plain_version(loss: str, correction: str, level: str, kl: str, proximal: bool) -> None:
    """In value; and chunks of tokens that cut rows have the same sum and the same gradient."""
    config = corrected(
        correction, loss=loss, correction_level=level, correction_floor=0.7, correction_cap=1.5, kl=0.3 if kl else 0.0
    ).model_copy(update={"kl_kind": kl or "k3"})
    for seed in range(3):
        new, about = drawn(seed, proximal=proximal, reference=bool(kl))
        value, gradient = slopes(new, about, config)
        assert value == pytest.approx(plain(new.double().numpy(), about, config), abs=1e-5)
        assert token_sums(new, about, config).loss.item() == pytest.approx(value, abs=1e-6)
        first = needs_rows(config, proximal=proximal)
        whole, parts, cut = of_rows(about, new if first else None, config), new.clone().requires_grad_(), 0.0
        for begin in range(0, 16, 5):
            part = slice(begin, min(begin + 5, 16))
            term = part_loss(parts[part], whole, part, config)
            term.backward()
            cut += term.item()
        assert parts.grad is not None and cut == pytest.approx(value, abs=1e-5)
        assert parts.grad.tolist() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(("loss", "correction", "level", "kl"), OPTIONS)
def test_the_order_and_the_company_of_rows_change_nothing(loss: str, correction: str, level: str, kl: str) -> None:
    config = corrected(correction, loss=loss, correction_level=level, kl=0.3 if kl else 0.0)
    config = config.model_copy(update={"kl_kind": kl or "k3"})
    new, about = drawn(7, proximal=False, reference=bool(kl))
    value, gradient = slopes(new, about, config)
    total, each, first = 0.0, [], 0
    for count in about.trained:
        row = slice(first, first + count)
        named = {name: getattr(about, name) for name in ("behaviour", "advantages", "weights", "reference")}
        alone = replace(about, trained=(count,), **{name: None if of is None else of[row] for name, of in named.items()})
        own, slope = slopes(new[row], alone, config)
        total, each, first = total + own, each + slope, first + count
    assert total == pytest.approx(value, abs=1e-6) and each == pytest.approx(gradient, abs=1e-6)


# ---------------------------------------------------------------------------------------------------- denominators


def sample(prompt: int, sampled: int, **more: Any) -> Sample:
    tokens, zeros = prompt + sampled, (0.0,) * (prompt + sampled)
    return Sample(0, 0, (5,) * tokens, (False,) * prompt + (True,) * sampled, zeros, zeros, (), **more)


@pytest.mark.parametrize(
    ("aggregation", "long", "short"), [("token", 1 / 4, 1 / 4), ("sequence", 1 / 6, 1 / 2), ("fixed", 1 / 20, 1 / 20)]
)
def test_what_a_token_counts_by_hand(aggregation: str, long: float, short: float) -> None:
    """Completions of 3 and 1 tokens, of 10 at most, and one that is empty."""
    denominators = Denominators.of([sample(2, 3), sample(4, 1), sample(3, 0)])
    assert denominators == Denominators(tokens=4, sequences=2)
    config = TrainConfig(aggregation=aggregation)
    assert denominators.weight(3, config, max_tokens=10) == pytest.approx(long)
    assert denominators.weight(1, config, max_tokens=10) == pytest.approx(short)


def test_a_rollout_of_several_rows_is_one_sequence() -> None:
    """Rows of 3, 0 and 2 tokens of one rollout, the first one empty in another order; and a rollout of 4 beside it."""
    rows = [sample(2, 3, others=2), sample(6, 0, part=1, others=5), sample(8, 2, part=2, others=3), sample(2, 4)]
    denominators = Denominators.of(rows)
    assert denominators == Denominators(tokens=9, sequences=2)
    assert denominators.weight(3 + 2, TrainConfig(aggregation="sequence"), 10) == pytest.approx(1 / (2 * 5))
    assert Denominators.of([sample(2, 0, others=3), sample(5, 3, part=1)]) == Denominators(3, 1)
    assert Denominators.of([sample(2, 0)]) == Denominators(0, 0)
