from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress, islice, takewhile
from typing import Any

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import Callbacks, Fact
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import REQUEST_OF, Slice
from skipjoin.policies.aging import MARGIN, Aging
from skipjoin.policies.bin_edges import BinEdges
from skipjoin.policies.cells import Cell, Entry, SortedCells, Standing
from skipjoin.policies.claims import FirstTokenClaims
from skipjoin.policies.first_tokens import Alarms, FirstTokenPace
from skipjoin.policies.gittins import NOT_BEGUN, GittinsIndex, Kind, kind_of
from skipjoin.policies.hazards import BIN_EDGES, BINS, bin_of
from skipjoin.policies.length_model import ForecastClass

# Factor by which the counts of arrivals shrink when indices change, and the count below which a kind is forgotten.
_NEW_KEPT, _MIN_NEW = 0.9, 0.05
# Steps within which the cached prefix of each waiting request is looked up again.
_LOOKUP_STEPS = 64
# Share of the time for prompts computed ahead where all requests cost the same, so that ordering gains nothing.
_MIN_AHEAD = 0.03
# Groups of requests, which precede each other. The first two are ordered by arrival, the first one also by prefill.
FIRST, OLD, OTHER = range(3)


def _turn(group: int, key: float) -> float:
    """Return a number that is equal for requests of a group of which neither has a reason to run first."""
    return 0 if group == FIRST else key if group == OLD else math.floor(key / MARGIN)


class _Job:
    __slots__ = ("cached", "cell", "cls", "entry", "kind", "place", "standing")

    kind: Kind

    def __init__(self, request: Request, cls: ForecastClass) -> None:
        self.cell: Cell | None = None
        self.entry: Entry = (request.arrival, request.id, request)
        self.cls = cls
        self.cached = request.progress.cached
        self.standing = Standing()
        self.place = NOT_BEGUN


