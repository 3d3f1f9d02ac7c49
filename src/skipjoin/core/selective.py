from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy_set import Policies
from skipjoin.core.promises import may_pass
from skipjoin.core.request import Request

# Returns the current maximum of each kind of need, in blocks.
Limits = Callable[[], Sequence[int]]


def fitting(ordering: object, limits: Limits, kv: KVAccounts) -> Iterator[Request]:
    """Iterate lazily, in rank order, over requests that lack KV or a reservation, of which a need is within its limit.

    It may find others. The cost is independent of the queue. `limits` is called again after each request, which may
    have taken blocks. An ordering without a method `fitting` finds none.
    """
    find = getattr(ordering, "fitting", None)
    found: Iterator[Request] = iter(()) if find is None else find(limits, kv)
    return found


def finds_by_needs(admission: object) -> bool:
    """Return whether the ordering finds requests by their needs for this admission policy, holders included."""
    return hasattr(admission, "limits")


def lacks_kv(request: Request, kv: KVAccounts) -> bool:
    """Return whether the request lacks KV on the device, or a reservation for its next token, with none in transit."""
    if (held := kv.blocks_of(request)) is None:
        return True
    return held.moving is None and (not held.device or request.progress.known > request.progress.reserved_tokens)


def passing(policies: Policies, kv: KVAccounts, holders: Sequence[Request]) -> Iterator[Request]:
    """Iterate in rank order over the holders, and the requests that lack KV and would be admitted.

    The admission's method `limits(kv)`, which it may lack, returns how many blocks one may need, for each kind of need.
    """
    limits = getattr(policies.admission, "limits", None)
    if limits is None:
        return iter(holders)
    # The ordering is notified at the end of the step, and still has those that this step has admitted.
    ordering = policies.ordering
    found: Iterator[Request] = (
        request for request in fitting(ordering, lambda: limits(kv), kv) if lacks_kv(request, kv)
    )
    # Those that were admitted before only return.
    found = takewhile(lambda request: kv.blocks_of(request) is not None or may_pass(ordering, request, kv), found)
    return heapq.merge(holders, found, key=ordering.rank) if holders else found
