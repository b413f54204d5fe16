"""What a server offers beyond OpenAI's own schema, found out by asking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollyard.engine.openai.answers import Piece
from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.failure import ServerError
from rollyard.types import Sampling

PROMPT = "1, 2, 3,"
EXTENDED: Mapping[str, object] = {"return_token_ids": True, "top_k": -1}  # refused where unknown names are
PLAIN: Mapping[str, object] = {}
WAYS = ((EXTENDED, 5), (PLAIN, 5), (PLAIN, None))  # of asking, and logprobs of the likeliest tokens: the most telling first
TELLING = 0.2  # nats between two tokens; less may be rounding
ROUNDING = 0.05  # nats


@dataclass(frozen=True, slots=True)
class Offer:
    """How a server may be asked, and what it tells."""

    extended: bool  # takes top_k, ignore_eos and return_token_ids, as vLLM and SGLang do
    token_ids: bool  # tells which tokens it sampled
    logprobs: bool  # tells the logprob of each
    tempered: bool  # it is that after temperature
    renormalised: bool  # it is that among the tokens which top_p and top_k kept
    window: int | None  # tokens of prompt and completion, where it says

    @property
    def processed(self) -> bool:
        """Logprobs are always those of the distribution the token was drawn from."""
        return self.tempered and self.renormalised

    def exact(self, sampling: Sampling) -> bool:
        """They are with this sampling. Greedy tokens have theirs at a temperature of 1."""
        tempered = self.tempered or sampling.temperature in (0.0, 1.0)
        return self.logprobs and tempered and (self.renormalised or (sampling.top_p == 1.0 and not sampling.top_k))


async def ask_offer(client: OpenAIClient) -> Offer:
    """Three to five completions of one token. Raises ServerError when no server is there, or it refuses."""
    window = await _window(client)
    plain = Sampling(1, temperature=1.0)
    for extra, logprobs in WAYS:
        try:
            first = await client.complete(PROMPT, plain, logprobs=logprobs, extra=extra)
            break
        except ServerError as error:
            if error.status not in (400, 422) or (extra, logprobs) == WAYS[-1]:
                raise
    hot = await client.complete(PROMPT, Sampling(1, temperature=2.0), logprobs=logprobs, extra=extra)
    narrow = await client.complete(PROMPT, Sampling(1, temperature=1.0, top_p=1e-3), logprobs=logprobs, extra=extra)
    return Offer(
        extended=bool(extra),
        token_ids=first.token_ids is not None,
        logprobs=bool(first.logprobs),
        tempered=_tempered(first, hot),
        renormalised=_renormalised(first, narrow),
        window=window,
    )


async def _window(client: OpenAIClient) -> int | None:
    """As listed. A server without a list is asked all the same; a key that is refused is not."""
    try:
        listed = await client.models()
    except ServerError as error:
        if error.status not in (404, 405):
            raise
        return None
    return next((served.window for served in listed if served.name == client.model), None)


def _tempered(plain: Piece, hot: Piece) -> bool:
    """Are tokens half as far apart at a temperature of 2? What normalises them cancels out."""
    if not plain.top or not hot.top:
        return False
    known = sorted(plain.top[0].keys() & hot.top[0].keys(), key=lambda token: plain.top[0][token])
    if len(known) < 2:
        return False
    apart, apart_hot = (piece.top[0][known[-1]] - piece.top[0][known[0]] for piece in (plain, hot))
    return apart > TELLING and abs(apart_hot - apart / 2) < apart / 8


def _renormalised(plain: Piece, narrow: Piece) -> bool:
    """Is a token certain when no other is kept? Only where it is not certain anyway is that telling."""
    if not plain.top or not narrow.logprobs:
        return False
    return max(plain.top[0].values(), default=0.0) < -ROUNDING < narrow.logprobs[0]
