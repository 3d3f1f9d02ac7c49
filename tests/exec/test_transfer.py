from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from copiers import CopyError, HarshStore, LateCopier
from engines import BLOCK_SIZE, CONFIGS, tiny_model

from skipjoin.core.request import Request
from skipjoin.core.step import PAUSE_S, Direction, Move, Slice, Span, StepPlan, StepResult
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.transfer import Copier, Ended, StreamCopier, ThreadCopier
from skipjoin.model.config import ModelConfig
from skipjoin.sampling import SamplingParams

StoreT = TypeVar("StoreT", bound=KVStore)
OUT, IN = Direction.OUT, Direction.IN
DEVICE_BLOCKS, CPU_BLOCKS = 24, 20
# Generous timeout for conditions that must become true.
LONG_S = 30.0
OWNER = Request(0, 0.0, [0], 1)


def make_store(kind: type[StoreT] = HarshStore, device: str = "cpu", *, cpu_blocks: int = CPU_BLOCKS) -> StoreT:
    store = kind(
        ModelConfig.from_dict(CONFIGS["llama"]),
        torch.float32,
        torch.device(device),
        device_blocks=DEVICE_BLOCKS,
        cpu_blocks=cpu_blocks,
        block_size=BLOCK_SIZE,
    )
    generator = torch.Generator().manual_seed(1)
    for pool in filter(None, (store.device, store.cpu)):
        pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=generator))
    return store


def move(direction: Direction, source: list[int], target: list[int], block_size: int = BLOCK_SIZE) -> Move:
    return Move(direction, OWNER, tuple(source), tuple(target), len(source) * block_size)


def pools(store: KVStore) -> dict[Direction, torch.Tensor]:
    return {OUT: store.device.block_view(), IN: store.cpu.block_view()}


def wait_for(copier: Copier, count: int) -> Ended:
    ended = Ended([], [])
    deadline = time.perf_counter() + LONG_S
    while len(ended.completed) + len(ended.failed) < count and time.perf_counter() < deadline:
        more = copier.poll(0.01)
        ended.completed.extend(more.completed)
        ended.failed.extend(more.failed)
    return ended


@pytest.fixture
def store() -> HarshStore:
    return make_store()


@pytest.fixture
def copier(store: HarshStore) -> Iterator[ThreadCopier]:
    made = ThreadCopier(store)
    yield made
    made.close()


def random_blocks(draw: random.Random, total: int, count: int) -> list[int]:
    first = draw.randrange(total)
    return draw.choice([[(first + i) % total for i in range(count)], draw.sample(range(total), count)])


def copy_random_moves(store: KVStore, copier: Copier) -> None:
    draw = random.Random(3)
    expected = {direction: pool.clone() for direction, pool in pools(store).items()}
    for _ in range(40):
        direction = draw.choice([OUT, IN])
        count = draw.randint(1, CPU_BLOCKS)
        other = IN if direction is OUT else OUT
        source, target = (random_blocks(draw, len(expected[pool]), count) for pool in (direction, other))
        expected[other][target] = expected[direction][source]
        copier.begin([move(direction, source, target)])
    assert len(wait_for(copier, 40).completed) == 40
    for direction, pool in pools(store).items():
        assert torch.equal(pool, expected[direction])


def test_random_moves_equal_plain_indexing() -> None:
    store = make_store(KVStore)
    copier = ThreadCopier(store)
    copy_random_moves(store, copier)
    copier.close()


gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def busy(device: torch.device) -> torch.Tensor:
    """Queue some milliseconds of work on the current stream."""
    made = torch.randn(2048, 2048, device=device)
    for _ in range(20):
        made = made @ made
        made /= made.norm()
    return made


