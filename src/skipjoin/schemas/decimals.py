from __future__ import annotations

import re

# How the patterns of `Decimal` of pydantic 2.12 and 2.13 begin. No grammar expresses their look-ahead.
_START = r"^(?!^[-+.]*$)[+-]?0*"
_BOUND = re.compile(r"\{([01]),(\d+)\}")
# A pattern of `max_digits` alone is written with one alternative for each digit.
_MAX_DIGITS = 64


def plain_decimal(pattern: str) -> str:
    """Return a pattern of decimal numbers that the pattern of pydantic's `Decimal` allows, or any other unchanged.

    pydantic's pattern with `max_digits` and `decimal_places` allows any text, because one alternative may be empty
    and has no end.
    """
    if not pattern.startswith(_START):
        return pattern
    rest = pattern.removeprefix(_START)
    bounds = [int(bound) for _, bound in _BOUND.findall(rest)]
    number = None
    match _BOUND.sub(r"{\1,N}", rest), bounds:
        case r"\d*\.?\d*$", []:
            number = r"\d+\.?\d*|\.\d+"
        case r"\d*\.?\d{0,N}0*$", [places]:
            number = rf"\d+{_fraction(places)}"
        case r"(?:\d{0,N}|(?=[\d.]{1,N}0*$)\d{0,N}\.\d{0,N}0*$)", [whole, _, _, places] if whole or places:
            number = rf"0*\d{{1,{whole}}}{_fraction(places)}" if whole else rf"0*\.\d{{1,{places}}}"
        case r"(?:\d{0,N}|(?=[\d.]{1,N}0*$)\d*\.\d*0*$)", [digits, _] if 0 < digits <= _MAX_DIGITS:
            mixed = [rf"\d{{{whole}}}\.\d{{1,{digits - whole}}}" for whole in range(1, digits)]
            number = "|".join([rf"\d{{1,{digits}}}", rf"0\.\d{{1,{digits}}}", *mixed])
    return pattern if number is None else f"^[+-]?({number})$"


def _fraction(places: int) -> str:
    return rf"(\.\d{{1,{places}}})?" if places else ""
