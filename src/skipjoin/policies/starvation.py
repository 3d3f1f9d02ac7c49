"""How long a request may be passed over: from the one number that says what users accept, or within a bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skipjoin.core.policy import CostModel
from skipjoin.core.step import PAUSE_S, StepShape

# FastServe tunes its threshold from the objective and sets it to the objective itself, which turns the queues into
# round robin at overload. Simulated on ShareGPT's lengths above capacity, the mean and the P95 of normalized latency
# fall until 100 objectives or so, and stay.
_OBJECTIVES = 100
# Blocking moves take at most this much of the time that the steps compute; see `least_bound`.
_MOVING_SHARE = 1.5


def starvation_after(slo_s: float) -> float:
    """Seconds without running after which a request is promoted (FastServe section 4.1).

    slo_s: seconds per output token that users accept.
    """
    return _OBJECTIVES * slo_s


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The most of everything that can come together.

    cost: what steps and moves take. requests: live at once. max_len: tokens of a request, at most what the device
    holds. max_seqs, max_tokens: of a step. device_blocks, host_blocks: KV blocks of block_size tokens; no
    host_blocks where KV never moves. depth: plans in flight. moves_overlapped: whether moves overlap with steps, too.
    stages: between which steps are shared out (`EvenStages`); then as many plans are in flight.
    """

    cost: CostModel
    requests: int
    max_len: int
    max_seqs: int
    max_tokens: int
    device_blocks: int
    host_blocks: int
    block_size: int
    depth: int
    moves_overlapped: bool
    stages: int = 1

    @property
    def blocks(self) -> int:
        """Of the longest request."""
        return -(-self.max_len // self.block_size)

    @property
    def step_s(self) -> float:
        """The longest step, its moves aside: all tokens are prefill at the end of the context, beside most decodes."""
        on_device = self.device_blocks * self.block_size
        seqs = min(self.max_seqs, self.max_tokens, self.requests)
        shape = StepShape(self.max_tokens, self.max_tokens * self.max_len, seqs, min(on_device, seqs * self.max_len))
        return max(PAUSE_S, self.cost.step(shape))

    @property
    def turn_steps(self) -> int:
        """Steps until the first queue's first request has left it, since it became the first; see `least_bound`."""
        chunks = -(-self.max_len // self.max_tokens)
        step_blocks = -(-self.max_tokens // self.block_size) + self.max_seqs
        spared = 1
        if self.device_blocks < 3 * self.blocks + self.depth * step_blocks:
            prefill = max(1, self.max_tokens - self.max_seqs + 1)
            spared = -(-self.device_blocks * self.block_size // prefill)
        moves = 2 if self.host_blocks else 0
        return self.stages * (2 * chunks + spared + moves + 2 * self.depth + 2 * (self.depth - 1))

    @property
    def stay_s(self) -> float:
        """The longest stay in the first queue, from promotion to the plan that runs the request."""
        if not self.moves_overlapped:
            return self.requests * self.turn_steps * (self.step_s + self._all_moves_s)
        step_s = (1 + _MOVING_SHARE) * self.step_s
        own = self.cost.transfer(self.blocks)
        return self.requests * ((self.turn_steps + 3) * step_s + 6 * own) + self._all_moves_s

    @property
    def around_s(self) -> float:
        """What a wait takes besides the threshold and the stay: whole steps before, between and after the two."""
        return (2 + self.depth) * (self.step_s + self._all_moves_s)

    @property
    def _all_moves_s(self) -> float:
        """All KV on the device leaves, and as much comes in."""
        return 2 * self.cost.transfer(self.device_blocks) if self.host_blocks else 0.0


def least_bound(most: WorstCase) -> float:
    """The shortest time in seconds that can be promised as a bound on waiting, from a request's arrival, or the end of
    a step that ran it, to the end of the next step that runs it: `around_s + 2 x stay_s`.

    Promised by skip-join MLFQ (FastServe section 4.1) whose promotions nothing paces and whose threshold alpha is what
    remains of the bound: bound - around_s - stay_s, at least stay_s. That steps and moves take what the profile says,
    that copies do not fail, and that no request is in an earlier band is assumed.

    Proof. An arrival is seen at the end of a step; alpha later it starves; at the next decision, at most a step later,
    it is promoted to the tail of the first queue; and when it is chosen, `depth` steps end until its own has. These
    are `around_s`. In between it stays in the first queue. A request that comes later queues behind it, so at
    most requests - 1 are ahead. Call the first of them the head. While a request waits for space, none behind gets in:
    the others run only if they hold KV. A request that was served leaves the queue and, as alpha is at least the
    stay, is not promoted again within it: each has one turn, and a turn is no longer than `turn_steps`:

    - Each step runs the head, or else the best of the queue that holds KV on the device, and gives it all the tokens
      of the step that it can use; no request evicts it. It leaves after the chunks of max_len, for which its promotion
      gives it the time, and a decode, which takes a whole quantum. The best holder may lose its chunks once, to a
      head that got in since: 2 x chunks + 1 steps.
    - The head may find no request to serve ahead of it and no space, as requests that run and have not sampled since
      they came are spared. In a step with tokens to spare all of those sample. In another one all but the last of them
      do, and the last one leaves room for the head on a device of three longest requests and what the plans in flight
      hold: a step of each kind. On a smaller one they compute at least max_tokens - max_seqs + 1 of its tokens per
      step.
    - With plans in flight each of these is seen `depth` - 1 steps late, and victims first pause for as long.
    - While its KV moves others may be let into the queue and run at once: two steps.

    Blocking moves: at most the whole device leaves and comes in. Where moves overlap with steps, only the head comes in
    with a blocking one, and all that leaves was computed before, which took longer than to move it out and in (`Swap`),
    or came in overlapped with steps, in no more time than they take: so the moves take half and all of the steps' time,
    beyond what was on the device at first and the moves of the longest request, in and out and in again. The head may
    be in transit: the link holds two steps' time and one request more, and a landing is seen at a step's end. Once it
    is the head it does not leave.

    Where steps are shared out between stages, what a step does for the head or for spared requests takes up to
    `stages` plans: a prompt's tokens of one step are cut into as many chunks, and a request that could run is in one of
    as many plans that follow each other.

    Where newcomers wait for memory until a request ends (`Defer`), there is no bound: none makes way for the head.
    """
    return most.around_s + 2 * most.stay_s


def starvation_within(bound_s: float, most: WorstCase) -> float:
    """The threshold in seconds with which no wait exceeds `bound_s`, which is at least `least_bound(most)`.

    Raises ValueError if it is less.
    """
    if not bound_s >= (least := least_bound(most)):
        raise ValueError(f"bound_s must be at least {least}, got {bound_s}")
    return bound_s - most.around_s - most.stay_s


def most_requests(bound_s: float, most: WorstCase) -> int:
    """How many requests may be live so that the bound can be promised, at most as many as are; 0: not even one."""
    low, high = 0, most.requests
    while low < high:
        middle = (low + high + 1) // 2
        if least_bound(replace(most, requests=middle)) <= bound_s:
            low = middle
        else:
            high = middle - 1
    return low
