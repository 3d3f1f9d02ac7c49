"""A capacity that clients share: one over its share leaves room for those that are not."""

from __future__ import annotations

from dataclasses import dataclass

# Seconds between two searches for claims that have expired.
_EXPIRY_CHECK_S = 1.0


@dataclass(slots=True)
class _Client:
    """held: what the client has of the capacity. claim: what it was refused within its share, and asks for again until
    `claim_ends`."""

    held: int = 0
    claim: int = 0
    claim_ends: float = 0.0


class Shares:
    """What each client holds of one capacity, and what it may take.

    A part of the capacity is a reserve. What is left of it, divided by the number of clients that hold or claim
    something, is the share of each. A request for `amount` is one of three:

    - Within the share: it may take all that is free.
    - The first of a client that holds nothing, of at most the reserve: it leaves room for the claims of others, unless
      it has a claim itself.
    - Any other borrows: it leaves room for the claims of others, and the reserve.

    A refused request of the first two kinds is a claim, for as long as the client is expected to come back. So a client
    that borrows never takes the reserve, and no place that comes free is lent while a client that was refused within
    its share waits for it. With a reserve of zero and one client this is a plain bound.

    reserve: its share of the capacity, in [0, 1).
    """

    def __init__(self, reserve: float = 0.0) -> None:
        self.used = 0
        self._reserve = reserve
        self._clients: dict[str, _Client] = {}
        self._claimed = 0
        self._next_check = 0.0

    def reserve_of(self, capacity: int) -> int:
        """Return what borrowers leave free: at least 1, of a capacity of 2 or more, if there is any reserve."""
        if not self._reserve or capacity < 2:
            return 0
        return max(1, int(self._reserve * capacity))

    def held(self, client: str) -> int:
        """Return what the client holds."""
        return found.held if (found := self._clients.get(client)) is not None else 0

    def count_with(self, client: str) -> int:
        """Return the number of clients that hold or claim something, this one included."""
        return len(self._clients) + (client not in self._clients)

    def excess(self, client: str, amount: int, capacity: int, now: float, *, instead_of: int = 0) -> int:
        """Return how much others must give back before the client can take `amount`; 0 or less: it can now.

        Args:
            instead_of: what the client holds now and gives back for it.
        """
        self._drop_expired(now)
        mine = self._clients.get(client) or _Client()
        free = capacity - self.used + instead_of
        if amount <= mine.claim or self._is_within_share(client, amount - instead_of, capacity):
            return amount - free
        claimed = self._claimed - mine.claim
        if self._is_first(client, amount, capacity, instead_of):
            return amount + claimed - free
        return amount + claimed + self.reserve_of(capacity) - free

    def refuse(
        self, client: str, amount: int, capacity: int, now: float, *, instead_of: int = 0, expected_in_s: float
    ) -> bool:
        """Note a claim if the client could take `amount` by its share, and return whether it could.

        Args:
            expected_in_s: seconds until the client comes back.
        """
        is_entitled = self._is_within_share(client, amount - instead_of, capacity) or self._is_first(
            client, amount, capacity, instead_of
        )
        if is_entitled and self._reserve:
            mine = self._clients.setdefault(client, _Client())
            self._claimed += amount - mine.claim
            mine.claim, mine.claim_ends = amount, now + expected_in_s
        return is_entitled

    def take(self, client: str, amount: int) -> None:
        """Let the client hold `amount` more, or less. Its claim, if it has one, is met."""
        mine = self._clients.setdefault(client, _Client())
        mine.held += amount
        self.used += amount
        self._end_claim(client, mine)

    def give_back(self, client: str, amount: int) -> None:
        """Let the client hold `amount` less."""
        self.used -= amount
        if (mine := self._clients.get(client)) is not None:
            mine.held -= amount
            if not (mine.held or mine.claim):
                del self._clients[client]

    def _is_within_share(self, client: str, more: int, capacity: int) -> bool:
        share = (capacity - self.reserve_of(capacity)) / self.count_with(client)
        return self.held(client) + more <= share

    def _is_first(self, client: str, amount: int, capacity: int, instead_of: int) -> bool:
        return self.held(client) == instead_of and amount <= self.reserve_of(capacity)

    def _end_claim(self, client: str, mine: _Client) -> None:
        self._claimed -= mine.claim
        mine.claim = 0
        if not mine.held:
            del self._clients[client]

    def _drop_expired(self, now: float) -> None:
        if not self._claimed or now < self._next_check:
            return
        self._next_check = now + _EXPIRY_CHECK_S
        for client, mine in list(self._clients.items()):
            if mine.claim and mine.claim_ends <= now:
                self._end_claim(client, mine)
