from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from skipjoin.core.events import Reserved
from skipjoin.core.kv.reservations import Owner
from skipjoin.core.request import Request


class _Reservation(NamedTuple):
    parent: Owner
    blocks: int
    drawn: int


class ReservationUse:
    """Statistics of nested reservations, reserve blocks and groups (EconoServe section 3.2)."""

    def __init__(self) -> None:
        self.hosted = 0
        self.vacated = 0
        self._reservations: dict[Request, _Reservation] = {}
        self._nested: dict[Request, dict[Request, None]] = {}
        self._once_hosted: set[Request] = set()  # unfinished ones only
        self._hosted_blocks = self._reserved_blocks = 0  # current
        self._hosted_block_s = self._reserved_block_s = 0.0
        self._group_sizes: Counter[int] = Counter()
        self._forming: Counter[Hashable] = Counter()  # groups that formed at `_formed_at`
        self._formed_at = 0.0

    # -- events -------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self._hosted_block_s += seconds * self._hosted_blocks
        self._reserved_block_s += seconds * self._reserved_blocks

    def reserved(self, event: Reserved) -> None:
        request, parent = event.request, event.parent
        before = self._reservations.get(request)
        drawn = event.drawn + (0 if before is None else before.drawn)
        self._set(request, _Reservation(parent, event.blocks, drawn))
        if isinstance(parent, Request) and request not in self._once_hosted:
            self._once_hosted.add(request)
            self.hosted += 1
        if event.group is not None:
            self._join_group(event.group, event.now)

    def lost_kv(self, request: Request, *, blocks_left: int = 0) -> None:
        reservation = self._reservations.get(request)
        self.vacated += reservation is not None and isinstance(reservation.parent, Request)
        self._end(request)
        if reservation is not None and blocks_left:
            self._set(request, _Reservation(reservation.parent, blocks_left, 0))

    def finished(self, request: Request) -> None:
        self._end(request)
        self._once_hosted.discard(request)

    def restarted(self) -> None:
        self._reservations.clear()
        self._nested.clear()
        self._hosted_blocks = self._reserved_blocks = 0

    def close(self) -> None:
        self.restarted()
        self._once_hosted.clear()

    # -- figures ------------------------------------------------------------------------------------------

    def kv(self, seconds: float, device_blocks: int) -> dict[str, float]:
        return {
            "hosted_requests": self.hosted,
            "hosted_blocks_mean": self._hosted_block_s / seconds,
            "vacated": self.vacated,
            "reserve_used_mean": self._reserved_block_s / seconds / device_blocks,
        }

    @property
    def nested(self) -> tuple[int, int]:
        """Number of requests that are hosted now, and their blocks."""
        return sum(map(len, self._nested.values())), self._hosted_blocks

    def groups(self) -> Counter[int]:
        return self._group_sizes + Counter(self._forming.values())

    # -- folding ------------------------------------------------------------------------------------------

    def _set(self, request: Request, reservation: _Reservation | None) -> None:
        before = self._reservations.pop(request, None)
        if before is not None:
            self._count(before, -1)
            if isinstance(before.parent, Request):
                self._nested[before.parent].pop(request)
        if reservation is not None:
            self._reservations[request] = reservation
            self._count(reservation, 1)
            if isinstance(reservation.parent, Request):
                self._nested.setdefault(reservation.parent, {})[request] = None

    def _count(self, reservation: _Reservation, sign: int) -> None:
        self._reserved_blocks += sign * reservation.drawn
        if isinstance(reservation.parent, Request):
            self._hosted_blocks += sign * reservation.blocks
        elif reservation.parent is not None:
            self._reserved_blocks += sign * reservation.blocks

    def _end(self, request: Request) -> None:
        reservation = self._reservations.get(request)
        parent = None if reservation is None else reservation.parent
        for nested in list(self._nested.get(request, ())):
            self._set(nested, self._reservations[nested]._replace(parent=parent))
        self._nested.pop(request, None)
        self._set(request, None)

    def _join_group(self, group: Hashable, now: float) -> None:
        if now != self._formed_at:
            self._group_sizes.update(self._forming.values())
            self._forming.clear()
            self._formed_at = now
        self._forming[group] += 1
