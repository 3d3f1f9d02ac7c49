"""Many simulated runs at once, in separate processes: sweeps over a grid, searches for the largest rate and for the
fewest replicas. The shards of one run are in separate processes, too."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import count
from multiprocessing import active_children, get_context
from multiprocessing.queues import Queue
from statistics import fmean
from typing import Protocol

from skipjoin.bench.bound import Bound
from skipjoin.bench.simulation import Cell, Run, ShardResult, run
from skipjoin.observe.record import Record

# A search ends when its bracket is this narrow, relative to the rate.
_TOLERANCE = 0.02
# The first factor between tried rates: small, so that a start near the result does not go far into overload, which
# takes longest to simulate. It is squared at each step up to the longest.
_FIRST_STRIDE, _LONGEST_STRIDE = 1.25, 4.0
# Rates outside this range are not searched.
_LOWEST_RPS, _HIGHEST_RPS = 1e-4, 1e5
_TICK_S = 0.2


class SweepPlan(Protocol):
    """A source of cells; results may add further cells."""

    def first(self) -> Iterable[Cell]:
        """The initial cells."""
        ...

    def then(self, cell: Cell, record: Record) -> Iterable[Cell]:
        """The cells that follow from a finished one."""
        ...


class Grid:
    """A fixed list of cells."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells

    def first(self) -> Sequence[Cell]:
        return self._cells

    def then(self, cell: Cell, record: Record) -> Sequence[Cell]:
        return ()


class RateSearch:
    """Searches the largest rate at which the mean over seeds keeps a bound: steps up or down, in growing strides, until
    the rate lies between two others, then bisects the interval (on a logarithmic scale) to 2 %.

    cells: one per seed, all at the initial rate. The search stops for a system that keeps the bound at 100,000 requests
    per second, or breaks it at 0.0001 or at a rate without arrivals.
    """

    def __init__(self, cells: Sequence[Cell], bound: Bound) -> None:
        self._cells = cells
        self._bound = bound
        self._holds: float | None = None  # the highest rate known to keep the bound
        self._breaks: float | None = None  # the lowest rate known to break it
        self._values: list[float] = []  # at the current rate
        self._stride = _FIRST_STRIDE

    def first(self) -> Sequence[Cell]:
        return self._cells

    def then(self, cell: Cell, record: Record) -> list[Cell]:
        self._values.append(self._bound.value(record))
        if len(self._values) < len(self._cells):
            return []
        rate = cell.extent.rate_rps
        assert rate is not None
        if self._bound.allows(fmean(self._values)):
            self._holds = rate
        else:
            self._breaks = rate
        following = self._next()
        cells = [] if following is None else self._at(following)
        return cells if all(cell.jobs() for cell in cells) else []

    def _next(self) -> float | None:
        if self._breaks is None or self._holds is None:
            stride, self._stride = self._stride, min(self._stride**2, _LONGEST_STRIDE)
            if self._breaks is None:
                assert self._holds is not None
                following = self._holds * stride
            else:
                following = self._breaks / stride
            return following if _LOWEST_RPS <= following <= _HIGHEST_RPS else None
        if self._breaks <= self._holds * (1 + _TOLERANCE):
            return None
        return float((self._holds * self._breaks) ** 0.5)

    def _at(self, rate: float) -> list[Cell]:
        self._values = []
        return [replace(cell, extent=replace(cell.extent, rate_rps=rate)) for cell in self._cells]


class SweepWatcher(Protocol):
    """Receives the progress of a sweep."""

    def begun(self, number: int, cell: Cell) -> None:
        """A cell was queued."""

    def share(self, number: int, share: float) -> None:
        """The share of a cell's requests that have ended."""

    def done(self, number: int, record: Record) -> None:
        """A cell is finished."""


def sweep(plans: Sequence[SweepPlan], processes: int, watcher: SweepWatcher) -> None:
    """Run all cells; raises an exception of a run. An interrupt ends the sweep at once; cells reported as `done` stay
    so."""
    context = get_context("spawn")  # a fork would copy locks held by other threads
    shares: Queue[tuple[int, int, float]] = context.Queue()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_enter, initargs=(shares,))
    numbers = count()
    cells: dict[int, _Running] = {}
    waiting: dict[Future[_Result], tuple[_Running, int]] = {}

    def begin(plan: SweepPlan, more: Iterable[Cell]) -> None:
        for cell in more:
            running = _Running(next(numbers), plan, cell)
            cells[running.number] = running
            watcher.begun(running.number, cell)
            for shard in range(cell.shards):
                waiting[pool.submit(_run, running.number, cell, shard)] = (running, shard)

    try:
        for plan in plans:
            begin(plan, plan.first())
        while waiting:
            finished, _ = wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            for number, shard, share in _drain(shares):
                watcher.share(number, cells[number].share(shard, share))
            for future in sorted(finished, key=lambda one: waiting[one][0].number):
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
    """A cell under way."""

    def __init__(self, number: int, plan: SweepPlan, cell: Cell) -> None:
        self.number = number
        self.plan = plan
        self.cell = cell
        self._shares = [0.0] * cell.shards
        self._results: dict[int, ShardResult] = {}

    def share(self, shard: int, share: float) -> float:
        """The share of the cell's requests that have ended, now that this is the shard's."""
        self._shares[shard] = share
        return fmean(self._shares)

    def done(self, shard: int, result: _Result) -> Record | None:
        """A shard is done; the record of the cell if it was the last one."""
        if not isinstance(result, ShardResult):
            return result
        self._results[shard] = result
        if len(self._results) < self.cell.shards:
            return None
        results, self._results = self._results, {}
        return Run(self.cell).record([results[shard] for shard in range(self.cell.shards)])


def _drain(shares: Queue[tuple[int, int, float]]) -> Iterator[tuple[int, int, float]]:
    while not shares.empty():
        yield shares.get()


# -- in a worker process ----------------------------------------------------------------------------------

# What a worker sends back: the record of a run in one shard, or a shard's part of it.
_Result = Record | ShardResult

_shares: list[Queue[tuple[int, int, float]]] = []  # in a worker: the queue to the parent
_latest: dict[int, Run] = {}  # in a worker: the run that its last shard was of, by its number


def _enter(shares: Queue[tuple[int, int, float]]) -> None:
    # Ctrl-C reaches every process of the terminal; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _shares.append(shares)


def _run(number: int, cell: Cell, shard: int) -> _Result:
    def tell(share: float) -> None:
        _shares[0].put((number, shard, share))

    if cell.shards == 1:
        return run(cell, on_share=tell)
    if number not in _latest:
        _latest.clear()
        _latest[number] = Run(cell)
    return _latest[number].shard(shard, on_share=tell)
