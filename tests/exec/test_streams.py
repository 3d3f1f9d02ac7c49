"""Copies on simulated CUDA streams: in any order of execution, every request reads its own keys and values.

The plans are those of the real scheduler.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from copiers import HarshStore
from engines import CONFIGS

from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Slice, StepPlan, StepResult
from skipjoin.exec import copy_engine
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.transfer import Ended, StreamCopier
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from support.load import load
from support.policies import EVICTIONS
from support.watch import WatchedCore, World
from support.worlds import combinations

OUT, IN = Direction.OUT, Direction.IN
DEVICE_BLOCKS, CPU_BLOCKS, BLOCK_SIZE = 28, 40, 4


class Streams:
    """Work on streams, executed one item at a time in any order that events allow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.all: list[FakeStream] = []
        self.model = self.current = FakeStream(self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self))
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.use)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def turn(self) -> None:
        ready = [stream for stream in self.all if stream.can_go_on]
        if ready:
            self.draw.choice(ready).work.popleft()()


class FakeEvent:
    def __init__(self) -> None:
        self.is_done = False

    def record(self, stream: FakeStream) -> None:
        stream.work.append(self.pass_)

    def pass_(self) -> None:
        self.is_done = True

    def query(self) -> bool:
        return self.is_done


class FakeStream:
    """Work in order."""

    def __init__(self, streams: Streams) -> None:
        self.work: deque[Callable[[], Any]] = deque()
        self.streams = streams
        streams.all.append(self)

    @property
    def can_go_on(self) -> bool:
        head = self.work[0] if self.work else None
        return head is not None and not (isinstance(head, Waiting) and not head.event.is_done)

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent()
        event.record(other)
        self.work.append(Waiting(event))

    def synchronize(self) -> None:
        while self.work:
            self.streams.turn()


class Waiting:
    """Item of work that becomes executable when an event is done."""

    def __init__(self, event: FakeEvent) -> None:
        self.event = event

    def __call__(self) -> None:
        pass


class LazyStore(HarshStore):
    """Store that queues its copies on the current stream; sources become NaN when the copies execute."""

    streams: Streams

    def copy(self, move: Move) -> None:
        self.streams.current.work.append(lambda: HarshStore.copy(self, move))


def lazy_store(streams: Streams) -> LazyStore:
    store = LazyStore(
        ModelConfig.from_dict(CONFIGS["llama"]),
        torch.float32,
        torch.device("cpu"),
        device_blocks=DEVICE_BLOCKS,
        cpu_blocks=CPU_BLOCKS,
        block_size=BLOCK_SIZE,
    )
    store.streams = streams
    store.device.tensor.fill_(torch.nan)
    store.cpu.tensor.fill_(torch.nan)
    return store


class Device:
    def __init__(self, streams: Streams) -> None:
        self.store = lazy_store(streams)
        self.copier = StreamCopier(self.store)
        self.wrong: list[str] = []
        self._streams = streams

    def begin(self, plan: StepPlan) -> tuple[StepPlan, Ended, FakeEvent]:
        ended = self.copier.run_blocking(plan.blocking)
        self.copier.begin(plan.overlapped)
        end = FakeEvent()
        for piece in plan.slices:
            self._streams.model.work.append(lambda piece=piece: self._compute(piece))
        end.record(self._streams.model)
        return plan, ended, end

    def finish(self, plan: StepPlan, ended: Ended, end: FakeEvent) -> StepResult:
        while not end.query():
            self._streams.turn()
        more = self.copier.poll()
        tokens = [piece.start + piece.tokens if piece.samples else None for piece in plan.slices]
        return StepResult(plan, tokens, 0.01, completed=[*ended.completed, *more.completed], failed=ended.failed)

    def _compute(self, piece: Slice) -> None:
        """Read all earlier positions and write the slice's own."""
        pool = self.store.device.block_view()
        for position in range(piece.start + piece.tokens):
            block, offset = piece.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            own = piece.request.id * 1000.0 + position
            if position >= piece.start:
                pool[block, offset] = own
            elif (found := pool[block, offset].item()) != own:
                self.wrong.append(f"{piece.request.id} at {position}: {found}")


def serve(core: WatchedCore, device: Device, requests: list[Request], streams: Streams) -> int:
    flying: deque[tuple[StepPlan, Ended, FakeEvent]] = deque()
    now, moves = 0.0, 0
    while requests or core.requests or flying:
        while requests and requests[0].arrival <= now:
            core.add(requests.pop(0), now)
        while (plan := core.start_step(now)) is not None:
            flying.append(device.begin(plan))
            moves += len(plan.blocking) + len(plan.overlapped)
        for _ in range(streams.draw.randrange(4)):
            streams.turn()
        if flying:
            core.finish_step(device.finish(*flying.popleft()), now)
        now += 0.01
    device.copier.close()
    return moves


