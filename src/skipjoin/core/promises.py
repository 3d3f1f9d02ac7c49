"""Promises of an ordering that hold whatever they cost, such as recomputation.

An ordering with bounds on waiting has any of the methods that are asked for here. They must be pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.request import Request


def may_await_prefix(ordering: object, request: Request, now: float) -> bool:
    ask = getattr(ordering, "may_await_prefix", None)
    return ask is None or bool(ask(request, now))


def must_precede(ordering: object, request: Request, others: Iterable[Request]) -> bool:
    """Return whether the request must not wait for KV while one of the `others`, all unfinished, has some."""
    ask = getattr(ordering, "must_precede", None)
    return ask is not None and bool(ask(request, others))


def may_pass(ordering: object, request: Request, kv: KVAccounts) -> bool:
    """Return whether the request may be admitted before one without KV that ranks before it."""
    ask = getattr(ordering, "may_pass", None)
    return ask is None or bool(ask(request, kv))
