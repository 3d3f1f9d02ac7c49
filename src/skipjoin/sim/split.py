"""Replicas that compute prompts only, and others that go on with their requests, as in DistServe: the KV of a prompt
crosses the network in between.

A request generates its first token on a prefill replica, where its blocks stay fenced until its KV has landed on a
decode replica. That replica pulls it, first come first served, when its admission policy has space for it without an
eviction. So full decode replicas stall the prefill replicas.

What is simplified: every replica has a link of its own, whichever GPUs share a server.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from skipjoin.core.events import Event, Finished
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.dispatch import Dispatch
from skipjoin.sim.driver import Arrivals, Replica
from skipjoin.sim.hardware import NETWORK_LATENCY_S


class Network:
    """Links between replicas: each replica has one, which carries `bytes_per_s` either way.

    A transfer has the sender's way out and the receiver's way in to itself. Transfers queue for these in the order in
    which they are asked for. latency_s: from the last byte to its arrival.
    """

    def __init__(self, bytes_per_s: float, *, latency_s: float = NETWORK_LATENCY_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._out_free_at: defaultdict[int, float] = defaultdict(float)
        self._in_free_at: defaultdict[int, float] = defaultdict(float)

    def send(self, source: int, target: int, size: float, now: float) -> tuple[float, float]:
        """Queue a transfer of `size` bytes from one replica to another. Returns when it begins and when it has
        arrived."""
        begun = max(now, self._out_free_at[source], self._in_free_at[target])
        ended = begun + size / self._bytes_per_s
        self._out_free_at[source] = self._in_free_at[target] = ended
        return begun, ended + self._latency_s


@dataclass(slots=True)
class Handover:
    """One request's way from a prefill replica to a decode replica.

    prompt: the request as the prefill replica had it. request: as the decode replica takes it. source, target: their
    numbers. size: bytes of KV. ready, pulled, begun, landed: when its first token was there, when the decode replica
    had space for it, and when its transfer began and ended; None for what is not known yet.
    """

    prompt: Request
    request: Request
    source: int
    target: int
    size: float
    ready: float
    pulled: float | None = None
    begun: float | None = None
    landed: float | None = None


class SplitWatcher:
    """What a run over prefill and decode replicas tells; it is told in the order of time, and before the events of the
    turn that it comes from or leads to. Here: nothing is done with it."""

    def arrived(self, request: Request) -> None:
        """The request arrived. It may still get a forecast."""

    def handed_over(self, handover: Handover) -> None:
        """A request got its first token, and is to go on elsewhere."""

    def landed(self, handover: Handover) -> None:
        """The KV of a request has landed; it arrives at its decode replica next."""

    def ended(self, event: Finished) -> None:
        """A request is over, on either kind of replica."""


class SplitTraffic:
    """The traffic of replicas of which the first `prefill_replicas` compute prompts and the others decode.

    arrivals: of whole requests. prefill, decode: choose the replica of a request when it arrives and when its prompt is
    done, counted from 0 among the replicas of that kind. token_bytes: of a token's KV, all layers.
    """

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
        for number, replica in enumerate(replicas[prefill_replicas:], prefill_replicas):
            replica.on_decided = partial(self._pull, number)
        self._prefill_replicas = prefill_replicas
        self._arrivals = arrivals
        self._prefill = prefill
        self._decode = decode
        self._network = network
        self._token_bytes = token_bytes
        self._watcher = watcher or SplitWatcher()
        self._whole: dict[Request, Request] = {}  # by what a prefill replica has of it
        self._waiting: defaultdict[int, deque[Handover]] = defaultdict(deque)  # for space, by the target
        self._woken: list[int] = []  # replicas that turn once more at this instant
        self._landing: list[tuple[float, int, Handover]] = []  # a heap of (end, number, handover)
        self._pulls = 0
        self._now = 0.0

    @property
    def next_at(self) -> float:
        if self._woken:
            return self._now
        return min(self._arrivals.next_at, self._landing[0][0] if self._landing else math.inf)

    @property
    def left(self) -> int:
        return len(self._arrivals) + len(self._landing) + sum(map(len, self._waiting.values()))

    def due(self, now: float) -> Iterator[tuple[int, Request | None]]:
        self._now = now
        for whole in self._arrivals.take(now):
            self._watcher.arrived(whole)
            prompt = _prompt_of(whole)
            self._whole[prompt] = whole
            yield self._prefill.choose(prompt), prompt
        for replica in self._woken:
            yield replica, None
        self._woken.clear()
        while self._landing and self._landing[0][0] <= now:
            _, _, handover = heapq.heappop(self._landing)
            self._cores[handover.source].release(handover.prompt, now)
            self._watcher.landed(handover)
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
        """A request ended on its prefill replica, with its first token or without."""
        prompt, whole = event.request, self._whole.pop(event.request)
        if event.reason is FinishReason.LENGTH and whole.max_tokens > 1:
            self._hand_over(replica, prompt, whole)
        else:
            self._cores[replica].release(prompt, self._now)
            self._woken.append(replica)
            self._end(event)

    def _end(self, event: Finished) -> None:
        """A request is over, on either kind of replica."""
        self._watcher.ended(event)
        self._arrivals.observe((event,))

    def _hand_over(self, source: int, prompt: Request, whole: Request) -> None:
        computed = prompt.computed
        request = replace(whole, output=list(prompt.output), computed=computed, planned=computed)
        target = self._prefill_replicas + self._decode.choose(request)
        handover = Handover(prompt, request, source, target, computed * self._token_bytes, self._now)
        self._waiting[target].append(handover)
        self._woken.append(target)
        self._watcher.handed_over(handover)

    def _pull(self, target: int, now: float) -> None:
        """Begin the transfers for which a decode replica has space, in its turn."""
        waiting, core = self._waiting[target], self._cores[target]
        while waiting and core.expect(waiting[0].request, now):
            handover = waiting.popleft()
            handover.pulled = now
            handover.begun, handover.landed = self._network.send(handover.source, target, handover.size, now)
            self._pulls += 1
            heapq.heappush(self._landing, (handover.landed, self._pulls, handover))


def _prompt_of(whole: Request) -> Request:
    """The request as a prefill replica has it: with one token to generate, and KV that stays until it is elsewhere."""
    return replace(whole, max_tokens=1, keeps_kv=True, output=[])
