from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from skipjoin.core.events import (
    Computed,
    Decoded,
    Event,
    Finished,
    Moved,
    MoveFailed,
    Planned,
    Preempted,
    Preemption,
    Released,
    Reserved,
    Restarted,
)
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move
from skipjoin.observe.reservations import ReservationUse
from skipjoin.observe.residency import Residency


class SharedEndUse:
    def __init__(self) -> None:
        self.slots = 0
        self.restores = 0
        self._saved: set[Request] = set()  # requests with checkpointed slots
        self.blocks = 0  # current number of blocks
        self._block_s = 0.0

    def pass_time(self, seconds: float) -> None:
        self._block_s += seconds * self.blocks

    def moved(self, move: Move) -> None:
        if move.request is None:
            return
        if move.direction is Direction.OUT and move.spans:
            self.slots += move.tokens
            self._saved.add(move.request)
        elif move.direction is Direction.IN and move.request in self._saved:
            self.restores += 1
            self._saved.remove(move.request)

    def lost(self, request: Request) -> None:
        self._saved.discard(request)

    def close(self) -> None:
        self._saved.clear()

    def kv(self, seconds: float, slot_bytes: float) -> dict[str, Any]:
        return {
            "shared_blocks_mean": self._block_s / seconds,
            "checkpointed_slots": self.slots,
            "checkpointed_bytes": round(self.slots * slot_bytes),
            "restores": self.restores,
        }


# Length of the series. At twice this length, every other point is dropped.
POINTS = 240


class Point(NamedTuple):
    """Sample of the series, with KV in shares of the device's."""

    time_s: float
    kv_used: float
    kv_allocated: float
    running: int
    waiting: int


