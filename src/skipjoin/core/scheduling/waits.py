"""Why a request waits: reasons, recorded when the planner examines a request and does not run it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class WaitReason(StrEnum):
    """Why a request does not run at this moment.

    The planner examines requests best first and stops where no further one can run. Requests behind that point share
    one reason, so that a long queue costs nothing.
    """

    NO_SEAT = "no_seat"  # the step has as many requests as it may
    TOKEN_BUDGET = "token_budget"  # the step has as many tokens as it may
    NO_KV = "no_kv"  # KV blocks are short
    KV_ON_HOST = "kv_on_host"  # its KV is on the host, and the eviction policy has not moved it back yet
    KV_IN_TRANSIT = "kv_in_transit"  # its KV is on its way between the tiers
    TOKEN_PENDING = "token_pending"  # it was chosen, and its plan waits for the plans in flight before it
    BEHIND_MEMORY = "behind_memory"  # it is ranked behind a request that waits for KV blocks
    BEHIND_PREFIX = "behind_prefix"  # a request that runs computes KV that it can use
    HELD_BY_BATCHER = "held_by_batcher"
    HELD_BY_ADMISSION = "held_by_admission"
    HELD_BY_EVICTION = "held_by_eviction"
    NOT_EXAMINED = "not_examined"  # no decision was made since it arrived
    DISPATCH = "dispatch"  # it was chosen, and its plan waits for the host


class WaitState(NamedTuple):
    """Why a request waits. since: seconds on the driver's clock. short: KV blocks that are missing, with NO_KV."""

    reason: WaitReason
    since: float
    short: int = 0
