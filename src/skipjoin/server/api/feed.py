"""Server-sent events for consoles, which share snapshots of bounded size.

Without a listener no snapshot is taken, and the engines record no steps. Otherwise there is one per second, or fewer
if they took more than `MAX_SHARE` of the time of a process. A listener that reads slowly skips snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator
from typing import Any

from skipjoin.observe.reasons import words_of
from skipjoin.recipes import listed
from skipjoin.routes import SERVER_SENT
from skipjoin.server.api.auth import Viewer
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.explain import reasons_of
from skipjoin.server.api.replays import Replays
from skipjoin.server.api.responses import encode
from skipjoin.server.api.service import Service
from skipjoin.server.api.snapshots import MAX_ROWS, STEP_FIELDS, Owned, Snapshot, take_snapshot, visible
from skipjoin.server.engines.connected_engine import ConnectedEngine
from skipjoin.server.engines.messages import DescribeRequests, RequestStates
from skipjoin.version import VERSION

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MAX_SHARE = 0.005
MAX_LISTENERS = 16
# Listeners of one key on a server with several, so that two keys cannot take all.
MAX_OF_KEY = 4
# Finished requests that a new listener gets at once.
MAX_BACKLOG = 512
# An engine in a long step answers later, and is in the next snapshot.
_TIMEOUT_S = 2.0


class Feed:
    def __init__(self, service: Service, *, has_batches: bool = False) -> None:
        self._service = service
        self._has_batches = has_batches
        self._listeners: Counter[str] = Counter()  # by key
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Snapshot] | None = None
        self._finished_of: dict[ConnectedEngine, int] = {}  # `total_finished` of the last reply
        self._backlog: deque[Owned] = deque(maxlen=MAX_BACKLOG)
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        if self._next is not None:
            self._next.cancel()

    async def events(self, viewer: Viewer) -> AsyncGenerator[bytes, None]:
        """Yield a `hello` event, then `snapshot` events, as the viewer may see them.

        Raise 503 for too many listeners.
        """
        self._check_room(viewer.key)
        self._listeners[viewer.key] += 1
        try:
            yield SERVER_SENT.frame(encode(self._hello(viewer)), "hello")
            while not self._is_closed:
                try:
                    snapshot = await asyncio.shield(self._upcoming())
                except asyncio.CancelledError:
                    if self._is_closed:
                        return
                    raise
                yield SERVER_SENT.frame(snapshot.encoded(viewer.owner, has_totals=viewer.has_totals), "snapshot")
        finally:
            self._listeners[viewer.key] -= 1
            self._listeners += Counter()  # drop keys without listeners

    def _check_room(self, key: str) -> None:
        if self._listeners[key] >= MAX_OF_KEY and len(set(self._service.config.api_keys)) > 1:
            why = f"{MAX_OF_KEY} consoles of this key listen already: close one of them"
        elif self._listeners.total() >= MAX_LISTENERS:
            why = f"{MAX_LISTENERS} consoles listen already"
        else:
            return
        raise ApiError(503, why, code="too_many_consoles")

    def _hello(self, viewer: Viewer) -> dict[str, Any]:
        service, info = self._service, self._service.info
        return {
            "model": service.name,
            "version": VERSION,
            "recipe": info.recipe,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_model_len": info.max_model_len,
            "replicas": service.client.wanted,
            "max_rows": MAX_ROWS,
            "step_fields": STEP_FIELDS,
            "sees_all": viewer.owner is None,
            "sees_totals": viewer.has_totals,
            "has_batches": self._has_batches,
            "recipes": sorted(listed()),
            "reasons": words_of(reasons_of(info)),
            "finished": visible(self._backlog, viewer.owner),
        }

    def _upcoming(self) -> asyncio.Future[Snapshot]:
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return self._next

    async def _run(self) -> None:
        while self._listeners.total():
            begin = time.monotonic()
            try:
                cost_s = await self._publish()
            except Exception:
                logger.exception("no snapshot for the console could be taken")
                cost_s = 0.0
            period_s = max(PERIOD_S, cost_s / MAX_SHARE)
            await asyncio.sleep(max(0.0, begin + period_s - time.monotonic()))

    async def _publish(self) -> float:
        """Publish a snapshot, and return the longest time that it took any process."""
        replies = await self._service.client.ask(self._question, _TIMEOUT_S)
        begin = time.thread_time()
        states = {engine: reply for engine, reply in replies.by_engine.items() if isinstance(reply, RequestStates)}
        self._finished_of = {engine: reply.total_finished for engine, reply in states.items()}
        snapshot = take_snapshot(self._service, states, replies.silent)
        self._backlog.extend(reversed(snapshot.finished))
        snapshot.encoded(None, has_totals=True)
        if self._next is not None and not self._next.done():
            self._next.set_result(snapshot)
        return max([time.thread_time() - begin, *(reply.seconds for reply in states.values())])

    def _question(self, number: int, engine: ConnectedEngine) -> DescribeRequests:
        after = self._finished_of.get(engine, 0)
        return DescribeRequests(number, rows=MAX_ROWS, finished_after=after, has_steps=True)


class ConsoleStreams:
    """Snapshots and simulations, whose open streams would delay the end of the server."""

    def __init__(self, service: Service, *, has_batches: bool = False) -> None:
        self.feed = Feed(service, has_batches=has_batches)
        self.replays = Replays()

    def close(self) -> None:
        self.feed.close()
        self.replays.close()
