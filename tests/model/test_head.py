from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollyard.model import head
from rollyard.model.head import HeadPass, forward_backward
from rollyard.types import Sampling

ROWS, WIDTH, VOCAB = 23, 16, 50
PLAIN = Sampling(9)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, WIDTH, generator=generator) / 2).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (ROWS,), generator=generator)


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One row at a time, the kept set as a Python set, in float64."""
    logprobs, entropies, missed = [], [], []
    for state, target in zip(hidden.double(), targets.tolist(), strict=True):
        logits = weight.double() @ state / temperature
        ranked = sorted(range(VOCAB), key=lambda token: -logits[token].item())
        ranked = ranked[: top_k or VOCAB]
        shares = logits[ranked].softmax(0).tolist()
        kept, held = [], 0.0
        for token, share in zip(ranked, shares, strict=True):
            if held >= top_p:
                break
            kept.append(token)
            held += share
        missed.append(target not in kept)
        kept = sorted({*kept, target})
        every = logits[kept].log_softmax(0)
        logprobs.append(every[kept.index(target)])
        entropies.append(-(every.exp() * every).sum())
    return torch.stack(logprobs), torch.stack(entropies), torch.tensor(missed)


def direction(rows: int = ROWS) -> Tensor:
    """What each logprob counts in the loss of these tests."""
    return torch.linspace(-1, 2, rows)


def run(hidden: Tensor, weight: Tensor, targets: Tensor, sampling: Sampling = PLAIN, chunk: int | None = None) -> HeadPass:
    def loss(logprobs: Tensor, part: slice) -> Tensor:
        return (logprobs * direction(len(targets))[part]).sum()

    return forward_backward(hidden.detach(), weight, targets, loss, sampling, chunk)


@pytest.mark.parametrize("chunk", [1, 7, 23, None])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 1.0, 5), (0.9, 0.7, 12)]
)
def test_equals_the_plain_computation(temperature: float, top_p: float, top_k: int, chunk: int | None) -> None:
    hidden, weight, targets = inputs()
    found = run(hidden, weight, targets, Sampling(9, temperature, top_p, top_k), chunk)
    plain_hidden, plain_weight = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
    expected, expected_entropy, expected_missed = plain(plain_hidden, plain_weight, targets, temperature, top_p, top_k)
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.missed, expected_missed)
    assert found.missed.any() == (top_p < 1 or top_k > 0)
    (expected * direction()).sum().backward()
    torch.testing.assert_close(found.d_hidden, plain_hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, plain_weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cached", [1, 3 * VOCAB, 1000 * VOCAB])
def test_the_size_of_what_is_cached_changes_nothing(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(*inputs())
    monkeypatch.setattr(head, "CACHED_LOGITS", cached)
    for one, other in zip(whole, run(*inputs()), strict=True):
        torch.testing.assert_close(one, other)


def test_a_loss_that_bends_with_the_logprob() -> None:
    """The gradient is taken where the logprob is: of sum exp(logprob), the probabilities."""
    hidden, weight, targets = inputs()
    found = forward_backward(hidden.detach(), weight, targets, lambda logprobs, _: logprobs.exp().sum(), Sampling(9), 4)
    (hidden @ weight.detach().T).softmax(-1).gather(1, targets[:, None]).sum().backward()
    torch.testing.assert_close(found.d_hidden, hidden.grad, rtol=1e-4, atol=1e-6)


def test_gradients_of_the_weight_add_up() -> None:
    hidden, weight, targets = inputs()
    run(hidden, weight, targets)
    once = weight.grad.clone()
    run(hidden, weight, targets, chunk=4)
    torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-4, atol=1e-5)


def test_bfloat16_weights_get_float32_logprobs() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    found = run(hidden, weight, targets, chunk=5)
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32
    assert found.d_hidden.dtype == weight.grad.dtype == torch.bfloat16
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    expected = (exact[0] @ exact[1].T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(found.logprobs, expected.detach(), rtol=0.02, atol=0.02)
    (expected * direction()).sum().backward()
    torch.testing.assert_close(found.d_hidden.float(), exact[0].grad, rtol=0.05, atol=0.05)
    torch.testing.assert_close(weight.grad.float(), exact[1].grad, rtol=0.05, atol=0.1)


def test_autocast_products_leave_float32_gradients() -> None:
    exact = inputs()
    expected = run(*exact)
    hidden, weight, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = run(hidden, weight, targets, chunk=5)
    assert found.logprobs.dtype == found.d_hidden.dtype == weight.grad.dtype == torch.float32
    assert not torch.equal(found.logprobs, expected.logprobs)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found.d_hidden, expected.d_hidden, rtol=0.05, atol=0.05)
    torch.testing.assert_close(weight.grad, exact[1].grad, rtol=0.05, atol=0.1)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = inputs()
    frozen = weight.detach()
    assert run(hidden, frozen, targets, chunk=4).d_hidden.abs().sum() > 0
    assert frozen.grad is None


def largest_allocation(chunk: int) -> int:
    """Bytes of the largest single operator's result for 64 rows and a vocabulary of 5000."""
    hidden, weight = torch.randn(64, 4), torch.randn(5000, 4, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as trace:
        run(hidden, weight, torch.randint(5000, (64,)), chunk=chunk)
    return max(event.self_cpu_memory_usage for event in trace.events())


def test_never_holds_the_logits_of_all_rows() -> None:
    assert largest_allocation(chunk=8) == 8 * 5000 * 4
    assert largest_allocation(chunk=64) == 64 * 5000 * 4


def test_greedy_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        run(*inputs(), Sampling(9, temperature=0.0))
