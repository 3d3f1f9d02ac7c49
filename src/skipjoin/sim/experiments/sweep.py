from __future__ import annotations

import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import cached_property
from itertools import count
from multiprocessing import active_children, get_all_start_methods, get_context
from multiprocessing.queues import Queue
from statistics import fmean
from typing import ClassVar, Protocol

from skipjoin.observe.record import Record
from skipjoin.report.bound import Bound, Bounds
from skipjoin.sim.experiments.cell import Cell
from skipjoin.sim.experiments.simulation import Run, ShardResult, run
from skipjoin.sim.experiments.system import MAX_REPLICAS
from skipjoin.workload.fields import MAX_REQUESTS

# Relative width of the bracket at which a search ends.
_TOLERANCE = 0.02
_REPLICA_TOLERANCE = 0.01
# Factor between tried numbers, squared at each step up to the longest. It starts small, because overload takes longest
# to simulate.
_FIRST_STRIDE, _LONGEST_STRIDE = 1.25, 4.0
# Range of rates that are searched.
_LOWEST_RPS, _HIGHEST_RPS = 1e-4, 1e5
_TICK_S = 0.2


class SweepPlan(Protocol):
    def first(self) -> Iterable[Cell]: ...
    def then(self, cell: Cell, record: Record) -> Iterable[Cell]: ...


class Grid:
    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells

    def first(self) -> Sequence[Cell]:
        return self._cells

    def then(self, cell: Cell, record: Record) -> Sequence[Cell]:
        return ()


class BoundSearch(ABC):
    """Search for the number (rate or replicas) at which the means over seeds just satisfy all bounds.

    The search moves in growing strides until the number is bracketed, then bisects on a logarithmic scale.
    """

    # Whether the bound is harder to keep at larger numbers.
    _harder_above: ClassVar[bool]

    def __init__(self, cells: Sequence[Cell], bounds: Bounds | Bound) -> None:
        self._cells = cells
        self._bounds = Bounds((bounds,)) if isinstance(bounds, Bound) else bounds
        self._holds: float | None = None  # the hardest number known to keep the bound
        self._breaks: float | None = None  # the easiest number known to break it
        self._records: list[Record] = []  # at the current number
        self._stride = _FIRST_STRIDE

    def first(self) -> Sequence[Cell]:
        return self._cells

    def then(self, cell: Cell, record: Record) -> Sequence[Cell]:
        self._records.append(record)
        if len(self._records) < len(self._cells):
            return []
        if self._bounds.hold(self._records):
            self._holds = self._number(cell)
        else:
            self._breaks = self._number(cell)
        following = self._next()
        self._records = []
        return [] if following is None else self._at(following)

    def _next(self) -> float | None:
        if self._holds is not None and self._breaks is not None:
            return self._between(self._holds, self._breaks)
        stride, self._stride = self._stride, min(self._stride**2, _LONGEST_STRIDE)
        known = self._holds if self._breaks is None else self._breaks
        assert known is not None
        upward = self._harder_above == (self._breaks is None)
        return self._beyond(known, stride if upward else 1 / stride)

    @abstractmethod
    def _number(self, cell: Cell) -> float: ...

    @abstractmethod
    def _at(self, number: float) -> Sequence[Cell]:
        """Return the cells at this number, one per seed; none ends the search."""

    @abstractmethod
    def _beyond(self, known: float, factor: float) -> float | None: ...

    @abstractmethod
    def _between(self, holds: float, breaks: float) -> float | None:
        """Return a number within the bracket, or None to end the search."""


class RateSearch(BoundSearch):
    """Search for the maximum rate at which a bound holds, within 2 %."""

    _harder_above = True

    def _number(self, cell: Cell) -> float:
        assert cell.extent.rate_rps is not None
        return cell.extent.rate_rps

    def _at(self, number: float) -> Sequence[Cell]:
        cells = [replace(cell, extent=replace(cell.extent, rate_rps=number)) for cell in self._cells]
        return cells if all(cell.jobs() for cell in cells) else []

    def _beyond(self, known: float, factor: float) -> float | None:
        following = known * factor
        duration_s = max(cell.extent.duration_s or 0.0 for cell in self._cells)
        is_drawn = following * duration_s <= MAX_REQUESTS
        return following if _LOWEST_RPS <= following <= _HIGHEST_RPS and is_drawn else None

    def _between(self, holds: float, breaks: float) -> float | None:
        return None if breaks <= holds * (1 + _TOLERANCE) else math.sqrt(holds * breaks)


