from __future__ import annotations

from dataclasses import dataclass, field

from skipjoin.core.kv.reservations import Reservation
from skipjoin.core.step import Direction


class Count:
    """Number of blocks, without their identities."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks = 0

    def __len__(self) -> int:
        return self.blocks


@dataclass(eq=False, slots=True)
class CountedBlocks:
    reservation: Reservation
    device: Count
    room: int = 0
    tokens_before_drop: int = 0
    table: tuple[int, ...] = ()
    cpu: list[int] = field(default_factory=list)
    moving: Direction | None = None

    @property
    def away(self) -> int:
        return len(self.cpu)

    @property
    def is_settled(self) -> bool:
        return self.moving is None
