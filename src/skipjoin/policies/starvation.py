from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from skipjoin.core.policy import CostModel
from skipjoin.core.step import PAUSE_S, StepShape
from skipjoin.policies.mlfq import shortest_step

# Default threshold in shortest iterations: the quantum of the eleventh queue. A request waits until the requests ahead
# have used their quanta down to its own queue. With a full batch ahead, this takes at most one quantum of that queue,
# and few outputs are longer than the 1,023 tokens before the eleventh. A request that waits longer waits for requests
# that arrived later.
_ITERATIONS = 1024
# The same in objectives: FastServe's are ten iterations per token (section 6.1). It uses a single objective, which
# turns the queues into round robin at overload. Latencies are the same at four times this threshold, and at an eighth
# of it 12 % longer in the mean (benchmarks/papers/fastserve/choices).
_OBJECTIVES = 100
# Transfers take at most this multiple of the time of steps, besides those of the head (`stay_s`): all KV that is
# swapped out was computed before, which took longer than swapping it out and in (`Swap`), or swapped in within the time
# of steps.
_MOVING_SHARE = 1.5
# Transfers of the longest request that may delay a head. Three are its own: in, out and in again. Three more count if
# it becomes the head in transit: the request that the link holds beyond two steps' time, its swap-out and swap-in.
_HEAD_TRANSFERS = 6


def starvation_after(cost: CostModel, slo_s: float | None = None) -> float:
    """Return the seconds without running after which a request is promoted (FastServe section 4.1)."""
    return _ITERATIONS * shortest_step(cost) if slo_s is None else _OBJECTIVES * slo_s


@dataclass(frozen=True, slots=True)
class WorstCase:
    """Worst-case load of an engine, with `stages` plans in flight."""

    cost: CostModel
    requests: int
    max_len: int
    max_seqs: int
    max_tokens: int
    device_blocks: int
    cpu_blocks: int  # 0 where KV is never swapped
    block_size: int
    depth: int
    moves_overlapped: bool
    stages: int = 1

    @property
    def blocks(self) -> int:
        return -(-self.max_len // self.block_size)

    @property
    def step_s(self) -> float:
        """Longest step without transfers: all tokens prefill at the end of the context, with the most decodes."""
        on_device = self.device_blocks * self.block_size
        seqs = min(self.max_seqs, self.max_tokens, self.requests)
        shape = StepShape(self.max_tokens, self.max_tokens * self.max_len, seqs, min(on_device, seqs * self.max_len))
        return max(PAUSE_S, self.cost.step(shape))

    @property
    def turn_steps(self) -> int:
        """Number of steps from becoming the head of the first queue until leaving it."""
        # Each step runs the head, or else the best KV holder of the queue, with all tokens that it can use. It leaves
        # after the chunks of max_len, whose time its promotion grants, and a decode, which uses a quantum. The best
        # holder may lose its chunks once, to a head admitted later.
        tokens = 2 * -(-self.max_len // self.max_tokens) + 1
        step_blocks = -(-self.max_tokens // self.block_size) + self.max_seqs
        # The head may lack space, because running requests that have not sampled since their admission are spared. In
        # a step with spare tokens all of those sample, in another one all except the last. The last leaves space for
        # the head if the device holds three longest requests and the blocks of the plans in flight. On a smaller device
        # they compute at least max_tokens - max_seqs + 1 of its tokens per step.
        spared = 1
        if self.device_blocks < 3 * self.blocks + self.depth * step_blocks:
            prefill = max(1, self.max_tokens - self.max_seqs + 1)
            spared = -(-self.device_blocks * self.block_size // prefill)
        # While the head's KV moves, others may be admitted and run for two steps.
        moves = 2 if self.cpu_blocks else 0
        # With plans in flight, the last chunk and the last sample are noticed late, and victims pause before each.
        late = 4 * (self.depth - 1)
        # With pipeline stages, the work of one step takes up to `stages` plans.
        return self.stages * (tokens + spared + 1 + moves + late)

    @property
    def stay_s(self) -> float:
        """Longest time in the first queue, from promotion to the plan that runs the request."""
        # At most requests - 1 are ahead, and each is served once: it is not promoted again within the stay.
        if not self.moves_overlapped:
            return self.requests * self.turn_steps * (self.step_s + self._all_moves_s)
        # The link may hold two steps' time of transfers, and their end is noticed at a step's end.
        step_s = (1 + _MOVING_SHARE) * self.step_s
        own = self.cost.transfer(self.blocks)
        return self.requests * ((self.turn_steps + 3) * step_s + _HEAD_TRANSFERS * own) + self._all_moves_s

    @property
    def around_s(self) -> float:
        """Waiting time besides threshold and stay: whole steps before, between and after them."""
        return (2 + self.depth) * (self.step_s + self._all_moves_s)

    @property
    def _all_moves_s(self) -> float:
        return 2 * self.cost.transfer(self.device_blocks) if self.cpu_blocks else 0.0


def min_bound(most: WorstCase) -> float:
    """Return the smallest bound on waiting in seconds that can be guaranteed, from a step's end to the next one's.

    It holds for skip-join MLFQ (FastServe section 4.1) without rate-limited promotions and `Defer`, if steps and
    transfers take the profiled time, copies do not fail, and no request is in a better band.
    """
    # A request starves alpha = bound - around_s - stay_s after it was noticed, and is then promoted to the tail of the
    # first queue. As alpha is at least stay_s, a request that was served is not promoted again while it stays there.
    return most.around_s + 2 * most.stay_s


def starvation_within(bound_s: float, most: WorstCase) -> float:
    """Return the starvation threshold in seconds that keeps every wait within `bound_s`, at least `min_bound(most)`."""
    if not bound_s >= (least := min_bound(most)):
        raise ValueError(f"bound_s must be at least {least}, got {bound_s}")
    return bound_s - most.around_s - most.stay_s


def max_requests(bound_s: float, most: WorstCase) -> int:
    return bisect_right(
        range(1, most.requests + 1), bound_s, key=lambda count: min_bound(replace(most, requests=count))
    )
