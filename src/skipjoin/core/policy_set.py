from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import (
    AdmissionPolicy,
    Allocation,
    Batcher,
    BatcherWrapper,
    Callbacks,
    EvictionPolicy,
    Fact,
    Learned,
    Measured,
    Ordering,
    Retention,
)
from skipjoin.core.request import Request
from skipjoin.core.step import Slice


def explanation(policy: object, request: Request, now: float, kv: KVAccounts) -> list[Fact]:
    """Return the facts of a policy's method `explain`, which it may lack."""
    explain = getattr(policy, "explain", None)
    return [] if explain is None else list(explain(request, now, kv))


def is_decode_invariant(policy: object) -> bool:
    """True if decode-only steps without waiting requests leave the policy unchanged, even if calls are skipped.

    Subclasses do not inherit it: each class declares an attribute of its own.
    """
    name = "is_decode_invariant"
    return name in vars(type(policy)) and bool(getattr(policy, name))


@dataclass(frozen=True, slots=True)
class Policies:
    """One serving system."""

    ordering: Ordering
    batcher: Batcher
    admission: AdmissionPolicy
    eviction: EvictionPolicy
    learned: Learned | None = None
    measured: Measured | None = None
    retention: Retention | None = None
    on_begin: tuple[Callable[[float, KVAccounts], Iterable[tuple[Account, int]]], ...] = field(
        init=False, repr=False, compare=False
    )
    on_arrived: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)
    on_scheduled: tuple[Callable[[Sequence[Slice], float], None], ...] = field(init=False, repr=False, compare=False)
    on_reserved: tuple[Callable[[Request, Allocation, float], None], ...] = field(init=False, repr=False, compare=False)
    on_deferred: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)
    on_preempted: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)
    on_reforecast: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)
    on_charged: tuple[Callable[[Request, float, float], None], ...] = field(init=False, repr=False, compare=False)
    on_finished: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)

    @property
    def is_decode_invariant(self) -> bool:
        return all(map(is_decode_invariant, (self.ordering, self.batcher, self.admission, self.eviction)))

    @property
    def parts(self) -> tuple[object, ...]:
        batchers: list[Batcher] = [self.batcher]
        while isinstance(wrapper := batchers[-1], BatcherWrapper):
            batchers.append(wrapper.batcher)
        return (self.ordering, *batchers, self.admission, self.eviction)

    def explain(self, request: Request, now: float, kv: KVAccounts) -> list[Fact]:
        return [fact for part in self.parts for fact in explanation(part, request, now, kv)]

    def __post_init__(self) -> None:
        parts = self.parts
        # A policy that asks the ordering, for example about its promises (`core.promises`), has a method `bind`.
        for part in parts[1:]:
            if (bind := getattr(part, "bind", None)) is not None:
                bind(self.ordering)
        for name in (name for name in vars(Callbacks) if name.startswith("on_")):
            inherited = getattr(Callbacks, name)
            has = [part for part in parts if getattr(type(part), name, inherited) is not inherited]
            object.__setattr__(self, name, tuple(getattr(part, name) for part in has))
