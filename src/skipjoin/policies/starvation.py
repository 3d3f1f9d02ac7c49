from __future__ import annotations

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
# Maximum ratio of transfer time to computing time; see `min_bound`.
_MOVING_SHARE = 1.5
# Transfers of the longest request that may delay a head; see `min_bound`. Three are its own: in, out and in again.
# Three more count if it becomes the head in transit, although some of them coincide with these: the request that the
# link holds beyond two steps' time, the head's swap-out, and its swap-in.
_HEAD_TRANSFERS = 6


def starvation_after(cost: CostModel, slo_s: float | None = None) -> float:
    """Return the seconds without running after which a request is promoted (FastServe section 4.1).

    Args:
        slo_s: Acceptable seconds per output token; None derives the threshold from the cost model.
    """
    return _ITERATIONS * shortest_step(cost) if slo_s is None else _OBJECTIVES * slo_s


@dataclass(frozen=True, slots=True)
class WorstCase:
    """Worst-case load of an engine.

    Attributes:
        max_len: Maximum tokens of a request, at most the device's capacity.
        cpu_blocks: 0 where KV is never swapped.
        moves_overlapped: Whether transfers may overlap with steps.
        stages: Pipeline stages that share each step (`EvenStages`), with as many plans in flight.
    """

    cost: CostModel
    requests: int
    max_len: int
    max_seqs: int
    max_tokens: int
    device_blocks: int
    cpu_blocks: int
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
        """Number of steps from becoming the head of the first queue until leaving it; see `min_bound`."""
        chunks = -(-self.max_len // self.max_tokens)
        step_blocks = -(-self.max_tokens // self.block_size) + self.max_seqs
        spared = 1
        if self.device_blocks < 3 * self.blocks + self.depth * step_blocks:
            prefill = max(1, self.max_tokens - self.max_seqs + 1)
            spared = -(-self.device_blocks * self.block_size // prefill)
        moves = 2 if self.cpu_blocks else 0
        return self.stages * (2 * chunks + spared + moves + 2 * self.depth + 2 * (self.depth - 1))

    @property
    def stay_s(self) -> float:
        """Longest time in the first queue, from promotion to the plan that runs the request."""
        if not self.moves_overlapped:
            return self.requests * self.turn_steps * (self.step_s + self._all_moves_s)
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
    """Return the smallest bound on waiting in seconds that can be guaranteed: `around_s + 2 x stay_s`.

    A wait lasts from a request's arrival, or the end of a step that ran it, to the end of the next step that runs it.

    The bound holds for skip-join MLFQ (FastServe section 4.1) without rate-limited promotions. The threshold is alpha =
    bound - around_s - stay_s, which is at least stay_s. It assumes that steps and transfers take the profiled time,
    that copies do not fail, and that no request is in a better band. There is no bound where new requests wait for
    memory until another finishes (`Defer`).

    Proof. An arrival is noticed at the end of a step. It starves alpha later, and is promoted to the tail of the first
    queue at most a step later. Once chosen, its step is complete after `depth` steps. These are `around_s`.

    In between it stays in the first queue. Later requests queue behind it, so at most requests - 1 are ahead. A served
    request leaves the queue, and is not promoted again within the stay, because alpha is at least stay_s. So each is
    served once. Call the first of the queue the head. While it waits for space, other requests of the queue run only if
    they hold KV. From becoming the head until leaving, a request takes at most `turn_steps` steps:

    - Each step runs the head, or else the best KV holder of the queue, with all tokens that it can use. No request
      evicts it. It leaves after the chunks of max_len, whose time its promotion grants, and a decode, which uses a
      whole quantum. The best holder may lose its chunks once, to a head admitted later: 2 x chunks + 1 steps.
    - The head may lack space, because running requests that have not sampled since their admission are spared. In a
      step with spare tokens all of those sample, in another one all except the last. The last leaves space for the head
      if the device holds three longest requests and the blocks of the plans in flight: a step of each kind. On a
      smaller device they compute at least max_tokens - max_seqs + 1 of its tokens per step: `spared` + 1 steps.
    - With plans in flight, the last chunk and the last sample are noticed `depth` - 1 steps late, and victims pause for
      as long before each: 4 x (depth - 1) steps.
    - While the head's KV moves, others may be admitted and run: two steps.

    With pipeline stages, the work of one step takes up to `stages` plans: a prompt is cut into as many chunks, and a
    runnable request joins one of as many consecutive plans.

    Blocking transfers swap at most the whole device out and in. Where transfers overlap with steps, only the head is
    swapped in with a blocking one. All KV that is swapped out was either computed before, which took longer than
    swapping it out and in (`Swap`), or swapped in within the time of steps. So transfers take one and a half times the
    steps' time, besides three kinds: the KV that is on the device at first, the transfers of the longest request (in,
    out and in again), and those in progress when a request becomes the head. The link then holds two steps' time and
    one request more, and their end is noticed at a step's end. The head is not swapped out.
    """
    return most.around_s + 2 * most.stay_s


def starvation_within(bound_s: float, most: WorstCase) -> float:
    """Return the starvation threshold in seconds that keeps every wait within `bound_s`.

    Raises:
        ValueError: `bound_s` is below `min_bound(most)`.
    """
    if not bound_s >= (least := min_bound(most)):
        raise ValueError(f"bound_s must be at least {least}, got {bound_s}")
    return bound_s - most.around_s - most.stay_s


def max_requests(bound_s: float, most: WorstCase) -> int:
    low, high = 0, most.requests
    while low < high:
        middle = (low + high + 1) // 2
        if min_bound(replace(most, requests=middle)) <= bound_s:
            low = middle
        else:
            high = middle - 1
    return low
