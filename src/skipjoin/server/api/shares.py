from __future__ import annotations

from dataclasses import dataclass

# Interval of searches for expired reservations.
_EXPIRY_CHECK_S = 1.0


@dataclass(slots=True)
class _Client:
    weight: float = 1.0
    held: int = 0
    reserved: int = 0
    reserved_until: float = 0.0


class Shares:
    """Fair shares of one capacity.

    A fraction is a reserve. The rest is divided by weight among the clients with holdings or a reservation. A request
    is

    - within the share: it may use all free capacity;
    - the first of a client, and at most the reserve: it leaves room for others' reservations;
    - beyond the share: it leaves room for others' reservations and for the reserve.

    A refused request of the first two becomes a reservation until the client is expected to retry.
    """

    def __init__(self, reserve: float = 0.0) -> None:
        self.used = 0
        self._reserve = reserve
        self._clients: dict[str, _Client] = {}
        self._weights = 0.0  # of all clients
        self._reserved = 0
        self._next_check = 0.0

    def reserve_of(self, capacity: int) -> int:
        if not self._reserve or capacity < 2:
            return 0
        return max(1, int(self._reserve * capacity))

    def held(self, client: str) -> int:
        return found.held if (found := self._clients.get(client)) is not None else 0

    def count_with(self, client: str) -> int:
        return len(self._clients) + (client not in self._clients)

    def excess(
        self, client: str, amount: int, capacity: int, now: float, *, instead_of: int = 0, weight: float = 1.0
    ) -> int:
        """Return the amount that must be freed before `amount` fits in place of `instead_of`."""
        self._drop_expired(now)
        mine = self._clients.get(client) or _Client()
        free = capacity - self.used + instead_of
        if amount <= mine.reserved or self._is_within_share(client, amount - instead_of, capacity, weight):
            return amount - free
        reserved = self._reserved - mine.reserved
        if self._is_first(client, amount, capacity, instead_of):
            return amount + reserved - free
        return amount + reserved + self.reserve_of(capacity) - free

    def refuse(
        self,
        client: str,
        amount: int,
        capacity: int,
        now: float,
        *,
        instead_of: int = 0,
        weight: float = 1.0,
        expected_in_s: float,
    ) -> bool:
        is_entitled = self._is_within_share(client, amount - instead_of, capacity, weight) or self._is_first(
            client, amount, capacity, instead_of
        )
        if is_entitled and self._reserve:
            mine = self._find_or_add(client, weight)
            self._reserved += amount - mine.reserved
            mine.reserved, mine.reserved_until = amount, now + expected_in_s
        return is_entitled

    def take(self, client: str, amount: int, weight: float = 1.0) -> None:
        mine = self._find_or_add(client, weight)
        mine.held += amount
        self.used += amount
        self._end_reservation(client, mine)

    def give_back(self, client: str, amount: int) -> None:
        self.used -= amount
        if (mine := self._clients.get(client)) is not None:
            mine.held -= amount
            if not (mine.held or mine.reserved):
                self._drop(client)

    def _find_or_add(self, client: str, weight: float) -> _Client:
        if (mine := self._clients.get(client)) is None:
            mine = self._clients[client] = _Client(weight)
            self._weights += weight
        return mine

    def _drop(self, client: str) -> None:
        self._weights -= self._clients.pop(client).weight
        if not self._clients:
            self._weights = 0.0  # without the rounding errors of fractions

    def _is_within_share(self, client: str, more: int, capacity: int, weight: float) -> bool:
        if (mine := self._clients.get(client)) is not None:
            weight, total = mine.weight, self._weights
        else:
            total = self._weights + weight
        share = (capacity - self.reserve_of(capacity)) * weight / total
        return self.held(client) + more <= share

    def _is_first(self, client: str, amount: int, capacity: int, instead_of: int) -> bool:
        return self.held(client) == instead_of and amount <= self.reserve_of(capacity)

    def _end_reservation(self, client: str, mine: _Client) -> None:
        self._reserved -= mine.reserved
        mine.reserved = 0
        if not mine.held:
            self._drop(client)

    def _drop_expired(self, now: float) -> None:
        if not self._reserved or now < self._next_check:
            return
        self._next_check = now + _EXPIRY_CHECK_S
        for client, mine in list(self._clients.items()):
            if mine.reserved and mine.reserved_until <= now:
                self._end_reservation(client, mine)
