from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import NamedTuple

from skipjoin.core.request import Request


class Slice(NamedTuple):
    """Consecutive tokens of one request that are computed in one step.

    Attributes:
        awaits: Whether a plan in flight samples the last input token.
        blocks: Device blocks of positions [0, start + tokens), in order.
    """

    request: Request
    start: int
    tokens: int
    samples: bool
    awaits: bool
    blocks: tuple[int, ...]


# Parts of slices, read without bytecode for each of them.
REQUEST_OF: Callable[[Slice], Request] = itemgetter(0)
START_OF: Callable[[Slice], int] = itemgetter(1)
TOKENS_OF: Callable[[Slice], int] = itemgetter(2)
SAMPLES_OF: Callable[[Slice], bool] = itemgetter(3)


class Direction(Enum):
    OUT = "device to host"
    WITHIN = "device to device"  # always blocking
    IN = "host to device"


# Directions that use the link between the tiers.
LINK = (Direction.OUT, Direction.IN)


class Span(NamedTuple):
    first: int
    slots: int


# Most of a pool that states of requests take, likewise snapshots of them.
STATE_SHARE = 0.25
# Requests on the device, many of them paused, and swapped-out ones, for each that runs.
_STATES_PER_SEQ, _SWAPPED_STATES_PER_SEQ = 2, 8


class StateSizes(NamedTuple):
    """Slots for state of requests that is no KV, such as that of linear attention, called `name`."""

    name: str
    device: int
    cpu: int = 0
    snapshots: int = 0  # further slots on the device, for states at the ends of cached prefixes
    blocks: float = 0.0  # size of a state on the link between the tiers, in KV blocks

    @classmethod
    def fitting(
        cls, state_bytes: int, *, pool_bytes: float, swap_bytes: float, block_bytes: int, seqs: int, snapshots: int
    ) -> StateSizes:
        """Return the slots that fit into a part of each KV pool for steps of at most `seqs` requests."""
        here, there = (int(size * STATE_SHARE) // state_bytes for size in (pool_bytes, swap_bytes))
        return cls(
            "recurrent state",
            min(_STATES_PER_SEQ * seqs, here),
            min(_SWAPPED_STATES_PER_SEQ * seqs, there),
            min(snapshots, here),
            state_bytes / block_bytes,
        )


class StateMove(NamedTuple):
    """Copy of a state, which takes the time of this many blocks."""

    source: int
    target: int
    blocks: float


class Move(NamedTuple):
    """Copy of KV blocks between the tiers or within the device: `source[i]` is copied to `target[i]`.

    Attributes:
        request: Owner of the blocks, which without `spans` are consecutive in its table. None for cached blocks.
        tokens: Number of tokens that the copied slots hold.
        spans: Slots to copy of each block, to the same slots of its target. Empty to copy whole blocks.
    """

    direction: Direction
    request: Request | None
    source: tuple[int, ...]
    target: tuple[int, ...]
    tokens: int
    spans: tuple[Span, ...] = ()
    state: StateMove | None = None

    def blocks(self, block_size: int) -> float:
        """Return how much is copied, with the state."""
        blocks = self.tokens / block_size if self.spans else len(self.source)
        return blocks if self.state is None else blocks + self.state.blocks


class StepShape(NamedTuple):
    """Work of one step, as input of a cost model."""

    prefill: int = 0  # tokens of slices longer than one token
    attention: int = 0  # query-key pairs of these tokens
    decodes: int = 0  # number of slices of one token
    context: int = 0  # KV tokens that these slices read

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> StepShape:
        if sum(map(TOKENS_OF, slices)) == len(slices):  # decodes only, as most steps
            return cls(decodes=len(slices), context=sum(map(START_OF, slices)) + len(slices))
        prefill = attention = decodes = context = 0
        for slice_ in slices:
            n = slice_.tokens
            if n == 1:
                decodes += 1
                context += slice_.start + 1
            else:
                prefill += n
                attention += n * slice_.start + n * (n + 1) // 2
        return cls(prefill, attention, decodes, context)


class Capture(NamedTuple):
    """Snapshot of the state that the first `tokens` tokens of a slice leave, in slot `target`."""

    slice_index: int
    tokens: int
    target: int


class StatePlan(NamedTuple):
    """State of requests that is no KV, such as that of linear attention."""

    slots: tuple[int, ...] = ()  # slot of each slice's request, with the state before the slice and then after it
    restored: tuple[tuple[int, int], ...] = ()  # copies of snapshots before the slices run, from and to these slots
    captured: tuple[Capture, ...] = ()  # snapshots to take while they run


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decision for one step. Executors run plans in the order of their ids.

    The source of a blocking swap-out is copied first, so the same plan may overwrite it. A plan without slices ends as
    soon as a move has completed, or after `PAUSE_S`.
    """

    id: int
    slices: tuple[Slice, ...]
    blocking: tuple[Move, ...] = ()  # must complete before the slices run
    overlapped: tuple[Move, ...] = ()  # run asynchronously, possibly over many plans
    waiting_for_kv: tuple[Request, ...] = ()  # would be in this step if all their KV were on the device
    states: StatePlan | None = None


class StageTime(NamedTuple):
    """Seconds that one pipeline stage worked on a step, blocking moves included, and was idle before it."""

    busy: float
    idle: float  # 0 in its first step


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a plan.

    Attributes:
        tokens: The sampled token of each slice; None if the slice does not sample.
        seconds: Duration of the step, blocking moves included. In a pipeline, the sum over its stages.
        moving: Part of `seconds` that the step waited for its blocking moves.
        completed, failed: Moves since the previous result. Slices that read targets of failed ones are invalid.
        dropped: Reasons why slices were dropped, by index: the step exceeded the device's memory, or the grammar
            failed. Several ranks drop none for lack of memory, because they would diverge.
        refused: Those of `dropped` whose requests exceed a limit.
    """

    plan: StepPlan
    tokens: Sequence[int | None]
    seconds: float
    details: Mapping[int, object] = field(default_factory=dict)
    moving: float = 0.0
    completed: Sequence[Move] = ()
    failed: Sequence[Move] = ()
    stages: Sequence[StageTime] = ()
    dropped: Mapping[int, str] = field(default_factory=dict)
    refused: Collection[int] = ()


# Maximum duration of a plan without slices, in seconds. It bounds how long a new request waits for a copy.
PAUSE_S = 0.005
