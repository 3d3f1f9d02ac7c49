"""Server-sent events for consoles, which share snapshots.

While anyone listens, one is taken per second, or fewer to stay within `MAX_SHARE` of the time of a process. A slow
listener skips snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import msgspec

from skipjoin.observe.explanation import objectives
from skipjoin.observe.history import RUNNING, History
from skipjoin.observe.reasons import OptionNames, ReasonText, reason_texts, words_of
from skipjoin.observe.steps import StepSummary
from skipjoin.recipes import find, listed
from skipjoin.routes import SERVER_SENT
from skipjoin.server.api.auth import Viewer
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.replays import Replays
from skipjoin.server.api.responses import encode
from skipjoin.server.api.service import Service
from skipjoin.server.engines.connected_engine import ConnectedEngine, live_requests
from skipjoin.server.engines.messages import DescribeRequests, Ready, RequestStates
from skipjoin.version import VERSION

# Live requests in one snapshot, the first in rank order of each engine.
MAX_ROWS = 200
STEP_FIELDS = ("replica", *(field.name for field in fields(StepSummary)))
_GAUGES = ("kv_cached_blocks", "kv_cpu_cached_blocks", "kv_shared_blocks", "kv_bidirectional_blocks")
# Rows by label value, for the recipes that have them.
_RECIPE_GAUGES = ("queue_requests", "deadline_requests", "kv_hosted_requests", "kv_hosted_blocks")
_COUNTERS = (
    *("queue_demotions_total", "queue_promotions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "engine_steps_total", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("swap_in_bytes_total", "swap_out_bytes_total", "recomputed_tokens_total"),
)


# Figures that sum over the requests of all keys. From their changes a viewer could tell the lengths of a single one.
_TOTALS = frozenset(["kv_cache_usage", "queued_tokens", "used_blocks", *_GAUGES, *_RECIPE_GAUGES, *_COUNTERS])


class Owned(NamedTuple):
    owner: str
    row: dict[str, Any]


class Snapshot:
    def __init__(self, common: dict[str, Any], rows: list[Owned], finished: list[Owned]) -> None:
        self._common = common
        self._rows = rows
        self.finished = finished
        self._encoded: dict[tuple[str | None, bool], bytes] = {}

    def encoded(self, owner: str | None, *, has_totals: bool) -> bytes:
        if (owner, has_totals) not in self._encoded:
            common = self._common if has_totals else _without_totals(self._common)
            self._encoded[owner, has_totals] = encode(
                {**common, "rows": visible(self._rows, owner), "finished": visible(self.finished, owner)}
            )
        return self._encoded[owner, has_totals]


def _without_totals(common: Mapping[str, Any]) -> dict[str, Any]:
    def hidden(figures: Mapping[str, Any]) -> dict[str, Any]:
        return {name: None if name in _TOTALS else value for name, value in figures.items()}

    return {
        **common,
        "load": hidden(common["load"]),
        "engines": [hidden(engine) for engine in common["engines"]],
        "groups": [{**group, "device_blocks": None, "cpu_blocks": None} for group in common["groups"]],
        "steps": [],
    }


def visible(parts: Iterable[Owned], owner: str | None) -> list[dict[str, Any]]:
    return [part.row for part in parts if owner in (None, part.owner)]


def take_snapshot(service: Service, replies: Mapping[ConnectedEngine, RequestStates], silent: list[int]) -> Snapshot:
    wall, client, admission = time.time(), service.client, service.admission
    load = client.load()
    rows = [Owned(request.owner, request.row()) for request in client.without_engine()[:MAX_ROWS]]
    finished: list[Owned] = []
    for engine, reply in replies.items():
        rows += [Owned(request.owner, request.row()) for request in live_requests(engine, reply)]
        finished += (_finished(service, history, wall - reply.now) for history in reply.finished)
    common = {
        "time": wall,
        "load": {
            "running": load.running,
            "waiting": load.waiting,
            "kv_cache_usage": load.usage,
            "requests": admission.requests,
            "queued_tokens": admission.tokens,
        },
        "engines": [_engine(engine) for engine in replies],
        "silent_replicas": silent,
        "groups": [
            {"replica": engine.number, **msgspec.structs.asdict(group)}
            for engine, reply in replies.items()
            for group in reply.groups
        ],
        "steps": [step for engine, reply in replies.items() for step in _steps(engine, reply, wall)],
    }
    return Snapshot(common, rows, finished)


def _engine(engine: ConnectedEngine) -> dict[str, Any]:
    stats, metrics = engine.stats, engine.stats.metrics
    facts = ("device", "dtype", "device_blocks", "cpu_blocks", "block_size", "block_bytes")
    return {
        "replica": engine.number,
        **{name: getattr(engine.info, name) for name in facts},
        "used_blocks": stats.blocks_used,
        "running": stats.running,
        "waiting": stats.waiting,
        "is_hung": engine.is_hung,
        **{name: sum(metrics.row(name)) for name in (*_GAUGES, *_COUNTERS)},
        **{name: metrics.row(name) for name in _RECIPE_GAUGES},
    }


def _steps(engine: ConnectedEngine, reply: RequestStates, wall: float) -> Iterator[list[float]]:
    shift = wall - reply.now
    for step in reply.steps:
        values = (getattr(step, name) for name in STEP_FIELDS[3:])
        yield [engine.number, round(step.begin + shift, 4), round(step.end + shift, 4), *(round(v, 5) for v in values)]


def _finished(service: Service, history: History, shift: float) -> Owned:
    request = service.index.of_number(history.number)
    assert history.ended is not None
    facts, seconds = history.facts(), history.seconds(history.ended)
    row = {
        "id": "" if request is None else request.response_id,
        "choice": 0 if request is None else request.choices[history.number],
        "arrived_at": history.arrival + shift,
        "ended_at": history.ended + shift,
        "reason": history.reason,
        "service": history.service,
        "prompt_tokens": history.prompt_tokens,
        "output_tokens": history.output_tokens,
        "ttft_s": None if history.first_token is None else facts.ttft(history.ended),
        "tpot_s": facts.tpot(history.ended),
        "jct_s": facts.jct(history.ended),
        "waited_s": sum(value for state, value in seconds.items() if state != RUNNING),
        "preemptions": sum(history.preemptions.values()),
        "objectives": {name: outcome["met"] for name, outcome in objectives(history, history.ended).items()},
        "forecast": history.prediction and history.prediction._asdict(),
    }
    return Owned("" if request is None else request.owner, row)


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


_SHOWN_FACTS = ("recipe", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


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
        """Yield `hello`, then `snapshot` events. Raise 503 for too many listeners."""
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
            **{name: getattr(info, name) for name in _SHOWN_FACTS},
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
        """Return the longest time that a snapshot took any process."""
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


def reasons_of(info: Ready) -> dict[str, ReasonText]:
    return reason_texts(info, OptionNames(param_names=tuple(find(info.recipe_path or info.recipe).parameters)))


class ConsoleStreams:
    """Streams that would delay the end of the server."""

    def __init__(self, service: Service, *, has_batches: bool = False) -> None:
        self.feed = Feed(service, has_batches=has_batches)
        self.replays = Replays()

    def close(self) -> None:
        self.feed.close()
        self.replays.close()
