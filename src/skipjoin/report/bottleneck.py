from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from skipjoin.report.results import Record

# Limits and the wait reasons that they cause (`skipjoin.core.waits`). Other reasons are no limit of the
# machine, such as the time until the next decision.
_LIMITS = {
    "slots": ("no_slot",),
    "KV": ("no_kv", "behind_memory", "kv_on_cpu", "kv_in_transit", "held_by_admission", "held_by_eviction"),
    "tokens per step": ("token_budget",),
    "the recipe's batcher": ("held_by_batcher", "step_time", "behind_real_time"),
}
# Shares of latency below which waiting is too rare for an order of requests to matter, and of steps with enough tokens
# to saturate the machine from which it has no more to give.
_MIN_WAIT_SHARE = 0.01
_MIN_SATURATED_SHARE = 0.5
NOTHING = "nothing"


def limit_of(records: Sequence[Record]) -> tuple[str, float] | None:
    """Return the limit that requests wait for most, and the share of their latency in which they wait for any limit.

    Without such waits the limit is "compute" if most steps saturate the machine, else `NOTHING`.
    """
    known = [record for record in records if record.get("wait_s") is not None and record["jct_s"]["mean"]]
    if not known:
        return None
    latency_s = fmean(record["jct_s"]["mean"] for record in known)
    waits = {limit: fmean(_waited(record, reasons) for record in known) for limit, reasons in _LIMITS.items()}
    share = sum(waits.values()) / latency_s
    if share >= _MIN_WAIT_SHARE:
        return max(waits, key=lambda limit: waits[limit]), share
    saturated = fmean((record.get("forward") or {}).get("at_target") or 0.0 for record in known)
    return ("compute" if saturated >= _MIN_SATURATED_SHARE else NOTHING), share


def _waited(record: Record, reasons: Sequence[str]) -> float:
    waits: dict[str, float] = record["wait_s"]
    return sum(waits.get(reason, 0.0) for reason in reasons)
