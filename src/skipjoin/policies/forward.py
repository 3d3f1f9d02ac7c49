"""The forward size that saturates the machine: tokens in one step beyond which more hardly raise the rate."""

from __future__ import annotations

from bisect import bisect_left

from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape

# Sizes that are tried first: each is at least this much larger than the one before it.
_STRIDE = 1.2


def saturating_tokens(cost: CostModel, most: int, *, share: float = 0.9) -> int:
    """The target forward size (EconoServe section 2.1): the smallest number of prompt tokens in one step, from 1 to
    `most`, at which tokens per second reach `share` of the best rate of any size up to `most`.

    Only `cost.step` of prompt tokens counts: no attention, no decodes. The best rate is that of a geometric grid; the
    answer is found by bisection between two of its sizes. So it is exact where the rate does not fall as the size
    grows; where it does, the answer has such a rate, but a size off the grid may have a better one, or reach it with
    fewer tokens. Raises ValueError for `most` below 1 or a share that is not in (0, 1].
    """
    if most < 1:
        raise ValueError(f"most must be at least 1 token, got {most}")
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")

    def rate(tokens: int) -> float:
        return tokens / cost.step(StepShape(prefill=tokens))

    sizes = _sizes(most)
    rates = list(map(rate, sizes))
    wanted = share * max(rates)
    place = next(place for place, found in enumerate(rates) if found >= wanted)
    low = sizes[place - 1] + 1 if place else 1
    return low + bisect_left(range(low, sizes[place]), True, key=lambda tokens: rate(tokens) >= wanted)


def _sizes(most: int) -> list[int]:
    """From 1 to `most`, geometrically."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, round(_STRIDE * sizes[-1]))))
    return sizes
