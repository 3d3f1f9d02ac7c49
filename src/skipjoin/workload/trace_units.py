from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

from skipjoin.config import ConfigError
from skipjoin.workload.prefixes import HASH_TOKENS
from skipjoin.workload.trace_lines import HASH_IDS, Line

TIME_UNITS = {"s": 1, "ms": 1000}
# Usual tokens of an id: those of Mooncake, of Qwen-Bailian, and of other engines' blocks.
_SIZES = (HASH_TOKENS, 16, 32, 64, 128, 256)
_DETECTED_ROWS = 1000
_MAX_TIME = 1e300  # larger integers overflow float
# Between requests, in the mean of a file: a shorter time in milliseconds, or a longer one in seconds, is implausible.
_MIN_GAP_MS, _MAX_GAP_S = 5.0, 1000.0


class TraceUnits(NamedTuple):
    """Units of a trace."""

    per_s: int  # units of `timestamp` in a second
    hash_tokens: int | None  # prompt tokens of each of `hash_ids`; None ignores these


def with_units(
    lines: Iterator[Line], time_unit: str, hash_tokens: int | None, *, has_parts: bool
) -> tuple[Iterator[Line], TraceUnits]:
    """Return the same lines and their units; "auto" and None mean to detect them."""
    head: list[Line] = []
    error: ConfigError | None = None
    try:
        for line in lines:
            head.append(line)
            if len(head) == _DETECTED_ROWS:
                break
    except ConfigError as found:
        error = found  # raised after the rows before it
    per_s = _per_s(head) if time_unit == "auto" else TIME_UNITS[time_unit]
    tokens = hash_tokens or _hash_tokens(head)
    return _continued(head, lines, error), TraceUnits(per_s, tokens if has_parts else None)


def _continued(head: Sequence[Line], rest: Iterator[Line], error: ConfigError | None) -> Iterator[Line]:
    yield from head
    if error is not None:
        raise error
    yield from rest


def _per_s(lines: Sequence[Line]) -> int:
    """Mooncake's timestamps are integers of milliseconds. Traces of the same form have fractions of seconds."""
    times = [cell for line in lines if _is_number(cell := line.cell("arrival_s")) and abs(cell) < _MAX_TIME]
    gap = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    has_fractions = any(time != int(time) for time in times)
    if 0 < gap < _MIN_GAP_MS or (has_fractions and gap <= _MAX_GAP_S):
        return TIME_UNITS["s"]
    return TIME_UNITS["ms"]


def _is_number(cell: object) -> TypeGuard[int | float]:
    # bool is a subclass of int.
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _hash_tokens(lines: Sequence[Line]) -> int:
    """Return the first of the usual sizes that fits all prompts; of none, Mooncake's, by which a row is an error."""
    low, high = 0.0, math.inf
    for line in lines:
        tokens, ids = line.cell("prompt_tokens"), line.cell(HASH_IDS)
        count = len(ids.replace(",", " ").split()) if isinstance(ids, str) else len(ids) if isinstance(ids, list) else 0
        tokens = int(tokens) if isinstance(tokens, str) and tokens.isdecimal() else tokens
        if isinstance(tokens, int) and count:
            # The last id may be that of a shorter part, or miss.
            low = max(low, tokens / (count + 1))
            high = min(high, tokens / (count - 1) if count > 1 else math.inf)
    return next((size for size in _SIZES if low < size < high), HASH_TOKENS)
