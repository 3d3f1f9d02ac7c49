"""Explanations of requests, as JSON: intervals of their lives with reasons, what held them up, and what would help."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from skipjoin.observe.holders import Holder
from skipjoin.observe.life import RUNNING, Life
from skipjoin.server.api.reasons import Explanation, explanations
from skipjoin.server.api.request_index import IndexedRequest
from skipjoin.server.api.service import Service
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.messages import FindLives, LivesFound


class Explainer:
    """Explains requests to one caller.

    Args:
        owner: Caller whose requests alone are named; None if the caller sees all.
    """

    def __init__(self, service: Service, owner: str | None) -> None:
        self._index = service.index
        self._owner = owner
        self._reasons = explanations(service.info)

    def choice(self, life: Life, choice: int, reply: LivesFound, replica: int) -> dict[str, Any]:
        """Return the explanation of one choice."""
        now, wall = reply.now, time.time() - reply.now
        end = now if life.ended is None else life.ended
        seconds = {state: round(value, 6) for state, value in life.seconds(now).items()}
        waits = {state: value for state, value in seconds.items() if state != RUNNING}
        longest = max(waits, key=waits.__getitem__, default=None)
        return {
            "choice": choice,
            "replica": replica,
            "number": life.number,
            "state": life.reason or life.intervals[-1].state,
            "is_finished": life.ended is not None,
            "arrived_at": life.arrival + wall,
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
            "advice": self._advice(longest, waits),
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
            "holders": [self.holder(one) for one in reply.holders.get(life.number, ())],
        }

    def holder(self, holder: Holder) -> dict[str, Any]:
        """Return a request that held what another one waited for. Those of other clients have no id."""
        request = self._index.of_number(holder.number)
        is_visible = request is not None and self._owner in (None, request.owner)
        return {
            "id": request.response_id if request is not None and is_visible else None,
            "choice": request.choices[holder.number] if request is not None and is_visible else None,
            "seconds": holder.seconds,
            "service": holder.service,
            "is_finished": holder.is_finished,
        }

    def words(self) -> dict[str, dict[str, str]]:
        """Return all reasons in words."""
        return words_of(self._reasons)

    def _advice(self, longest: str | None, waits: Mapping[str, float]) -> str:
        if longest is None or waits[longest] <= 0:
            return ""
        return self._reasons[longest].remedy


def words_of(reasons: Mapping[str, Explanation]) -> dict[str, dict[str, str]]:
    """Return reasons in words as JSON."""
    return {str(name): reason._asdict() for name, reason in reasons.items()}


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


async def find_lives(
    client: EngineClient, request: IndexedRequest, timeout_s: float
) -> dict[int, tuple[Life, LivesFound, int]]:
    """Return the lives of a request's choices by number, each with its engine's reply and number."""
    numbers = list(request.choices)
    replies = await client.ask(lambda number, engine: FindLives(number, numbers), timeout_s)
    found: dict[int, tuple[Life, LivesFound, int]] = {}
    for engine, reply in replies.by_engine.items():
        assert isinstance(reply, LivesFound)
        for life in reply.lives:
            found[life.number] = life, reply, engine.number
    return found


async def recent_lives(
    service: Service, owner: str | None, since_s: float, most: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Return the intervals of the requests of `owner`, or all with None, that lived in the last `since_s` seconds."""
    replies = await service.client.ask(lambda number, engine: FindLives(number, None, since_s, most), timeout_s)
    found = []
    for engine, reply in replies.by_engine.items():
        assert isinstance(reply, LivesFound)
        wall = time.time()
        shift = wall - reply.now
        for life in reply.lives:
            request = service.index.of_number(life.number)
            if request is None or owner not in (None, request.owner):
                continue
            found.append(
                {
                    "id": request.response_id,
                    "choice": request.choices[life.number],
                    "replica": engine.number,
                    "service": life.service,
                    "arrived_at": life.arrival + shift,
                    "ended_at": None if life.ended is None else life.ended + shift,
                    "now": wall,
                    "intervals": [
                        (one.state, one.begin + shift, None if one.end is None else one.end + shift, one.preempted)
                        for one in life.intervals
                    ],
                }
            )
    return found
