from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from statistics import median
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from skipjoin.observe.explanation import explained, facts_of
from skipjoin.observe.history import Competitor, History
from skipjoin.observe.reasons import words_of
from skipjoin.server.api import arrivals
from skipjoin.server.api.arrivals import Arrival
from skipjoin.server.api.auth import Viewer, viewer_of
from skipjoin.server.api.browsers import json_body
from skipjoin.server.api.errors import ApiError, bad_request, request_not_found
from skipjoin.server.api.feed import ConsoleStreams, reasons_of
from skipjoin.server.api.replays import ReplayBody, question_of
from skipjoin.server.api.replies import json_response, service_of
from skipjoin.server.api.request_index import KEEP_S, IndexedRequest
from skipjoin.server.api.service import Service
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.messages import DescribeRequests, FindHistories, HistoriesFound, RequestStates

# An engine answers between two steps, which do not take longer unless it hangs.
TIMEOUT_S = 5.0
# Recent requests from which the time around the engine is measured.
_RECENT_S, _MAX_RECENT = 600.0, 500


async def recorded_load(service: Service, owner: str | None, since_s: float) -> dict[str, Any]:
    arrivals = service.arrivals.since(since_s, owner)
    client, info = service.client, service.info
    replies, found = await asyncio.gather(
        client.ask(lambda number, engine: DescribeRequests(number, rows=0), TIMEOUT_S),
        client.ask(lambda number, engine: FindHistories(number, None, _RECENT_S, _MAX_RECENT), TIMEOUT_S),
    )
    states = [reply for reply in replies.by_engine.values() if isinstance(reply, RequestStates)]
    now = time.monotonic()
    first_tokens = {
        history.number: history.first_token + _clock_difference(now, reply.now)
        for reply in found.by_engine.values()
        if isinstance(reply, HistoriesFound)
        for history in reply.histories
        if history.first_token is not None
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
    return 0.0 if abs(now - engine_now) <= TIMEOUT_S else now - engine_now


def _around_s(arrival: Arrival, first_tokens: Mapping[int, float]) -> float | None:
    first = first_tokens.get(arrival.number)
    return None if first is None or arrival.first_at is None else arrival.submit_s + max(0.0, arrival.first_at - first)


MAX_HISTORIES = 1000
# Proxies would hold events back.
_NO_BUFFERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def show_requests(request: Request) -> Response:
    """Return the `engines.messages.RequestReport` of each unfinished request, its response and its replica."""
    service = service_of(request)
    owner = _viewer(request).owner
    found = await service.client.describe(TIMEOUT_S)
    rows = [
        {**request.row(), "facts": facts_of(request.state.facts)}
        for request in found.requests
        if owner in (None, request.owner)
    ]
    return json_response({"requests": rows, "silent_replicas": found.silent})


async def stream_events(request: Request) -> Response:
    """Stream snapshots of the server as server-sent events."""
    events = _streams(request).feed.events(_viewer(request))
    return await _streamed(events)


async def show_histories(request: Request) -> Response:
    """Return the intervals of requests that lived in the last `since_s` seconds, live ones first."""
    owner = _viewer(request).owner
    since_s, most = _number(request, "since_s", 60, KEEP_S), _number(request, "most", 100, MAX_HISTORIES)
    histories = await recent_histories(service_of(request), owner, since_s, int(most), TIMEOUT_S)
    return json_response({"histories": histories})


async def show_arrivals(request: Request) -> Response:
    """Return the lengths and times of requests that ended in the last hour, and the machine that served them."""
    owner = _viewer(request).owner
    since_s = _number(request, "since_s", arrivals.KEEP_S, arrivals.KEEP_S)
    return json_response(await recorded_load(service_of(request), owner, since_s))


async def replay(request: Request) -> Response:
    """Simulate the load of the last hour under other recipes and limits, with progress as server-sent events."""
    if _viewer(request).owner is not None:
        raise ApiError(403, "only a key with operator=yes may start simulations", code="operator_only")
    service = service_of(request)
    body = await service.parse(await json_body(request), ReplayBody)
    load = await recorded_load(service, None, body.since_s)
    return await _streamed(_streams(request).replays.events(await service.in_thread(question_of, load, body)))


async def explain_request(request: Request, name: str) -> Response:
    """Return the life of a request, by either id, or of a program's latest call, up to ten minutes after it."""
    owner = _viewer(request).owner
    service = service_of(request)
    found = service.index.find_call(name, owner)
    if found is None:
        raise request_not_found(name)
    reasons, choices = reasons_of(service.info), []
    for number, (history, reply, replica) in sorted((await find_histories(service.client, found, TIMEOUT_S)).items()):
        competitors = [_competitor(service, owner, other) for other in reply.competitors.get(number, ())]
        told = explained(history, reply.now, time.time(), reasons, reply.standings.get(number))
        choices.append({"choice": found.choices[number], "replica": replica, **told, "competitors": competitors})
    ids = {"id": found.response_id, "request_id": found.request_id}
    lost = len(found.choices) - len(choices)
    return json_response({**ids, "choices": choices, "lost_choices": lost, "reasons": words_of(reasons)})


def _competitor(service: Service, owner: str | None, other: Competitor) -> dict[str, Any]:
    request = service.index.of_number(other.number)
    if request is None or owner not in (None, request.owner):
        named: dict[str, Any] = {"id": None, "choice": None}
    else:
        named = {"id": request.response_id, "choice": request.choices[other.number]}
    return {**named, "seconds": other.seconds, "service": other.service, "is_finished": other.is_finished}


async def find_histories(
    client: EngineClient, request: IndexedRequest, timeout_s: float
) -> dict[int, tuple[History, HistoriesFound, int]]:
    numbers = list(request.choices)
    replies = await client.ask(lambda number, engine: FindHistories(number, numbers), timeout_s)
    found: dict[int, tuple[History, HistoriesFound, int]] = {}
    for engine, reply in replies.by_engine.items():
        assert isinstance(reply, HistoriesFound)
        for history in reply.histories:
            found[history.number] = history, reply, engine.number
    return found


async def recent_histories(
    service: Service, owner: str | None, since_s: float, most: int, timeout_s: float
) -> list[dict[str, Any]]:
    replies = await service.client.ask(lambda number, engine: FindHistories(number, None, since_s, most), timeout_s)
    found = []
    for engine, reply in replies.by_engine.items():
        assert isinstance(reply, HistoriesFound)
        wall = time.time()
        shift = wall - reply.now
        for history in reply.histories:
            request = service.index.of_number(history.number)
            if request is None or owner not in (None, request.owner):
                continue
            found.append(
                {
                    "id": request.response_id,
                    "choice": request.choices[history.number],
                    "replica": engine.number,
                    "service": history.service,
                    "arrived_at": history.arrival + shift,
                    "ended_at": None if history.ended is None else history.ended + shift,
                    "now": wall,
                    "intervals": [
                        (
                            interval.state,
                            interval.begin + shift,
                            None if interval.end is None else interval.end + shift,
                            interval.preempted,
                        )
                        for interval in history.intervals
                    ],
                }
            )
    return found


def _viewer(request: Request) -> Viewer:
    service = service_of(request)
    _ = service.info  # 503 while the server starts
    return viewer_of(service.config, request.state.owner)


def _streams(request: Request) -> ConsoleStreams:
    found: ConsoleStreams = request.app.state.streams
    return found


def _number(request: Request, name: str, default: float, high: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= high:
        raise bad_request(f"{name} must be a number in [1, {high:g}], got {text[:40]!r}", name)
    return value


async def _streamed(events: AsyncGenerator[bytes, None]) -> Response:
    first = await anext(events)
    return StreamingResponse(_all(first, events), media_type="text/event-stream", headers=_NO_BUFFERS)


async def _all(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event
