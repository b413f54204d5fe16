"""Relatives of the temperature and the kept set: engine and trainer name the same distribution, at its edges too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.engine.embedded.serving import DECODERS, answers, ask, serving
from tests.right_values.chain import chain_folder
from tests.right_values.learning import completion, judged, trained

# Probabilities of tokens 0, 2, 3, 4, ..., how they are drawn, and by hand what is left of them.
CASES: dict[str, tuple[tuple[float, ...], dict[str, Any], tuple[float, ...]]] = {
    "top_p keeps the token that reaches it": ((0.5, 0.3, 0.2), {"top_p": 0.7}, (0.625, 0.375)),
    "top_p smaller than the likeliest": ((0.5, 0.3, 0.2), {"top_p": 0.2}, (1.0,)),
    "top_p is a share of what top_k left": ((0.4, 0.3, 0.2, 0.1), {"top_p": 0.55, "top_k": 3}, (4 / 7, 3 / 7)),
    "among equals the lower id": ((0.25,) * 4, {"top_k": 2}, (0.5, 0.5)),
    "top_k beyond the vocabulary": ((0.5, 0.5), {"top_k": 10**6}, (0.5, 0.5)),
    "a temperature before the kept set": ((0.6, 0.3, 0.1), {"temperature": 0.5, "top_p": 0.9}, (0.8, 0.2)),
    "a high temperature": ((0.64, 0.16, 0.04), {"temperature": 2.0}, (8 / 14, 4 / 14, 2 / 14)),
    "a low temperature": ((0.6, 0.4), {"temperature": 0.01}, (1.0, 0.0)),
}
IDS = (0, 2, 3, 4)


@pytest.mark.parametrize("kernels", DECODERS)
async def test_what_is_drawn_is_what_is_learnt_from(tmp_path: Path, kernels: str) -> None:
    """Each case has a prompt of its own; every token that may be drawn is, with the logprob that it has by hand, and ratio 1."""
    prompts = {name: 20 + place for place, name in enumerate(CASES)}
    table = {
        prompts[name]: {token: math.log(share) for token, share in zip(IDS, shares, strict=False)}
        for name, (shares, *_) in CASES.items()
    }
    folder = chain_folder(tmp_path, table)
    async with serving(folder, kernels=kernels) as engine:
        for name, (_, sampling, left) in CASES.items():
            requests = [
                ask(prompts[name], (prompts[name],), 1, member=k, ignore_eos=True, **{"temperature": 1.0} | sampling)
                for k in range(40)
            ]
            written = await answers(engine, requests)
            found = {one.token_ids[0]: one.logprobs[0] for one in written.values()}
            wanted = {token: math.log(share) for token, share in zip(IDS, left, strict=False) if share}
            assert found == pytest.approx(wanted, abs=2e-5), name
            members = [(completion((token,), member=k, logprobs=[found[token]]), float(k)) for k, token in enumerate(found)]
            step = await trained(folder, [judged(*members, prompt=(prompts[name],))], rollout=sampling)
            assert step.kept_set_misses == 0.0 and step.logprob_gap_max < 2e-5, name
            assert step.ratio_mean == pytest.approx(1.0, abs=2e-5), name
            entropy = -sum(share * math.log(share) for share in left if share)
            assert step.entropy == pytest.approx(entropy, abs=1e-4), name
