from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from skipjoin.core.policy import Fact, Ordering
from skipjoin.core.request import Request
from skipjoin.observe.history import RUNNING, History
from skipjoin.observe.reasons import ReasonText


class Standing(NamedTuple):
    """Place of a live request in the scheduler's order, from 0, and what its policies say about it."""

    place: int
    requests: int
    facts: Sequence[Fact]


def standing(request: Request, live: Collection[Request], ordering: Ordering, facts: Sequence[Fact]) -> Standing:
    rank, own = ordering.rank, ordering.rank(request)
    return Standing(sum(rank(other) < own for other in live), len(live), facts)


def explained(
    history: History, now: float, wall: float, reasons: Mapping[str, ReasonText], standing: Standing | None
) -> dict[str, Any]:
    """Explain one history, `now` on the engine's clock and `wall` seconds since the epoch.

    `standing` is None if the request has finished, or its engine does not tell.
    """
    end = now if history.ended is None else history.ended
    seconds = {state: round(value, 6) for state, value in history.seconds(now).items()}
    waits = {state: value for state, value in seconds.items() if state != RUNNING}
    longest = max(waits, key=waits.__getitem__, default=None)
    return {
        "number": history.number,
        "state": history.reason or history.intervals[-1].state,
        "is_finished": history.ended is not None,
        "arrived_at": history.arrival + wall - now,
        "total_s": end - history.arrival,
        "first_token_s": None if history.first_token is None else history.first_token - history.arrival,
        "service": history.service,
        "is_urgent": history.is_urgent,
        "priority": history.priority,
        "program": history.program,
        "prompt_tokens": history.prompt_tokens,
        "cached_tokens": history.cached_tokens,
        "output_tokens": history.output_tokens,
        "earlier_tokens": history.earlier_tokens,
        "max_tokens": history.max_tokens,
        "preemptions": history.preemptions,
        "forecast": history.prediction and history.prediction._asdict(),
        "objectives": objectives(history, now),
        "seconds": seconds,
        "longest_wait": longest,
        "advice": "" if longest is None or waits[longest] <= 0 else reasons[longest].remedy,
        "intervals": [
            {
                "state": interval.state,
                "begin_s": interval.begin - history.arrival,
                "end_s": (now if interval.end is None else interval.end) - history.arrival,
                "is_current": interval.end is None and history.ended is None,
                "preempted": interval.preempted,
                "short_blocks": interval.short,
            }
            for interval in history.intervals
        ],
        "omitted_s": history.omitted_s,
        "place": standing and standing.place,
        "live_requests": standing and standing.requests,
        "facts": facts_of(standing.facts if standing is not None else ()),
    }


def facts_of(facts: Sequence[Fact]) -> list[dict[str, Any]]:
    return [fact._asdict() for fact in facts]


def objectives(history: History, now: float) -> dict[str, dict[str, Any]]:
    """Return each objective with its value so far, and whether it was met, or None while that is open."""
    facts, target, is_over = history.facts(), history.target, history.ended is not None
    rows = (
        ("ttft", target.ttft_s, facts.ttft(now), history.first_token is not None),
        ("tpot", target.tpot_s, facts.tpot(now), is_over),
        ("jct", target.jct_s, facts.jct(now), is_over),
    )
    found = {}
    for name, bound, value, is_decided in rows:
        if bound < math.inf:
            is_missed = value is not None and value > bound and (is_decided or name != "tpot")
            is_met = is_decided and (name == "ttft" or facts.is_complete)
            met = False if is_missed else True if is_met else False if is_over else None
            found[name] = {"bound_s": bound, "value_s": value, "met": met}
    return found