@pytest.mark.parametrize(
    ("eviction", "overlap", "seed"),
    [
        pytest.param(*case, marks=marks)
        for case, marks in combinations(["chaos", "proactive", "swap"], [False, True], range(4))
    ],
)
def test_requests_read_their_own_kv_in_any_order_of_streams(
    monkeypatch: pytest.MonkeyPatch, seed: int, eviction: str, *, overlap: bool
) -> None:
    depth = 2 if overlap else 1
    streams = Streams(monkeypatch, seed)
    device = Device(streams)
    world = World("fastserve", depth, overlap, EVICTIONS[eviction], device_blocks=DEVICE_BLOCKS, cpu_blocks=CPU_BLOCKS)
    core = world.core()
    moves = serve(core, device, load(seed, 14, rate=200.0), streams)
    assert device.wrong == []
    assert moves > 5
    while core.kv.is_moving:
        core.finish_step(device.finish(*device.begin(core.start_step(1e3))), 1e3)  # type: ignore[arg-type]
    core.assert_all_free()


def move(direction: Direction, block: int) -> Move:
    return Move(direction, Request(block, 0.0, [0], 1), (block,), (block,), 1)


def test_overlapped_directions_and_blocking_moves_are_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    device = Device(streams)
    copier = device.copier
    out, incoming, now = [move(OUT, block) for block in (1, 2)], [move(IN, 3)], [move(OUT, 4), move(IN, 5)]
    copier.begin([*out, *incoming])
    others = [stream for stream in streams.all if stream is not streams.model]
    assert len(others) == 2
    assert copier.run_blocking(now[::-1]).completed == now
    while streams.model.work:
        streams.model.work.popleft()()
    # The steps are not blocked, although none of the moves has executed.
    assert copier.poll() == ([], [])
    while others[1].work:
        others[1].work.popleft()()
    assert copier.poll(30.0) == (incoming, [])
    while others[0].work:
        others[0].work.popleft()()
    assert copier.poll() == (out, [])


@pytest.mark.parametrize("seed", range(8))
def test_overlapped_moves_in_wait_for_earlier_moves_out(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The move out may belong to the same plan or to an unsettled one, because its blocks are free at once.

    An overlapped move also waits for the step before it.
    """
    streams = Streams(monkeypatch, seed)
    device = Device(streams)
    store, copier = device.store, device.copier
    pool, host = store.device.block_view(), store.cpu.block_view()
    pool[4], host[5] = 1.0, 2.0
    streams.model.work.append(lambda: pool[7].fill_(3.0))
    copier.run_blocking([Move(OUT, Request(0, 0.0, [0], 1), (4,), (4,), 1)])
    if seed % 2:
        streams.model.work.append(lambda: None)  # a step
    copier.begin([Move(IN, Request(1, 0.0, [0], 1), (5,), (4,), 1), Move(OUT, Request(2, 0.0, [0], 1), (7,), (8,), 1)])
    copier.close()
    assert [pool[4, 0].item(), host[4, 0].item(), host[8, 0].item()] == [2.0, 1.0, 3.0]


class Kernel:
    def __init__(self) -> None:
        self.calls: list[int] = []
        self.error: Exception | None = None

    def __call__(
        self, target: torch.Tensor, source: torch.Tensor, target_ids: torch.Tensor, source_ids: torch.Tensor
    ) -> None:
        assert target_ids.dtype == source_ids.dtype == torch.int64
        self.calls.append(len(target_ids))
        if self.error is not None:
            raise self.error
        target[target_ids] = source[source_ids]


def test_kernel_copies_many_short_runs_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = KVStore(
        ModelConfig.from_dict(CONFIGS["llama"]),
        torch.float32,
        torch.device("cpu"),
        device_blocks=20,
        cpu_blocks=20,
        block_size=BLOCK_SIZE,
    )
    assert isinstance(store.cpu, PagedKV)
    engine = copy_engine.StreamedCopies(store.device, store.cpu)
    monkeypatch.setattr(copy_engine, "MIN_RUN_BYTES", 2 * store.device.block_bytes + 1)
    monkeypatch.setattr(copy_engine, "_MAX_SHORT_RUNS", 2)
    kernel = engine._kernel._kernel = Kernel()
    draw = torch.Generator().manual_seed(0)
    source = torch.randn(store.device.block_view().shape, generator=draw)
    store.device.block_view().copy_(source)

    def copied(rows: list[int], to: list[int]) -> bool:
        pool = store.cpu.block_view()
        pool.fill_(-1)
        expected = pool.clone()
        expected[to] = source[rows]
        engine.copy(OUT, copy_engine.Pairs(rows, to), BLOCK_SIZE)
        return torch.equal(pool, expected)

    assert copied([3, 9, 1, 2], [0, 5, 7, 8])
    assert kernel.calls == [4]  # three runs of four blocks
    assert copied([3, 9], [0, 5])
    assert copied([4, 5, 6, 10, 11, 12, 14, 15, 16], [1, 2, 3, 9, 10, 11, 13, 14, 15])
    assert kernel.calls == [4]
    kernel.error = RuntimeError("no compiler")
    for _ in range(2):
        assert copied([3, 9, 1, 2], [0, 5, 7, 8])
    assert kernel.calls == [4, 4], "a failed kernel must not be called again"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
