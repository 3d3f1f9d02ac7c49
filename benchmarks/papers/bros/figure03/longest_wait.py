"""The simple preemptive rule of BROS's section 2.2."""

from __future__ import annotations

from collections.abc import Sequence

from skipjoin.core.policy_set import Policies
from skipjoin.core.step import Slice
from skipjoin.policies.ordering import FixedKey
from skipjoin.recipes import Settings, recipe
from skipjoin.recipes.parts import preemptive


class LongestWait(FixedKey):
    """Longest time since the last step first, or since arrival."""

    is_decode_invariant = False

    def __init__(self) -> None:
        super().__init__(lambda request: request.arrival)

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        for slice_ in slices:
            self._ranking.set_volatile(slice_.request, (now, slice_.request.arrival, slice_.request.id))


@recipe
def longest_wait(s: Settings) -> Policies:
    """Requests that have waited longest since their last step first, with proactive swapping."""
    return preemptive(s, LongestWait)
