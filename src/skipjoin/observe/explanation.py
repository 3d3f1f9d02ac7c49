"""Explanation of a life, as JSON: its intervals with reasons, what held it up, and what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from skipjoin.observe.life import RUNNING, Life
from skipjoin.observe.reasons import Explanation


def explained(life: Life, now: float, wall: float, reasons: Mapping[str, Explanation]) -> dict[str, Any]:
    """Return the explanation of one life.

    Args:
        now: Seconds on the engine's clock, and `wall` since the epoch.
    """
    end = now if life.ended is None else life.ended
    seconds = {state: round(value, 6) for state, value in life.seconds(now).items()}
    waits = {state: value for state, value in seconds.items() if state != RUNNING}
    longest = max(waits, key=waits.__getitem__, default=None)
    return {
        "number": life.number,
        "state": life.reason or life.intervals[-1].state,
        "is_finished": life.ended is not None,
        "arrived_at": life.arrival + wall - now,
        "total_s": end - life.arrival,
        "first_token_s": None if life.first_token is None else life.first_token - life.arrival,
        "service": life.service,
        "is_urgent": life.is_urgent,
        "priority": life.priority,
        "prompt_tokens": life.prompt_tokens,
        "cached_tokens": life.cached_tokens,
        "output_tokens": life.output_tokens,
        "earlier_tokens": life.earlier_tokens,
        "max_tokens": life.max_tokens,
        "preemptions": life.preemptions,
        "forecast": life.prediction and life.prediction._asdict(),
        "objectives": objectives(life, now),
        "seconds": seconds,
        "longest_wait": longest,
        "advice": "" if longest is None or waits[longest] <= 0 else reasons[longest].remedy,
        "intervals": [
            {
                "state": one.state,
                "begin_s": one.begin - life.arrival,
                "end_s": (now if one.end is None else one.end) - life.arrival,
                "is_current": one.end is None and life.ended is None,
                "preempted": one.preempted,
                "short_blocks": one.short,
            }
            for one in life.intervals
        ],
        "omitted_s": life.omitted_s,
    }


def objectives(life: Life, now: float) -> dict[str, dict[str, Any]]:
    """Return each objective of a request with its value so far, and whether it was met, or None while that is open."""
    facts, target, is_over = life.facts(), life.target, life.ended is not None
    rows = (
        ("ttft", target.ttft_s, facts.ttft(now), life.first_token is not None),
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
