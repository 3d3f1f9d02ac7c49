from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import AdmissionPolicy, Allocation, Callbacks, CostModel, Deferral
from skipjoin.core.request import FinishReason, ProgramId, Request
from skipjoin.core.step import StepShape
from skipjoin.policies.program_book import HYSTERESIS, ProgramBook

# Maximum number of programs whose blocks are held, which each admission looks at.
_MAX_HELD = 256


class ProgramLeases(Callbacks):
    """Retention of the KV of programs while they call tools, around the admission policy `inner`.

    Nearly all pauses of the owner's programs are shorter than a lease. In its first part, no call is admitted to the
    blocks that does not precede the program. It lasts as long as the program's return is worth idle blocks, by the
    owner's pauses and the time to compute, or swap in, the KV again.
    """

    def __init__(self, inner: AdmissionPolicy, book: ProgramBook, cost: CostModel) -> None:
        self._inner = inner
        self._book = book
        self._cost = cost
        self._renewal_s = 0.0
        self._held: dict[ProgramId, _Lease] = {}

    def keep_until(self, request: Request, now: float) -> float | None:
        name = request.options.program
        if name is None or request.progress.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return None
        until = self._book.returns_until(name, now)
        tokens, value = request.progress.computed, self._book.value(request)
        self._held.pop(name, None)
        held_until = self._book.held_until(name, self._renewal_s, now)
        self._held[name] = _Lease(tokens, min(until, held_until), value, request)
        if len(self._held) > _MAX_HELD:
            del self._held[next(iter(self._held))]
        return until

    def on_begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        if not self._renewal_s:
            self._renewal_s = self._time_to_renew(kv)
        if self._held:
            ended = [name for name, lease in self._held.items() if lease.until <= now]
            for name in ended:
                del self._held[name]
        return ()

    def on_arrived(self, request: Request, now: float) -> None:
        if request.options.program is not None:
            self._held.pop(request.options.program, None)

    def reserve(self, request: Request, target: int, kv: KVAccounts) -> Allocation | Deferral:
        answer, cache = self._inner.reserve(request, target, kv), kv.cache
        if not self._held or cache is None or kv.blocks_of(request) is not None or not isinstance(answer, Allocation):
            return answer
        found = kv.hit(request).held if request.progress.computed else 0
        short = answer.now + answer.spare - found - kv.available
        if short + cache.leased_blocks <= 0 or short + self._protected(request, kv, cache.leased_blocks) <= 0:
            return answer
        return Deferral.INCOMING

    def _protected(self, request: Request, kv: KVAccounts, most: int) -> int:
        """Return the number of leased blocks of programs that the request does not precede."""
        value, options = self._book.value(request), request.options
        tokens = sum(
            lease.tokens // kv.block_size
            for lease in self._held.values()
            if lease.request.options.client == options.client
            and lease.request.own_band <= request.progress.band
            and HYSTERESIS * lease.value >= value
        )
        return min(most, tokens)

    def _time_to_renew(self, kv: KVAccounts) -> float:
        tokens = kv.device_total * kv.block_size
        renewal_s = self._cost.step(StepShape(prefill=tokens))
        # A smaller tier loses part of the KV that leaves the device.
        if (tiers := kv.tiers) is not None and tiers.cpu_total >= kv.device_total:
            renewal_s = min(renewal_s, 2 * self._cost.transfer(kv.device_total))
        return renewal_s


class _Lease(NamedTuple):
    """First part of a lease of `tokens` tokens, after the call `request`."""

    tokens: int
    until: float
    value: float
    request: Request
