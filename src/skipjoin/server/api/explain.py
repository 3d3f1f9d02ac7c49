from __future__ import annotations

import time
from typing import Any

from skipjoin.observe.explanation import explained
from skipjoin.observe.holders import Holder
from skipjoin.observe.life import Life
from skipjoin.observe.reasons import Explanation, OptionNames, explanations
from skipjoin.recipes import find
from skipjoin.server.api.request_index import IndexedRequest
from skipjoin.server.api.service import Service
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.messages import FindLives, LivesFound, Ready


class Explainer:
    """Explains requests to `owner`, whose requests alone are named; None sees all."""

    def __init__(self, service: Service, owner: str | None) -> None:
        self._index = service.index
        self._owner = owner
        self._reasons = reasons_of(service.info)

    def choice(self, life: Life, choice: int, reply: LivesFound, replica: int) -> dict[str, Any]:
        return {
            "choice": choice,
            "replica": replica,
            **explained(life, reply.now, time.time(), self._reasons, reply.standings.get(life.number)),
            "holders": [self.holder(one) for one in reply.holders.get(life.number, ())],
        }

    def holder(self, holder: Holder) -> dict[str, Any]:
        request = self._index.of_number(holder.number)
        is_visible = request is not None and self._owner in (None, request.owner)
        return {
            "id": request.response_id if request is not None and is_visible else None,
            "choice": request.choices[holder.number] if request is not None and is_visible else None,
            "seconds": holder.seconds,
            "service": holder.service,
            "is_finished": holder.is_finished,
        }


def reasons_of(info: Ready) -> dict[str, Explanation]:
    return explanations(info, OptionNames(param_names=tuple(find(info.recipe_path or info.recipe).parameters)))


async def find_lives(
    client: EngineClient, request: IndexedRequest, timeout_s: float
) -> dict[int, tuple[Life, LivesFound, int]]:
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
                        (
                            interval.state,
                            interval.begin + shift,
                            None if interval.end is None else interval.end + shift,
                            interval.preempted,
                        )
                        for interval in life.intervals
                    ],
                }
            )
    return found
