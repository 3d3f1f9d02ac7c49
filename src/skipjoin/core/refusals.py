from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from skipjoin.core.waits import WaitReason


class Scope(Enum):
    REQUEST = "this request"
    INCOMING = "every request that holds no KV yet"
    ALL = "every request that was not offered yet"


class Refusal(NamedTuple):
    scope: Scope
    reason: WaitReason


NO_SLOT = Refusal(Scope.ALL, WaitReason.NO_SLOT)
NO_TOKENS = Refusal(Scope.ALL, WaitReason.TOKEN_BUDGET)
# An unchunked prompt does not fit. Incoming requests must not overtake it; running requests still decode.
PROMPT_DOES_NOT_FIT = Refusal(Scope.INCOMING, WaitReason.TOKEN_BUDGET)
# The step's budget of prompt tokens is used up; decoding requests still join.
PROMPTS_ARE_FULL = Refusal(Scope.INCOMING, WaitReason.TOKEN_BUDGET)
HELD = Refusal(Scope.REQUEST, WaitReason.HELD_BY_BATCHER)
INCOMING_HELD = Refusal(Scope.INCOMING, WaitReason.HELD_BY_BATCHER)
ALL_HELD = Refusal(Scope.ALL, WaitReason.HELD_BY_BATCHER)
# A step with it would take too long for a request of higher rank.
TOO_LONG = Refusal(Scope.REQUEST, WaitReason.STEP_TIME)
INCOMING_TOO_LONG = Refusal(Scope.INCOMING, WaitReason.STEP_TIME)
ALL_TOO_LONG = Refusal(Scope.ALL, WaitReason.STEP_TIME)
# A best-effort request would make a step too long for real-time requests.
BEHIND_REAL_TIME = Refusal(Scope.REQUEST, WaitReason.BEHIND_REAL_TIME)
INCOMING_BEHIND_REAL_TIME = Refusal(Scope.INCOMING, WaitReason.BEHIND_REAL_TIME)
ALL_BEHIND_REAL_TIME = Refusal(Scope.ALL, WaitReason.BEHIND_REAL_TIME)
# Steps stay limited until no real-time request has been live for this time.
QUIET_S = 60.0
