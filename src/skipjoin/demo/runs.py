from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from skipjoin.config import ConfigError
from skipjoin.demo.load import MixedLoad, probe, sized
from skipjoin.demo.outcome import EngineCounts, Outcome, engine_counts
from skipjoin.demo.server import DemoServer, write_model
from skipjoin.loadtest.client import ClientProgress, Exchange
from skipjoin.loadtest.plan import LoadPlan
from skipjoin.loadtest.runs import measure
from skipjoin.loadtest.targets import Target
from skipjoin.observe.record import Record

PEER = "peer"
# No server is faster; one that sends all tokens at once seems to take no time for them.
_MIN_TOKEN_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    recipes: Sequence[str]
    max_num_seqs: int = 4
    background: int = 6
    chats: int = 24
    peer: Target | None = None


class DemoWatcher(Protocol):
    def stage(self, text: str) -> None: ...

    def sized(self, load: MixedLoad, token_s: float) -> None: ...

    def progress(self, progress: ClientProgress) -> None: ...

    def done(self, outcome: Outcome) -> None: ...


def run_demo(demo: Demo, watcher: DemoWatcher) -> str | None:
    """Measure all systems, and return the reason if a server failed before the end.

    Raises:
        ConfigError: A server does not start, or the peer cannot be reached.
    """
    load: MixedLoad | None = None
    if demo.peer is not None:  # first, because a wrong URL should not be noticed after the other runs
        watcher.stage(f"{PEER}: warming up")
        _token_seconds(demo.peer, min(demo.max_num_seqs, demo.background))
    with tempfile.TemporaryDirectory(prefix="skipjoin-demo-") as folder:
        model = write_model(Path(folder))
        for number, recipe in enumerate(demo.recipes):
            first = "; the first start on a machine compiles for up to a minute" if not number else ""
            watcher.stage(f"{recipe}: starting a server{first}")
            with DemoServer(model, recipe, demo.max_num_seqs) as server:
                target = Target(base_url=server.url)
                watcher.stage(f"{recipe}: measuring the time per token")
                token_s = _token_seconds(target, min(demo.max_num_seqs, demo.background))
                if load is None:
                    load = sized(demo.background, demo.chats, token_s)
                    watcher.sized(load, token_s)
                watcher.stage(recipe)
                if reason := _measure(target, load, recipe, demo.max_num_seqs, watcher):
                    return reason
    if demo.peer is None or load is None:
        return None
    watcher.stage(PEER)
    return _measure(demo.peer, load, PEER, None, watcher)


def _token_seconds(target: Target, requests: int) -> float:
    seen = _Seen()
    if reason := measure(target, _plan(probe(requests), "probe", warmup=1), seen):
        raise ConfigError(reason)
    found: float | None = seen.record["tpot_s"]["mean"]
    if found is None:
        failures = {exchange.failure for exchange in seen.exchanges if exchange.failure is not None}
        raise ConfigError(f"{target.base_url}: the first requests failed: {'; '.join(map(': '.join, failures))}")
    return max(found, _MIN_TOKEN_S)


def _measure(target: Target, load: MixedLoad, name: str, slots: int | None, watcher: DemoWatcher) -> str | None:
    seen = _Seen(target, watcher)
    reason = measure(target, _plan(load, name), seen)
    if seen.record:
        watcher.done(Outcome(name, seen.record, seen.exchanges, seen.counts, slots))
    return reason


def _plan(load: MixedLoad, label: str, *, warmup: int = 0) -> LoadPlan:
    return LoadPlan(workload=load, rates=(None,), duration_s=load.duration_s, warmup=warmup, label=label)


@dataclass(slots=True)
class _Seen:
    target: Target | None = None
    watcher: DemoWatcher | None = None
    record: Record = field(default_factory=dict)
    exchanges: Sequence[Exchange] = ()
    counts: EngineCounts = field(default_factory=EngineCounts)

    def begun(self, number: int, rate: float | None, seed: int) -> None:
        if self.target is not None:
            self.counts = engine_counts(self.target)

    def progress(self, progress: ClientProgress) -> None:
        if self.watcher is not None:
            self.watcher.progress(progress)

    def done(self, record: Record, exchanges: Sequence[Exchange]) -> None:
        self.record, self.exchanges = record, exchanges
        if self.target is not None:
            self.counts = engine_counts(self.target).since(self.counts)
