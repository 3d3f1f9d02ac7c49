from __future__ import annotations

import time
from typing import Any

from skipjoin.observe.competitors import Competitor
from skipjoin.observe.explanation import explained
from skipjoin.observe.history import History
from skipjoin.observe.reasons import OptionNames, ReasonText, reason_texts
from skipjoin.recipes import find
from skipjoin.server.api.request_index import IndexedRequest
from skipjoin.server.api.service import Service
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.messages import FindHistories, HistoriesFound, Ready


class Explainer:
    """Explains requests to `owner`, whose requests alone are named; None sees all."""

    def __init__(self, service: Service, owner: str | None) -> None:
        self._index = service.index
        self._owner = owner
        self._reasons = reasons_of(service.info)

    def choice(self, history: History, choice: int, reply: HistoriesFound, replica: int) -> dict[str, Any]:
        return {
            "choice": choice,
            "replica": replica,
            **explained(history, reply.now, time.time(), self._reasons, reply.standings.get(history.number)),
            "competitors": [self.competitor(other) for other in reply.competitors.get(history.number, ())],
        }

    def competitor(self, other: Competitor) -> dict[str, Any]:
        request = self._index.of_number(other.number)
        is_visible = request is not None and self._owner in (None, request.owner)
        return {
            "id": request.response_id if request is not None and is_visible else None,
            "choice": request.choices[other.number] if request is not None and is_visible else None,
            "seconds": other.seconds,
            "service": other.service,
            "is_finished": other.is_finished,
        }


def reasons_of(info: Ready) -> dict[str, ReasonText]:
    return reason_texts(info, OptionNames(param_names=tuple(find(info.recipe_path or info.recipe).parameters)))


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