class ReplicaSearch(BoundSearch):
    """Search for the minimum number of replicas at which a bound holds, exact up to 100 and within 1 % above."""

    _harder_above = False

    @cached_property
    def _most(self) -> int:
        return min(
            MAX_REPLICAS,
            max(len(cell.jobs()) + sum(stream.size for stream in cell.workload.closed) for cell in self._cells),
        )

    def _number(self, cell: Cell) -> float:
        return cell.system.replicas

    def _at(self, number: float) -> Sequence[Cell]:
        return [replace(cell, system=replace(cell.system, replicas=int(number))) for cell in self._cells]

    def _beyond(self, known: float, factor: float) -> float | None:
        if factor > 1:
            return min(math.ceil(known * factor), self._most) if known < self._most else None
        return max(math.floor(known * factor), 1) if known > 1 else None

    def _between(self, holds: float, breaks: float) -> float | None:
        if holds - breaks <= max(1, _REPLICA_TOLERANCE * holds):
            return None
        middle: float = round(math.sqrt(holds * breaks))
        return min(max(middle, breaks + 1), holds - 1)


class SweepWatcher(Protocol):
    def begun(self, number: int, cell: Cell) -> None: ...
    def share(self, number: int, share: float) -> None: ...
    def done(self, number: int, record: Record) -> None: ...


# Called with a cell's number, the cell and its `Run.requests`, before it is reported as `done`.
OnRequests = Callable[[int, Cell, Iterable[Record]], None]


def sweep(
    plans: Sequence[SweepPlan], processes: int, watcher: SweepWatcher, *, on_requests: OnRequests | None = None
) -> None:
    """Run all cells in worker processes, and raise the exception of a failed run.

    An interrupt ends the sweep at once; cells that were reported as `done` remain so.
    """
    # The processes fork from one that has imported this module and has no threads, whose locks they would copy.
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload([__name__])
    shares: Queue[tuple[int, int, float]] = context.Queue()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_enter, initargs=(shares,))
    numbers = count()
    cells: dict[int, _Running] = {}
    waiting: dict[Future[_Result], tuple[_Running, int]] = {}

    def begin(plan: SweepPlan, more: Iterable[Cell]) -> None:
        for cell in more:
            running = _Running(next(numbers), plan, cell, on_requests)
            cells[running.number] = running
            watcher.begun(running.number, cell)
            for shard in range(cell.shards):
                waiting[pool.submit(_run, running.number, cell, shard, on_requests is not None)] = (running, shard)

    try:
        for plan in plans:
            begin(plan, plan.first())
        while waiting:
            finished, _ = wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            for number, shard, share in _drain(shares):
                watcher.share(number, cells[number].share(shard, share))
            for future in sorted(finished, key=lambda name: waiting[name][0].number):
                running, shard = waiting.pop(future)
                record = running.done(shard, future.result())
                if record is not None:
                    watcher.done(running.number, record)
                    begin(running.plan, running.plan.then(running.cell, record))
    except BaseException:
        for worker in active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        shares.close()


class _Running:
    def __init__(self, number: int, plan: SweepPlan, cell: Cell, on_requests: OnRequests | None) -> None:
        self.number = number
        self.plan = plan
        self.cell = cell
        self._on_requests = on_requests
        self._shares = [0.0] * cell.shards
        self._results: dict[int, ShardResult] = {}

    def share(self, shard: int, share: float) -> float:
        self._shares[shard] = share
        return fmean(self._shares)

    def done(self, shard: int, result: _Result) -> Record | None:
        if not isinstance(result, ShardResult):
            record, requests = result
            self._tell(requests)
            return record
        self._results[shard] = result
        if len(self._results) < self.cell.shards:
            return None
        results, self._results = self._results, {}
        whole, shards = Run(self.cell), [results[shard] for shard in range(self.cell.shards)]
        self._tell(whole.requests(shards))
        return whole.record(shards)

    def _tell(self, requests: Iterable[Record]) -> None:
        if self._on_requests is not None:
            self._on_requests(self.number, self.cell, requests)


def _drain(shares: Queue[tuple[int, int, float]]) -> Iterator[tuple[int, int, float]]:
    while not shares.empty():
        yield shares.get()


# -- in a worker process ----------------------------------------------------------------------------------

# Result of a worker: the record of an unsharded run, and its requests if wanted; or the result of one shard.
_Result = tuple[Record, list[Record]] | ShardResult

_shares: list[Queue[tuple[int, int, float]]] = []  # in a worker: the queue to the parent
_latest: dict[int, Run] = {}  # in a worker: the run of its last shard, by number


def _enter(shares: Queue[tuple[int, int, float]]) -> None:
    # Ctrl-C reaches every process of the terminal; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _shares.append(shares)


def _run(number: int, cell: Cell, shard: int, keeps_requests: bool) -> _Result:
    def report(share: float) -> None:
        _shares[0].put((number, shard, share))

    if cell.shards == 1:
        requests: list[Record] = []
        return run(cell, on_share=report, on_requests=requests.extend if keeps_requests else None), requests
    if number not in _latest:
        _latest.clear()
        _latest[number] = Run(cell)
    return _latest[number].shard(shard, on_share=report)
