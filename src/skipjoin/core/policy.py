from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

from skipjoin.core.context import StepContext
from skipjoin.core.events import Preemption
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.refusals import Refusal
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepShape


class CostModel(Protocol):
    @property
    def revision(self) -> int:
        """Version of the estimates, with which callers discard what they cached."""

    @property
    def margin(self) -> float:
        """Factor that nearly all measured steps stayed within, at least 1."""

    def step(self, shape: StepShape) -> float: ...

    def transfer(self, blocks: float) -> float:
        """Return the seconds to transfer KV blocks in one direction."""


class Callbacks:
    """Notifications that every policy may receive.

    All other methods are queries. The planner may call them speculatively, so they change nothing unless they say so.
    """

    def on_arrived(self, request: Request, now: float) -> None: ...

    def on_begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        """Return how many blocks each account should reserve in the step that is planned next, as far as available."""
        return ()

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        """Called after slices were computed and the counters of their requests updated."""

    def on_reserved(self, request: Request, allocation: Allocation, now: float) -> None:
        """Called after a request got a KV reservation for `request.progress.reserved_tokens` tokens."""

    def on_deferred(self, request: Request, now: float) -> None: ...

    def on_preempted(self, request: Request, now: float) -> None:
        """Called after some or all of a request's KV was dropped or swapped out."""

    def on_reforecast(self, request: Request, now: float) -> None: ...

    def on_charged(self, request: Request, tokens: float, now: float) -> None:
        """Called after a request, which may be finished, took the time of `tokens` output tokens besides its own."""

    def on_finished(self, request: Request, now: float) -> None: ...


class Ordering(Protocol):
    """Priority order of requests, which is total and changes only in the `Callbacks` and in `ranked`."""

    def on_arrived(self, request: Request, now: float) -> None: ...
    def on_begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]: ...
    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None: ...
    def on_reserved(self, request: Request, allocation: Allocation, now: float) -> None: ...
    def on_preempted(self, request: Request, now: float) -> None: ...
    def on_reforecast(self, request: Request, now: float) -> None: ...
    def on_finished(self, request: Request, now: float) -> None: ...

    def ranked(self, now: float) -> Iterator[Request]:
        """Iterate lazily over all requests in rank order. May promote requests that are due at `now`.

        During the iteration, only `rank` and `outranks` may be called.
        """

    def rank(self, request: Request) -> Any:
        """Return the sort key of `ranked`; keys of all requests are comparable."""

    def outranks(self, one: Request, other: Request) -> bool:
        """Return whether `one` is strictly more important, so that it may evict `other` to be admitted."""

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        """Return the requests in the order in which they are expected to run next, each after a sort key.

        Keys are equal where neither of two requests has a reason to run first.
        """


class Fact(NamedTuple):
    """Figure by which a policy decides about a request, for a reader."""

    label: str  # a few words, such as "slack"
    value: float | str
    unit: str  # "s", or what a number counts, such as "tokens", or empty
    meaning: str  # a sentence about the request


class Measured(Protocol):
    """Figures of a recipe's own, for metrics, read a few times per second."""

    def measure(self, now: float) -> Mapping[str, Sequence[float]]:
        """Return values by name of a metric, in the order of its label's values."""


class Retention(Protocol):
    """Policy that decides how long KV of finished requests is worth more than other cached KV."""

    def keep_until(self, request: Request, now: float) -> float | None:
        """Return the time until which the KV of a program's finished call is kept, if it is."""


