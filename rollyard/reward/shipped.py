"""Rewards that ship: each a small function, to be named without a file. All but `math_verify` need nothing but texts."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 1000  # characters of a number that is still read as one
NUMBER = re.compile(
    r"(?<![\d.])(?P<sign>(?<![\w)\]}])[-+])?"  # in "7-3" the minus is no sign
    r"(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<part>(?(whole)(?:\.\d+)?|\.\d+))"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\d))?(?P<below>/\d+(?![\d.]))?"
)
FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
BOXED = re.compile(r"\\boxed\s*\{")
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")  # of LaTeX in a text


def unjudged(prompt: str, completion: str) -> float:
    """0 for everything: for callers whose own trainer judges, such as TRL's. There is nothing to be learnt from it here."""
    return 0.0


def exact_match(prompt: str, completion: str, answer: object) -> float:
    """1 when the completion is the answer and nothing else, 0 otherwise. Judges the built-in tasks.

    Raises TypeError for an answer that is neither a text nor a whole number: 0.5 may be meant to be "0.50", or not.
    """
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        raise TypeError(f"the answer {answer!r} is neither a text nor a whole number")
    return float(completion == str(answer))


def numeric_match(prompt: str, completion: str, answer: object) -> float:
    r"""1 when the last number of the completion equals the last one of the answer, 0 otherwise, also when it has none.

    A number in the last \boxed{} counts before any other. 1,204 is 1204, $3.50 is 3.5, 2.0 is 2, \frac{1}{2} and 1/2 are
    0.5; in 7-3 the minus is no sign. Values are compared exactly. The way of scoring GSM8K's answers (arXiv:2110.14168).

    Raises ValueError when the answer has no number.
    """
    wanted = last_number(str(answer))
    if wanted is None or isinstance(answer, bool):
        raise ValueError(f"the answer {answer!r} has no number")
    return float(last_number(completion) == wanted)


def last_number(text: str) -> Fraction | None:
    """The number that counts in a text, None where there is none."""
    boxes = [found.end() for found in BOXED.finditer(text)]
    for part in (*(_boxed(text, start) for start in boxes[-1:]), text):
        plain = FRACTION.sub(r" \1/\2 ", part.replace("−", "-").replace("\\,", "").replace("{,}", ","))
        numbers = [number for found in NUMBER.finditer(plain) if (number := _value(found)) is not None]
        if numbers:
            return numbers[-1]
    return None


def _boxed(text: str, start: int) -> str:
    """From the opening brace to the one that closes it, or to the end."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start:place]
    return text[start:]


def _value(found: re.Match[str]) -> Fraction | None:
    if not found[0] or len(found[0]) > LONGEST:
        return None
    value = Fraction(f"{found['sign'] or ''}{(found['whole'] or '0').replace(',', '')}{found['part']}{found['exponent'] or ''}")
    below = int(found["below"][1:]) if found["below"] else 1
    return value / below if below else None


def regex(prompt: str, completion: str, pattern: str) -> float:
    """1 when `reward.pattern` is found in the completion, 0 otherwise: `re.search` of Python, flags such as (?s) included."""
    return float(re.search(pattern, completion) is not None)


def format(prompt: str, completion: str, form: str) -> float:
    """1 when the whole completion has the form of `reward.format`, 0 otherwise. A dot matches a line's end too.

    The default is the format reward of DeepSeek-R1 (arXiv:2501.12948): thoughts in <think>, then an answer in <answer>.
    """
    return float(re.fullmatch(form, completion, re.DOTALL) is not None)


def length_penalty(prompt: str, completion: str, tokens: int, max_tokens: int) -> float:
    """-tokens / max_tokens: from 0 for nothing to -1 for all that `rollout.max_tokens` allows. To be weighted.

    The plainest of length rewards; those that compare within a group, as Kimi k1.5 does (arXiv:2501.12599), are another thing.
    """
    return -tokens / max_tokens


def soft_overlong(prompt: str, completion: str, tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, section 3.4, equation 13), in tokens.

    0 up to max_tokens - buffer; then (max_tokens - buffer - tokens) / buffer, which falls to -1 at max_tokens; -1 beyond.
    `buffer` is `reward.overlong_buffer`, by default a fifth of `rollout.max_tokens`, as in the paper (4096 of 20480).
    """
    return max(-1.0, min(0.0, (max_tokens - buffer - tokens) / buffer))


def math_verify(prompt: str, completion: str, answer: object) -> float:
    r"""1 when math-verify holds the completion's answer and the right one to be equal, 0 otherwise.

    An answer without $ or \boxed around it is taken to be LaTeX as a whole. What math-verify cannot read or compare is 0, as
    it says itself; what takes it more than 3 s is no verdict (by itself it would say: not equal).

    Raises ValueError when it cannot read the answer. It sets signals: only in a main thread.
    """
    from math_verify import parse, verify

    text = str(answer)
    gold = parse(text if any(each in text for each in DELIMITERS) else f"\\boxed{{{text}}}", parsing_timeout=3)
    if not gold:
        raise ValueError(f"math-verify cannot read the answer {answer!r}")
    try:
        found = parse(completion, parsing_timeout=3, raise_on_error=True)
        return float(verify(gold, found, timeout_seconds=3, raise_on_error=True))
    except Exception:  # noqa: BLE001 - of math-verify and sympy; one that ran out of time is none of these
        return 0.0
