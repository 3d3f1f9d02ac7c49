from __future__ import annotations

from bisect import bisect_left

from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape

# Ratio between neighboring sizes of the grid.
_STRIDE = 1.2


def saturating_tokens(cost: CostModel, most: int, *, share: float = 0.9) -> int:
    """Return the target forward size (EconoServe section 2.1).

    It is the smallest number of prompt tokens whose rate reaches `share` of the best one on a geometric grid up to
    `most`.
    """

    def rate(tokens: int) -> float:
        return tokens / cost.step(StepShape(prefill=tokens))

    sizes = _sizes(most)
    rates = list(map(rate, sizes))
    wanted = share * max(rates)
    place = next(place for place, found in enumerate(rates) if found >= wanted)
    low = sizes[place - 1] + 1 if place else 1
    return low + bisect_left(range(low, sizes[place]), True, key=lambda tokens: rate(tokens) >= wanted)


def _sizes(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, round(_STRIDE * sizes[-1]))))
    return sizes
