from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollyard.model.head import sampled_logprobs

ROWS, WIDTH, VOCAB = 23, 16, 50


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


@pytest.mark.parametrize("chunk", [1, 7, 23, None])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 1.0, 5), (0.9, 0.7, 12)]
)
def test_equals_the_plain_computation(temperature: float, top_p: float, top_k: int, chunk: int | None) -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy, missed = sampled_logprobs(
        hidden, weight, targets, temperature=temperature, top_p=top_p, top_k=top_k, chunk=chunk
    )
    plain_hidden, plain_weight = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
    expected, expected_entropy, expected_missed = plain(plain_hidden, plain_weight, targets, temperature, top_p, top_k)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    assert torch.equal(missed, expected_missed)
    assert missed.any() == (top_p < 1 or top_k > 0)
    assert not entropy.requires_grad

    direction = torch.linspace(-1, 2, ROWS)
    (logprobs * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(hidden.grad, plain_hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, plain_weight.grad, rtol=1e-4, atol=1e-5)


def test_bfloat16_weights_get_float32_logprobs() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, entropy, _ = sampled_logprobs(hidden, weight, targets, temperature=1.0, chunk=5)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = (hidden.float() @ weight.float().T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected, rtol=0.02, atol=0.02)
    logprobs.sum().backward()
    reference = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    (reference[0] @ reference[1].T).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    torch.testing.assert_close(weight.grad.float(), reference[1].grad, rtol=0.05, atol=0.1)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = inputs()
    logprobs, _, _ = sampled_logprobs(hidden, weight.detach(), targets, temperature=1.0, chunk=4)
    logprobs.sum().backward()
    assert hidden.grad is not None


def largest_allocation(chunk: int) -> int:
    """Bytes of the largest single operator's result, forward and backward, for 64 rows and a vocabulary of 5000."""
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(5000, 4, requires_grad=True)
    targets = torch.randint(5000, (64,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as trace:
        logprobs, _, _ = sampled_logprobs(hidden, weight, targets, temperature=1.0, chunk=chunk)
        logprobs.sum().backward()
    return max(event.self_cpu_memory_usage for event in trace.events())


def test_never_holds_the_logits_of_all_rows() -> None:
    assert largest_allocation(chunk=8) == 8 * 5000 * 4
    assert largest_allocation(chunk=64) == 64 * 5000 * 4


def test_greedy_is_refused() -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="above 0"):
        sampled_logprobs(hidden, weight, targets, temperature=0.0)
