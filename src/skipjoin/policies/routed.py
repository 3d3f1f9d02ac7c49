from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import Allocation, Callbacks, Fact, Ordering
from skipjoin.core.policy_set import explanation
from skipjoin.core.promises import may_await_prefix, may_pass, must_precede
from skipjoin.core.request import Request
from skipjoin.core.selective import Limits, fitting
from skipjoin.core.step import Slice


class Routed(Callbacks):
    """Base of an ordering that keeps each request in one of several orderings, to which it forwards everything."""

    def inner(self, request: Request) -> Ordering:
        raise NotImplementedError

    def inners(self) -> Iterable[Ordering]:
        """Return all orderings, that of the best requests first."""
        raise NotImplementedError

    def on_arrived(self, request: Request, now: float) -> None:
        self.inner(request).on_arrived(request, now)

    def on_begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        return [funded for ordering in self.inners() for funded in ordering.on_begin(now, kv)]

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        by_inner: dict[Ordering, list[Slice]] = {}
        for slice_ in slices:
            by_inner.setdefault(self.inner(slice_.request), []).append(slice_)
        for ordering, own_slices in by_inner.items():
            ordering.on_scheduled(own_slices, now)

    def on_reserved(self, request: Request, allocation: Allocation, now: float) -> None:
        self.inner(request).on_reserved(request, allocation, now)

    def on_preempted(self, request: Request, now: float) -> None:
        self.inner(request).on_preempted(request, now)

    def on_reforecast(self, request: Request, now: float) -> None:
        self.inner(request).on_reforecast(request, now)

    def on_finished(self, request: Request, now: float) -> None:
        self.inner(request).on_finished(request, now)

    def ranked(self, now: float) -> Iterator[Request]:
        # Eager, so that all time-dependent changes happen now and not while the iterator is consumed.
        return chain.from_iterable([ordering.ranked(now) for ordering in self.inners()])

    def fitting(self, limits: Limits, kv: KVAccounts) -> Iterator[Request]:
        return chain.from_iterable(fitting(ordering, limits, kv) for ordering in self.inners())

    def may_await_prefix(self, request: Request, now: float) -> bool:
        return may_await_prefix(self.inner(request), request, now)

    def may_pass(self, request: Request, kv: KVAccounts) -> bool:
        return may_pass(self.inner(request), request, kv)

    def must_precede(self, request: Request, others: Iterable[Request]) -> bool:
        inner = self.inner(request)
        return must_precede(inner, request, (other for other in others if self.inner(other) is inner))

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        yield from explanation(self.inner(request), request, now, kv)
