from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class WaitReason(StrEnum):
    """Reason why a request is not running.

    The planner examines requests in rank order. Those after the last one that can run share one reason.
    """

    NO_SLOT = "no_slot"  # the batch has its maximum number of requests
    TOKEN_BUDGET = "token_budget"  # the batch has its maximum number of tokens
    NO_KV = "no_kv"  # too few KV blocks, or no slot for other state
    KV_ON_CPU = "kv_on_cpu"  # swapped out, and not yet swapped in by the eviction policy
    KV_IN_TRANSIT = "kv_in_transit"  # a swap is in progress
    GRAMMAR = "grammar"  # its grammar is being compiled, or computes the allowed tokens
    TOKEN_PENDING = "token_pending"  # scheduled, behind earlier plans in flight
    BEHIND_MEMORY = "behind_memory"  # ranked behind a request that waits for KV blocks
    BEHIND_PREFIX = "behind_prefix"  # a running request computes a prefix that it can reuse
    BEHIND_REAL_TIME = "behind_real_time"  # best-effort, and would lengthen the steps of real-time requests
    STEP_TIME = "step_time"  # a step with it would take too long for a request of higher rank
    HELD_BY_BATCHER = "held_by_batcher"  # although the batch has room for more requests and tokens
    HELD_BY_ADMISSION = "held_by_admission"  # there are blocks for its next step, but not for what is reserved for it
    HELD_BY_EVICTION = "held_by_eviction"  # pauses, so that its KV can be evicted
    NOT_EXAMINED = "not_examined"  # no step was planned since it arrived
    DISPATCH = "dispatch"  # scheduled, before its plan is dispatched


class WaitState(NamedTuple):
    """Current wait of a request."""

    reason: WaitReason
    since: float
    short: int = 0  # number of missing KV blocks, with NO_KV
