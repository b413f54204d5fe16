"""The rewards that ship: values by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.reward import shipped


def test_exact_match():
    assert [shipped.exact_match("", text, "42") for text in ("42", "42 ", "", "4 2")] == [1.0, 0.0, 0.0, 0.0]
    assert shipped.exact_match("", "42", 42) == 1.0
    for answer in (42.0, True, None, ["42"]):
        with pytest.raises(TypeError, match="neither a text nor"):
            shipped.exact_match("", "42", answer)


NUMBERS = [
    ("144", 144),
    ("57 + 87 = 144.", 144),
    ("The answer is 1,204", 1204),
    ("It costs $1,204.50.", Fraction(2409, 2)),
    ("12,34 apples", 34),
    ("1,2345", 2345),
    ("It is -28", -28),
    ("It is −28", -28),
    ("7-3", 3),
    ("x-3", 3),
    ("(2)-3", 3),
    ("= -3", -3),
    ("+5", 5),
    ("2.0", 2),
    (".5", Fraction(1, 2)),
    ("0.5", Fraction(1, 2)),
    ("1/2", Fraction(1, 2)),
    ("-3/4 of it", Fraction(-3, 4)),
    (r"\frac{1}{2}", Fraction(1, 2)),
    (r"\boxed{42} in 3 steps", 42),
    (r"\boxed{1} or rather \boxed{\text{about } {2}} of 9", 2),
    (r"\boxed{none} so 7", 7),
    (r"\boxed{-1{,}000", -1000),
    ("#### 18", 18),
    ("1e3", 1000),
    ("1e-2", Fraction(1, 100)),
    ("3/0", None),
    ("no idea", None),
    ("", None),
    ("9" * 2000, None),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_the_last_number_of_a_text(text, number):
    assert shipped.last_number(text) == number


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_however_a_number_is_written(number, digits):
    written = (f"{number}", f"{number:,}", f"so it is {number:,}.", f"${number}$", f"{number}.{'0' * digits}")
    for text in (*written, f"\\boxed{{{number:,}}}"):
        assert shipped.last_number(text) == number, text


@given(st.text("0123456789,.-+/e{}\\boxedfrac $", max_size=60))
def test_no_text_breaks_it(text):
    shipped.last_number(text)


def test_numeric_match():
    assert shipped.numeric_match("", "so 1,204 it is", "#### 1204") == 1.0
    assert shipped.numeric_match("", "so 0.50", 0.5) == 1.0
    assert shipped.numeric_match("", "3/2", "1/2") == 0.0
    assert shipped.numeric_match("", "nothing", "1") == 0.0
    for answer in ("none", None, True):
        with pytest.raises(ValueError, match="has no number"):
            shipped.numeric_match("", "1", answer)


def test_regex_and_format():
    assert [shipped.regex("", text, r"\d+ (?i:apples)") for text in ("I have 3 Apples", "apples")] == [1.0, 0.0]
    form = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
    good = "<think>so\nit is</think>\n<answer>4</answer>\n"
    assert [shipped.format("", text, form) for text in (good, good + "and", "<answer>4</answer>")] == [1.0, 0.0, 0.0]


def test_lengths_by_hand():
    """DAPO's numbers: at most 20,480 tokens, a buffer of 4,096."""
    assert [shipped.length_penalty("", "", tokens, 64) for tokens in (0, 16, 64)] == [0.0, -0.25, -1.0]
    found = [shipped.soft_overlong("", "", tokens, 20480, 4096) for tokens in (1, 16384, 17408, 20480, 20481, 30000)]
    assert found == [0.0, 0.0, -0.25, -1.0, -1.0, -1.0]


def test_math_verify():
    pytest.importorskip("math_verify")
    for completion, answer, reward in (
        ("the answer is 0.5", r"\frac{1}{2}", 1.0),
        (r"so $\frac{2}{4}$", "1/2", 1.0),
        (r"\boxed{3\sqrt{2}}", r"3\sqrt{2}", 1.0),
        ("3", r"3\sqrt{2}", 0.0),
        ("nothing", 42, 0.0),
        ("", "42", 0.0),
        (r"$\{1,2\}$", r"$\{2,1\}$", 1.0),
    ):
        assert shipped.math_verify("", completion, answer) == reward, completion
    with pytest.raises(ValueError, match="cannot read the answer"):
        shipped.math_verify("", "1", "$$")
