"""Promises of an ordering that hold whatever they cost, such as recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.request import Request


class Promising(Protocol):
    """Ordering with bounds on waiting. It may have any of these methods."""

    def may_await_prefix(self, request: Request, now: float) -> bool:
        """Return whether the request may wait for a prefix that another one computes. Must be pure."""
        ...

    def must_precede(self, request: Request, others: Iterable[Request]) -> bool:
        """Return whether the request must not wait for KV while another one has some. Must be pure.

        Args:
            others: Unfinished requests of this ordering; those of other bands do not count.
        """
        ...

    def may_pass(self, request: Request, kv: KVAccounts) -> bool:
        """Return whether the request may be admitted before one without KV that ranks before it. Must be pure."""
        ...


def may_await_prefix(ordering: object, request: Request, now: float) -> bool:
    ask = getattr(ordering, "may_await_prefix", None)
    return ask is None or bool(ask(request, now))


def must_precede(ordering: object, request: Request, others: Iterable[Request]) -> bool:
    ask = getattr(ordering, "must_precede", None)
    return ask is not None and bool(ask(request, others))


def may_pass(ordering: object, request: Request, kv: KVAccounts) -> bool:
    ask = getattr(ordering, "may_pass", None)
    return ask is None or bool(ask(request, kv))
