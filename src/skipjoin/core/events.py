from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import NamedTuple

from skipjoin.core.kv.reservations import Owner
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Move, StepPlan, StepResult
from skipjoin.core.waits import WaitReason


class Preemption(Enum):
    PAUSE = "kept on the device"
    SPILL = "moved to CPU memory in part"
    SWAP = "moved to CPU memory"
    DROP = "dropped, to be recomputed"


class Arrived(NamedTuple):
    request: Request
    now: float


class Admitted(NamedTuple):
    """A request got its first KV blocks, or the first ones after an eviction."""

    request: Request
    now: float
    cached: int = 0  # prefix-cache hit in tokens, perhaps its own KV unless `is_first`
    on_cpu: int = 0  # number of the last of them that were on the CPU tier
    is_first: bool = True


class Reserved(NamedTuple):
    """A request got a KV reservation."""

    request: Request
    now: float
    parent: Owner
    blocks: int
    drawn: int = 0  # blocks that an account gave to it
    group: Hashable | None = None  # equal for requests that start and end together


class Started(NamedTuple):
    request: Request
    now: float


class Preempted(NamedTuple):
    """A request that ran, or held KV on the device, was preempted."""

    request: Request
    now: float
    how: Preemption
    kept: int = 0  # tokens whose KV stays; not used with PAUSE, which keeps all


class Waited(NamedTuple):
    """A request's wait reason changed. The wait ends when a plan contains the request."""

    request: Request
    now: float
    reason: WaitReason | None  # None if it is no longer examined, so that `Planned.tail` applies
    short: int = 0


class Moved(NamedTuple):
    move: Move
    now: float


class MoveFailed(NamedTuple):
    """A move failed. `Preempted` (DROP) follows if KV is lost."""

    move: Move
    now: float


class Planned(NamedTuple):
    """A step was planned."""

    plan: StepPlan
    now: float
    held: int  # device blocks that are not free
    reserved: int  # the same with reserved ones
    tail: WaitReason = WaitReason.NOT_EXAMINED  # of requests that were not examined
    cap: int = 0  # number of requests up to which the next step accepts best-effort ones
    shared: int = 0


class Computed(NamedTuple):
    result: StepResult
    now: float


class Decoded(NamedTuple):
    """Several decode-only steps ran at once, instead of `Planned`, `Computed` and `Token` events."""

    requests: tuple[Request, ...]
    since: float  # when the first was planned
    ends: Sequence[float]  # when each ended, which is when the next was planned
    reserved: Sequence[int]


class Token(NamedTuple):
    request: Request
    now: float
    token: int
    detail: object


class Finished(NamedTuple):
    request: Request
    now: float
    reason: FinishReason
    detail: str = ""  # cause and remedy of an ERROR; the client may see it
    is_refused: bool = False


class Released(NamedTuple):
    request: Request
    now: float
    reserved: int


class Restarted(NamedTuple):
    """The executor restarted: all KV and these plans are lost. `Preempted` events (DROP) follow."""

    plans: tuple[StepPlan, ...]
    now: float


Event = (
    Arrived
    | Admitted
    | Reserved
    | Started
    | Preempted
    | Waited
    | Planned
    | Computed
    | Decoded
    | Moved
    | MoveFailed
    | Token
    | Finished
    | Released
    | Restarted
)
