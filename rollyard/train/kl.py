"""The divergence of the policy from a reference, estimated on tokens that the policy sampled.

With r = logprob now - logprob of the reference, of a sampled token:

    k1 = r                    k2 = r^2 / 2                    k3 = exp(-r) - 1 + r

Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html. In value, on fresh samples, k1 and k3
have KL(policy | reference) as their mean (k3 is never negative and varies less), and k2 is close to it near the reference.

What is optimised differs (https://arxiv.org/abs/2506.09477): the gradient of k1 itself is 0 in the mean, so k1 is not added to
the loss but taken from the token's advantage, as a penalty in the reward is; then, and with k2 added to the loss, what falls is
KL(policy | reference). k3 added to the loss (as in GRPO, https://arxiv.org/abs/2402.03300, equation 4) has the gradient of
KL(reference | policy). All are of each token's own distribution, after what the policy had written: what a token does to
later ones is in none of them. k1 is clipped and weighed with the advantage; k2 and k3 are not, and a token counts in them as
`train.aggregation` says. In k3 an r below -20 counts as -20 and has no gradient: float32 has no e^100.
"""

from __future__ import annotations

from torch import Tensor

from rollyard.config import TrainConfig
from rollyard.train.correction import limited


def estimate(new: Tensor, reference: Tensor, config: TrainConfig) -> Tensor:
    """Logprobs `[tokens]` of both -> nats `[tokens]`. Differentiable in `new`."""
    ratio = new - reference
    if config.kl_kind == "k1":
        return ratio
    if config.kl_kind == "k2":
        return ratio.square() / 2
    inverse = limited(-ratio)  # in both terms, else what is left of the gradient beyond the limit points away from the reference
    return inverse.exp() - 1 - inverse
