from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import msgspec

from skipjoin.observe.explanation import objectives
from skipjoin.observe.history import RUNNING, History
from skipjoin.observe.steps import StepSummary
from skipjoin.server.api.responses import encode
from skipjoin.server.api.service import Service
from skipjoin.server.engines.connected_engine import ConnectedEngine, LiveRequest, live_requests
from skipjoin.server.engines.messages import RequestStates

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
    rows = [_live(request) for request in client.without_engine()[:MAX_ROWS]]
    finished: list[Owned] = []
    for engine, reply in replies.items():
        rows += [_live(request) for request in live_requests(engine, reply)]
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


def _live(request: LiveRequest) -> Owned:
    return Owned(request.owner, request.row())


def _engine(engine: ConnectedEngine) -> dict[str, Any]:
    info, stats = engine.info, engine.stats
    metrics = stats.metrics
    return {
        "replica": engine.number,
        "device": info.device,
        "dtype": info.dtype,
        "device_blocks": info.device_blocks,
        "cpu_blocks": info.cpu_blocks,
        "block_size": info.block_size,
        "block_bytes": info.block_bytes,
        "used_blocks": stats.blocks_used,
        "running": stats.running,
        "waiting": stats.waiting,
        "is_hung": engine.is_hung,
        **{name: sum(metrics.row(name)) for name in (*_GAUGES, *_COUNTERS)},
        **{name: metrics.row(name) for name in _RECIPE_GAUGES},
    }


def _steps(engine: ConnectedEngine, reply: RequestStates, wall: float) -> Iterator[list[float]]:
    """Yield each step as a list, because there may be a hundred per second."""
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
