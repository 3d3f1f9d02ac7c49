from __future__ import annotations

import math


def number(value: float, digits: int = 3) -> str:
    """Format with up to `digits` significant digits before or after the point, without an exponent."""
    decimals = digits if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def amount(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == "s":
        return f"-{duration(-value)}" if value < 0 else duration(value)
    text = number(value)
    return f"{text} {unit.removesuffix('s') if text == '1' else unit}" if unit else text


def duration(seconds: float) -> str:
    for unit, length_s in (("µs", 1e-6), ("ms", 1e-3)):
        # The rounded number decides, so that 999.7 ms is 1 s.
        text = number(seconds / length_s)
        if seconds > 0 and float(text) < 1000:
            return f"{text} {unit}"
    return f"{number(seconds)} s" if seconds < 999.5 else f"{seconds:,.0f} s"
