"""Steps to measure, ordered so that every prefix of the list covers what an engine may run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

# Slices as (start, tokens).
SliceShapes = tuple[tuple[int, int], ...]
# Of each kind, one step in this many is held out of the fit, to assess it.
HELD_OUT_EVERY = 3
# Bases of the Halton sequences. Not 3: since every third step is held out, one third of a range would be.
_BASES = (2, 5, 7, 11)


class Limits(NamedTuple):
    tokens: int
    requests: int
    positions: int
    kv_tokens: int
    vocab_size: int = 1


class Case(NamedTuple):
    slices: SliceShapes
    held_out: bool


def cases(limits: Limits, per_kind: int) -> list[Case]:
    found: dict[SliceShapes, bool] = {((0, 1),): False}
    if limits.tokens < 2 or limits.positions < 2:
        kinds: tuple[Callable[[Limits, list[float]], SliceShapes], ...] = (_decodes,)
    else:
        kinds = (_decodes, _prompts, _mix, _chunk)
    for index in range(per_kind):
        for kind in kinds:
            slices = kind(limits, [_halton(index + 1, base) for base in _BASES])
            if _can_run(slices, limits):
                found.setdefault(slices, index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1)
    return [Case(slices, held_out) for slices, held_out in found.items()]


def _can_run(slices: SliceShapes, limits: Limits) -> bool:
    return (
        len(slices) <= limits.requests
        and sum(tokens for _, tokens in slices) <= limits.tokens
        and sum(start + tokens for start, tokens in slices) <= limits.kv_tokens
    )


def _decodes(limits: Limits, at: list[float]) -> SliceShapes:
    batch = _between(1, min(limits.requests, limits.tokens), at[0])
    return tuple(_ragged(batch, 1 + int(at[1] ** 2 * (limits.positions - 1)), limits.positions))


def _prompts(limits: Limits, at: list[float]) -> SliceShapes:
    tokens = _between(2, limits.tokens, at[0])
    # One prompt, or the same tokens split over up to four prompts, which need less attention.
    most = min(limits.requests, tokens // 2)
    parts = max(min(most, 1 + int(at[1] * 4)), -(-tokens // limits.positions))
    return ((0, min(limits.positions, max(2, tokens // parts))),) * min(parts, limits.requests)


def _chunk(limits: Limits, at: list[float]) -> SliceShapes:
    tokens = _between(2, min(limits.tokens, limits.positions), at[0])
    return ((int(at[1] * (limits.positions - tokens)), tokens),)


def _mix(limits: Limits, at: list[float]) -> SliceShapes:
    batch = _between(1, max(1, min(limits.requests - 1, limits.tokens - 2)), at[2])
    context = 1 + int(at[1] ** 2 * (limits.positions - 1))
    tokens = _between(2, max(2, min(limits.tokens - batch, limits.positions)), at[0])
    start = int(at[3] ** 2 * (limits.positions - tokens))
    return (*_ragged(batch, context, limits.positions), (start, tokens))


def _ragged(batch: int, context: int, positions: int) -> Iterator[tuple[int, int]]:
    for index in range(batch):
        length = round(context * (0.5 + (index + 0.5) / batch))
        yield (min(positions, max(1, length)) - 1, 1)


def _between(low: int, high: int, at: float) -> int:
    return max(low, min(high, round(low * math.exp(at * math.log(max(1.0, high / low))))))


def _halton(index: int, base: int) -> float:
    """Return element `index`, from 1, of the van der Corput sequence."""
    value, digit = 0.0, 1.0
    while index:
        digit /= base
        index, rest = divmod(index, base)
        value += digit * rest
    return value
