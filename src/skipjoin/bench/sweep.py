"""Many simulated runs at once, in processes of their own: sweeps over a grid, and searches for the largest rate."""

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
from skipjoin.bench.simulation import Cell, run
from skipjoin.observe.record import Record

# A search ends when its bracket is this narrow, relative to the rate.
_TOLERANCE = 0.02
# What the rate is first multiplied or divided by: who starts near is not sent far into overload, which takes longest to
# simulate. Squared at each step up to the longest.
_FIRST_STRIDE, _LONGEST_STRIDE = 1.25, 4.0
# Rates outside this range are not searched.
_LOWEST_RPS, _HIGHEST_RPS = 1e-4, 1e5
_TICK_S = 0.2


class SweepPlan(Protocol):
    """Which cells to run; what comes of them may call for more."""

    def first(self) -> Iterable[Cell]:
        """The cells to begin with."""
        ...

    def then(self, cell: Cell, record: Record) -> Iterable[Cell]:
        """The cells that a finished one calls for."""
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
    """Looks for the largest rate at which the mean over seeds keeps a bound: steps up or down, in strides that
    grow, until it lies between two rates, then halves the interval (on a logarithmic scale) to 2 %.

    cells: one per seed, all at the rate to start from. A system that keeps the bound at 100,000 requests per second,
    or breaks it at 0.0001 or where no request arrives any more, is given up there.
    """

    def __init__(self, cells: Sequence[Cell], bound: Bound) -> None:
        self._cells = cells
        self._bound = bound
        self._holds: float | None = None  # the highest rate known to keep it
        self._breaks: float | None = None  # the lowest rate known to break it
        self._values: list[float] = []  # at the present rate
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
    """Told how a sweep goes."""

    def begun(self, number: int, cell: Cell) -> None:
        """A cell was put in line."""

    def share(self, number: int, share: float) -> None:
        """So much of a cell's requests are over."""

    def done(self, number: int, record: Record) -> None:
        """A cell is finished."""


def sweep(plans: Sequence[SweepPlan], processes: int, watcher: SweepWatcher) -> None:
    """Run everything; raises what a run raised. An interrupt ends it at once; what was `done` before stays so."""
    context = get_context("spawn")  # a fork would take locks of other threads with it
    shares: Queue[tuple[int, float]] = context.Queue()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_enter, initargs=(shares,))
    numbers = count()
    waiting: dict[Future[Record], tuple[int, SweepPlan, Cell]] = {}

    def begin(plan: SweepPlan, cells: Iterable[Cell]) -> None:
        for cell in cells:
            number = next(numbers)
            watcher.begun(number, cell)
            waiting[pool.submit(_run, number, cell)] = (number, plan, cell)

    try:
        for plan in plans:
            begin(plan, plan.first())
        while waiting:
            finished, _ = wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            for number, share in _drain(shares):
                watcher.share(number, share)
            for future in sorted(finished, key=lambda one: waiting[one][0]):
                number, plan, cell = waiting.pop(future)
                record = future.result()
                watcher.done(number, record)
                begin(plan, plan.then(cell, record))
    except BaseException:
        for worker in active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        shares.close()


def _drain(shares: Queue[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    while not shares.empty():
        yield shares.get()


# -- in a worker process ----------------------------------------------------------------------------------

_shares: list[Queue[tuple[int, float]]] = []  # the way back to the parent, in a worker


def _enter(shares: Queue[tuple[int, float]]) -> None:
    # Ctrl-C reaches every process of the terminal; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _shares.append(shares)


def _run(number: int, cell: Cell) -> Record:
    return run(cell, on_share=lambda share: _shares[0].put((number, share)))
