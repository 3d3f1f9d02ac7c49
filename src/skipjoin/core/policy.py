"""The seams. A serving system is one value of `Policies`; the scheduler knows nothing else about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from skipjoin.core.events import Preemption
from skipjoin.core.kv import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepPlan, StepShape


class CostModel(Protocol):
    """What work costs, in seconds. One object serves the policies and the simulated executor."""

    @property
    def revision(self) -> int:
        """Changes when answers given before no longer hold. Whoever keeps answers compares it."""
        ...

    def step(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        ...

    def transfer(self, blocks: int) -> float:
        """Seconds to move `blocks` KV blocks across the link between the tiers, one way."""
        ...


class LengthPredictor(Protocol):
    """Predicted output lengths."""

    def predict(self, request: Request) -> int:
        """Tokens that the request will have generated when it ends, at least 1."""
        ...


class Ordering(Protocol):
    """Who matters most now. Owns whatever it knows about each request.

    The order is total and changes only in the calls below, so a step costs what it chooses and what changed, not
    the length of the queue.
    """

    def arrived(self, request: Request, now: float) -> None:
        """The request entered the engine."""

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        """These slices were computed; their requests' counters include them."""

    def evicted(self, request: Request, now: float) -> None:
        """The request's KV was dropped or swapped out; a dropped one has its tokens to compute again."""

    def left(self, request: Request, now: float) -> None:
        """The request finished or was aborted: forget it."""

    def ranked(self, now: float) -> Iterator[Request]:
        """All requests best first, lazily. Nothing else may be called while the iterator is in use, except
        `rank` and `outranks`."""
        ...

    def rank(self, request: Request) -> Any:
        """The key that `ranked` sorts by, comparable with the other requests' keys, smaller first."""
        ...

    def outranks(self, one: Request, other: Request) -> bool:
        """Whether `one` matters strictly more, so that it may evict `other` to get in. Equals never do."""
        ...

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        """These requests in the order in which they are expected to run next, soonest first, each with when: a value
        that compares with the others', equal where one of two has no reason to go first."""
        ...


class Refusal(Enum):
    """A batcher's no."""

    SKIP = "not this one"
    CLOSE = "nobody who holds no KV yet"
    STOP = "look no further"


class BatchBuilder(Protocol):
    """One step's batch while it is being filled."""

    def offer(self, request: Request, pending: int) -> int | Refusal:
        """How many of the request's `pending` tokens to compute in this step, at least 1, or a refusal. What is offered
        and not taken changes nothing."""
        ...

    def take(self, request: Request, tokens: int) -> None:
        """The request has space and joins the batch with that many tokens."""


class Outlook(NamedTuple):
    """What a batcher may look at before a step is filled.

    in_flight: the plans that have not committed, oldest first. idle: who could run, best first, each with the tokens
    that it has to compute; of those that hold no KV on the device, who finds free blocks. Made while it is read, which
    costs what is read of it; to be read once, before anybody is offered. Who is offered, and has space in the end, may
    differ.
    """

    in_flight: Sequence[StepPlan] = ()
    idle: Iterable[tuple[Request, int]] = ()


NO_OUTLOOK = Outlook()


class Batcher(Protocol):
    """Which of the ordered requests run together, and how many tokens of each."""

    def open(self, now: float, outlook: Outlook = NO_OUTLOOK) -> BatchBuilder:
        """Begin a step's batch."""
        ...


@dataclass(frozen=True, slots=True)
class Grant:
    """Admission. now: device blocks that must be available for the request now; blocks: how many it may claim in
    all; spare: blocks that must stay available besides."""

    now: int
    blocks: int = 0
    spare: int = 0


class Wait(Enum):
    """A reservation's no: the request waits for a later step."""

    WAIT = "wait"


class AdmissionPolicy(Protocol):
    """How much KV a request is promised when it gets its first block."""

    def admit(self, request: Request, kv: KVLedger) -> Grant | Wait:
        """Decide over a request that holds nothing. `kv` as of now; what evictions would free is not counted."""
        ...


class EvictionPolicy(Protocol):
    """What leaves the device when space is short, and what moves ahead of need.

    returns_overlapped: whether KV comes back from the host beside steps only, as `ahead` says, while its request is
    passed over; otherwise before the step that runs it.
    """

    @property
    def returns_overlapped(self) -> bool: ...

    def arrived(self, request: Request, now: float) -> None:
        """The request entered the engine."""

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, newcomer: Request | None
    ) -> Sequence[tuple[Request, Preemption]]:
        """Who makes way, and how (SWAP or DROP), until `short` blocks are available.

        candidates: requests that may be evicted, least important first; together they free enough. newcomer: who needs
        the blocks and has no KV on the device: it waits if the answer is empty. None: who needs them runs and grows,
        and somebody must make way.
        """
        ...

    def dropped(self, tokens: int, now: float) -> None:
        """KV of that many tokens was dropped for a newcomer."""

    def ahead(
        self, still: Sequence[Request], ordering: Ordering, kv: KVLedger, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        """Requests to move out and in beside this step, which none of them joins. Asked before the step is filled.

        still: the holders of KV, on either tier, of which nothing is in transit, in no order that matters. One that a
        plan in flight runs pauses in this step, and can leave beside a later one. With `returns_overlapped`, one must
        come in where all KV lies on the host.
        """
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """One serving system: a choice for every seam."""

    ordering: Ordering
    batcher: Batcher
    admission: AdmissionPolicy
    eviction: EvictionPolicy
