"""A limited link: moves complete when the simulator's link would finish them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
import torch
from engines import BLOCK_SIZE, CONFIGS

from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Slice, StepPlan
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.exec.throttle import ThrottledCopier, copier_for
from skipjoin.exec.transfer import Ended
from skipjoin.model.config import ModelConfig
from skipjoin.policies.cost import LinearCost
from support.waiting import Clock

# Exact in binary, so that times can be compared exactly.
STEP_S, BLOCK_S = 1.0, 0.25
OUT, IN = Direction.OUT, Direction.IN


class InstantCopier:
    """Copier whose moves take no time. Those of `bad` fail."""

    def __init__(self, bad: Sequence[Move] = ()) -> None:
        self._bad = bad
        self._on_way: list[Move] = []

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        return Ended(list(moves), [])

    def begin(self, moves: Sequence[Move]) -> None:
        self._on_way += moves

    def poll(self, timeout_s: float = 0.0) -> Ended:
        moves, self._on_way = self._on_way, []
        return Ended([move for move in moves if move not in self._bad], [move for move in moves if move in self._bad])

    def close(self) -> None: ...


def throttled(clock: Clock, bad: Sequence[Move] = ()) -> ThrottledCopier:
    return ThrottledCopier(InstantCopier(bad), lambda move: BLOCK_S * len(move.source), clock=clock, sleep=clock.sleep)


def move(number: int, direction: Direction, blocks: int) -> Move:
    return Move(direction, Request(number, 0.0, [0], 1), tuple(range(blocks)), tuple(range(blocks)), 16 * blocks)


@pytest.mark.parametrize("seed", range(5))
def test_moves_complete_in_the_step_in_which_the_simulated_ones_do(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    copier = throttled(clock)
    executor = SimulatedExecutor(LinearCost(floor=STEP_S, prefill_token=0.0, block=BLOCK_S))
    piece = Slice(Request(0, 0.0, [0], 1), 0, 1, True, False, (0,))
    late = 0
    for number in range(100):
        moves = [move(10 * number + at, draw.choice((OUT, IN)), draw.randint(1, 6)) for at in range(4)]
        plan = StepPlan(number, (piece,), tuple(moves[: draw.randint(0, 2)]), tuple(moves[2 : draw.randint(2, 4)]))
        simulated = executor.submit(plan, clock.now)
        ended = copier.run_blocking(plan.blocking)
        copier.begin(plan.overlapped)
        clock.sleep(STEP_S)
        assert clock.now == simulated.ready_at
        completed = [*ended.completed, *copier.poll().completed]
        assert sorted(moved.request.id for moved in completed) == sorted(
            moved.request.id for moved in simulated.outcome.completed
        ), number
        late += any(moved in plan.overlapped for moved in completed) < len(plan.overlapped)
    assert late > 20, "most moves take longer than their own step"


def test_a_failed_move_is_reported_once_and_a_wait_ends_with_the_first_move() -> None:
    clock = Clock()
    moves = [move(1, OUT, 4), move(2, IN, 8)]
    copier = throttled(clock, moves[1:])
    copier.begin(moves)
    assert copier.poll() == ([], [])
    assert copier.poll(5.0) == (moves[:1], [])
    assert clock.now == pytest.approx(1.0, abs=1e-3)
    assert copier.poll(5.0) == ([], moves[1:])
    assert clock.now == pytest.approx(2.0, abs=1e-3)
    assert copier.poll(5.0) == ([], [])
    assert clock.now == pytest.approx(2.0, abs=1e-3), "nothing is in flight"


def test_a_store_with_a_limit_moves_its_blocks_at_that_rate() -> None:
    config, pools = ModelConfig.from_dict(CONFIGS["llama"]), {"device_blocks": 8, "cpu_blocks": 8}
    store = KVStore(config, torch.float32, torch.device("cpu"), **pools, block_size=BLOCK_SIZE, link_bytes_per_s=1e5)
    one = Move(OUT, Request(1, 0.0, [0], 1), (0, 1), (3, 2), 2 * BLOCK_SIZE)
    copier, begin = copier_for(store), time.perf_counter()
    assert copier.run_blocking([one]).completed == [one]
    assert time.perf_counter() - begin >= 2 * store.device.block_bytes / 1e5
    copier.begin([one])
    assert copier.poll() == ([], [])
    while not (ended := copier.poll(1.0)).completed:
        pass
    assert ended == ([one], [])
    assert time.perf_counter() - begin >= 4 * store.device.block_bytes / 1e5
    copier.close()
