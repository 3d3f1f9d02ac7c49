from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import msgspec

from skipjoin.server.api.arrivals import Arrival
from skipjoin.server.api.service import Service
from skipjoin.server.engines.messages import DescribeRequests, FindLives, LivesFound, RequestStates

# An engine answers between two steps, which do not take longer unless it hangs.
TIMEOUT_S = 5.0
# Recent requests from which the time around the engine is measured.
_RECENT_S, _MAX_RECENT = 600.0, 500


async def recorded_load(service: Service, owner: str | None, since_s: float) -> dict[str, Any]:
    arrivals = service.arrivals.since(since_s, owner)
    client, info = service.client, service.info
    replies, found = await asyncio.gather(
        client.ask(lambda number, engine: DescribeRequests(number, rows=0), TIMEOUT_S),
        client.ask(lambda number, engine: FindLives(number, None, _RECENT_S, _MAX_RECENT), TIMEOUT_S),
    )
    states = [reply for reply in replies.by_engine.values() if isinstance(reply, RequestStates)]
    now = time.monotonic()
    first_tokens = {
        life.number: life.first_token + _clock_difference(now, reply.now)
        for reply in found.by_engine.values()
        if isinstance(reply, LivesFound)
        for life in reply.lives
        if life.first_token is not None
    }
    machine = {
        **msgspec.structs.asdict(info),
        "replicas": client.wanted,
        "recipe_path": info.recipe_path or info.recipe,
        "cost": next((state.cost for state in states if state.cost is not None), info.cost),
        "between_steps_s": median([state.between_steps_s for state in states] or [0.0]),
    }
    del machine["folder"]
    # In a thread, as there may be many thousands.
    public = await service.in_thread(lambda: [arrival.public(_around_s(arrival, first_tokens)) for arrival in arrivals])
    return {"machine": machine, "arrivals": public}


def _clock_difference(now: float, engine_now: float) -> float:
    """Return the seconds to add to an engine's times: 0 on this machine, whose processes share one clock."""
    return 0.0 if abs(now - engine_now) <= TIMEOUT_S else now - engine_now


def _around_s(arrival: Arrival, first_tokens: Mapping[int, float]) -> float | None:
    first = first_tokens.get(arrival.number)
    return None if first is None or arrival.first_at is None else arrival.submit_s + max(0.0, arrival.first_at - first)
