"""The seams. A serving system is one value of `Policies`; the scheduler knows nothing else about it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from skipjoin.core.events import Preemption
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account, Lender
from skipjoin.core.request import Request
from skipjoin.core.scheduling.context import StepContext
from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.core.step import Slice, StepShape


class CostModel(Protocol):
    """What work costs, in seconds. One object serves the policies and the simulated executor."""

    @property
    def revision(self) -> int:
        """Changes when answers given before no longer hold; a caller that keeps answers compares it."""
        ...

    def step(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        ...

    def transfer(self, blocks: float) -> float:
        """Seconds to move `blocks` KV blocks across the link between the tiers, one way."""
        ...


class Callbacks:
    """What every seam may be told of requests. A policy overrides what it needs; `Policies` calls only that.

    All other methods of the seams answer questions and must leave a policy as it was, unless their docstring says
    otherwise: the planner may ask speculatively, and more than once in a step.
    """

    def arrived(self, request: Request, now: float) -> None:
        """The request entered the engine."""

    def begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        """A step is about to be decided. Returns accounts and how many blocks each is to have: it gets as many as are
        available."""
        return ()

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        """These slices were computed; their requests' counters include them."""

    def claimed(self, request: Request, now: float) -> None:
        """The request was granted a claim on KV, which reaches `request.claimed` tokens."""

    def evicted(self, request: Request, now: float) -> None:
        """KV of the request was dropped or moved to the host, all of it or the last part; what is dropped has its
        tokens to compute again."""

    def reforecast(self, request: Request, now: float) -> None:
        """The request's `forecast` changed."""

    def finished(self, request: Request, now: float) -> None:
        """The request ended, however it did: forget it."""


class Ordering(Protocol):
    """Which requests matter most now. Owns what it knows of each request, from the `Callbacks`.

    The order is total and changes only in the callbacks and in `ranked`, so a step costs what it chooses and what
    changed, not the length of the queue.
    """

    def arrived(self, request: Request, now: float) -> None: ...
    def ran(self, slices: Sequence[Slice], now: float) -> None: ...
    def claimed(self, request: Request, now: float) -> None: ...
    def evicted(self, request: Request, now: float) -> None: ...
    def reforecast(self, request: Request, now: float) -> None: ...
    def finished(self, request: Request, now: float) -> None: ...

    def ranked(self, now: float) -> Iterator[Request]:
        """All requests best first, lazily. May promote what is due at `now`. While the iterator is in use, only `rank`
        and `outranks` may be called."""
        ...

    def rank(self, request: Request) -> Any:
        """The key that `ranked` sorts by, comparable with the other requests' keys, smaller first."""
        ...

    def outranks(self, one: Request, other: Request) -> bool:
        """Whether `one` matters strictly more, so that it may evict `other` to get in. Equals never do."""
        ...

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        """These requests in the order in which they are expected to run next, soonest first, each with when: a value
        that compares with the others', equal where neither of two has a reason to go first."""
        ...


class Scope(Enum):
    """Which requests a batcher's refusal is for."""

    REQUEST = "this request"
    NEWCOMERS = "every request that holds no KV yet"
    ALL = "every request that was not offered yet"


class Refusal(NamedTuple):
    """A batcher's no: for which requests, and why."""

    scope: Scope
    reason: WaitReason


NO_SEAT = Refusal(Scope.ALL, WaitReason.NO_SEAT)
NO_TOKENS = Refusal(Scope.ALL, WaitReason.TOKEN_BUDGET)
# A prompt that is computed whole does not fit: no newcomer overtakes it, and decodes go on.
PROMPT_DOES_NOT_FIT = Refusal(Scope.NEWCOMERS, WaitReason.TOKEN_BUDGET)
# The step has its share of prompts' tokens; requests that generate still join.
PROMPTS_ARE_FULL = Refusal(Scope.NEWCOMERS, WaitReason.TOKEN_BUDGET)
HELD = Refusal(Scope.REQUEST, WaitReason.HELD_BY_BATCHER)
NEWCOMERS_HELD = Refusal(Scope.NEWCOMERS, WaitReason.HELD_BY_BATCHER)
ALL_HELD = Refusal(Scope.ALL, WaitReason.HELD_BY_BATCHER)


class BatchBuilder(Protocol):
    """One step's batch while it is being filled."""

    def offer(self, request: Request, pending: int) -> int | Refusal:
        """How many of the request's `pending` tokens to compute in this step, at least 1, or a refusal. What is offered
        and not taken changes nothing."""
        ...

    def take(self, request: Request, tokens: int) -> None:
        """The request has space and joins the batch with that many tokens."""


class Batcher(Protocol):
    """Which of the ordered requests run together, and how many tokens of each."""

    @property
    def cap(self) -> int:
        """Up to how many requests the next step takes best-effort ones."""
        ...

    def open(self, context: StepContext) -> BatchBuilder:
        """Begin a step's batch. May change the batcher; called once per step, and once more, without candidates, where
        nothing of the first batch can run."""
        ...


