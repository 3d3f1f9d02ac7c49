"""Events of the engine core, in order, for drivers, metrics and traces."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import NamedTuple

from skipjoin.core.kv.reservations import Owner
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Move, StepPlan, StepResult
from skipjoin.core.waits import WaitReason


class Preemption(Enum):
    """What happened to the KV of a preempted request."""

    PAUSE = "kept on the device"
    SPILL = "moved to CPU memory in part"
    SWAP = "moved to CPU memory"
    DROP = "dropped, to be recomputed"


class Arrived(NamedTuple):
    request: Request
    now: float


class Admitted(NamedTuple):
    """A request got its first KV blocks, or the first ones after an eviction.

    Attributes:
        cached: Prefix-cache hit in tokens.
        on_cpu: Number of the hit's last tokens that were on the CPU tier.
        is_first: False if the request has held KV before, so that the hit may be its own KV.
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
        group: Equal for requests that start and end together; their reservations are made in one decision.
    """

    request: Request
    now: float
    parent: Owner
    blocks: int
    drawn: int = 0
    group: Hashable | None = None


class Started(NamedTuple):
    """A request joined the running batch, for the first time or again."""

    request: Request
    now: float


class Preempted(NamedTuple):
    """A request that was running, or that held KV on the device, was preempted.

    Attributes:
        kept: Tokens whose KV stays on the device. With PAUSE, all of it stays.
    """

    request: Request
    now: float
    how: Preemption
    kept: int = 0


class Waited(NamedTuple):
    """A request's wait reason changed. The wait ends when a plan contains the request.

    With NOT_EXAMINED, the reason is that of `Planned.tail`.

    Attributes:
        short: Number of missing KV blocks, with NO_KV.
    """

    request: Request
    now: float
    reason: WaitReason
    short: int = 0


class Moved(NamedTuple):
    """A move landed."""

    move: Move
    now: float


class MoveFailed(NamedTuple):
    """A move failed. If its request lost KV, a `Preempted` event (DROP) follows."""

    move: Move
    now: float


class Planned(NamedTuple):
    """A step was planned.

    Attributes:
        held: Device blocks that are not free; `reserved` also counts reserved ones.
        tail: Wait reason of requests that the decision did not examine.
        cap: Number of requests up to which the next step accepts best-effort requests.
    """

    plan: StepPlan
    now: float
    held: int
    reserved: int
    tail: WaitReason = WaitReason.NOT_EXAMINED
    cap: int = 0
    lent: int = 0


class Computed(NamedTuple):
    """The result of a step arrived. Events of its moves, tokens and finished requests follow."""

    result: StepResult
    now: float


class Decoded(NamedTuple):
    """Several decode-only steps ran at once (`EngineCore.decode`), instead of `Planned`, `Computed` and `Token` events.

    Attributes:
        since: Time at which the first step was planned.
        ends: Times of the steps' results, at which the next steps were planned.
        reserved: Value of `Planned.reserved` for each step.
    """

    requests: tuple[Request, ...]
    since: float
    ends: Sequence[float]
    reserved: Sequence[int]


class Token(NamedTuple):
    """A token was generated. `detail` is further output of the sampler, usually None."""

    request: Request
    now: float
    token: int
    detail: object


class Finished(NamedTuple):
    """A request left the engine.

    Its blocks are freed when the plans that contain it commit, or with `Released` if it keeps its KV.

    Attributes:
        detail: With `FinishReason.ERROR`, the cause and remedy; may be shown to the client.
        is_refused: Whether the cause is a limit that the request exceeds.
    """

    request: Request
    now: float
    reason: FinishReason
    detail: str = ""
    is_refused: bool = False


class Released(NamedTuple):
    """The KV that a finished request kept (`Request.keeps_kv`) was released. `reserved` is as in `Planned`."""

    request: Request
    now: float
    reserved: int


class Restarted(NamedTuple):
    """The executor restarted. All KV on both tiers and these plans are lost.

    Requests that held KV are preempted (DROP) next.
    """

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