@gpu
@needs_cuda
@pytest.mark.parametrize("block_size", [4, 1024])  # for the kernel and for the copy engines
def test_moves_that_overlap_compute_equal_plain_indexing(block_size: int) -> None:
    """Even blocks move out and odd blocks move in continuously."""
    config = ModelConfig.from_dict(CONFIGS["llama"] | {"num_hidden_layers": 4, "head_dim": 64})
    device = torch.device("cuda")
    store = KVStore(config, torch.float32, device, device_blocks=64, cpu_blocks=64, block_size=block_size)
    host = store.cpu
    assert host.tensor.is_pinned()
    draw, copier = random.Random(5), StreamCopier(store)
    for _ in range(12):
        for pool in (store.device.tensor, host.tensor):
            pool.copy_(torch.randn(pool.shape))
        torch.cuda.synchronize()
        expected = {direction: pool.cpu().clone() for direction, pool in pools(store).items()}
        moves = []
        for parity, direction, other in ((0, OUT, IN), (1, IN, OUT)):
            source, target = (draw.sample(range(parity, 64, 2), 24) for _ in range(2))
            expected[other][target] = expected[direction][source]
            moves += [move(direction, source[at : at + 6], target[at : at + 6], block_size) for at in range(0, 24, 6)]
        draw.shuffle(moves)
        for moved in moves:
            busy(device)
            copier.begin([moved])
        assert len(wait_for(copier, len(moves)).completed) == len(moves)
        torch.cuda.synchronize()
        for direction, pool in pools(store).items():
            assert torch.equal(pool.cpu(), expected[direction])
    copier.close()


@gpu
@needs_cuda
@pytest.mark.parametrize("block_size", [4, 1024])
def test_moves_are_ordered_with_steps_on_streams(block_size: int) -> None:
    config = ModelConfig.from_dict(CONFIGS["llama"] | {"num_hidden_layers": 4, "head_dim": 64})
    device = torch.device("cuda")
    store = KVStore(config, torch.float32, device, device_blocks=8, cpu_blocks=8, block_size=block_size)
    copier, pool, host = StreamCopier(store), store.device.block_view(), store.cpu.block_view()
    for value in range(20):
        host[3] = -1.0 - value
        pool[2] = float("nan")
        torch.cuda.synchronize()
        busy(device)
        pool[2] = float(value)
        copier.begin([move(OUT, [2], [5])])  # after the previous step
        pool[4] = 100.0 + value
        assert copier.run_blocking([move(IN, [3], [4]), move(OUT, [4], [6])]).failed == []
        seen = pool[4].clone()  # the step
        pool[4] = float("nan")
        copier.begin([move(IN, [3], [4])])
        assert len(wait_for(copier, 2).completed) == 2
        torch.cuda.synchronize()
        assert (host[5] == value).all()
        assert (host[6] == 100 + value).all()
        assert (seen == -1 - value).all()
        assert (pool[4] == -1 - value).all()
    copier.close()


def test_spans_keep_their_slots_in_all_directions() -> None:
    """One step moves blocks in all directions: sources are read before they are overwritten, and moves in come last."""
    store = make_store(KVStore)
    device, host = store.device.head_view(), store.cpu.head_view()
    was = device.clone(), host.clone()
    incoming = Move(IN, OWNER, (2,), (4,), 2, (Span(0, 2),))
    within = Move(Direction.WITHIN, OWNER, (3,), (4,), BLOCK_SIZE - 2, (Span(2, BLOCK_SIZE - 2),))
    out = Move(OUT, OWNER, (4, 5), (6, 7), 3, (Span(1, 2), Span(0, 1)))
    assert not ThreadCopier(store).run_blocking([incoming, within, out]).failed
    assert torch.equal(host[6, :, 1:3], was[0][4, :, 1:3])
    assert torch.equal(host[6, :, 3:], was[1][6, :, 3:])
    assert torch.equal(host[7, :, :1], was[0][5, :, :1])
    assert torch.equal(device[4], torch.cat([was[1][2, :, :2], was[0][3, :, 2:]], dim=1))
    assert torch.equal(device[3], was[0][3])