class Learned(Protocol):
    @property
    def notes(self) -> int: ...
    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`.

        Raises:
            ValueError: The state is invalid. Nothing has changed then.
        """


class BatchBuilder(Protocol):
    def offer(self, request: Request, pending: int) -> int | Refusal:
        """Return how many of the `pending` tokens to compute in this step, at least 1, or a refusal.

        Must not change the builder; `take` follows if the request has its KV.
        """

    def take(self, request: Request, tokens: int) -> None: ...


class CountingBuilder:
    """Base of a batch builder for which decodes are alike, so that the planner does not ask about each of them.

    A subclass that overrides `offer` or `take` but not `decodes` is asked about each decode.

    Attributes:
        decoding: Requests whose decodes are alike, if not those of all.
    """

    __slots__ = ()
    counts_decodes: ClassVar[bool] = True
    decoding: Container[Request] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not {"decodes", "offer", "take"}.isdisjoint(vars(cls)):
            cls.counts_decodes = "decodes" in vars(cls)

    @property
    def decodes(self) -> int:
        """Number of decodes that it would accept next, of whichever requests."""
        raise NotImplementedError

    def take_decodes(self, count: int) -> None:
        raise NotImplementedError


class Batcher(Protocol):
    @property
    def cap(self) -> int:
        """Number of requests up to which the next step accepts best-effort ones."""

    def open(self, context: StepContext) -> BatchBuilder:
        """Start the batch of a step; may change the batcher. Called again if nothing in the first batch can run."""


class BatcherWrapper(Callbacks):
    """Base of a batcher around another one. `Policies` notifies and explains both."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher

    @property
    def cap(self) -> int:
        return self.batcher.cap


@dataclass(frozen=True, slots=True)
class Allocation:
    """Decision of an admission policy to give a request a KV reservation.

    Attributes:
        now: Device blocks that must be available immediately.
        blocks: Total size of the reservation.
        spare: Additional blocks that must remain available.
        tokens: Tokens that it covers; None for no limit.
        parent: Parent reservation; None for the shared pool.
        draws: Account whose unused blocks permanently cover a shortage.
    """

    now: int
    blocks: int = 0
    spare: int = 0
    tokens: int | None = None
    parent: Owner = None
    draws: Account | None = None
    group: Hashable | None = None


class Deferral(Enum):
    """Refusal of an admission policy; the value says which requests wait."""

    INCOMING = "no request without KV is admitted in this step"
    REQUEST = "of requests that lack KV, those that the ordering finds by their needs are still admitted"


class AdmissionPolicy(Protocol):
    def reserve(self, request: Request, target: int, kv: KVAccounts) -> Allocation | Deferral:
        """Decide on a reservation for a request that has none, or one that covers fewer than `target` tokens.

        Must be pure. It is called speculatively, and before arrival if the KV comes from another engine. Blocks that
        evictions would free are not counted in `kv`.
        """


class Eviction(NamedTuple):
    """Eviction of one request.

    Attributes:
        how: What happens to its device KV: SWAP, SPILL or DROP.
        blocks: With SPILL and DROP, the number of blocks to free, in the order of `KVAccounts.filled_after`; None for
            all. The request then waits until all of its KV fits on the device.
        shared: Whether to share these blocks bidirectionally with the request that needs them, where possible.
        displaces: Whether requests that rank after this one lose their KV on a full CPU tier. If even that does not
            suffice, the KV of this request is dropped.
    """

    request: Request
    how: Preemption
    blocks: int | None = None
    shared: bool = False
    displaces: bool = False


class EvictionPolicy(Protocol):
    """Policy that decides which KV leaves the device, and which is swapped in advance."""

    @property
    def shares(self) -> bool:
        """True if blocks are shared bidirectionally: best-effort requests fill theirs from the last slot down."""

    def returns_overlapped(self, request: Request) -> bool:
        """Return whether `ahead` alone swaps the request in, rather than the step that would run it. Must be pure."""

    def returns_alongside(self, request: Request) -> bool:
        """Return whether a step that computes other slices swaps the request in with overlapped moves. Must be pure.

        The request then takes its place in the batch without a slice. Otherwise the moves are blocking.
        """

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        """Choose evictions that make `short` blocks available. Must be pure.

        Args:
            candidates: Requests that may be evicted, least important first. Their footprints together suffice.
            incoming: Request without its KV on the device that needs the blocks; it waits if the result is empty. If
                None, at least one candidate must be evicted.
        """

    def on_dropped(self, tokens: int, now: float) -> None: ...

    def ahead(
        self, settled: Sequence[Request], ordering: Ordering, kv: KVAccounts, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        """Return the requests to swap out and to swap in with overlapped moves. They do not join this step.

        Called once per step before the batch is filled; may change the policy. If all requests have swapped-out KV and
        return overlapped, it must swap one in. Running ones of the `settled` holders pause, and are swapped out later.
        """