@dataclass(frozen=True, slots=True)
class Grant:
    """A claim on KV. now: device blocks that must be available for the request now; blocks: how many it may have in
    all; spare: blocks that must stay available besides.

    tokens: that it may have before it asks again; None: it never does. lender: what lends the blocks; None: they are
    free for all. draws: an account that gives up unused blocks for what is not available. group: see `Claimed`.
    """

    now: int
    blocks: int = 0
    spare: int = 0
    tokens: int | None = None
    lender: Lender = None
    draws: Account | None = None
    group: Hashable | None = None


class Wait(Enum):
    """An admission policy's no: the request waits for a later step."""

    WAIT = "no request that holds no KV gets any in this step"
    PASS = "others may get some, for a while"


class AdmissionPolicy(Protocol):
    """How much KV a request is granted when it gets its first block, and when its claim reaches no further."""

    def claim(self, request: Request, target: int, kv: KVAccounts) -> Grant | Wait:
        """Decide over a request that is to have `target` tokens on the device, and that has no claim or one that ends
        before. `kv` as of now; what evictions would free is not counted. Must be pure: it is asked speculatively, and
        before the request arrives where its KV is to come from another engine (`EngineCore.expect`)."""
        ...


class Eviction(NamedTuple):
    """One request makes way. how: what becomes of its KV on the device: SWAP, SPILL or DROP.

    blocks: how many its lender gets back, with SPILL and DROP: those that it claims and does not hold first, then those
    without KV, then its last ones, whose KV moves to the host (SPILL) or is dropped. The KV before them stays where it
    is, and the request waits until it can have all on the device again. None, or as many as there are: all.

    lent: these blocks with KV become blocks of the request that needs them, which fills them from the other end; only
    what it overwrites is saved on the host. Where they cannot be lent to it, `how` says what becomes of them.
    """

    request: Request
    how: Preemption
    blocks: int | None = None
    lent: bool = False


class EvictionPolicy(Protocol):
    """What leaves the device when space is short, and what moves ahead of need."""

    @property
    def lends(self) -> bool:
        """Whether best-effort requests lend blocks: they fill them from the last slot down, for life."""
        ...

    def returns_overlapped(self, request: Request) -> bool:
        """Whether KV of this request that is on the host comes back with overlapped moves only, as `ahead` says,
        while the request is passed over; otherwise with a blocking move of the step that runs it. Pure."""
        ...

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        """Which requests make way, and how, until `short` blocks are available. Pure.

        candidates: requests that may be evicted, least important first; together their footprints are enough. newcomer:
        the request that needs the blocks and does not have its KV on the device: it waits if the answer is empty. None:
        a request needs them that runs and grows, or but for which nothing would run, and at least one candidate must
        make way.
        """
        ...

    def dropped(self, tokens: int, now: float) -> None:
        """KV of that many tokens was dropped for a newcomer."""

    def ahead(
        self, settled: Sequence[Request], ordering: Ordering, kv: KVAccounts, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        """Requests to move out and in with overlapped moves of this step, which none of them joins. Asked once per
        step, before it is filled; may change the policy.

        settled: the holders of KV, on either tier or on both, of which nothing is in transit, in no order that matters.
        One that a plan in flight runs pauses in this step, and can leave with a later one. Where all requests have KV
        on the host, and it returns overlapped, at least one must come in.
        """
        ...


def rests(policy: object) -> bool:
    """Whether steps in which all requests decode, and nothing waits, leave the policy as it was, whether it is asked
    and told of them or not. A class says so by an attribute `rests` of its own, for itself alone: one that is derived
    from it may do more."""
    name = "rests"
    return name in vars(type(policy)) and bool(getattr(policy, name))


@dataclass(frozen=True, slots=True)
class Policies:
    """One serving system: a choice for every seam.

    on_begin, on_arrived, ...: the `Callbacks` that the four policies have, in the order of the seams.
    """

    ordering: Ordering
    batcher: Batcher
    admission: AdmissionPolicy
    eviction: EvictionPolicy
    on_begin: tuple[Callable[[float, KVAccounts], Iterable[tuple[Account, int]]], ...] = field(
        init=False, repr=False, compare=False
    )
    on_arrived: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)
    on_ran: tuple[Callable[[Sequence[Slice], float], None], ...] = field(init=False, repr=False, compare=False)
    on_claimed: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)
    on_evicted: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)
    on_reforecast: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)
    on_finished: tuple[Callable[[Request, float], None], ...] = field(init=False, repr=False, compare=False)

    @property
    def rest(self) -> bool:
        """Whether all of them do, as `rests` says."""
        return all(map(rests, (self.ordering, self.batcher, self.admission, self.eviction)))

    def __post_init__(self) -> None:
        seams = (self.ordering, self.batcher, self.admission, self.eviction)
        for name in ("begin", "arrived", "ran", "claimed", "evicted", "reforecast", "finished"):
            inherited = getattr(Callbacks, name)
            has = [seam for seam in seams if getattr(type(seam), name, inherited) is not inherited]
            object.__setattr__(self, f"on_{name}", tuple(getattr(seam, name) for seam in has))
