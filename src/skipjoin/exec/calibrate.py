"""Measure what steps cost here: a few steps of known shape through the executor, fitted to a linear cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepPlan
from skipjoin.exec.local import LocalExecutor, Sampling
from skipjoin.policies.cost import LinearCost
from skipjoin.sampling import SamplingParams

# Seconds that measuring may take before it is content with what it has: large models start slowly enough.
PATIENCE_S = 5.0
_REPEATS = 3
# What a smallest step takes at least, so that a cost model never divides time into nothing.
_LEAST_S = 1e-5


def measure_cost(executor: LocalExecutor, max_tokens: int, max_context: int) -> LinearCost:
    """The cost model of this executor, from steps of up to `max_tokens` tokens and `max_context` positions.

    Writes into KV blocks that nobody holds yet: call it before the first request.
    """
    kv = executor.store.device
    room = min(max_context, kv.num_blocks * kv.block_size)
    long = max(2, min(512, max_tokens, room))
    short = max(2, long // 4)
    many = max(1, min(16, max_tokens, kv.num_blocks))
    far = max(1, min(1024, room - 1, kv.num_blocks * kv.block_size // many - 1))
    deadline = time.perf_counter() + PATIENCE_S

    def seconds(slices: list[tuple[int, int]]) -> float:
        return _median_seconds(lambda: _timed(executor, slices), deadline)

    _timed(executor, [(0, long)])  # first touches of memory and code are not what a step costs
    one = seconds([(0, 1)])
    batch = seconds([(0, 1)] * many)
    batch_far = seconds([(far - 1, 1)] * many) if far > 1 else batch
    prefill_short, prefill_long = seconds([(0, short)]), seconds([(0, long)])
    # prefill(n) = floor + a n + b n^2 / 2, solved for a and b at the two lengths, neither below zero.
    per_short, per_long = (prefill_short - one) / short, (prefill_long - one) / long
    attention = max(0.0, 2 * (per_long - per_short) / max(1, long - short))
    token = max(0.0, per_long - attention * long / 2)
    decode = max(0.0, (batch - one) / max(1, many - 1))
    context = max(0.0, (batch_far - batch) / (many * max(1, far - 1)))
    return LinearCost(
        floor=max(_LEAST_S, one - decode - context),
        prefill_token=token,
        attention_pair=attention,
        decode=decode,
        context_token=context,
    )


def _median_seconds(run: Callable[[], float], deadline: float) -> float:
    times = [run()]
    while len(times) < _REPEATS and time.perf_counter() < deadline:
        times.append(run())
    return statistics.median(times)


def _timed(executor: LocalExecutor, slices: list[tuple[int, int]]) -> float:
    """Seconds of one step with slices of (start, tokens), each in blocks of its own as far as they go."""
    kv = executor.store.device
    sampling = Sampling(SamplingParams(temperature=0), 0, ())
    pieces, next_block = [], 0
    for number, (start, tokens) in enumerate(slices):
        blocks = -(-(start + tokens) // kv.block_size)
        table = tuple((next_block + index) % kv.num_blocks for index in range(blocks))
        next_block += blocks
        request = Request(number, 0.0, [number % 2] * (start + tokens), 1, sampling=sampling)
        pieces.append(Slice(request, start, tokens, True, False, table))
    return executor.submit(StepPlan(0, tuple(pieces)), 0.0).result().seconds
