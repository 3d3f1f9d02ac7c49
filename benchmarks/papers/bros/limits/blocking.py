"""`bros` as it was before swap-ins overlapped with steps."""

from __future__ import annotations

from dataclasses import replace

from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.policies.eviction import Share
from skipjoin.recipes import Settings, recipe
from skipjoin.recipes.bros import PackingParams, bros


class Blocking(Share):
    """`Share` whose swapped-out requests return with blocking moves."""

    is_decode_invariant = True

    def returns_alongside(self, request: Request) -> bool:
        return False


@recipe
def bros_blocking(s: Settings, p: PackingParams) -> Policies:
    """BROS whose steps wait for the KV of every request that they swap in."""
    return replace(bros(s, p), eviction=Blocking(s.cost))
