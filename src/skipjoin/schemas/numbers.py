"""Exact ranges of JSON numbers, and regular expressions of their texts.

The compiler of grammars reads numbers as doubles, so it is exact below 2^53 only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

# Doubles represent all integers below it.
EXACT_BELOW = 2**53
# Digits of a decimal that the compiler keeps.
_EXACT_DIGITS = 15
# Numbers below it have decimals within these digits.
_MAX_SHORT = 10**12
# Multiples that are enumerated, as numbers or as last digits.
_MAX_MULTIPLES = 1024
# Largest coefficient of multipleOf that the compiler handles in about 10 ms. Its time grows with the coefficient.
_MAX_COEFFICIENT = 1000
# Decimals of multipleOf beyond which the compiler reads other digits than the schema has.
_MAX_DECIMALS = 6
_ANY_DECIMALS = r"(\.[0-9]+)?"
_REPEATED = re.compile(r"(\d)\1{5,}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact(value: float) -> Fraction:
    """Return a number exactly. A double is what its shortest text says."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def is_inexact(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(is_inexact, value.values()))
    if isinstance(value, list):
        return any(map(is_inexact, value))
    return is_number(value) and abs(value) >= EXACT_BELOW


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Numbers between two bounds, of which None is no bound, that are multiples of `step`, if given."""

    low: Fraction | None = None
    high: Fraction | None = None
    is_open_low: bool = False
    is_open_high: bool = False
    step: Fraction | None = None
    is_integer: bool = False

    def __contains__(self, value: Fraction) -> bool:
        if self.low is not None and (value < self.low or (self.is_open_low and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.is_open_high and value == self.high)):
            return False
        if self.is_integer and value.denominator != 1:
            return False
        return self.step is None or (value / self.step).denominator == 1

    @property
    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.is_open_low or self.is_open_high))

    def tightened(self) -> NumberRange:
        """Return the same numbers, with bounds that are among them where the numbers are multiples or doubles.

        Readers take 0.99999999999999999999 for the double 1, which an exclusive bound of 1 must not allow.
        """
        step = self.step
        if self.is_integer:
            step = Fraction(1) if step is None else Fraction(step.numerator)  # the integers among the multiples
        if step is None:
            closed = self._closed(_shorter)
            return self._closed(_neighbor) if closed.is_empty else closed
        low, high = self.low, self.high
        if low is not None:
            low = math.ceil(low / step) * step + (step if self.is_open_low and (low / step).denominator == 1 else 0)
        if high is not None:
            high = math.floor(high / step) * step - (
                step if self.is_open_high and (high / step).denominator == 1 else 0
            )
        return NumberRange(low, high, step=None if self.is_integer and step == 1 else step, is_integer=self.is_integer)

    def _closed(self, nearest: Callable[[Fraction, float], Fraction]) -> NumberRange:
        """Return the numbers with inclusive bounds `nearest` to the exclusive ones.

        Zero stays, since its neighbors have hundreds of digits, and so do bounds beyond which integers are no doubles.
        """
        low, high = self.low, self.high
        is_low, is_high = (bound is not None and 0 < abs(bound) < EXACT_BELOW for bound in (low, high))
        is_low, is_high = is_low and self.is_open_low, is_high and self.is_open_high
        return NumberRange(
            nearest(low, math.inf) if low is not None and is_low else low,
            nearest(high, -math.inf) if high is not None and is_high else high,
            self.is_open_low and not is_low,
            self.is_open_high and not is_high,
        )

    @property
    def is_exact_in_doubles(self) -> bool:
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if any(abs(bound) >= EXACT_BELOW for bound in bounds):
            return False
        if any(bound.denominator != 1 and abs(_decimal(bound)[0]) >= 10**_EXACT_DIGITS for bound in bounds):
            return False
        if self.step is None:
            return True
        coefficient, digits = _decimal(self.step)
        # It compares fractional multiples with bounds in doubles, so that 0.3 may be more than 3 times 0.1.
        return coefficient <= _MAX_COEFFICIENT and digits <= _MAX_DECIMALS and not (digits and bounds)

    def is_compilable(self) -> bool:
        """Return whether the compiler accepts the numbers, though it may take too long."""
        bounds = (self.low, self.high)
        return all(bound is None or abs(bound) < EXACT_BELOW for bound in bounds) and (
            self.step is None or _decimal(self.step)[0] < 2**32
        )

    def patterns(self) -> list[str] | None:
        """Return regular expressions of which a text must match all, or None if there are none of bounded size."""
        if (texts := self._multiples()) is not None:
            return ["|".join(map(re.escape, texts))]
        step = [] if self.step is None else _multiples_of(self.step, is_integer=self.is_integer)
        if step is None:
            return None
        bounds = [
            *([_at_least(self.low, is_open=self.is_open_low)] if self.low is not None else []),
            *([_at_most(self.high, is_open=self.is_open_high)] if self.high is not None else []),
        ]
        fraction = "" if self.is_integer else r"(\.[0-9]+)?"
        return [f"-?(0|[1-9][0-9]*){fraction}", *step, *bounds]

    def _multiples(self) -> list[str] | None:
        step = self.step or (Fraction(1) if self.is_integer else None)
        if step is None or self.low is None or self.high is None:
            return None
        count = math.floor(self.high / step) - math.ceil(self.low / step) + 1
        if count > _MAX_MULTIPLES:
            return None
        first = math.ceil(self.low / step) * step
        return [text_of(value) for number in range(count) if (value := first + number * step) in self]


def _shorter(bound: Fraction, limit: float) -> Fraction:
    """Return the next number of few digits, in which the compiler has bounds, in the direction of `limit`."""
    if abs(bound) >= _MAX_SHORT:
        return _neighbor(bound, limit)
    step = Fraction(10) ** (math.floor(math.log10(abs(bound))) - _EXACT_DIGITS + 1)
    return (math.floor(bound / step) + 1) * step if limit > 0 else (math.ceil(bound / step) - 1) * step


def _neighbor(bound: Fraction, limit: float) -> Fraction:
    """Return the next double in the direction of `limit`."""
    value = float(bound)
    while (exact(value) <= bound) if limit > 0 else (exact(value) >= bound):
        value = math.nextafter(value, limit)
    return exact(value)


def text_of(value: Fraction) -> str:
    coefficient, digits = _decimal(abs(value))
    whole, rest = divmod(coefficient, 10**digits)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole}.{rest:0{digits}d}" if digits else f"{sign}{whole}"


def _decimal(value: Fraction) -> tuple[int, int]:
    digits = 0
    denominator = value.denominator
    for prime in (2, 5):
        count = 0
        while denominator % prime == 0:
            denominator //= prime
            count += 1
        digits = max(digits, count)
    assert denominator == 1
    return int(value * 10**digits), digits


def _multiples_of(step: Fraction, *, is_integer: bool) -> list[str] | None:
    """Return regular expressions of multiples by their last digits, if these decide."""
    coefficient, digits = _decimal(step)
    zeros = 0
    while coefficient % 10 == 0:
        coefficient //= 10
        zeros += 1
    last = next((n for n in range(11) if 10**n % coefficient == 0), None)
    if last is None or (digits and last > digits) or 10**last // coefficient > _MAX_MULTIPLES:
        return None
    endings = [f"{value:0{last}d}" if last else "" for value in range(0, 10**last, coefficient)]
    if digits:  # the coefficient does not end with a zero
        lead = digits - last
        options = [f"[0-9]{{{lead}}}({'|'.join(endings)})", *([f"[0-9]{{1,{lead}}}"] if lead else [])]
        options += [short for ending in endings if (short := ending.rstrip("0")) != ending and short and not lead]
        return [rf"-?[0-9]+(\.({'|'.join(options)})?0*)?"]
    tail = (f"({'|'.join(endings)})" if last else "") + f"0{{{zeros}}}"
    small = [str(int(ending + "0" * zeros or "0")) for ending in endings]
    fraction = "" if is_integer else r"(\.0+)?"
    return [f"-?([1-9][0-9]*{tail}|{'|'.join(small)}){fraction}"]


# -- bounds -----------------------------------------------------------------------------------------------------------


def _at_least(bound: Fraction, *, is_open: bool) -> str:
    if bound > 0:
        return _above(bound, is_open=is_open)
    if bound == 0 and is_open:
        return "[0-9.]*[1-9].*"
    return f"[0-9].*|-({_below(-bound, is_open=is_open)})"


def _at_most(bound: Fraction, *, is_open: bool) -> str:
    if bound < 0:
        return f"-({_above(-bound, is_open=is_open)})"
    if bound == 0 and is_open:
        return "-.*[1-9].*"
    return f"-.*|{_below(bound, is_open=is_open)}"


def _above(bound: Fraction, *, is_open: bool) -> str:
    """Return a regular expression of texts without a sign from a positive bound up."""
    whole, _, decimals = text_of(bound).partition(".")
    start = _short(whole)
    options = [rf"[1-9][0-9]{{{len(whole)},}}{_ANY_DECIMALS}"]
    digits = whole if is_open or decimals else whole.rstrip("0")
    for place, digit in enumerate(digits):
        if digit != "9":
            rest = len(whole) - place - 1
            options.append(f"{_short(whole[:place])}[{int(digit) + 1}-9][0-9]{{{rest}}}{_ANY_DECIMALS}")
    for place, digit in enumerate(decimals):
        if digit != "9":
            options.append(rf"{start}\.{_short(decimals[:place])}[{int(digit) + 1}-9][0-9]*")
    if is_open:
        options.append(rf"{start}\.{_short(decimals)}[0-9]*[1-9][0-9]*")
    elif decimals:
        options.append(rf"{start}\.{_short(decimals)}[0-9]*")
    else:
        options.append(f"{_short(digits)}[0-9]{{{len(whole) - len(digits)}}}{_ANY_DECIMALS}")
    return "|".join(options)


def _below(bound: Fraction, *, is_open: bool) -> str:
    """Return a regular expression of texts without a sign from zero up to a bound, which is not an open zero."""
    whole, _, decimals = text_of(bound).partition(".")
    start, options = _short(whole), []
    if len(whole) > 1:
        options.append(rf"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){_ANY_DECIMALS}")
    for place, digit in enumerate(whole):
        lowest = 1 if place == 0 and len(whole) > 1 else 0
        if int(digit) > lowest:
            rest = len(whole) - place - 1
            options.append(f"{_short(whole[:place])}[{lowest}-{int(digit) - 1}][0-9]{{{rest}}}{_ANY_DECIMALS}")
    for place, digit in enumerate(decimals):
        if digit != "0":
            options.append(rf"{start}\.{_short(decimals[:place])}[0-{int(digit) - 1}][0-9]*")
    if decimals:  # fewer digits are less
        options.append(start)
        options += [rf"{start}\.{_short(decimals[:end])}" for end in range(1, len(decimals))]
    if not is_open:
        options.append(rf"{start}\.{_short(decimals)}0*" if decimals else rf"{start}(\.0+)?")
    return "|".join(options)


def _short(digits: str) -> str:
    return _REPEATED.sub(lambda found: f"{found[1]}{{{len(found[0])}}}", digits)
