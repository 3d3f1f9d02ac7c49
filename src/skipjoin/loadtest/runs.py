from __future__ import annotations

import asyncio
import gc
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import uvloop

from skipjoin.config import ConfigError
from skipjoin.loadtest.client import (
    CONNECTION_FAILURES,
    MAX_FAILING_S,
    REJECTED,
    Client,
    ClientProgress,
    ClientRun,
    ClosedLoad,
    Exchange,
    warm_up,
)
from skipjoin.loadtest.http_request import Bodies
from skipjoin.loadtest.plan import LoadPlan
from skipjoin.loadtest.targets import Target
from skipjoin.observe.programs import ProgramFacts
from skipjoin.observe.record import Record, Slo, percentile, summarize, summarize_programs
from skipjoin.system.machine import cpu_name
from skipjoin.version import VERSION

# Lag from which a request counts as late, and P99 lag from which the client is the bottleneck.
LATE_S, TOO_LATE_S = 0.010, 0.020
_CACHE_CONFIG = re.compile(r"^(?:skipjoin|vllm):cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class LoadWatcher(Protocol):
    def begun(self, number: int, rate: float | None, seed: int) -> None: ...
    def progress(self, progress: ClientProgress) -> None: ...
    def done(self, record: Record, exchanges: Sequence[Exchange]) -> None: ...


def measure(target: Target, plan: LoadPlan, watcher: LoadWatcher) -> str | None:
    """Run the plan, and return the reason if it ended early. A run that Ctrl-C ends leaves no record."""
    # The server's event loop.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(target, plan, watcher))


async def _measure(target: Target, plan: LoadPlan, watcher: LoadWatcher) -> str | None:
    rate, seed = plan.runs()[0]
    first = plan.draw(rate, seed)
    async with Client(target, timeout_s=plan.timeout_s) as client:
        head = await _head(client, plan, texts=any(job.prompt is not None for job in first[:1]))
        await warm_up(client, first[: plan.warmup], Bodies(client.target, f"{seed}/warm-up"))
        for number, (rate, seed) in enumerate(plan.runs()):
            if number:
                await asyncio.sleep(plan.settle_s)
                if reason := await _unreachable(client):
                    return reason
            watcher.begun(number, rate, seed)
            # Bodies differ by rate, so that a server's prefix cache has no hits from the previous run.
            bodies = Bodies(client.target, f"{seed}/{rate}/prompts")
            closed = _closed(client.target, plan, rate, seed)
            run = ClientRun(client, plan.draw(rate, seed), bodies, watcher.progress, closed=closed)
            with _quiet_memory():
                seconds = await run.go()
            workload = plan.workload.describe(rate, plan.duration_s, seed, plan.limit)
            measured = figures(run.exchanges, seconds, plan.slo, window_s=plan.duration_s)
            watcher.done(head | {"workload": workload} | measured, run.exchanges)
            lost = any(exchange.failure and exchange.failure.kind in CONNECTION_FAILURES for exchange in run.exchanges)
            if lost and (reason := await _unreachable(client)):
                return reason
            if run.gone:
                return f"{target.base_url} failed all connections for {MAX_FAILING_S:g} s; the run was ended early"
    return None


def _closed(target: Target, plan: LoadPlan, rate: float | None, seed: int) -> list[ClosedLoad]:
    assert plan.duration_s is not None or not plan.workload.closed
    return [
        ClosedLoad(
            stream,
            stream.jobs(seed, index),
            Bodies(target, f"{seed}/{rate}/closed {stream.name}"),
            plan.duration_s or 0.0,
        )
        for index, stream in enumerate(plan.workload.closed)
    ]


async def _unreachable(client: Client) -> str | None:
    try:
        await client.get("/v1/models")
    except ConfigError as error:
        return str(error)
    return None


@contextmanager
def _quiet_memory() -> Iterator[None]:
    """Disable most garbage collection: a full collection would pause all streams for tens of milliseconds."""
    before, has_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not has_frozen:  # objects that the caller froze stay frozen
            gc.unfreeze()


# -- the record -------------------------------------------------------------------------------------------


async def _head(client: Client, plan: LoadPlan, *, texts: bool) -> Record:
    models = await client.models()
    target = client.target
    if target.model is None:
        target = client.target = replace(target, model=models[0]["id"])
    card = next((model for model in models if model["id"] == target.model), {})
    _, text = await client.get("/metrics")
    server = {name: value for found in _CACHE_CONFIG.findall(text) for name, value in _LABEL.findall(found)}
    settings: dict[str, Any] = {
        "endpoint": target.endpoint,
        "prompts": "trace" if texts else "random",
        "prompt_ids": list(target.prompt_ids),
        "extra_body": dict(target.extra),
        "warmup": plan.warmup,
        "timeout_s": plan.timeout_s,
        "max_model_len": card.get("max_model_len"),
    }
    for name, label in (("block_size", "block_size"), ("kv_blocks", "num_gpu_blocks")):
        settings[name] = int(server[label]) if server.get(label, "").isdecimal() else None
    return {
        "recipe": plan.label or server.get("recipe", "unknown"),
        "model": target.model,
        "hardware": plan.hardware,
        "driver": "http",
        "settings": settings,
        "machine": _machine(),
        "version": VERSION,
    }


def figures(exchanges: Sequence[Exchange], seconds: float, slo: Slo, *, window_s: float | None = None) -> Record:
    failures = [(exchange.job.kind, exchange.failure.kind) for exchange in exchanges if exchange.failure is not None]
    record = summarize(
        [exchange.facts for exchange in exchanges if exchange.failure is None],
        now=seconds,
        rejected=[job for job, kind in failures if kind == REJECTED],
        errors=[job for job, kind in failures if kind != REJECTED],
        slo=slo,
        window_s=window_s,
    )
    # A client cannot observe the start of a request, nor the engine's work.
    for part in (record, *record.get("classes", {}).values(), *record.get("services", {}).values()):
        part["queue_s"] = dict.fromkeys(part["queue_s"])
        part["breakdown_s"] = part["wait_s"] = None
    record["quantiles"]["queue_s"] = []
    record |= dict.fromkeys(("kv", "steps", "batch_mean", "forward", "groups", "series"))
    if programs := _programs(exchanges):
        record["programs"] = summarize_programs(programs) | {"recomputed_tokens": None}
    kinds = Counter(kind for _, kind in failures)
    record["client"] = {**_lags(exchanges), "errors_by_kind": dict(kinds.most_common())}
    return record


def _programs(exchanges: Iterable[Exchange]) -> list[ProgramFacts]:
    """Return the programs; one of which a call failed or was not sent counts as unfinished."""
    programs: dict[str, ProgramFacts] = {}
    for exchange in exchanges:
        if name := exchange.job.program:
            facts = exchange.facts
            program = programs.setdefault(name, ProgramFacts(facts.arrival, facts.arrival))
            program.calls += 1
            program.live += exchange.failure is not None
            if facts.ended is not None:
                program.ended = max(program.ended, facts.ended)
                program.calls_s += facts.ended - facts.arrival
    return list(programs.values())


def _lags(exchanges: Sequence[Exchange]) -> dict[str, float | None]:
    lags = sorted(exchange.lag for exchange in exchanges if exchange.lag is not None)
    if not lags:
        return dict.fromkeys(("lag_mean_s", "lag_p99_s", "lag_max_s", "sent_late"))
    return {
        "lag_mean_s": round(sum(lags) / len(lags), 6),
        "lag_p99_s": round(percentile(lags, 99), 6),
        "lag_max_s": round(lags[-1], 6),
        "sent_late": round(sum(lag > LATE_S for lag in lags) / len(lags), 6),
    }


def _machine() -> dict[str, object]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
    }
