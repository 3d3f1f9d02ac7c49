from __future__ import annotations

from collections.abc import Sequence

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import CostModel, Ordering
from skipjoin.core.request import Request
from skipjoin.policies.econo import Phase, phase_of
from skipjoin.policies.eviction import Vacate
from skipjoin.policies.exact_reservations import PROMPTS, ExactReservations
from skipjoin.policies.nesting import parent_of


class Park(Vacate):
    """`Vacate` that also swaps out decodes which wait in the prompts' share, last ones first, for a prompt.

    Otherwise prompts that do not fit would wait for their first token as long as decodes wait for KV. Moves in both
    directions are overlapped, so they may take longer than recomputation would.
    """

    is_decode_invariant = True

    def __init__(self, cost: CostModel, reservations: ExactReservations) -> None:
        super().__init__(cost)
        self._reservations = reservations

    def returns_alongside(self, request: Request) -> bool:
        return True

    def ahead(
        self, settled: Sequence[Request], ordering: Ordering, kv: KVAccounts, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        if (missing := self._reservations.missing_for_prompt(kv)) <= 0:
            return (), ()
        waiting = [request for request in settled if _waits_in_share(request, kv)]
        leaving = list[Request]()
        for request in sorted(waiting, key=ordering.rank, reverse=True):
            if missing <= 0:
                break
            leaving.append(request)
            missing -= kv.footprint(request)
        return leaving, ()


def _waits_in_share(request: Request, kv: KVAccounts) -> bool:
    progress = request.progress
    return (
        not progress.in_flight
        and progress.known > progress.reserved_tokens
        and parent_of(request, kv) is PROMPTS
        and phase_of(request, progress.known) is Phase.WAITING
    )
