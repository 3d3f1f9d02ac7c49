from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple

from skipjoin.core.context import StepContext, eligible_tokens
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import Allocation, BatchBuilder, Callbacks, CostModel, Deferral
from skipjoin.core.refusals import PROMPT_DOES_NOT_FIT, Refusal
from skipjoin.core.request import Request
from skipjoin.policies.batching import TargetBuilder, TargetForward
from skipjoin.policies.econo import PaddedLengths, Phase, QueueOrder
from skipjoin.policies.ranking import Ranking


class Demand(NamedTuple):
    """Resources needed by a request without KV.

    Attributes:
        prompt: Tokens to compute before the request samples.
        kv: KV tokens until it finishes.
    """

    prompt: int
    kv: int


class Room:
    """Remaining capacity of a step for requests without KV. Call `begin` and then `open` once per step."""

    def __init__(self) -> None:
        self.steps = 0
        self._kv: KVAccounts | None = None
        self._target = self._tokens = self._slots = 0
        self._blocks = 0

    def begin(self, kv: KVAccounts) -> None:
        self._kv = kv

    def open(self, context: StepContext, slots: int, target: int) -> None:
        assert self._kv is not None, "begin comes first"
        needs = [eligible_tokens(one, context) for one in self._kv.holders() if one.progress.finish_reason is None]
        self.steps += 1
        self._target = target
        self._tokens = target - sum(needs)
        self._slots = slots - sum(map(bool, needs))
        self._blocks = self._kv.available

    @property
    def is_full(self) -> bool:
        return min(self._slots, self._tokens, self._blocks) <= 0

    def distance(self, demand: Demand) -> float:
        """Return the Euclidean distance between a demand and the capacity, in shares; inf if it does not fit."""
        if self._kv is None:
            return math.inf
        tokens, blocks = self._tokens_of(demand), self._kv.blocks_for(demand.kv)
        if tokens > self._tokens or blocks > self._blocks:
            return math.inf
        return math.hypot((self._tokens - tokens) / self._target, (self._blocks - blocks) / self._kv.device_total)

    def take(self, demand: Demand) -> None:
        assert self._kv is not None, "begin comes first"
        self._slots -= 1
        self._tokens -= self._tokens_of(demand)
        self._blocks -= self._kv.blocks_for(demand.kv)

    def _tokens_of(self, demand: Demand) -> int:
        return demand.prompt if demand.prompt <= self._target else self._tokens


class WholeReservations(Callbacks):
    """Reserves KV for prompt and expected output before the first token (exact allocation, EconoServe section 2.1).

    A request that outgrows its reservation reserves its newly expected need. Failing that, it grows block by block and
    may preempt requests that came later.
    """

    def __init__(
        self,
        lengths: PaddedLengths,
        *,
        room: Room | None = None,
        group: Callable[[Request, float], Hashable] | None = None,
    ) -> None:
        self._lengths = lengths
        self._room = room
        self._group = group
        self._now = 0.0

    def on_begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        self._now = now
        if self._room is not None:
            self._room.begin(kv)
        return ()

    def reserve(self, request: Request, target: int, kv: KVAccounts) -> Allocation | Deferral:
        tokens = self._lengths.kv_tokens(request, max(0, target - len(request.prompt)))
        blocks = kv.blocks_for(tokens)
        fits = kv.shortfall_of_reservation(request, blocks, None) <= 0
        if kv.blocks_of(request) is None:
            group = None if self._group is None else self._group(request, self._now)
            return Allocation(now=blocks, blocks=blocks, tokens=tokens, group=group) if fits else Deferral.INCOMING
        if not fits:
            blocks = kv.blocks_for(target)
            tokens = min(tokens, blocks * kv.block_size)
        return Allocation(now=blocks, blocks=blocks, tokens=tokens)


class WholePrompts(TargetForward):
    """`TargetForward` with whole prompts.

    A prompt longer than the remaining tokens waits, and no new request overtakes it. A prompt longer than a whole step
    is cut, and continues with the remaining tokens of later steps.
    """

    def __init__(
        self, max_seqs: int, max_tokens: int, cost: CostModel, *, target: int | None = None, room: Room | None = None
    ) -> None:
        super().__init__(max_seqs, max_tokens, cost, target=target)
        self._room = room

    def open(self, context: StepContext) -> BatchBuilder:
        self._follow_cost()
        if self._room is not None:
            self._room.open(context, self.max_seqs, self.target)
        return WholePromptsBuilder(self.max_seqs, self.target)


class WholePromptsBuilder(TargetBuilder):
    __slots__ = ("_target",)

    def __init__(self, seqs: int, tokens: int) -> None:
        super().__init__(seqs, tokens)
        self._target = tokens

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if not request.progress.planned and 0 < self.tokens_left < pending <= self._target:
            return PROMPT_DOES_NOT_FIT
        return super().offer(request, pending)


class _Class(IntEnum):
    HOLDER = 0  # has reserved KV and not lost it
    CHOSEN = 1  # chosen for this step
    WAITING = 2


