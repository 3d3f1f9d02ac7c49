from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from typing import NamedTuple

from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import Allocation, Callbacks, Deferral, Fact, Ordering
from skipjoin.core.promises import must_precede
from skipjoin.core.request import UNLIMITED, Band, Request
from skipjoin.policies.econo import PaddedLengths, Phase, phase_of
from skipjoin.policies.nesting import ParentRequests, parent_of, unused

# Account of the KV that is set aside for prompts.
PROMPTS = Account("prompts")
# Account that collects free blocks for a request, which others would take before enough of them are free.
COLLECTED = Account("collected")


class GroupGate:
    """Admission of groups until KV is full, and again once a group completes (EconoServe Algorithm 1).

    A group consists of the decodes that reserve with equal labels while the gate is open, until none of them runs
    within its reservation any more.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._was_refused = False
        self._forming: dict[Hashable, int] = {}  # number of the group by label
        self._group_of: dict[Request, int] = {}
        self._sizes: Counter[int] = Counter()
        self._numbers = count()

    def begin(self) -> None:
        """Close the gate if a decode was refused in the last step and a group has members."""
        for request in [
            request for request in self._group_of if phase_of(request, request.progress.known) is not Phase.RUNNING
        ]:
            self.leave(request)
        if self._was_refused and self._sizes:
            self.is_open = False
            self._forming.clear()
        self._was_refused = False

    def refuse(self) -> None:
        self._was_refused = self.is_open

    def join(self, request: Request, label: Hashable) -> None:
        self.leave(request)
        if label is None:
            return
        if label not in self._forming:
            self._forming[label] = next(self._numbers)
        group = self._group_of[request] = self._forming[label]
        self._sizes[group] += 1

    def leave(self, request: Request) -> None:
        group = self._group_of.pop(request, None)
        if group is None:
            return
        self._sizes[group] -= 1
        if not self._sizes[group]:
            del self._sizes[group]
            self.is_open = True


class _Wanted(NamedTuple):
    """Reservation of a decode, and the unused blocks that a parent request must have."""

    target: int
    forecast: Forecast | None
    tokens: int
    blocks: int
    nested_tokens: int
    nested_blocks: int
    need: int


class ExactReservations(Callbacks):
    """Reserves exactly the KV that a decode is predicted to need until it finishes (EconoServe section 3.3).

    A prompt reserves only its own KV, from a share of the pool. It then becomes a decode that waits for its
    reservation. If a parent request has room, a request nests its whole reservation, prompt and output.

    A request that outgrows its reservation extends it from its parent's unused blocks, available blocks, and the
    prompts' share, in this order. If none suffices it pauses with its KV in place (offload-free preemption). Other
    requests are evicted for a reservation only if nothing runs, they have a worse priority, or it must precede them.

    Free blocks are collected for one request at a time: an overdue one or, for a share of the KV that is reserved, the
    prompt that has waited longest for the KV and the time that it needs. Otherwise a prompt larger than the reserve
    would starve behind decodes, and a long output behind shorter ones. The prompt reserves the KV of its output, too.

    With `parks`, the prompts' share grows to the size of the oldest prompt that does not fit, while the CPU tier has
    room for the KV of decodes that wait. `Park` swaps these out, so that the share soon is free again.

    Args:
        reserve: Share of the pool for prompts, which they exceed only while no decode waits.
        collected: Blocks collected for prompts, as a share of those that other requests reserve first.
        gate: Decides when waiting decodes are admitted; None admits them whenever KV suffices.
        overdue: Requests that precede all others because of their age; the ordering adds and removes them.
    """

    is_decode_invariant = True

    def __init__(
        self,
        lengths: PaddedLengths,
        *,
        group: Callable[[Request, float], Hashable] | None,
        reserve: float,
        parents: ParentRequests | None,
        collected: float = 0.0,
        gate: GroupGate | None = None,
        overdue: AbstractSet[Request] = frozenset(),
        parks: bool = False,
    ) -> None:
        self._lengths = lengths
        self._group = group
        self._reserve = reserve
        self._parents = parents
        self._gate = gate
        self._overdue = overdue
        self._parks = parks
        self._next_prompt: Request | None = None  # the oldest prompt that did not fit, until it has KV
        self._share = collected
        self._owed = 0.0  # collected blocks of prompts minus the share of other reservations, at least 0
        self._reserving: set[Request] = set()  # those with a reservation of their own before
        self._now = 0.0
        self._collector: Request | None = None  # request for which blocks are collected
        self._running: Request | None = None  # the last one found to run
        self._bands: Counter[Band] = Counter()  # of all requests, before any is lifted
        self._ordering: Ordering | None = None
        self._live: set[Request] = set()  # those that the ordering knows
        self._prompts: dict[Request, None] = {}  # those without KV, and some that hold it again
        self._was_refused = False  # whether a request was in the last step
        self._wanted: dict[Request, _Wanted] = {}  # of decodes that were refused or admitted

    def bind(self, ordering: Ordering) -> None:
        self._ordering = ordering

    def on_begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        self._now = now
        if self._parents is not None:
            self._parents.begin(kv)
        if self._gate is not None:
            self._gate.begin()
        self._choose_next_prompt(kv)
        collected = self._blocks_to_collect(kv)
        prompts = max(math.ceil(self._reserve * kv.device_total), self._next_blocks(kv))
        return (PROMPTS, min(prompts, kv.device_total - collected)), (COLLECTED, collected)

    def on_arrived(self, request: Request, now: float) -> None:
        self._bands[request.own_band] += 1
        self._live.add(request)
        self._prompts[request] = None

    def on_reserved(self, request: Request, allocation: Allocation, now: float) -> None:
        self._change_parents()
        self._prompts.pop(request, None)
        self._pay(request, allocation)
        if self._gate is not None and phase_of(request, request.progress.known) is Phase.RUNNING:
            self._gate.join(request, allocation.group)

    def on_deferred(self, request: Request, now: float) -> None:
        self._was_refused = True  # prompts behind a decode without KV on the device are not asked
        if request.progress.planned and self._gate is not None:
            self._gate.refuse()

    def on_preempted(self, request: Request, now: float) -> None:
        self._change_parents()
        self._prompts[request] = None
        if self._gate is not None:
            self._gate.leave(request)

    def on_finished(self, request: Request, now: float) -> None:
        self._change_parents()
        self._wanted.pop(request, None)
        self._prompts.pop(request, None)
        self._reserving.discard(request)
        if self._gate is not None:
            self._gate.leave(request)
        self._live.discard(request)
        band = request.own_band
        self._bands[band] -= 1
        if not self._bands[band]:
            del self._bands[band]

    def reserve(self, request: Request, target: int, kv: KVAccounts) -> Allocation | Deferral:
        if kv.blocks_of(request) is None:
            return self._first_reservation(request, kv)
        if self._has_outgrown(request, kv) and (more := self._more(request, target, kv)) is not None:
            return more
        wanted = self._want(request, target, kv)
        tokens, blocks = wanted.tokens, wanted.blocks
        is_open = self._gate is None or self._gate.is_open
        short = kv.shortfall_of_reservation(request, blocks, None)
        if is_open and short <= 0:
            return Allocation(now=blocks, blocks=blocks, tokens=tokens, group=self._group_of(request))
        if (
            is_open
            and self._parents is not None
            and (parent := self._parents.seek(request, wanted.need, kv)) is not None
        ):
            tokens, blocks = wanted.nested_tokens, wanted.nested_blocks
            return Allocation(now=blocks, blocks=blocks, tokens=tokens, parent=parent, group=self._group_of(request))
        if self._is_stuck(request, kv) or self._may_displace(request, kv):
            group = self._group_of(request)
            return Allocation(now=blocks, blocks=blocks, tokens=tokens, draws=PROMPTS, group=group)
        if request is self._collector and short <= unused(COLLECTED, kv):
            group = self._group_of(request)
            return Allocation(now=blocks, blocks=blocks, tokens=tokens, draws=COLLECTED, group=group)
        return Deferral.REQUEST

    def missing_for_prompt(self, kv: KVAccounts) -> int:
        """Return how many blocks the prompt lacks for which decodes that wait give up theirs, at least 0."""
        return 0 if self._next_prompt is None else max(0, self._next_blocks(kv) - self._room_for_prompts(kv))

    def _choose_next_prompt(self, kv: KVAccounts) -> None:
        before, tiers = self._next_prompt, kv.tiers
        if before is not None and before in self._prompts and kv.blocks_of(before) is None:
            return
        self._next_prompt = None
        if not self._parks or not self._was_refused or tiers is None or not tiers.cpu_free:
            return
        fits = self._room_for_prompts(kv)
        oldest = (
            request
            for request in self._prompts
            if kv.blocks_of(request) is None and fits < kv.blocks_for(request.progress.known) <= tiers.cpu_free
        )
        self._next_prompt = next(oldest, None)

    def _next_blocks(self, kv: KVAccounts) -> int:
        return 0 if self._next_prompt is None else kv.blocks_for(self._next_prompt.progress.known)

    def _blocks_to_collect(self, kv: KVAccounts) -> int:
        """Return how many blocks a request needs besides its own, and make it the collector."""
        waiting = [request for request in self._overdue if request in self._live and _waits(request, kv)]
        request = min(waiting, key=lambda request: (request.arrival, request.id), default=None)
        self._collector = request = request if request is not None else self._waiting_longest(kv)
        self._was_refused = False
        # While nothing runs, no blocks become free.
        if request is None or self._is_stuck(request, kv) or any(own < request.progress.band for own in self._bands):
            return 0
        if kv.blocks_of(request) is None:
            return kv.blocks_for(self._tokens_collected(request))
        blocks = self._wanted[request].blocks if request in self._wanted else 0
        return max(0, kv.available + kv.shortfall_of_reservation(request, blocks, None))

    def _pay(self, request: Request, allocation: Allocation) -> None:
        if allocation.parent is not None or request in self._reserving:
            return
        self._reserving.add(request)
        if request is not self._collector:
            self._owed = max(0.0, self._owed - self._share * allocation.blocks)
        elif request not in self._overdue:
            self._owed += allocation.blocks

    def _waiting_longest(self, kv: KVAccounts) -> Request | None:
        """Return the prompt with the longest wait to the KV and the time that it needs, if it does not fit."""
        if self._owed or not self._share or not self._prompts:
            return None
        before, best = self._collector, min(self._bands)

        def waits(request: Request) -> bool:
            return kv.blocks_of(request) is None and request.progress.band <= best

        if before is not None and before in self._prompts and waits(before):
            return before
        if not self._was_refused:
            return None
        fits = self._room_for_prompts(kv)
        return max(
            (request for request in self._prompts if waits(request) and kv.blocks_for(request.progress.known) > fits),
            key=lambda request: (self._slowdown(request), -request.id),
            default=None,
        )

    def _slowdown(self, request: Request) -> float:
        generated = request.progress.known - len(request.prompt)
        return (self._now - request.arrival) / (self._tokens(request) * self._lengths.remaining(request, generated))

    def _tokens_collected(self, request: Request) -> int:
        """Return the tokens of the prompt and, unless it is overdue and keeps its precedence, of the output."""
        return request.progress.known if request in self._overdue else self._tokens(request)

    def _tokens(self, request: Request) -> int:
        return self._lengths.kv_tokens(request, request.progress.known - len(request.prompt))

    def _want(self, request: Request, target: int, kv: KVAccounts) -> _Wanted:
        wanted, forecast = self._wanted.get(request), request.progress.forecast
        if wanted is not None and wanted.target == target and wanted.forecast is forecast:
            return wanted
        generated = max(0, target - len(request.prompt))
        tokens = self._lengths.kv_tokens(request, generated)
        nested = self._lengths.kv_tokens(request, generated, nested=True)
        blocks = kv.blocks_for(nested)
        need = self._parents.need(blocks, nested - target + 1, kv) if self._parents is not None else 0
        wanted = _Wanted(target, forecast, tokens, kv.blocks_for(tokens), nested, blocks, need)
        self._wanted[request] = wanted
        return wanted

    def _group_of(self, request: Request) -> Hashable:
        return None if self._group is None else self._group(request, self._now)

    def needs(self, request: Request, kv: KVAccounts) -> Sequence[int | None]:
        """Return the blocks that a prompt lacks, those that a decode lacks, and the need in a parent, if any."""
        known = request.progress.known
        if kv.blocks_of(request) is not None:
            decode, nested = self._needs_of_decode(request, known, kv)
            return (None, decode) if self._parents is None else (None, decode, nested)
        prompt = kv.blocks_for(known)
        if self._parents is None:
            return prompt, None
        return prompt, None, self._whole(request, self._parents, kv)[2]

    def _needs_of_decode(self, request: Request, known: int, kv: KVAccounts) -> tuple[int, int | None]:
        if self._has_outgrown(request, kv):
            return 0, None  # what it may use changes in every step
        wanted, parent = self._want(request, known, kv), parent_of(request, kv)
        return wanted.blocks - (kv.footprint(request) if parent is None else 0), wanted.need

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        if kv.blocks_of(request) is None or request.progress.reserved_tokens == UNLIMITED:
            yield Fact("reservation", "none", "", "It holds no KV that the recipe has reserved for it.")
            return
        parent = parent_of(request, kv)
        match parent:
            case None:
                kind, meaning = "exact", "Its reservation has blocks of its own, for the expected output."
            case Request():
                kind, meaning = "nested", "Its KV lies in blocks that another request reserved and has not used."
            case _:
                kind, meaning = "prompt", "It has blocks for its prompt alone, from the share for prompts."
        yield Fact("reservation", kind, "", meaning)
        yield Fact("reserved", kv.blocks_for(request.progress.reserved_tokens), "blocks", "KV that it may fill.")
        nested = [holder for holder in kv.holders() if parent_of(holder, kv) is request]
        blocks = sum(kv.blocks_for(holder.progress.reserved_tokens) for holder in nested)
        yield Fact("unused", max(0, unused(request, kv)), "blocks", "Reserved KV that neither it nor others use.")
        yield Fact(
            "nested", len(nested), "requests", f"Requests that use {blocks} blocks of its reservation meanwhile."
        )

    def limits(self, kv: KVAccounts) -> Sequence[int]:
        prompt, decode = max(self._room_for_prompts(kv), self._collected(kv)), self._room_for_decodes(kv)
        return (prompt, decode) if self._parents is None else (prompt, decode, self._parents.largest(kv))

    def _room_for_prompts(self, kv: KVAccounts) -> int:
        prompt = unused(PROMPTS, kv)
        return kv.available if kv.available > prompt and not self._generation_waits(kv) else prompt

    def _room_for_decodes(self, kv: KVAccounts) -> int:
        # One that leaves the prompts' share makes room for itself if the share is larger than reserved.
        over = kv.reservations.overdrawn(PROMPTS) if kv.reservations is not None else 0
        room, request = max(0, kv.available + over), self._collector
        if request is None or request not in self._wanted or kv.blocks_of(request) is None:
            return room
        blocks = self._wanted[request].blocks
        is_covered = kv.shortfall_of_reservation(request, blocks, None) <= unused(COLLECTED, kv)
        return max(room, blocks) if is_covered else room

    def _collected(self, kv: KVAccounts) -> int:
        request = self._collector
        if request is None or kv.blocks_of(request) is not None:
            return 0
        blocks = kv.blocks_for(self._tokens_collected(request))
        return kv.blocks_for(request.progress.known) if blocks <= kv.available + unused(COLLECTED, kv) else 0

    def _first_reservation(self, request: Request, kv: KVAccounts) -> Allocation | Deferral:
        known = request.progress.known
        if self._parents is not None:
            tokens, blocks, need = self._whole(request, self._parents, kv)
            if (parent := self._parents.seek(request, need, kv)) is not None:
                return Allocation(now=blocks, blocks=blocks, tokens=tokens, parent=parent)
        blocks, spare = kv.blocks_for(known), unused(PROMPTS, kv)
        if blocks <= spare:
            return Allocation(now=blocks, blocks=blocks, tokens=known, parent=PROMPTS)
        if blocks <= kv.available and not self._generation_waits(kv):
            return Allocation(now=blocks, blocks=blocks, tokens=known)
        if self._may_displace(request, kv):
            return Allocation(now=blocks, blocks=blocks, tokens=known, draws=PROMPTS)
        collected = self._collected(kv)
        if collected and request is self._collector:
            tokens = self._tokens_collected(request)
            blocks = kv.blocks_for(tokens)
            return Allocation(now=blocks, blocks=blocks, tokens=tokens, draws=COLLECTED)
        has_room = spare or collected or (self._parents is not None and self._parents.largest(kv))
        return Deferral.REQUEST if has_room else Deferral.INCOMING

    def _has_outgrown(self, request: Request, kv: KVAccounts) -> bool:
        reserved = request.progress.reserved_tokens
        return len(request.prompt) < reserved < UNLIMITED and parent_of(request, kv) is not PROMPTS

    def _more(self, request: Request, target: int, kv: KVAccounts) -> Allocation | None:
        tokens = self._lengths.kv_tokens(request, target - len(request.prompt))
        parent = parent_of(request, kv)
        for wanted in (tokens, target):
            blocks = kv.blocks_for(wanted)
            if kv.shortfall_of_reservation(request, blocks, parent) <= unused(PROMPTS, kv):
                most = min(tokens, blocks * kv.block_size)
                return Allocation(now=blocks, blocks=blocks, tokens=most, parent=parent, draws=PROMPTS)
        return None

    def _whole(self, request: Request, parents: ParentRequests, kv: KVAccounts) -> tuple[int, int, int]:
        known = request.progress.known
        tokens = self._lengths.kv_tokens(request, known - len(request.prompt), nested=True)
        blocks = kv.blocks_for(tokens)
        # One step more, for the prompt.
        return tokens, blocks, parents.need(blocks, tokens - known + 1, kv)

    def _change_parents(self) -> None:
        if self._parents is not None:
            self._parents.changed()

    def _may_displace(self, request: Request, kv: KVAccounts) -> bool:
        band = request.progress.band
        # The first condition is quicker, and false for most loads.
        if max(self._bands, default=band) > band and any(holder.progress.band > band for holder in kv.holders()):
            return True
        holders = (holder for holder in kv.holders() if holder in self._live)
        return request in self._live and must_precede(self._ordering, request, holders)

    @staticmethod
    def _generation_waits(kv: KVAccounts) -> bool:
        # Latest holders first, as they are the likeliest to wait.
        return any(
            # The first condition is the quickest, and false for nearly all.
            request.progress.known > request.progress.reserved_tokens
            and phase_of(request, request.progress.known) is Phase.WAITING
            and request.progress.finish_reason is None
            for request in reversed(list(kv.holders()))
        )

    def _is_stuck(self, request: Request, kv: KVAccounts) -> bool:
        # All refused decodes of a step ask this, so the last answer is tried first.
        if (running := self._running) is not None and running is not request and _runs(running, kv):
            return False
        holders = (holder for holder in kv.holders() if holder is not request and _runs(holder, kv))
        self._running = next(holders, None)
        return self._running is None


def _runs(request: Request, kv: KVAccounts) -> bool:
    progress = request.progress
    is_running = progress.in_flight or phase_of(request, progress.known) is Phase.RUNNING
    return is_running and kv.blocks_of(request) is not None


def _waits(request: Request, kv: KVAccounts) -> bool:
    return kv.blocks_of(request) is None or phase_of(request, request.progress.known) is not Phase.RUNNING
