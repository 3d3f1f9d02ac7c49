from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from skipjoin.core.kv.interface import Hit
from skipjoin.core.kv.reservations import Reservation
from skipjoin.core.request import Request
from skipjoin.core.step import Direction


class Pool(Protocol):
    """Block pool of the engine, which allocates and frees blocks itself."""

    @property
    def block_size(self) -> int: ...
    @property
    def total(self) -> int: ...

    @property
    def free(self) -> int: ...

    def held(self, request: Request) -> int: ...

    def shared(self, request: Request) -> int:
        """Return the number of blocks that the request and others hold."""

    def hit(self, request: Request) -> Hit:
        """Return the prefix-cache hit of a request that holds nothing."""


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