def test_invalid_moves_are_rejected(store: HarshStore) -> None:
    for wrong, message in (
        (move(OUT, [DEVICE_BLOCKS], [0]), rf"source of a move must lie in \[0, {DEVICE_BLOCKS}\), got block 24"),
        (move(OUT, [0], [CPU_BLOCKS]), rf"target of a move must lie in \[0, {CPU_BLOCKS}\), got block 20"),
        (move(IN, [-1], [0]), r"source of a move .* got block -1"),
        (move(IN, [1, 2], [0]), "2 blocks in source and 1 in target"),
        (Move(OUT, OWNER, (1,), (0,), 2, (Span(BLOCK_SIZE - 1, 2),)), r"spans of a move must lie in \[0, "),
        (Move(OUT, OWNER, (1,), (0,), 2, (Span(0, 1),)), "1 spans of 1 blocks do not hold 2 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            store.copy(wrong)
    with pytest.raises(ValueError, match="no CPU pool"):
        make_store(KVStore, cpu_blocks=0).copy(move(OUT, [0], [0]))


def test_a_failed_copy_is_reported_once_and_later_ones_complete(
    store: HarshStore, copier: ThreadCopier, caplog: pytest.LogCaptureFixture
) -> None:
    moves = [move(OUT, [i], [i]) for i in range(6)]
    bad = [moves[1], moves[4]]
    store.fails = lambda moved: moved in bad
    with caplog.at_level(logging.ERROR):
        copier.begin(moves)
        ended = wait_for(copier, 6)
    assert ended.completed == [moves[0], moves[2], moves[3], moves[5]]
    assert ended.failed == bad
    assert len(caplog.records) == 2
    assert all("device to host, failed: request 0" in record.message for record in caplog.records)
    assert copier.poll() == ([], [])


def test_completed_waits_only_for_moves_in_flight(store: HarshStore, copier: ThreadCopier) -> None:
    begin = time.perf_counter()
    assert copier.poll(LONG_S) == ([], [])
    assert time.perf_counter() - begin < LONG_S / 2
    store.delay_s = 0.05
    moves = [move(OUT, [0], [0]), move(OUT, [1], [1])]
    copier.begin(moves)
    assert copier.poll() == ([], [])
    assert copier.poll(LONG_S) == (moves[:1], [])  # returns on the first completed move
    assert copier.poll(LONG_S) == (moves[1:], [])


def test_close_waits_for_the_running_copy_and_drops_the_rest(store: HarshStore) -> None:
    began, may_end = threading.Event(), threading.Event()

    def wait(one: Move) -> bool:
        began.set()
        may_end.wait(LONG_S)
        return False

    store.fails = wait
    copier = ThreadCopier(store)
    copier.begin([move(OUT, [i], [i]) for i in range(10)])
    before = pools(store)[IN].clone()
    assert began.wait(LONG_S)
    closing = threading.Thread(target=copier.close)
    closing.start()
    may_end.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    changed = (pools(store)[IN] != before).any(dim=1)
    assert changed.tolist() == [True] + [False] * (CPU_BLOCKS - 1)


class Steps:
    """An executor and plans for it: one request that decodes in device block 0, others that move."""

    def __init__(self, store: KVStore, copier: Callable[[KVStore], Copier] | None = None) -> None:
        self.store = store
        self.executor = LocalExecutor(tiny_model("llama"), store, copier=copier and copier(store))
        self._request = Request(1, 0.0, [1], 9, sampling=Sampling(SamplingParams(temperature=0), 0, ()))
        self._plans = 0

    def run(
        self, blocking: list[Move] | None = None, overlapped: list[Move] | None = None, *, slices: bool = True
    ) -> StepResult:
        piece = Slice(self._request, 0, 1, True, False, (0,))
        plan = StepPlan(self._plans, (piece,) * slices, tuple(blocking or ()), tuple(overlapped or ()))
        self._plans += 1
        result = self.executor.submit(plan, 0.0).result()
        assert [token is not None for token in result.tokens] == [True] * slices
        return result


@pytest.fixture
def steps(store: HarshStore) -> Iterator[Steps]:
    made = Steps(store)
    yield made
    made.executor.close()


def until_completed(steps: Steps, count: int) -> list[Move]:
    completed: list[Move] = []
    deadline = time.perf_counter() + LONG_S
    while len(completed) < count and time.perf_counter() < deadline:
        completed += steps.run(slices=False).completed
    return completed


def test_completed_overlapped_moves_are_reported_by_the_next_result(store: HarshStore, steps: Steps) -> None:
    moves = [move(OUT, [5], [7]), move(IN, [3], [9])]
    bad = move(OUT, [8], [2])
    store.fails = lambda moved: moved is bad
    first = steps.run(overlapped=[moves[0], bad, moves[1]])
    completed, failed = list(first.completed), list(first.failed)
    deadline = time.perf_counter() + LONG_S
    while len(completed) + len(failed) < 3 and time.perf_counter() < deadline:
        result = steps.run()
        completed += result.completed
        failed += result.failed
    assert completed == moves
    assert failed == [bad]


def test_overlapped_moves_in_may_overwrite_sources_of_blocking_moves_out(store: HarshStore, steps: Steps) -> None:
    one, two, three = (pools(store)[OUT][block].clone() for block in (3, 4, 5))
    other, third = pools(store)[IN][8].clone(), pools(store)[IN][9].clone()
    store.delay_s = 0.01  # a copy that does not wait would come too early
    blocking = [move(IN, [9], [3]), move(OUT, [3, 4, 5], [0, 1, 2])]
    moved = move(IN, [8], [4])
    first = steps.run(blocking=blocking, overlapped=[moved])
    assert moved in first.completed or until_completed(steps, 1) == [moved]
    assert torch.equal(pools(store)[IN][:3], torch.stack([one, two, three]))
    assert torch.equal(pools(store)[OUT][3], third)
    assert torch.equal(pools(store)[OUT][4], other)


def test_overlapped_moves_start_with_their_plan(store: HarshStore, steps: Steps) -> None:
    """The first plan slowly moves out blocks that the next one overwrites by moving in."""
    kept, other = pools(store)[OUT][5].clone(), pools(store)[IN][8].clone()
    store.delay_s = 0.02
    first = steps.executor.submit(StepPlan(0, (), (move(OUT, [5], [7]),), ()), 0.0)
    second = steps.executor.submit(StepPlan(1, (), (), (move(IN, [8], [5]),)), 0.0)
    completed = len(first.result().completed) + len(second.result().completed)
    assert completed + len(until_completed(steps, 2 - completed)) == 2
    assert torch.equal(pools(store)[IN][7], kept)
    assert torch.equal(pools(store)[OUT][5], other)


def test_no_step_waits_for_a_slow_copy(store: HarshStore, steps: Steps) -> None:
    may_end = threading.Event()
    store.fails = lambda moved: not may_end.wait(LONG_S)
    moves = [move(OUT, [5], [7]), move(OUT, [6], [8])]
    results = [steps.run(overlapped=moves), *(steps.run() for _ in range(20))]
    assert not any(result.completed or result.failed for result in results)
    # Only steps without slices wait, and only briefly.
    begin = time.perf_counter()
    assert steps.run(slices=False).completed == []
    assert time.perf_counter() - begin >= PAUSE_S
    may_end.set()
    assert until_completed(steps, 2) == moves


def test_plans_without_slices_end_when_a_move_completes(store: HarshStore) -> None:
    class Patient(LateCopier):
        asked_for: list[float] = []  # noqa: RUF012

        def poll(self, timeout_s: float = 0.0) -> Ended:
            self.asked_for.append(timeout_s)
            return super().poll(timeout_s)

    steps = Steps(store, lambda store: Patient(store, 2))
    result = steps.run(overlapped=[move(OUT, [5], [7])], slices=False)
    assert (result.completed, result.seconds < PAUSE_S) == ([], True)
    assert len(steps.run(slices=False).completed) == 1
    steps.run()
    steps.run(blocking=[move(OUT, [5], [7])], slices=False)
    assert Patient.asked_for == [PAUSE_S, PAUSE_S, 0, 0]
    steps.executor.close()


def test_without_a_cpu_tier_there_is_no_copy_thread() -> None:
    before = set(threading.enumerate())
    steps = Steps(make_store(KVStore, cpu_blocks=0))
    assert steps.run().completed == []
    with pytest.raises(ValueError, match="plan 1 moves KV blocks, but there is no CPU pool"):
        steps.run(overlapped=[move(OUT, [0], [0])])
    begun = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in begun if name.startswith("skipjoin-copy")]
    steps.executor.close()


def test_copy_errors_propagate_from_the_store(store: HarshStore) -> None:
    store.fails = lambda moved: True
    with pytest.raises(CopyError, match="request 0"):
        store.copy(move(OUT, [0], [0]))
    assert pools(store)[IN][0].isnan().all()
