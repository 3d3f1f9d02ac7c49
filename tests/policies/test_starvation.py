from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from skipjoin.policies.cost import LinearCost
from skipjoin.policies.starvation import WorstCase, max_requests, min_bound, starvation_after, starvation_within

# Every step takes 0.1 s, including the longest prompt, which fits one step; moving a block takes 10 ms.
WORST = WorstCase(
    LinearCost(floor=0.1, prefill_token=0.0, block=0.01),
    requests=8,
    max_len=64,
    max_seqs=4,
    max_tokens=64,
    device_blocks=100,
    cpu_blocks=0,
    block_size=4,
    depth=1,
    moves_overlapped=False,
)


def test_the_threshold_follows_the_objective_or_else_the_step_time() -> None:
    assert starvation_after(WORST.cost, 0.3) == pytest.approx(30.0)
    assert starvation_after(WORST.cost) == pytest.approx(102.4)


def test_the_bound_matches_a_calculation_by_hand() -> None:
    """A turn is a chunk that may be lost once, a decode, and two steps in which protected requests sample."""
    assert WORST.turn_steps == 5
    assert WORST.stay_s == pytest.approx(8 * 5 * 0.1)
    assert WORST.around_s == pytest.approx(3 * 0.1)
    assert min_bound(WORST) == pytest.approx(0.3 + 2 * 4.0)
    assert starvation_within(20.0, WORST) == pytest.approx(20.0 - 0.3 - 4.0)


def test_chunks_and_a_small_device_lengthen_turns() -> None:
    assert replace(WORST, max_tokens=16).turn_steps == 5 + 2 * 3
    # 160 tokens fit on the device, and 61 of them are computed per step.
    assert replace(WORST, device_blocks=40).turn_steps == 5 + 2


def test_blocking_moves_swap_the_whole_device_out_and_in() -> None:
    reactive = replace(WORST, cpu_blocks=100)
    assert reactive.stay_s == pytest.approx(8 * 7 * (0.1 + 2.0))
    assert reactive.around_s == pytest.approx(3 * (0.1 + 2.0))


def test_overlapped_moves_cost_part_of_the_steps_and_the_wait_for_the_link() -> None:
    proactive = replace(WORST, cpu_blocks=100, moves_overlapped=True)
    assert proactive.stay_s == pytest.approx(8 * ((7 + 3) * 0.25 + 6 * 0.16) + 2.0)


@pytest.mark.parametrize(
    "more",
    [
        {"requests": 9},
        {"max_len": 128},
        {"max_tokens": 32},
        {"cpu_blocks": 1},
        {"depth": 2},
        {"cost": LinearCost(floor=0.11, prefill_token=0.0)},
        {"cost": LinearCost(floor=0.1, prefill_token=1e-3)},
        {"cost": LinearCost(floor=0.1, prefill_token=0.0, context_token=1e-4)},
    ],
)
def test_the_bound_grows_with_each_cause_of_waiting(more: dict[str, Any]) -> None:
    assert min_bound(replace(WORST, **more)) > min_bound(WORST)


@pytest.mark.parametrize("bound", [0.5, 1.4, 3.0, 8.0, 8.3])
def test_max_requests_is_the_largest_number_within_the_bound(bound: float) -> None:
    fits = max_requests(bound, WORST)
    assert fits == 0 or min_bound(replace(WORST, requests=fits)) <= bound
    assert fits == WORST.requests or min_bound(replace(WORST, requests=fits + 1)) > bound


def test_max_requests_is_at_most_the_number_of_requests() -> None:
    assert max_requests(1e9, WORST) == 8
    assert max_requests(0.1, WORST) == 0


@pytest.mark.parametrize("bound", [8.0, 0.0, -1.0, math.nan])
def test_a_bound_that_cannot_be_held_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match=r"^bound_s must be at least 8.3"):
        starvation_within(bound, WORST)