class EngineUsage:
    """Statistics of steps, batches, preemptions and KV.

    Used KV is what computed tokens fill, counted once per sharing request. Allocated KV is held or reserved.
    """

    def __init__(self, *, device_blocks: int, block_size: int, block_bytes: int, start: float = 0.0) -> None:
        self._blocks = device_blocks
        self._block_size = block_size
        self._capacity = device_blocks * block_size
        self._block_bytes = block_bytes
        self.steps = 0
        self.slices = 0
        self.forwards: Counter[int] = Counter()  # number of steps by number of tokens
        self.recomputed_tokens = 0
        self.residency = Residency(block_size=block_size, block_bytes=block_bytes)
        self.reservations = ReservationUse()
        self.shared_ends = SharedEndUse()
        self._spilled: set[Request] = set()  # in the current decision
        self._resident: dict[Request, int] = {}  # tokens on the device
        self._on_cpu: dict[Request, int] = {}  # tokens on both tiers, of requests with KV in CPU memory
        self._used = 0
        self._dropped: dict[Request, int] = {}  # tokens that must be recomputed
        self._start = self._now = start
        self._used_seconds = 0.0
        self._allocated_seconds = 0.0
        self._reserved = 0
        self._points: list[Point] = []
        self._spacing = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Reserved: self._reserve,
            Planned: self._plan,
            Computed: self._compute,
            Decoded: self._decode,
            Preempted: self._preempt,
            Moved: self._move,
            MoveFailed: self._fail,
            Finished: self._finish,
            Released: self._release,
            Restarted: self._restart,
        }

    def observe(self, events: Iterable[Event]) -> None:
        handlers, folds = self._handlers, self.residency.handlers
        for event in events:
            kind = type(event)
            if (fold := folds.get(kind)) is not None:
                fold(event)
            if (handle := handlers.get(kind)) is not None:
                handle(event)

    def kv(self) -> dict[str, Any]:
        seconds = max(self._now - self._start, 1e-12)
        return {
            "used_mean": self._used_seconds / seconds,
            "allocated_mean": self._allocated_seconds / seconds,
            "preemptions": self.residency.preempted,
            "swapped_out_bytes": sum(self.residency.swapped_bytes[Direction.OUT]),
            "swapped_in_bytes": sum(self.residency.swapped_bytes[Direction.IN]),
            "wasted_swap_bytes": self.residency.wasted_bytes,
            "recomputed_tokens": self.recomputed_tokens,
            **self.reservations.kv(seconds, self._blocks),
            **self.shared_ends.kv(seconds, self._block_bytes / self._block_size),
        }

    def series(self) -> dict[str, list[float]]:
        stride = max(1, -(-len(self._points) // POINTS))
        points = self._points[::stride]
        return {name: [getattr(point, name) for point in points] for name in Point._fields}

    def close(self, *, keeps_series: bool) -> None:
        """Release references to requests, so that the rest is small enough to send to another process."""
        for known in (self._resident, self._on_cpu, self._dropped, self._spilled, self.residency):
            known.clear()
        self.reservations.close()
        self.shared_ends.close()
        if not keeps_series:
            self._points.clear()

    # -- folding ------------------------------------------------------------------------------------------

    def _reserve(self, event: Reserved) -> None:
        self._advance(event.now)
        self.reservations.reserved(event)

    def _plan(self, event: Planned) -> None:
        self._advance(event.now)
        self._reserved = event.reserved
        self.shared_ends.blocks = event.shared
        for move in event.plan.blocking:
            # Another slot of a request that is preempted already. Its first slots are part of the preemption event.
            if not move.spans or move.request is None:
                continue
            if move.direction is Direction.OUT and move.request not in self._spilled:
                self._reside(move.request, self._leave(move.request) - move.tokens)
        self._spilled.clear()
        self._note(event.now, len(event.plan.slices))

    def _preempt(self, event: Preempted) -> None:
        request, how = event.request, event.how
        if how is Preemption.PAUSE:
            return
        kept = event.kept
        self._spilled.add(request)
        self.reservations.lost_kv(request, blocks_left=-(-kept // self._block_size))
        # KV in CPU memory is a suffix, so KV before it may still be on the device.
        tokens = max(self._leave(request), self._on_cpu.pop(request, 0))
        if how is Preemption.DROP:
            self.shared_ends.lost(request)
            self._dropped[request] = max(tokens, self._dropped.get(request, 0))
        elif tokens > kept or not kept:
            self._on_cpu[request] = tokens
        if kept:
            self._reside(request, kept)

    def _finish(self, event: Finished) -> None:
        request = event.request
        if not request.keeps_kv:
            self._leave(request)
        self._on_cpu.pop(request, None)
        self._dropped.pop(request, None)
        self.reservations.finished(request)
        self.shared_ends.lost(request)

    def _release(self, event: Released) -> None:
        self._advance(event.now)
        self._reserved = event.reserved
        self._leave(event.request)

    def _restart(self, event: Restarted) -> None:
        self.reservations.restarted()

    def _compute(self, event: Computed) -> None:
        self._advance(event.now)
        slices = event.result.plan.slices
        if not slices:  # the plan only waited for moves
            return
        self.steps += 1
        self.slices += len(slices)
        live, resident, dropped = self.residency.live, self._resident, self._dropped
        self.forwards[sum(slice_.tokens for slice_ in slices)] += 1
        for slice_ in slices:
            request, end = slice_.request, slice_.start + slice_.tokens
            if request not in live:  # it finished during the step
                continue
            self._used += end - resident.get(request, 0)
            resident[request] = end
            if dropped and (high := dropped.get(request, 0)) > slice_.start:
                self.recomputed_tokens += min(end, high) - slice_.start

    def _decode(self, event: Decoded) -> None:
        count, begin = len(event.requests), event.since
        for end, reserved in zip(event.ends, event.reserved, strict=True):
            self._reserved = reserved
            self._note(begin, count)
            self._advance(end)
            self._used += count
            begin = end
        self.steps += len(event.ends)
        self.slices += count * len(event.ends)
        self.forwards[count] += len(event.ends)
        for request in event.requests:
            self._resident[request] += len(event.ends)

    def _move(self, event: Moved) -> None:
        move = event.move
        self.shared_ends.moved(move)
        if move.direction is Direction.IN and move.request is not None:
            self._reside(move.request, self._on_cpu.pop(move.request, 0))

    def _fail(self, event: MoveFailed) -> None:
        move, request = event.move, event.move.request
        if move.direction is Direction.OUT and request is not None and request in self._on_cpu:
            self._reside(request, self._resident.get(request, 0) + move.tokens)
            if self._resident.get(request) == self._on_cpu[request]:
                del self._on_cpu[request]

    def _reside(self, request: Request, tokens: int) -> None:
        before = self._resident.get(request, 0)
        if request in self.residency.live and tokens > before:
            self._used += tokens - before
            self._resident[request] = tokens

    def _leave(self, request: Request) -> int:
        tokens = self._resident.pop(request, 0)
        self._used -= tokens
        return tokens

    def _advance(self, now: float) -> None:
        seconds = now - self._now
        self.reservations.pass_time(seconds)
        self.shared_ends.pass_time(seconds)
        self._used_seconds += seconds * self._used / self._capacity
        self._allocated_seconds += seconds * self._reserved / self._blocks
        self._now = now

    def _note(self, now: float, running: int) -> None:
        points = self._points
        if points and now < points[-1].time_s + self._spacing:
            return
        used, allocated = self._used / self._capacity, self._reserved / self._blocks
        points.append(Point(now, used, allocated, running, max(0, len(self.residency.live) - running)))
        if len(points) > 2 * POINTS:
            del points[1::2]
            self._spacing = (now - points[0].time_s) / len(points)
