from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skipjoin.core.events import (
    Admitted,
    Arrived,
    Computed,
    Event,
    Finished,
    Moved,
    Preempted,
    Preemption,
    Restarted,
    Started,
)
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move


@dataclass(slots=True)
class PrefixUse:
    """Counters in prompt tokens: of first admissions, and `regained` at later ones, after an eviction."""

    queried: int = 0
    hit: int = 0
    regained: int = 0
    hit_on_cpu: int = 0
    saved_bytes: int = 0

    def admitted(self, event: Admitted) -> None:
        request = event.request
        if request.prefix is None or request.resumed:
            return
        if not event.is_first:
            self.regained += event.cached
            return
        self.queried += len(request.prompt)
        self.hit += event.cached
        self.hit_on_cpu += event.on_cpu


class Residency:
    """Where the requests of an engine and their KV are, and how often and how much that changed.

    Moves count when they have completed, so those that fail count nowhere.
    """

    def __init__(self, *, block_size: int = 1, block_bytes: int = 0) -> None:
        self._block_size, self._block_bytes = block_size, block_bytes
        self.live: set[Request] = set()
        self.running: set[Request] = set()
        self.cpu_blocks: dict[Request, int] = {}  # blocks on the CPU tier of live requests that do not run
        self.preemptions = tuple(dict.fromkeys(Preemption, 0) for _ in range(2))  # real-time, best-effort
        self.swapped_bytes = {Direction.OUT: [0, 0], Direction.IN: [0, 0]}  # of blocking and of overlapped moves
        self.wasted_bytes = 0  # swapped in for requests that computed no token before they lost KV again
        self._unused: dict[Request, int] = {}  # bytes swapped in since its latest token
        self.prefixes = PrefixUse()
        self._blocking: Sequence[Move] = ()  # of the step whose moves complete
        self._ran_at_once: Sequence[Request | None] = ()  # the requests of these moves that run in this step
        self.handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrive,
            Admitted: self.prefixes.admitted,
            Started: self._start,
            Preempted: self._preempt,
            Computed: self._compute,
            Moved: self._move,
            Finished: self._finish,
            Restarted: self._restart,
        }

    def observe(self, event: Event) -> None:
        if (handle := self.handlers.get(type(event))) is not None:
            handle(event)

    @property
    def preempted(self) -> dict[str, int]:
        return {how.name.lower(): sum(counts[how] for counts in self.preemptions) for how in Preemption}

    def clear(self) -> None:
        self.live.clear()
        self.running.clear()
        self.cpu_blocks.clear()
        self._unused.clear()
        self._blocking = self._ran_at_once = ()

    def _arrive(self, event: Arrived) -> None:
        self.live.add(event.request)

    def _start(self, event: Started) -> None:
        self.running.add(event.request)
        self.cpu_blocks.pop(event.request, None)  # its KV is swapped in before it runs

    def _preempt(self, event: Preempted) -> None:
        self.running.discard(event.request)
        self.preemptions[event.request.is_best_effort][event.how] += 1
        if event.how is Preemption.DROP:
            self.cpu_blocks.pop(event.request, None)
            self.wasted_bytes += self._unused.pop(event.request, 0)

    def _compute(self, event: Computed) -> None:
        plan = event.result.plan
        self._blocking = plan.blocking
        ran = {slice_.request for slice_ in plan.slices} if plan.blocking else frozenset()
        self._ran_at_once = [move.request for move in plan.blocking if move.request in ran]
        if self._unused:
            for slice_ in plan.slices:
                self._unused.pop(slice_.request, None)

    def _move(self, event: Moved) -> None:
        move = event.move
        if move.direction is Direction.WITHIN:
            return
        moved_bytes = round(move.blocks(self._block_size) * self._block_bytes)
        if move.request is None:
            self.prefixes.saved_bytes += moved_bytes
            return
        is_overlapped = all(other is not move for other in self._blocking)
        self.swapped_bytes[move.direction][is_overlapped] += moved_bytes
        if move.direction is Direction.IN:
            self.cpu_blocks.pop(move.request, None)
            if is_overlapped or move.request not in self._ran_at_once:
                self._unused[move.request] = self._unused.get(move.request, 0) + moved_bytes
            return
        self.wasted_bytes += self._unused.pop(move.request, 0)
        if move.request in self.live:
            self.cpu_blocks[move.request] = self.cpu_blocks.get(move.request, 0) + len(move.target)

    def _finish(self, event: Finished) -> None:
        self.live.discard(event.request)
        self.running.discard(event.request)
        self.cpu_blocks.pop(event.request, None)
        self._unused.pop(event.request, None)

    def _restart(self, event: Restarted) -> None:
        self.running.clear()
        self.cpu_blocks.clear()
        self._unused.clear()
