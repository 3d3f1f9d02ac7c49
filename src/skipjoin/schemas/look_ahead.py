from __future__ import annotations

import re

from skipjoin.schemas.reasons import shown
from skipjoin.structured_output import GrammarError

# How the patterns of `Decimal` of pydantic 2.12 and 2.13 begin. No grammar expresses their look-ahead.
_START = r"^(?!^[-+.]*$)[+-]?0*"
_BOUND = re.compile(r"\{([01]),(\d+)\}")
# A pattern of `max_digits` alone is written with one alternative for each digit.
_MAX_DIGITS = 64
# Patterns with look-ahead that zod 4.0 to 4.3 writes for e-mail addresses and durations, and equal ones without.
_EMAIL = r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_DATE = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_DURATION = rf"^P(?:\d+W|{_DATE}(?:{_TIME})?|{_TIME})$"
_OF_ZOD = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": _EMAIL,
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": _DURATION,
}
_AHEAD = re.compile(r"\^\(\?=")
# One part of a regular expression: an escape, a class of characters, the beginning or the end of a group, or an "|".
# A class without an end is one part, so that the time is linear.
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]?|[(|)]", re.DOTALL)


def check_escapes(pattern: str) -> None:
    """Raise `GrammarError` for an escape without a character, which the compiler would leave out."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise GrammarError(f"cannot be enforced: the pattern {shown(pattern)} ends within an escape")


def without_look_ahead(pattern: str) -> list[str]:
    """Return patterns without look-ahead, which no grammar has, that together match what `pattern` does.

    A look-ahead at the very beginning becomes a pattern, as in passwords: `^(?=.*[0-9]).{8,}$`. Patterns with others
    are returned unchanged.
    """
    pattern = _plain_decimal(_OF_ZOD.get(pattern, pattern))
    found = []
    rest = pattern
    while _AHEAD.match(rest):
        if (end := _end_of_group(rest, 1)) is None:
            return [pattern]
        found.append(f"^(?:{rest[4:end]})")
        rest = "^" + rest[end + 1 :]
    if not found or _has_alternatives(rest) or re.match(r"\^[*+?{]", rest):
        return [pattern]
    return [rest, *found]


def _end_of_group(pattern: str, begin: int) -> int | None:
    depth = 0
    for part in _PART.finditer(pattern, begin):
        depth += (part[0] == "(") - (part[0] == ")")
        if not depth and part[0] == ")":
            return part.start()
    return None


def _has_alternatives(pattern: str) -> bool:
    """Return whether "^" belongs to the first of several alternatives only."""
    depth = 0
    for part in _PART.finditer(pattern):
        depth += (part[0] == "(") - (part[0] == ")")
        if not depth and part[0] == "|":
            return True
    return False


def _plain_decimal(pattern: str) -> str:
    """Return a pattern of decimal numbers for that of pydantic's `Decimal`, or any other unchanged.

    With `max_digits` and `decimal_places`, pydantic's pattern allows any text, because one alternative may be empty and
    has no end.
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
