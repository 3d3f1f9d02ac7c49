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
    """A request got its first KV blocks, or the first ones after an eviction.

    `cached` is its prefix-cache hit in tokens, which may be its own KV unless `is_first`. The last `on_cpu` of them
    were on the CPU tier.
    """

    request: Request
    now: float
    cached: int = 0
    on_cpu: int = 0
    is_first: bool = True


class Reserved(NamedTuple):
    """A request got a KV reservation.

    Attributes:
        drawn: Blocks that an account gave to it.
        group: Equal for requests that start and end together.
    """

    request: Request
    now: float
    parent: Owner
    blocks: int
    drawn: int = 0
    group: Hashable | None = None


class Started(NamedTuple):
    request: Request
    now: float


class Preempted(NamedTuple):
    """A request that ran, or held KV on the device, was preempted. `kept` tokens of KV stay; all of it with PAUSE."""

    request: Request
    now: float
    how: Preemption
    kept: int = 0


class Waited(NamedTuple):
    """A request's wait reason changed. The wait ends when a plan contains the request.

    The reason is None if the planner no longer examines the request, so that `Planned.tail` applies.
    """

    request: Request
    now: float
    reason: WaitReason | None
    short: int = 0


class Moved(NamedTuple):
    move: Move
    now: float


class MoveFailed(NamedTuple):
    """A move failed. `Preempted` (DROP) follows if KV is lost."""

    move: Move
    now: float


class Planned(NamedTuple):
    """A step was planned. The next one accepts best-effort requests up to `cap` requests.

    Attributes:
        held: Device blocks that are not free; `reserved` also counts reserved ones.
        tail: Wait reason of requests that were not examined.
    """

    plan: StepPlan
    now: float
    held: int
    reserved: int
    tail: WaitReason = WaitReason.NOT_EXAMINED
    cap: int = 0
    shared: int = 0


class Computed(NamedTuple):
    result: StepResult
    now: float


class Decoded(NamedTuple):
    """Several decode-only steps ran at once, instead of `Planned`, `Computed` and `Token` events.

    The first step was planned at `since`, and each later one at the time in `ends` of the result before.
    """

    requests: tuple[Request, ...]
    since: float
    ends: Sequence[float]
    reserved: Sequence[int]


class Token(NamedTuple):
    request: Request
    now: float
    token: int
    detail: object


class Finished(NamedTuple):
    """A request left the engine. `detail` is the cause and remedy of an ERROR, and may be shown to the client."""

    request: Request
    now: float
    reason: FinishReason
    detail: str = ""
    is_refused: bool = False


class Released(NamedTuple):
    """The KV that a finished request kept was released."""

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
