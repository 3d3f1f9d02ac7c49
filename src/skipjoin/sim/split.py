"""Disaggregated prefill and decode, as in DistServe: prompt KV crosses the network between replicas.

A prefill replica keeps a request's KV until it has arrived at a decode replica, which pulls it, first come, first
served, when its admission policy has space without an eviction.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skipjoin.core.events import Event, Finished
from skipjoin.core.foreign import ForeignScheduler
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.dispatch import Dispatch
from skipjoin.sim.driver import Arrivals, Replica
from skipjoin.sim.hardware import NETWORK_LATENCY_S


class Network:
    """Full-duplex links, one per replica. Transfers queue in request order."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._out_free_at: defaultdict[int, float] = defaultdict(float)
        self._in_free_at: defaultdict[int, float] = defaultdict(float)

    def send(self, source: int, target: int, size: float, now: float) -> tuple[float, float]:
        begun = max(now, self._out_free_at[source], self._in_free_at[target])
        ended = begun + size / self._bytes_per_s
        self._out_free_at[source] = self._in_free_at[target] = ended
        return begun, ended + NETWORK_LATENCY_S


@dataclass(slots=True)
class Handover:
    """Migration of one request."""

    prompt: Request  # on the prefill replica
    request: Request  # on the decode replica
    source: int
    target: int
    size: float
    ready: float
    pulled: float | None = None  # when the decode replica has space; the next two are then known
    begun: float | None = None
    completed: float | None = None


class SplitWatcher:
    """Observer of a disaggregated run, in order of time; each call precedes the events of its replica's step."""

    def arrived(self, request: Request) -> None:
        """Called on arrival, when the request can still be given a forecast."""

    def handed_over(self, handover: Handover) -> None: ...

    def completed(self, handover: Handover) -> None:
        """Called before the request arrives at its decode replica."""

    def ended(self, event: Finished) -> None: ...


class SplitTraffic:
    def __init__(
        self,
        replicas: Sequence[Replica],
        prefill_replicas: int,
        arrivals: Arrivals,
        *,
        prefill: Dispatch,
        decode: Dispatch,
        network: Network,
        token_bytes: float,
        watcher: SplitWatcher | None = None,
    ) -> None:
        self._cores = [replica.core for replica in replicas]
        self._receivers: dict[int, ForeignScheduler] = {}
        for number, replica in enumerate(replicas[prefill_replicas:], prefill_replicas):
            replica.on_decided = partial(self._pull, number)
            if not isinstance(scheduler := replica.core.scheduler, ForeignScheduler):
                raise TypeError(f"replica {number} decodes, and its scheduler cannot receive KV")
            self._receivers[number] = scheduler
        self._prefill_replicas = prefill_replicas
        self._arrivals = arrivals
        self._prefill = prefill
        self._decode = decode
        self._network = network
        self._token_bytes = token_bytes
        self._watcher = watcher or SplitWatcher()
        self._whole: dict[Request, Request] = {}  # by its prefill version
        self._waiting: defaultdict[int, deque[Handover]] = defaultdict(deque)  # queue for space, by target
        self._woken: list[int] = []  # replicas to run again at this instant
        self._transfers: list[tuple[float, int, Handover]] = []  # a heap of (end, number, handover)
        self._pulls = 0
        self._now = 0.0

    @property
    def next_at(self) -> float:
        if self._woken:
            return self._now
        return min(self._arrivals.next_at, self._transfers[0][0] if self._transfers else math.inf)

    @property
    def left(self) -> int:
        return len(self._arrivals) + len(self._transfers) + sum(map(len, self._waiting.values()))

    def due(self, now: float) -> Iterator[tuple[int, Request | None]]:
        self._now = now
        for whole in self._arrivals.take(now):
            self._watcher.arrived(whole)
            prompt = _version_of(whole, max_tokens=1, keeps_kv=True)
            self._whole[prompt] = whole
            yield self._prefill.choose(prompt), prompt
        for replica in self._woken:
            yield replica, None
        self._woken.clear()
        while self._transfers and self._transfers[0][0] <= now:
            _, _, handover = heapq.heappop(self._transfers)
            self._cores[handover.source].release(handover.prompt, now)
            self._watcher.completed(handover)
            yield handover.source, None
            yield handover.target, handover.request

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        ends = [event for event in events if isinstance(event, Finished)]
        if replica < self._prefill_replicas:
            self._prefill.observe(replica, events)
            for event in ends:
                self._end_prompt(replica, event)
        else:
            self._decode.observe(replica - self._prefill_replicas, events)
            for event in ends:
                self._end(event)

    def _end_prompt(self, replica: int, event: Finished) -> None:
        prompt, whole = event.request, self._whole.pop(event.request)
        if event.reason is FinishReason.LENGTH and whole.max_tokens > 1:
            self._hand_over(replica, prompt, whole)
        else:
            self._cores[replica].release(prompt, self._now)
            self._woken.append(replica)
            self._end(event)

    def _end(self, event: Finished) -> None:
        self._watcher.ended(event)
        self._arrivals.observe((event,))

    def _hand_over(self, source: int, prompt: Request, whole: Request) -> None:
        computed = prompt.progress.computed
        request = _version_of(whole, resumed=prompt.progress.output)
        request.progress.rewind(computed)
        target = self._prefill_replicas + self._decode.choose(request)
        handover = Handover(prompt, request, source, target, computed * self._token_bytes, self._now)
        self._waiting[target].append(handover)
        self._woken.append(target)
        self._watcher.handed_over(handover)

    def _pull(self, target: int, now: float) -> None:
        waiting, receiver = self._waiting[target], self._receivers[target]
        while waiting and receiver.expect(waiting[0].request, now):
            handover = waiting.popleft()
            handover.pulled = now
            handover.begun, handover.completed = self._network.send(handover.source, target, handover.size, now)
            self._pulls += 1
            heapq.heappush(self._transfers, (handover.completed, self._pulls, handover))


def _version_of(whole: Request, **changes: Any) -> Request:
    version = replace(whole, **changes)
    version.progress.expect(whole.progress.forecast, whole.progress.target)
    return version
