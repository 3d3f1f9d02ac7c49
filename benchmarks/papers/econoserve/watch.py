"""Figures that records lack: groups, reservations that were too small, KV of waiting requests, finished requests."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from papers.econoserve.setting import labelled
from papers.figures.runs import MEASURED, Options, charged, probing, slim
from skipjoin.core.events import Arrived, Computed, Event, Finished, Planned, Preempted, Preemption, Reserved, Started
from skipjoin.core.request import Request
from skipjoin.observe.record import Record, percentile, rounded
from skipjoin.policies.exact_reservations import PROMPTS
from skipjoin.sim.experiments.cell import Cell
from skipjoin.sim.experiments.simulation import run

# Plans between two samples of the waiting requests.
_EVERY = 16
NEW, PREEMPTED, CHUNKED = "new generation", "preempted generation", "chunked prompt"


class Watch:
    """Folds the events of a run.

    A request has outgrown its reservation when it asks for more than the first reservation for its whole output. A
    waiting request with KV is a chunked prompt, a new generation or, if it has run before, a preempted generation.

    Args:
        blocks: Blocks of the KV pool.
        block_size: Tokens per block.
        reserve: Share of the pool that is reserved for prompts.
    """

    def __init__(self, blocks: int, block_size: int, reserve: float = 0.0) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._reserve_blocks = math.ceil(reserve * blocks)
        self._live: dict[Request, None] = {}
        self._requests = 0
        self._exact: dict[Request, int] = {}  # blocks of the first reservation for the whole output
        self._outgrown: set[Request] = set()
        self._lost: set[Request] = set()  # swapped or dropped at least once
        self._stopped: dict[Request, tuple[float, Preemption]] = {}
        self._preempted_s: defaultdict[Request, dict[Preemption, float]] = defaultdict(dict)
        self._shares: dict[Preemption, list[float]] = {how: [] for how in Preemption}
        self._over: list[float] = []
        self._under: list[float] = []
        self._reservations: dict[Request, Reserved] = {}
        self._reserved = self._max_reserved = 0  # blocks of all reservations
        self._prompts = 0  # blocks of prompts in the reserve
        self._hosted: set[Request] = set()
        self._vacated = 0
        self._fresh: dict[Request, None] = {}  # requests that have not run
        self._forwards: Counter[int] = Counter()  # tokens of plans while a prompt waits that fits the reserve
        self._groups: defaultdict[tuple[float, object], list[Request]] = defaultdict(list)
        self._ended_at: dict[Request, float] = {}
        self._ends_at: Counter[float] = Counter()
        self._steps = 0
        self._held: dict[str, list[float]] = {NEW: [], PREEMPTED: [], CHUNKED: []}
        self._plans = 0
        self.first: dict[str, float] = {}  # first use of each way to handle a reservation that is too small
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrive,
            Reserved: self._reserve,
            Started: self._start,
            Preempted: self._preempt,
            Planned: self._plan,
            Computed: self._compute,
            Finished: self._finish,
        }

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            if (handle := self._handlers.get(type(event))) is not None:
                handle(event)

    def figures(self) -> Record:
        """Return the figures of the run.

        Shares are of requests. `over` and `under` are relative to the first exact reservation, `preempted` to the
        completion time of preempted requests, and `max_reserved` to the pool.
        """
        count = max(1, self._requests)
        ends = Counter(self._ends_at.values())
        ends[0] = self._steps - ends.total()
        sizes = Counter(map(len, self._groups.values()))
        return {
            "failed": rounded(len(self._lost) / count),
            "outgrown": rounded(len(self._outgrown) / count),
            "over": _mean(self._over),
            "under": _mean(self._under),
            "preempted": {how.name.lower(): _mean(shares) for how, shares in self._shares.items()},
            "held": {name: _spread(values) for name, values in self._held.items()},
            "ends": {str(number): ends[number] for number in sorted(ends)},
            "group_sizes": {str(size): number for size, number in sorted(sizes.items())},
            "synced": self._synced(),
            "hosted": len(self._hosted),
            "vacated": self._vacated,
            "max_reserved": rounded(self._max_reserved / self._blocks),
            "forwards": {str(tokens): plans for tokens, plans in sorted(self._forwards.items())},
            "first": self.first,
        }

    def _synced(self) -> float | None:
        """Return the share of groups of several requests whose members all finish in one step."""
        groups = [members for members in self._groups.values() if len(members) > 1]
        return _mean([len({self._ended_at.get(member) for member in members}) == 1 for members in groups])

    def _arrive(self, event: Arrived) -> None:
        self._live[event.request] = self._fresh[event.request] = None
        self._requests += 1

    def _reserve(self, event: Reserved) -> None:
        request = event.request
        self._set(request, event)
        if isinstance(event.parent, Request):
            self._hosted.add(request)
        if event.group is not None:
            self._groups[event.now, event.group].append(request)
        if request in self._exact:
            self._outgrown.add(request)
            self.first.setdefault("reserve" if event.drawn else "more", event.now)
        elif request.progress.output or isinstance(event.parent, Request):
            self._exact[request] = event.blocks

    def _set(self, request: Request, reservation: Reserved | None) -> None:
        for one, sign in ((self._reservations.pop(request, None), -1), (reservation, 1)):
            if one is not None:
                self._reserved += sign * one.blocks
                self._prompts += sign * one.blocks * (one.parent is PROMPTS)
        if reservation is not None:
            self._reservations[request] = reservation

    def _start(self, event: Started) -> None:
        self._fresh.pop(event.request, None)
        if (stopped := self._stopped.pop(event.request, None)) is not None:
            since, how = stopped
            preempted = self._preempted_s[event.request]
            preempted[how] = preempted.get(how, 0.0) + event.now - since

    def _preempt(self, event: Preempted) -> None:
        request, how = event.request, event.how
        if how is not Preemption.PAUSE:
            self._lost.add(request)
            reservation = self._reservations.get(request)
            self._vacated += reservation is not None and isinstance(reservation.parent, Request)
            self._set(request, None)
        elif request not in self._exact:
            return  # its prompt is computed, and it waits for its reservation
        else:
            self._outgrown.add(request)
        self.first.setdefault(how.name.lower(), event.now)
        since, _ = self._stopped.get(request, (event.now, how))
        self._stopped[request] = (since, how)

    def _plan(self, event: Planned) -> None:
        self._plans += 1
        self._max_reserved = max(self._max_reserved, self._reserved)
        runs = {piece.request for piece in event.plan.slices}
        waiting = next((request for request in self._fresh if request not in runs), None)
        if waiting is not None and self._prompts + -(-len(waiting.prompt) // self._block_size) <= self._reserve_blocks:
            self._forwards[sum(piece.tokens for piece in event.plan.slices)] += 1
        if self._plans % _EVERY:
            return
        for request in self._live:
            if request.progress.computed and request not in runs:
                self._held[self._kind(request)].append(request.progress.computed / (self._blocks * self._block_size))

    def _kind(self, request: Request) -> str:
        if request.progress.computed < len(request.prompt):
            return CHUNKED
        return PREEMPTED if request in self._exact else NEW

    def _compute(self, event: Computed) -> None:
        self._steps += bool(event.result.plan.slices)

    def _finish(self, event: Finished) -> None:
        request = event.request
        self._live.pop(request, None)
        self._fresh.pop(request, None)
        self._set(request, None)
        self._ended_at[request] = event.now
        self._ends_at[event.now] += 1
        for how, seconds in self._preempted_s.pop(request, {}).items():
            self._shares[how].append(seconds / (event.now - request.arrival))
        if (reserved := self._exact.pop(request, None)) is not None:
            # The KV of the last token is never computed.
            needed = -(-(len(request.prompt) + len(request.progress.output) - 1) // self._block_size)
            self._over.append(max(0, reserved - needed) / reserved)
            self._under.append(max(0, needed - reserved) / reserved)


def _mean(values: Sequence[float]) -> float | None:
    return rounded(fmean(values)) if values else None


def _spread(values: list[float]) -> Record:
    found = sorted(values)
    points = {"p5": 5, "p50": 50, "p95": 95}
    spread = {name: rounded(percentile(found, percent)) if found else None for name, percent in points.items()}
    return {"seen": len(found), "mean": _mean(found), **spread}


def watched(cells: Sequence[tuple[Mapping[str, object], Cell]], options: Options) -> list[Record]:
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        records = pool.map(partial(_watched, decisions=options.decisions), [cell for _, cell in cells])
        return [one for (labels, _), record in zip(cells, records, strict=True) for one in labelled([record], **labels)]


def _watched(cell: Cell, decisions: float | str | None) -> Record:
    of = cell.system
    if decisions == MEASURED:
        of = charged(of, run(replace(cell, system=probing(of))))
    elif decisions is not None:
        of = replace(of, decision_s=decisions)
    watch = Watch(of.kv_blocks, of.block_size, float(of.recipe_params.get("reserve", 0.0)))
    record = run(replace(cell, system=of), on_events=watch.observe)
    return {**slim(record), "watch": watch.figures()}
