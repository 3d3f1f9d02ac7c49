from __future__ import annotations

from collections.abc import Collection

from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.request import Request


class StateSlots:
    """Slots for state of a request that is no KV block, such as that of linear attention.

    State cannot return to an earlier token, so a request with one loses all of its KV or none.
    """

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self._empty = list(range(total - 1, -1, -1))
        self._of: dict[Request, int] = {}

    @property
    def free(self) -> int:
        return len(self._empty)

    def slot_of(self, request: Request) -> int | None:
        return self._of.get(request)

    def reserve(self, request: Request) -> None:
        if not self._empty:
            raise LedgerError(f"request {request.id} needs a slot for its {self.name}, and none is free")
        self._of[request] = self._empty.pop()

    def release(self, request: Request) -> None:
        self._empty.append(self._of.pop(request))

    def check(self, holders: Collection[Request]) -> None:
        if self._of.keys() != set(holders):
            raise LedgerError(f"slots for {self.name} belong to other requests than hold blocks")
        if sorted((*self._empty, *self._of.values())) != list(range(self.total)):
            raise LedgerError(f"a slot for {self.name} leaked or doubled")
