"""What happened, in order: the engine core's output, for drivers, metrics and traces alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import NamedTuple

from skipjoin.core.kv.reservations import Lender
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.core.step import Move, StepPlan, StepResult


class Preemption(Enum):
    """What became of a preempted request's KV."""

    PAUSE = "kept on the device"
    SPILL = "moved to the host in part"
    SWAP = "moved to the host"
    DROP = "dropped, to be recomputed"


class Arrived(NamedTuple):
    """The request entered the engine."""

    request: Request
    now: float


class Admitted(NamedTuple):
    """The request got its first KV blocks, or the first after an eviction. cached: tokens whose KV it found there, the
    last `on_host` of them on the host."""

    request: Request
    now: float
    cached: int = 0
    on_host: int = 0


class Claimed(NamedTuple):
    """The request was granted a claim on KV. lender: what lends it; None: it is free for all. blocks: that the request
    may have in all. drawn: blocks that an account gave up for it. group: of requests that begin and end together, if it
    is in one: they have equal groups and claim in one decision."""

    request: Request
    now: float
    lender: Lender
    blocks: int
    drawn: int = 0
    group: Hashable | None = None


class Started(NamedTuple):
    """The request joined the running batch, for the first time or again."""

    request: Request
    now: float


class Preempted(NamedTuple):
    """The request was running, or holding KV on the device, and had to make way. kept: tokens whose KV stays on the
    device; of a request that pauses, all do."""

    request: Request
    now: float
    how: Preemption
    kept: int = 0


class Waited(NamedTuple):
    """The reason for which the request waits changed; it ends when the request is in a plan.

    NOT_EXAMINED: it shares the reason of the requests that decisions do not look at (`Planned.tail`). short: KV blocks
    that are missing, with NO_KV.
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
    """A move ended without its copy. A request that lost KV so is preempted (DROP) next."""

    move: Move
    now: float


class Planned(NamedTuple):
    """A step was decided. held: device blocks that are not free. claimed: those, and the ones that are claimed besides.
    tail: why requests wait that the decision did not examine. cap: up to how many requests the next step takes
    best-effort ones. lent: device blocks that two requests fill from both ends."""

    plan: StepPlan
    now: float
    held: int
    claimed: int
    tail: WaitReason = WaitReason.NOT_EXAMINED
    cap: int = 0
    lent: int = 0


class Computed(NamedTuple):
    """A step's result is there. Its moves, tokens and ends follow."""

    result: StepResult
    now: float


class Decoded(NamedTuple):
    """Several steps were decided and computed, each with one more token of each of these requests, and nothing else
    happened: it stands for the `Planned`, `Computed` and `Token` of all of them. Only where a driver takes steps
    together (`EngineCore.decode`).

    since: when the first one was decided. ends: when each one's result was there, and the next one was decided.
    claimed: with each, as in `Planned`.
    """

    requests: tuple[Request, ...]
    since: float
    ends: Sequence[float]
    claimed: Sequence[int]


class Token(NamedTuple):
    """A token was generated. detail: what else the sampler reports, None mostly."""

    request: Request
    now: float
    token: int
    detail: object


class Finished(NamedTuple):
    """The request left the engine; its blocks come home when the plans that hold them commit, or with `Released` if it
    keeps its KV. detail: with `FinishReason.ERROR`, what happened and what helps; it may be shown to the client."""

    request: Request
    now: float
    reason: FinishReason
    detail: str = ""


class Released(NamedTuple):
    """The KV that the ended request kept (`Request.keeps_kv`) is needed no more: its blocks come home. claimed: as in
    `Planned`, from now on."""

    request: Request
    now: float
    claimed: int


class Restarted(NamedTuple):
    """All KV on both tiers is lost, and so are these plans, which will have no result. The requests that held KV are
    preempted (DROP) next; all requests go on from the tokens that are known."""

    plans: tuple[StepPlan, ...]
    now: float


Event = (
    Arrived
    | Admitted
    | Claimed
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