class HoldersFirst(Callbacks):
    """Ordering that ranks KV holders by the time of their reservation, then waiting requests; none preempts another."""

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._ranking = Ranking()
        self._reservations = count()
        self._holders: set[Request] = set()

    def on_arrived(self, request: Request, now: float) -> None:
        self._wait(request, now)

    def on_reserved(self, request: Request, allocation: Allocation, now: float) -> None:
        if request not in self._holders:
            self._forget(request)
            self._holders.add(request)
            self._ranking.set_stable(request, (_Class.HOLDER, next(self._reservations), request.id))

    def on_preempted(self, request: Request, now: float) -> None:
        if request in self._holders and not request.progress.computed:  # dropped
            self._holders.remove(request)
            self._wait(request, now)

    def on_reforecast(self, request: Request, now: float) -> None:
        if request not in self._holders:
            self._wait(request, now)

    def on_finished(self, request: Request, now: float) -> None:
        self._forget(request)
        self._holders.discard(request)

    def ranked(self, now: float) -> Iterator[Request]:
        return iter(self._ranking)

    def rank(self, request: Request) -> Any:
        return self._ranking.key(request)

    def outranks(self, one: Request, other: Request) -> bool:
        return False

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self.rank(request)[0], request) for request in sorted(requests, key=self.rank)]

    def _wait(self, request: Request, now: float) -> None:
        key = self._order.key(request, request.progress.known, Phase.WAITING, now)
        self._ranking.set_stable(request, (_Class.WAITING, *key, request.arrival, request.id))

    def _forget(self, request: Request) -> None:
        self._ranking.discard(request)
        self._order.left(request)


class Closest(HoldersFirst):
    """Ordering that first ranks the requests whose demand is closest to a step's capacity (MultiRes, section 2.1).

    Each step repeatedly chooses the closest waiting request until none fits; the others follow by `order`. Planning
    time is quadratic in the queue length, so use it in simulations only.
    """

    def __init__(self, order: QueueOrder, room: Room, lengths: PaddedLengths) -> None:
        super().__init__(order)
        self._room = room
        self._lengths = lengths
        self._waiting: dict[Request, Demand] = {}
        self._chosen: list[Request] = []
        self._steps = 0

    def ranked(self, now: float) -> Iterator[Request]:
        if self._steps != self._room.steps:
            self._steps = self._room.steps
            self._choose(now)
        return super().ranked(now)

    def _choose(self, now: float) -> None:
        for request in self._chosen:
            if request in self._waiting:
                self._wait(request, now)
        self._chosen.clear()
        left = dict(self._waiting)
        while left and not self._room.is_full:
            request = min(left, key=self._distance)
            if self._distance(request)[0] == math.inf:
                return
            self._room.take(left.pop(request))
            self._ranking.set_stable(request, (_Class.CHOSEN, len(self._chosen), request.id))
            self._chosen.append(request)

    def _distance(self, request: Request) -> tuple[float, float, int]:
        return (self._room.distance(self._waiting[request]), request.arrival, request.id)

    def _wait(self, request: Request, now: float) -> None:
        super()._wait(request, now)
        generated = request.progress.known - len(request.prompt)
        self._waiting[request] = Demand(request.progress.known, self._lengths.kv_tokens(request, generated))

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self._waiting.pop(request, None)


class ByArrival:
    """First come, first served in both queues, without groups."""

    revision = 0

    def key(self, request: Request, known: int, phase: Phase, now: float) -> tuple[Any, ...]:
        return (request.arrival, request.id)

    def until(self, request: Request, known: int, now: float) -> float:
        return math.inf

    def lost(self, request: Request) -> None:
        pass

    def left(self, request: Request) -> None:
        pass


class ByGroup(ByArrival):
    """First come, first served, with decodes of similar remaining length grouped at the position of the first member.

    Args:
        length_range: Width of a length range in tokens; lengths within one range are equal.
    """

    def __init__(self, lengths: PaddedLengths, length_range: int) -> None:
        self._lengths = lengths
        self._length_range = length_range
        self._groups: dict[int, dict[Request, None]] = {}
        self._first: dict[int, tuple[float, int]] = {}
        self._member_of: dict[Request, int] = {}

    def key(self, request: Request, known: int, phase: Phase, now: float) -> tuple[Any, ...]:
        if phase is not Phase.WAITING:
            return super().key(request, known, phase, now)
        length = self._lengths.remaining(request, known - len(request.prompt)) // self._length_range
        if self._member_of.get(request) != length:
            self.left(request)
            self._member_of[request] = length
            self._groups.setdefault(length, {})[request] = None
            self._first.setdefault(length, (request.arrival, request.id))
        return (*self._first[length], length)

    def left(self, request: Request) -> None:
        length = self._member_of.pop(request, None)
        if length is not None:
            del self._groups[length][request]
            if not self._groups[length]:
                del self._groups[length], self._first[length]