class Adaptive(Callbacks):
    """Ordering by learned index and age, after requests that wait for their first token.

    A request's key is -log(index) + arrival / tau, and keys that differ by less than a margin do not preempt. Requests
    older than `overtaking_s` precede these, by arrival, so that no later request overtakes them except for its first
    token.

    Requests that wait for their first token follow by arrival + `prompt_patience` x prefill time. While others precede
    them, the index charges the prefill. It no longer counts from that sum on: requests that arrive later
    and have equal forecasts and limits do not overtake because of shorter prompts.

    First tokens of requests that then wait take time from others, which ordering must win back. Such prompts get
    `first_share` where costs are spread as widely as an exponential distribution, and 3 % where all are alike
    (`FirstTokenClaims`). While KV that left for first tokens costs too much, they take it only as their index allows.
    """

    def __init__(self, index: GittinsIndex, *, overtaking_s: float, first_share: float, prompt_patience: float) -> None:
        self._index = index
        self._revision = index.revision
        self._overtaking_s = overtaking_s
        self._aging = Aging(index.step_s)
        self._pace = FirstTokenPace(first_share, index.step_s)
        self._claims = FirstTokenClaims(index.time, index.step_s)
        self._patience = prompt_patience
        self._is_open = True
        # Whether first tokens may take KV from others as of `_asked`: constant within a step, which begins at `_now`.
        self._may_displace, self._asked, self._now = True, -math.inf, 0.0
        self._jobs: dict[Request, _Job] = {}
        self._cells: dict[tuple[Standing, Kind, int], Cell] = {}
        # First tokens by arrival and prefill, then old requests by arrival, then all others.
        self._orders = SortedCells(), SortedCells(), SortedCells()
        self._begun: set[Request] = set()  # have a bin
        self._edges = BinEdges()
        self._dropped: set[Request] = set()  # recompute KV in their next steps
        self._missing = Alarms()  # of fresh requests, when they miss their TTFT objective
        self._overdue = Alarms()  # of requests without output, when their prompt no longer counts
        self._aged = Alarms()  # of requests, when they are older than `overtaking_s`
        self._with_prefix: dict[Request, None] = {}  # without output, in the order of their next lookups
        self._running: Sequence[Slice] = ()
        # The requests of these slices, and those among them that had no bin before.
        self._ran: list[Request] = []
        self._ran_set: set[Request] = set()
        self._incoming: set[Request] = set()
        self._new: Counter[Kind] = Counter()  # recent arrivals
        self._latest = -math.inf  # time of the latest arrival

    # -- callbacks ----------------------------------------------------------------------------------------

    def on_begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        self._index.observe(kv, len(self._running))
        if self._claims:
            all_run = self._begun <= self._ran_set
            slots = self._index.max_seqs - len(self._running) if all_run else 0
            for request in self._claims.granted(now, slots, kv, partial(self._claimed_s, now)):
                job = self._jobs[request]
                self._stand(job, job.standing._replace(is_fresh=True))
        if self._with_prefix:
            self._look_up(kv)
        return ()

    def on_arrived(self, request: Request, now: float) -> None:
        index = self._index
        cls = index.model.expect(request.progress.forecast)
        job = self._jobs[request] = _Job(request, cls)
        job.kind = self._kind_of(request, job)
        self._new[job.kind] += 1
        self._latest = max(self._latest, request.arrival)
        self._aged.add(request.arrival + self._overtaking_s, request)
        if request.progress.output:
            self._enter(request, job, bin_of(len(request.progress.output) + 1))
            self._dropped.add(request)
        else:
            overdue_at = request.arrival + self._patience * index.prompt_s(job.kind)
            self._overdue.add(overdue_at, request)
            job.standing = Standing(is_fresh=self._claims.ask(request, overdue_at, now))
            if request.prefix is not None:
                self._with_prefix[request] = None
        ttft_s = request.progress.target.ttft_s
        if not request.progress.output and ttft_s < math.inf:
            self._missing.add(request.arrival + ttft_s, request)
        self._join(job)

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        jobs, self._running = self._jobs, slices
        self._follow_running()
        ran, requests = self._ran, self._ran_set
        self._edges.begin_step(requests)
        claims = self._claims
        claims.note_continued(ran, self._begun)
        incoming = self._incoming
        leaving = self._edges.reached & requests if self._edges.reached else self._edges.reached
        dropped = self._dropped & requests if self._dropped else self._dropped
        if not (incoming or leaving or dropped):
            claims.note_step(0, now)
            return
        prompts, prefill_s = 0, self._index.time.prefill
        # First tokens take the time of others only where these cannot run alongside.
        displaces = len(self._begun) > len(requests) - len(incoming)
        concerned, fresh = incoming | leaving | dropped, 0
        for slice_ in compress(slices, map(concerned.__contains__, ran)):
            request = slice_.request
            job = jobs[request]
            # Known tokens do not include the one just sampled, which may be the last: a bin is left once the request is
            # known to continue.
            is_begun, is_fresh = job.place != NOT_BEGUN, job.standing.is_fresh
            if slice_.tokens > 1 and (is_begun or (displaces and is_fresh)):
                prompts += slice_.tokens
            if is_fresh:
                fresh += slice_.tokens
                claims.note_prompt(slice_, now, displaces=displaces)
            if not is_begun:
                claims.note_part(request, is_whole=slice_.samples)
            if slice_.samples:
                self._dropped.discard(request)
                if self._edges.is_past(request):
                    self._advance(request, job)
            elif not is_begun:
                self._price(request, job)
        if prompts:
            self._pace.spend(prefill_s(prompts), now)
        claims.note_step(fresh, now)

    def on_preempted(self, request: Request, now: float) -> None:
        is_begun, is_lost = request in self._begun, True
        if is_begun:
            is_lost = request.progress.known - request.progress.computed > 1
            if is_lost:
                self._dropped.add(request)
        else:
            job = self._jobs[request]
            job.cached = 0
            self._price(request, job)
        self._claims.note_left(request, now, self._index.capacity, is_begun=is_begun, is_lost=is_lost)

    def on_reforecast(self, request: Request, now: float) -> None:
        job, index = self._jobs[request], self._index
        job.cls = index.model.expect(request.progress.forecast)
        self._price(request, job)

    def on_finished(self, request: Request, now: float) -> None:
        job = self._jobs.pop(request)
        self._leave(job)
        self._edges.forget(request)
        self._begun.discard(request)
        self._dropped.discard(request)
        self._claims.forget(request, self._jobs)
        self._with_prefix.pop(request, None)
        # Others were cut off: of their lengths it is known only which bins they survived.
        if request.progress.finish_reason is FinishReason.STOP and request.progress.output and job.place != NOT_BEGUN:
            self._index.model.note(job.cls, bin_of(len(request.progress.output)), ended=True)
        self._aged.sweep(self._jobs)
        self._missing.sweep(self._jobs)
        self._overdue.sweep(self._jobs)

    # -- the order ----------------------------------------------------------------------------------------

    def ranked(self, now: float) -> Iterator[Request]:
        jobs = self._jobs
        for request in self._missing.due(now):
            if (job := jobs.get(request)) is not None:
                self._stand(job, Standing(False, job.standing.is_old, job.standing.is_overdue))
        for request in self._overdue.due(now):
            if (job := jobs.get(request)) is not None and request not in self._begun:
                self._stand(job, Standing(job.standing.is_fresh, job.standing.is_old, True))
        for request in self._aged.due(now):
            if (job := jobs.get(request)) is not None:
                self._stand(job, Standing(job.standing.is_fresh, True, job.standing.is_overdue))
        self._index.refresh()
        if self._revision != self._index.revision:
            self._revision = self._index.revision
            self._retune(now)
        is_open = self._pace.is_open(now)
        if is_open != self._is_open:
            self._is_open = is_open
            self._sort()
        self._now = now
        return chain.from_iterable(self._orders)

    def rank(self, request: Request) -> tuple[int, float, float, int]:
        cell, arrival = self._jobs[request].cell, request.arrival
        assert cell is not None
        return (cell.group, cell.base + cell.per_s * arrival, arrival, request.id)

    def outranks(self, one: Request, other: Request) -> bool:
        mine, theirs = self._jobs[one].cell, self._jobs[other].cell
        assert mine is not None
        assert theirs is not None
        group, base, per_s = mine.group, mine.base, mine.per_s
        if group == FIRST:
            if theirs.group == FIRST:
                return False
            if self._asked != self._now:
                self._asked, self._may_displace = self._now, self._claims.may_displace(self._now)
            if not self._may_displace:
                group, base, per_s = self._place_later(mine)
        if group != theirs.group:
            return group < theirs.group
        margin = MARGIN if group == OTHER else 0.0
        return base + per_s * one.arrival + margin < theirs.base + theirs.per_s * other.arrival

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        found = sorted([(*self.rank(request), request) for request in requests])
        return [((group, _turn(group, key)), request) for group, key, _, _, request in found]

    def may_await_prefix(self, request: Request, now: float) -> bool:
        return now <= request.arrival + self._overtaking_s

    def must_precede(self, request: Request, others: Iterable[Request]) -> bool:
        # It may also stand before a request that is older still, and must then evict for both.
        oldest = next(iter(self._jobs)).arrival
        if self._latest <= oldest + self._overtaking_s:
            return False
        before = max((other.arrival for other in others), default=-math.inf) - self._overtaking_s
        running = {slice_.request for slice_ in self._running}
        older = takewhile(lambda earlier: earlier.arrival < before, self._jobs)
        return any(earlier not in running and not earlier.progress.awaits_grammar for earlier in older)

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        job, model = self._jobs[request], self._index.model
        place, cell = max(0, job.place), job.cell
        assert cell is not None
        edge = min(request.max_tokens + 1, BIN_EDGES[min(place + 1, BINS - 1)])
        ends = model.hazards(job.cls)[place] if place < job.kind.cap else 1.0
        words = "yes" if cell.group == FIRST else "no"
        yield Fact("first token first", words, "", "Whether it precedes others because it has no token yet.")
        if job.place == NOT_BEGUN:
            yield from self._explain_prompt(request, cell)
        meaning = "How much sooner than others it is worth running: chance to end soon per time, as a logarithm."
        log_index = self._index.log_index(cell.kind, cell.place)
        yield Fact("index", 0.0 - self._aging.base(log_index), "", meaning)
        yield Fact("age credit", self._aging.per_s * (now - request.arrival), "", "Is added to the index as it waits.")
        yield Fact("next length", edge, "tokens", "Output at which its index changes, unless it ends before.")
        yield Fact("chance to end", ends, "", "Chance that it ends before, learned from finished requests.")
        if job.cls is not None:
            yield Fact("forecast from", BIN_EDGES[job.cls], "tokens", "Range of its forecast, by which it is grouped.")
            expert = model.believed(job.cls)
            yield Fact("lengths by", expert, "", "Which of the learned length models has predicted best.")

    def _explain_prompt(self, request: Request, cell: Cell) -> Iterator[Fact]:
        index, ahead_s = self._index, 0.0
        key = cell.key((request.arrival, request.id, request))
        for other in self._cells.values():
            if other.place == NOT_BEGUN and other.group <= cell.group:
                before = other.find(key) if other.group == cell.group else len(other.entries)
                ahead_s += before * index.prompt_s(other.kind)
        meaning = "Time of the prompts of its class, client and program level that are computed before its own."
        yield Fact("prefill ahead", ahead_s, "s", meaning)
        meaning = "Time of its own prompt, without the tokens that it finds in the prefix cache."
        yield Fact("own prefill", index.prompt_s(cell.kind), "s", meaning)

    def _claimed_s(self, now: float, request: Request) -> float | None:
        job = self._jobs.get(request)
        is_late = now >= request.arrival + request.progress.target.ttft_s
        return None if job is None or job.place != NOT_BEGUN or is_late else self._index.prompt_s(job.kind)

    def _stand(self, job: _Job, standing: Standing) -> None:
        job.standing = standing
        self._join(job)

    # -- prompts ------------------------------------------------------------------------------------------

    def _kind_of(self, request: Request, job: _Job) -> Kind:
        progress = request.progress
        uncached = progress.known - (progress.computed or job.cached) if job.place == NOT_BEGUN else 0
        return kind_of(request, job.cls, self._index.time, uncached)

    def _price(self, request: Request, job: _Job) -> None:
        kind = self._kind_of(request, job)
        if kind != job.kind:
            job.kind = kind
            self._join(job)

    def _look_up(self, kv: KVAccounts) -> None:
        waiting = self._with_prefix
        for request in list(islice(waiting, 1 + len(waiting) // _LOOKUP_STEPS)):
            del waiting[request]
            job = self._jobs[request]
            if job.place != NOT_BEGUN:
                continue
            waiting[request] = None
            if kv.blocks_of(request) is not None:
                continue
            found = kv.hit(request).tokens
            # Without an objective, the kind depends on nothing else that changes while the request waits.
            if found != job.cached or job.kind.steps is not None:
                job.cached = found
                self._price(request, job)

    def _rank_cell(self, cell: Cell) -> None:
        if cell.standing.is_fresh and self._is_open:
            cell.group, cell.base, cell.per_s = FIRST, self._delay_s(cell), 1.0
        else:
            cell.group, cell.base, cell.per_s = self._place_later(cell)

    def _delay_s(self, cell: Cell) -> float:
        return self._patience * self._index.prompt_s(cell.kind)

    def _place_later(self, cell: Cell) -> tuple[int, float, float]:
        """Return the group, base and weight of age of requests whose first tokens do not precede others."""
        if cell.standing.is_old:
            return OLD, 0.0, 1.0
        per_s, base = self._aging.per_s, self._aging.base(self._index.log_index(cell.kind, cell.place))
        if cell.standing.is_overdue:
            without_prompt = self._aging.base(self._index.log_index(cell.kind.without_prompt, cell.place))
            base = min(base, without_prompt + per_s * self._delay_s(cell))
        return OTHER, base, per_s

    # -- places -------------------------------------------------------------------------------------------

    def _advance(self, request: Request, job: _Job) -> None:
        place = bin_of(request.progress.known - len(request.prompt) + 1)
        if job.place != NOT_BEGUN:
            for left in range(job.place, place):
                self._index.model.note(job.cls, left, ended=False)
        self._enter(request, job, place)
        self._join(job)

    def _enter(self, request: Request, job: _Job, place: int) -> None:
        if job.place == NOT_BEGUN:
            self._begun.add(request)
            job.standing = Standing(is_old=job.standing.is_old)
            if job.kind.uncached:
                job.kind = job.kind._replace(uncached=0)
        job.place = place
        edge = len(request.prompt) + BIN_EDGES[place + 1] - 1 if place + 1 < BINS else request.max_total_tokens
        self._edges.expect(request, edge)

    def _follow_running(self) -> None:
        # Most steps run the requests of the step before.
        ran = [*map(REQUEST_OF, self._running)]
        if self._incoming or ran != self._ran:
            self._ran, self._ran_set = ran, {*ran}
            self._incoming = self._ran_set - self._begun

    def _join(self, job: _Job) -> None:
        key = (job.standing, job.kind, job.place)
        cell, before = self._cells.get(key), job.cell
        if before is not None:
            if cell is before:
                return
            self._leave(job)
        if cell is None:
            cell = self._cells[key] = Cell(*key)
            self._rank_cell(cell)
            self._orders[cell.group].open(cell)
        job.cell = cell
        self._orders[cell.group].add(cell, job.entry)

    def _leave(self, job: _Job) -> None:
        cell = job.cell
        if cell is None:
            return
        job.cell = None
        self._orders[cell.group].remove(cell, job.entry)
        if not cell.entries:
            del self._cells[cell.standing, cell.kind, cell.place]
            self._orders[cell.group].close(cell)

    def _sort(self) -> None:
        for cell in self._cells.values():
            self._rank_cell(cell)
        for group, order in enumerate(self._orders):
            order.reset(cell for cell in self._cells.values() if cell.group == group)

    def _retune(self, now: float) -> None:
        """Apply changed indices, and derive aging from those of waiting and new requests."""
        running = Counter(id(job.cell) for slice_ in self._running if (job := self._jobs.get(slice_.request)))
        indices = [self._index.log_index(cell.kind, cell.place) for cell in self._cells.values()]
        waiting = [len(cell.entries) - running[id(cell)] for cell in self._cells.values()]
        oldest = [now - cell.entries[0][0] for cell in self._cells.values()]
        newest = [now - cell.entries[-1][0] for cell in self._cells.values()]
        ages = [(one + other) / 2 for one, other in zip(oldest, newest, strict=True)]
        # Recent arrivals weigh less with each call.
        self._new = Counter({kind: kept for kind, n in self._new.items() if (kept := n * _NEW_KEPT) > _MIN_NEW})
        new = [(self._index.log_index(kind, NOT_BEGUN), weight) for kind, weight in self._new.items()]
        self._aging.step_s = self._index.step_s
        self._pace.step_s = self._index.step_s
        spread = min(1.0, self._index.spread(self._new))
        self._claims.follow(self._index.step_s, max(_MIN_AHEAD, self._pace.share * spread * spread))
        self._aging.derive(indices, waiting, ages, new)
        self._sort()
