from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.schemas.numbers import NumberRange, exact, text_of

EDGES = [0, 1, 9, 10, 99, 100, 2**53, 2**63, 2**64, 10**17, 10**40]
WHOLE = st.builds(
    lambda edge, near, sign: Fraction(sign * edge + near), *map(st.sampled_from, (EDGES, range(-2, 3), (-1, 1)))
)
DECIMAL = st.builds(Fraction, st.integers(-3000, 3000), st.sampled_from([1, 4, 10, 100, 1000]))
BOUND = st.none() | WHOLE | DECIMAL
STEP = st.none() | st.sampled_from(
    [
        Fraction(text)
        for text in ("1", "2", "8", "250", "7", "5e9", "1e12", "0.1", "0.25", "0.005", "1e-12", "1.5", "0.7")
    ]
)
RANGES = st.builds(NumberRange, BOUND, BOUND, st.booleans(), st.booleans(), STEP, st.booleans())


def texts_near(*numbers: Fraction | None) -> set[str]:
    found = {"0", "-0", "0.0", "7", "-10", "0.10", "123456.5"}
    for number in numbers:
        for digits in (0, 1, 3):
            for near in (-11, -1, 0, 1, 9):
                value = Fraction(int((number or 0) * 10**digits) + near, 10**digits)
                found |= {text_of(value), f"{text_of(value)}0" if value.denominator > 1 else f"{text_of(value)}.0"}
    return found


@given(RANGES)
def test_patterns_match_the_numbers_of_a_range(numbers: NumberRange) -> None:
    tight = numbers.tightened()
    candidates = texts_near(numbers.low, numbers.high, numbers.step)
    for text in candidates:
        is_kept = Fraction(text) in tight
        assert not is_kept or Fraction(text) in numbers
        # Those that are left out are next to an exclusive bound.
        edges = [bound for bound in (numbers.low, numbers.high) if bound and abs(bound) < 2**53]
        is_near = any(abs(Fraction(text) - edge) <= abs(edge) / 10**13 for edge in edges)
        assert is_kept or Fraction(text) not in numbers or is_near
    if tight.is_empty:
        assert not any(Fraction(text) in numbers for text in candidates)
        return
    patterns = tight.patterns()
    if patterns is None:  # the last digits do not decide
        assert numbers.step in (7, Fraction(3, 2), Fraction(7, 10))
        return
    for text in candidates:
        is_matched = all(re.fullmatch(pattern, text) for pattern in patterns)
        assert not is_matched or Fraction(text) in numbers
        # An integer has no decimals, and enumerated numbers have one notation.
        is_expected = Fraction(text) in tight and text == text_of(Fraction(text))
        assert is_matched or not is_expected


@given(st.floats(1e-30, 1e15), st.booleans(), st.integers(1, 30))
def test_no_text_is_read_as_an_exclusive_bound(bound: float, is_low: bool, digits: int) -> None:
    """Text with more digits than a double has, such as 0.99999999999999999999, is the double 1 for its readers."""
    limit, sign = exact(bound), 1 if is_low else -1
    far = limit + sign * abs(limit)  # so that there are others
    numbers = NumberRange(limit, far, is_open_low=True) if is_low else NumberRange(far, limit, is_open_high=True)
    patterns = numbers.tightened().patterns()
    assert patterns is not None
    decimals = len(text_of(limit).partition(".")[2]) + digits
    text = text_of(limit + sign * Fraction(1, 10**decimals))
    assert not all(re.fullmatch(pattern, text) for pattern in patterns) or float(text) != bound
    near = text_of(exact(bound * (1 + sign * 1e-13)))
    assert all(re.fullmatch(pattern, near) for pattern in patterns)


@pytest.mark.parametrize("bound", [Fraction(10) ** 300, Fraction("1.7976931348623157e308")])
def test_patterns_of_large_bounds_are_short(bound: Fraction) -> None:
    for numbers in (NumberRange(bound), NumberRange(-bound, bound), NumberRange(high=-bound, is_open_high=True)):
        patterns = numbers.patterns()
        assert sum(map(len, patterns)) < 20_000
        for number in (bound, -bound, 2 * bound, -2 * bound):
            is_matched = all(re.fullmatch(pattern, text_of(number)) for pattern in patterns)
            assert is_matched == (number in numbers)
