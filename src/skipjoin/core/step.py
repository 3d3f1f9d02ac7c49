"""One engine step as frozen values: what was decided (StepPlan) and what came of it (StepResult)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from skipjoin.core.request import Request


class Slice(NamedTuple):
    """`tokens` consecutive tokens of one request, from position `start`, computed in one step.

    samples: the slice reaches the end of what is known, so the step samples the next token.
    awaits: its last input token is still being sampled by a plan in flight; the executor, which runs plans in
        order, takes it from there.
    blocks: the device blocks that hold positions [0, start + tokens), in order, as of this plan.
    """

    request: Request
    start: int
    tokens: int
    samples: bool
    awaits: bool
    blocks: tuple[int, ...]


class Direction(Enum):
    """Which way a move goes."""

    OUT = "device to host"
    WITHIN = "device to device"  # blocking moves only
    IN = "host to device"


# The directions that cross the link.
LINK = (Direction.OUT, Direction.IN)


class Span(NamedTuple):
    """Slots of a block that follow each other."""

    first: int
    slots: int


class Move(NamedTuple):
    """KV blocks of one request crossing between the tiers, or changing places: source[i] is copied to target[i]. None:
    full blocks that no request needs to hold, copied to the host so that later ones find them.

    The blocks follow each other in the request's table, whose first ones need not be among them. tokens: that the moved
    blocks hold, from the first slot of the first one on: all slots of all blocks, but for those behind the request's
    last token in the last block, which hold nothing.

    spans: the slots of each block that are copied, to the same slots; then these hold the tokens, and the blocks need
    not follow each other. Empty: all slots of all blocks.
    """

    direction: Direction
    request: Request | None
    source: tuple[int, ...]
    target: tuple[int, ...]
    tokens: int
    spans: tuple[Span, ...] = ()

    def blocks(self, block_size: int) -> float:
        """How many blocks' worth of slots are copied."""
        return self.tokens / block_size if self.spans else len(self.source)


class StepShape(NamedTuple):
    """The work of a step, as a cost model sees it.

    prefill: tokens of slices longer than one token. attention: query-key pairs of those tokens.
    decodes: slices of one token. context: KV tokens that those read.
    """

    prefill: int = 0
    attention: int = 0
    decodes: int = 0
    context: int = 0

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> StepShape:
        """The shape of a batch of slices."""
        prefill = attention = decodes = context = 0
        for piece in slices:
            n = piece.tokens
            if n == 1:
                decodes += 1
                context += piece.start + 1
            else:
                prefill += n
                attention += n * piece.start + n * (n + 1) // 2
        return cls(prefill, attention, decodes, context)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One decision. Executors run plans in the order of their ids and change nothing in them.

    blocking: moves that must land before the slices run. overlapped: moves that begin with the slices and land when
    they do, perhaps many plans later; nothing waits for them. Blocks that a move reads stay reserved until it has
    landed, except the source of a blocking move out: its copy is taken first, so this very plan may write there.

    A plan without slices gives moves time to land: it ends as soon as one has, or after a moment (`PAUSE_S`).

    waiting_for_kv: requests that would be in this step if all their KV were on the device: what swapping costs.
    """

    id: int
    slices: tuple[Slice, ...]
    blocking: tuple[Move, ...] = ()
    overlapped: tuple[Move, ...] = ()
    waiting_for_kv: tuple[Request, ...] = ()


class StageTime(NamedTuple):
    """One pipeline stage's part in a step.

    busy: seconds that it worked, its blocking moves included. idle: seconds that it had stood still by then since it
    ended the step before, for want of a plan or of what the stage before computes; 0 in its first step.
    """

    busy: float
    idle: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a plan.

    tokens: one entry per slice: the sampled token, or None where the slice does not sample.
    seconds: how long the step took, its blocking moves included; in a pipeline, all stages one after the other.
    details: what else the sampler reports (log-probabilities), by index into the plan's slices.
    moving: the part of `seconds` in which the step stood still for its blocking moves.
    landed, failed: moves that ended since the result before this one, in the order in which they did: all of the
    plan's blocking moves, and overlapped moves of this plan or of earlier ones. What a failed move would have written
    is worth nothing, and so are the slices that read it.
    stages: of a pipeline, from the first to the last; their busy seconds add up to `seconds`. Empty where one stage
    does it all.
    given_up: slices that were not computed because the step with them was more than the device can hold: why, by index
    into the plan's slices; their tokens are None. Each ends its request with `FinishReason.ERROR` and this text. What
    plans in flight bring for such a request counts for nothing. Executors of several ranks give nothing up: a rank that
    left out a slice would be out of step with the others.
    """

    plan: StepPlan
    tokens: Sequence[int | None]
    seconds: float
    details: Mapping[int, object] = field(default_factory=dict)
    moving: float = 0.0
    landed: Sequence[Move] = ()
    failed: Sequence[Move] = ()
    stages: Sequence[StageTime] = ()
    given_up: Mapping[int, str] = field(default_factory=dict)


# Longest that a plan without slices takes, in seconds: requests that arrive meanwhile wait for no copy.
PAUSE_S = 0.005
